"""SGLang's backend: what it builds without validation must be what validation would make of it; specs on tiny
vision-language models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from validated_structs import structs_validated
from vision_specs import make_spec, run_spec, vlm

__all__ = ["make_spec", "run_spec", "vlm"]


@pytest.fixture(autouse=True)
def _structs_validated() -> Iterator[None]:
    with structs_validated():
        yield
