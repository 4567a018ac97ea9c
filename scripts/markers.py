"""The number of tests that each marker selects, against the numbers that are recorded in tests/markers.txt.

    python scripts/markers.py             fails where a marker selects fewer tests than recorded
    python scripts/markers.py --record    writes the numbers; every library of CI has to be installed

A stage of CI selects its tests by a marker. A file that moves, or that can no longer be imported, would leave the stage unnoticed.
"""

from __future__ import annotations

import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "tests" / "markers.txt"
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
MARKERS = {line.partition(":")[0] for line in SETTINGS["markers"]}


class MarkerCount:
    """Counts the collected tests of each marker, and the modules that collection skipped."""

    def __init__(self) -> None:
        self.tests: Counter[str] = Counter()
        self.skipped: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            self.tests.update({mark.name for mark in item.iter_markers()} & MARKERS)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.skipped.append(report.nodeid)


def main() -> None:
    count = MarkerCount()
    options = [
        "--collect-only",
        "-q",
        "-q",
        "--no-summary",
        "-n",
        "0",
        "-m",
        "",
        "-p",
        "no:cacheprovider",
        str(ROOT / "tests"),
    ]
    if status := pytest.main(options, plugins=[count]):
        sys.exit(f"pytest cannot collect the tests (status {int(status)}): see above")
    if "--record" in sys.argv[1:]:
        if count.skipped:
            sys.exit(
                f"install the extra `adapters` first: without it these are not counted: {', '.join(count.skipped)}"
            )
        RECORDED.write_text("".join(f"{number} {name}\n" for name, number in sorted(count.tests.items())))
        return
    recorded = {
        name: int(number) for number, name in (line.split(" ", 1) for line in RECORDED.read_text().splitlines())
    }
    fewer = [
        f"{name}: {count.tests[name]} tests, {number} recorded"
        for name, number in recorded.items()
        if count.tests[name] < number
    ]
    if fewer:
        why = f"; collection skipped {', '.join(count.skipped)}" if count.skipped else ""
        sys.exit(
            "markers select fewer tests than recorded: "
            + "; ".join(fewer)
            + why
            + ". For tests that were removed on purpose, correct the number in tests/markers.txt"
        )
    print(", ".join(f"{name} {number}" for name, number in sorted(count.tests.items())))


if __name__ == "__main__":
    main()
