"""Writes the reference pages of docs/ from the code: spec.md, rules.md, cli.md, rows.md and trainers.md.

python scripts/docs            write them
python scripts/docs --check    exit status 1 where one is not up to date
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["ENGINE_PLUGINS_OFF"] = "strangers"  # the pages are the same whatever else is installed
from cli_page import cli_page
from rows_page import rows_page
from rules_page import rules_page
from spec_page import spec_page
from trainers_page import trainers_page

DOCS = Path(__file__).parents[2] / "docs"

if __name__ == "__main__":
    pages = {
        "spec.md": spec_page(),
        "rules.md": rules_page(),
        "cli.md": cli_page(),
        "rows.md": rows_page(),
        "trainers.md": trainers_page(),
    }
    outdated = {name: text for name, text in pages.items() if (DOCS / name).read_text(encoding="utf-8") != text}
    if "--check" not in sys.argv:
        for name, text in outdated.items():
            (DOCS / name).write_text(text, encoding="utf-8")
    elif outdated:
        sys.exit(f"not up to date: {', '.join(outdated)}: run python scripts/docs")
