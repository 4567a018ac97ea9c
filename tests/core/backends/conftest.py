"""Backends: what they build without validation must be what validation would make of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from validated_structs import structs_validated


@pytest.fixture(autouse=True)
def _structs_validated() -> Iterator[None]:
    with structs_validated():
        yield


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Any:
    """Its tokenizer in transformers."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model_dir)
