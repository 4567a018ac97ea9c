"""Running specs on the scripted backend with a tiny real tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from changed_specs import book_played
from running_specs import fresh_spec_code, make_spec, run_spec, structs_checked

__all__ = ["fresh_spec_code", "make_spec", "run_spec", "structs_checked"]


@pytest.fixture
def play_book(tmp_path: Path, tiny_tokenizer_dir: Path) -> Callable[..., Any]:
    """See `book_played`."""
    return partial(book_played, tmp_path, tiny_tokenizer_dir)
