"""Rows of real tokenizers and templates, held to literal ids: see `golden_kit`."""

from __future__ import annotations

from pathlib import Path

import pytest
from golden_kit import NAMES, kept, rows_of
from slow_cases import slow_but


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("goldens")


@pytest.mark.parametrize("name", slow_but(NAMES, "qwen3-tools"))
async def test_rows_are_the_ones_that_were_written_down(name: str, folder: Path) -> None:
    rows = await rows_of(name, folder)
    for row, golden in zip(rows, kept(name), strict=True):
        for column, value in golden.items():
            assert row[column] == value, column
        assert row.keys() == golden.keys()


def test_there_is_a_golden_for_each_kind_of_row() -> None:
    rows = [row for name in NAMES for row in kept(name)]
    assert {row["branch"] for row in rows} >= {0, 1}
    assert any(len(row["images"]) > 1 for row in rows)
    assert {name.split("-")[0] for name in NAMES} >= {"qwen3", "qwen2_5"}
