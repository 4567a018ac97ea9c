"""Fixtures of tests of data sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from changed_specs import book_played
from validated_structs import structs_validated
from vision_specs import vlm

__all__ = ["vlm"]


@pytest.fixture(autouse=True)
def _structs_validated() -> Iterator[None]:
    """What the engine makes without validation must be what validation would make of it."""
    with structs_validated():
        yield


@pytest.fixture
def play_book(tmp_path: Path, tiny_tokenizer_dir: Path) -> Callable[..., Any]:
    """See `book_played`."""
    return partial(book_played, tmp_path, tiny_tokenizer_dir)
