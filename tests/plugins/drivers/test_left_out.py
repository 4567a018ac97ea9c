"""Without the plugin, a run of several drivers is refused with what to install, and never read as the empty store in its folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from store_kit import make_header

from engine import plugin
from engine.errors import StoreError
from engine.plugins.drivers.shards import create_shards
from engine.store import RunStore, find_run

HEADER = make_header()
REASON = r"it belongs to the plugin `drivers`, which is not installed"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    RunStore.create(tmp_path, HEADER).close()
    folder = tmp_path / HEADER.run_id
    create_shards(folder, HEADER)
    monkeypatch.setenv(plugin.OFF, "drivers")
    plugin.installed.cache_clear()
    yield folder
    monkeypatch.undo()
    plugin.installed.cache_clear()


def test_a_run_of_several_drivers_is_not_read(run: Path) -> None:
    assert find_run(run) == run
    with pytest.raises(StoreError, match=f"{run} is a run of several drivers: {REASON}"):
        RunStore.open(run, readonly=True)


def test_a_url_of_shards_is_not_found(run: Path) -> None:
    with pytest.raises(StoreError, match=f"no run `s3://bucket/r`: URLs of runs are those of shards; {REASON}"):
        find_run("s3://bucket/r")
