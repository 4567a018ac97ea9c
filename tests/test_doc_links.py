"""Links of the pages of the root and of docs/ lead to files and headings, and the files of the project that they name exist."""

from __future__ import annotations

import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@functools.cache
def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links() -> None:
    assert {document.name: broken for document in DOCUMENTS if (broken := broken_links(document))} == {}


def broken_links(document: Path) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", text)):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        file = document.parent / path if path else document
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(link)
    return broken


def test_named_files_exist() -> None:
    for document in DOCUMENTS:
        if document.name == "CHANGELOG.md":
            continue  # names files as they were
        named = re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|sh))`", document.read_text(encoding="utf-8"))
        missing = [name for name in named if not (ROOT / name).exists() and not (ROOT / "engine" / name).exists()]
        assert missing == [], document


def test_every_page_has_one_place_in_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    pages = {
        str(file.relative_to(ROOT / "docs")) for file in (ROOT / "docs").rglob("*.md") if file.parent.name != "rules"
    }
    assert sorted(re.findall(r"[\w./-]+\.md", nav)) == sorted(pages)
