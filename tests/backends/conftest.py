"""Backends: what they build without validation must be what validation would make of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from validated_structs import structs_validated

from engine.backends.http import retries


@pytest.fixture(autouse=True)
def _structs_validated() -> Iterator[None]:
    with structs_validated():
        yield


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between tries of a request begin at a hundredth of a second."""
    monkeypatch.setattr(retries, "FIRST_PAUSE", 0.01)
