"""The reading path of docs/architecture.md: its stations are there, its leaves state their contracts, and a traced turn runs nothing else."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from functools import reduce
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/architecture.md").read_text()


def section(heading: str) -> str:
    """The text below a heading of the page."""
    match = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    assert match, heading
    return match[1]


STATIONS = re.findall(r"`([\w./]+\.py):([\w.]+)`", section("The twelve stations"))
LEAVES = sorted(set(re.findall(r"`([\w./]+\.py)`", section("The leaves"))))
FILES = {path for path, _ in STATIONS}


def test_there_are_twelve_stations_in_few_files() -> None:
    rows = re.findall(r"^\| (\d+) ", section("The twelve stations"), re.M)
    assert [int(number) for number in rows] == list(range(1, 13))
    assert len(FILES) <= 25


@pytest.mark.parametrize(("path", "name"), STATIONS)
def test_a_station_is_where_the_page_says(path: str, name: str) -> None:
    dotted = path.removesuffix(".py").replace("/", ".")
    module = importlib.import_module(dotted if dotted.startswith("engine.") else f"engine.{dotted}")
    assert reduce(getattr, name.split("."), module)


@pytest.mark.parametrize("path", sorted({*FILES, *LEAVES}))
def test_a_file_opens_with_its_contract(path: str) -> None:
    first = (ast.get_docstring(ast.parse((ROOT / path).read_text())) or "").partition("\n\n")[0]
    assert first.endswith((".", ":")), first
    assert len(first.split()) >= 5, first


@pytest.mark.slow
def test_a_traced_episode_runs_stations_and_leaves_alone() -> None:
    words = [sys.executable, "bench/calls.py", "--files", "--turns", "4"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = re.findall(r"^ +(each turn|once) +(\S+\.py)$", done.stdout, re.M)
    runs = {path.replace("engine/schemas/", "schemas/"): when for when, path in reversed(lines)}
    assert sorted(set(runs) - FILES - set(LEAVES)) == []
    repeated = [path for path, when in runs.items() if when == "each turn"]
    assert FILES & set(repeated)
