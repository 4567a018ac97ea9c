"""Generated files that are committed are up to date."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

from command_line import engine_output

ROOT = Path(__file__).parents[1]


run = partial(engine_output, "schema")


def test_the_committed_files_are_up_to_date() -> None:
    assert run(str(ROOT), "--check") == (0, "")


def test_the_reference_pages_are_up_to_date() -> None:
    """docs/trainers.md too: every entry of the table of trainers is on it."""
    done = subprocess.run(
        [sys.executable, "scripts/docs", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
