"""`engine serve SPEC` with several drivers, on a real Ray.

Needs Ray (the extra `ray`).
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))

from serve_kit import TASKS, TOKEN, command, content, unpacked, written

from engine.plugins.serve.client import Group, GroupClient
from engine.store import RunStore

pytest.importorskip("ray", reason="needs Ray: pip install 'episode-engine[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One unpacked tokenizer for all tests."""
    unpacked(tmp_path_factory.mktemp("tokenizer"))


def read(url: str, id: str, count: int) -> list[Group]:
    with GroupClient(url, TOKEN, patience=60) as client:
        return sorted(client.groups(id, count=count), key=lambda group: group.number)


@pytest.mark.exhaustive
def test_groups_of_two_drivers_are_those_of_one_process_also_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("EPISODE_ENGINE_CACHE", str(tmp_path / "cache"))
    results: list[Any] = []
    for drivers in (1, 2):
        folder = tmp_path / str(drivers)
        folder.mkdir()
        written(folder, rollout={"samples_per_task": 3, "concurrency": 4, "drivers": drivers})
        with command(folder, "spec.yaml") as (process, url):
            first = read(url, "first", 4)
            process.send_signal(signal.SIGKILL)
            process.wait()
        with command(folder, "--resume", "latest") as (process, url):
            again, second = read(url, "first", 4), read(url, "second", 4)
            assert content(again) == content(first)
            with httpx.Client(base_url=url, trust_env=False, headers={"authorization": f"Bearer {TOKEN}"}) as http:
                refused = http.post("/groups", json={"id": "third", "sampling": {"temperature": 0.5}})
            process.send_signal(signal.SIGTERM)
            assert process.wait() == 143
        results.append(content([*first, *second]))
        assert [group.task_id for group in first] == TASKS[:4]
    assert results[0] == results[1]
    assert refused.status_code == 409
    assert "not supported with several drivers" in refused.text
    (run,) = (tmp_path / "2" / "runs").iterdir()
    assert sorted(path.parent.name for path in run.glob("drivers/*/run.db")) == ["0", "1"]
    with RunStore.open(run, readonly=True) as store:
        assert len(store.finished()) == 24
