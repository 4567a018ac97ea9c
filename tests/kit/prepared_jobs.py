"""Which jobs of the plugin preparing are computed, and which are read from its cache."""

from __future__ import annotations

import pytest


@pytest.fixture
def jobs_done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of the jobs that are done in any process, and not read from disk."""
    from engine.plugins.preparing.jobs import PreparedCache

    done: list[str] = []
    put = PreparedCache.put
    monkeypatch.setattr(PreparedCache, "put", lambda self, key, value: (done.append(key), put(self, key, value)))
    return done
