"""The number of tests that each marker selects, against the numbers that are recorded in tests/markers.txt.

    python scripts/markers.py             fails where a marker selects fewer tests than recorded
    python scripts/markers.py --record    writes the numbers; every library of CI has to be installed
    python scripts/markers.py --record --allow slow "the matrix of X is one test"    a lower number needs its reason

A stage of CI selects its tests by a marker. A file that moves, or that can no longer be imported, would leave the stage unnoticed.
"""

from __future__ import annotations

import sys
import tomllib
from collections import Counter
from collections.abc import Mapping
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


def read() -> dict[str, tuple[int, str]]:
    """The recorded number of each marker, and the reason for its last fall."""
    recorded = {}
    for line in RECORDED.read_text(encoding="utf-8").splitlines():
        words, _, reason = line.partition("  # ")
        number, name = words.split()
        recorded[name] = (int(number), reason)
    return recorded


def allowed(words: list[str]) -> dict[str, str]:
    """The reasons of `--allow MARKER REASON`, by marker."""
    reasons = {words[at + 1]: words[at + 2] for at, word in enumerate(words[:-2]) if word == "--allow"}
    if words.count("--allow") != len(reasons) or not all(reasons.values()) or reasons.keys() - MARKERS:
        sys.exit('--allow needs a marker of pyproject.toml and a reason: --allow slow "the matrix of X is one test"')
    return reasons


def write(numbers: Mapping[str, int], reasons: Mapping[str, str]) -> None:
    """Write the numbers, and the reason where one is lower than before."""
    before = read()
    lower = [name for name, (number, _) in before.items() if numbers[name] < number and name not in reasons]
    if lower:
        sys.exit(
            "lower than recorded: "
            + ", ".join(f"{name} {before[name][0]} -> {numbers[name]}" for name in lower)
            + '. Where tests were removed on purpose, say why: --allow MARKER "reason"'
        )
    why = {name: reasons.get(name, before.get(name, (0, ""))[1]) for name in numbers}
    lines = [f"{numbers[name]} {name}" + (f"  # {why[name]}" if why[name] else "") for name in sorted(numbers)]
    RECORDED.write_text("\n".join(lines) + "\n", encoding="utf-8")


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
        write(count.tests, allowed(sys.argv[1:]))
        return
    recorded = {name: number for name, (number, _) in read().items()}
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
            + '. Where tests were removed on purpose: python scripts/markers.py --record --allow MARKER "reason"'
        )
    print(", ".join(f"{name} {number}" for name, number in sorted(count.tests.items())))


if __name__ == "__main__":
    main()
