"""Fixtures of the store's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from store_kit import Maker, make_header

from engine.store import RunStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    """A new run, open for writing."""
    with RunStore.create(tmp_path / "runs", make_header()) as made:
        yield made


@pytest.fixture
def maker() -> type[Maker]:
    """The functions that make records."""
    return Maker
