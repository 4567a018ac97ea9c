"""Chat APIs: what they build without validation must be what validation would make of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from validated_structs import structs_validated


@pytest.fixture(autouse=True)
def _structs_validated() -> Iterator[None]:
    with structs_validated():
        yield
