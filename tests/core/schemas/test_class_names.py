"""A class of `schemas/` and a class that runs never share a name: each import says which of the two is meant."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def classes(folder: Path) -> dict[str, str]:
    """Each class that the folder's own files define -> its file; folders that are symbolic links are left out."""
    files = [file for file in sorted(folder.rglob("*.py")) if file.resolve().is_relative_to(folder)]
    return {
        name: str(file.relative_to(ROOT))
        for file in files
        for name in re.findall(r"^ *class (\w+)[:(]", file.read_text(encoding="utf-8"), re.MULTILINE)
    }


def test_no_class_of_the_schemas_shares_its_name_with_a_class_that_runs() -> None:
    running = classes(ROOT / "engine") | classes(ROOT / "environments")
    configured = classes(ROOT / "schemas")
    assert len(configured) > 50
    assert {name: (file, running[name]) for name, file in configured.items() if name in running} == {}
