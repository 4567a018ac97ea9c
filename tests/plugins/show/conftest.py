"""The index of a list in a folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder."""
    monkeypatch.setenv("EPISODE_ENGINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
