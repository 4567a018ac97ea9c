"""docs/rules.md: every rule of `engine validate`, each with a link to its page."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEAD = """\
# Rules

<!-- Written by `python scripts/docs` from the rules' pages: docs/rules/ and engine/plugins/*/pages/. Edit those, then run it again. -->

`engine validate SPEC` reports each finding with file, line, column and rule. `engine explain RULE` prints the rule's page: what it finds, why it
matters, a bad and a good spec. An `error` makes a spec invalid. `yaml.*` and `spec.*` check the form of a file; the other rules check what it says.
"""


def rules_page() -> str:
    """Return the page: one table for each first part of a rule's name."""
    pages = [*(ROOT / "docs/rules").glob("*.md"), *(ROOT / "engine/plugins").glob("*/pages/*.md")]
    groups: dict[str, list[Path]] = {}
    for page in sorted(pages, key=lambda page: page.stem):
        groups.setdefault(page.stem.partition(".")[0], []).append(page)
    return HEAD + "".join("\n" + "\n".join(_table(group, members)) + "\n" for group, members in groups.items())


def _table(group: str, pages: list[Path]) -> Iterator[str]:
    yield from [f"## `{group}.*`", "", "| rule | severity | finds |", "|---|---|---|"]
    for page in pages:
        line = re.search(r"^\*(\w+)\*: (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        if line is None:
            raise ValueError(f"{page} has no line `*severity*: what the rule finds`")
        link = os.path.relpath(page, ROOT / "docs")
        yield f"| [`{page.stem}`]({link}) | {line[1]} | {line[2].replace('|', chr(92) + '|')} |"
