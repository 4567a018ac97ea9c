"""Services take part in the episodes of a run: they may replace objects and records, and all are closed, whatever one of them does."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import msgspec
import pytest

from engine.actions.action import EpisodeObjects
from engine.actions.services import EpisodeService
from engine.schemas.environment import EpisodeView, Task, UserTurn
from engine.schemas.journal import Record, UserRecord


class Noted(EpisodeService):
    """Notes its calls; `fails` raises."""

    def __init__(self, calls: list[str], name: str, fails: str = "") -> None:
        self._calls, self._name, self._fails = calls, name, fails

    def _call(self, what: str) -> None:
        self._calls.append(f"{what} {self._name}")
        if what == self._fails:
            raise OSError(f"{self._name} cannot {what}")

    def check(self) -> None:
        self._call("check")

    async def start(self, backends: Any) -> None:
        self._call("start")

    async def close(self) -> None:
        self._call("close")


@pytest.fixture
def serve_with(monkeypatch: pytest.MonkeyPatch) -> Any:
    def serve(*services: EpisodeService) -> None:
        monkeypatch.setattr("engine.runner.runner.open_services", lambda inputs: list(services))

    return serve


@pytest.mark.parametrize("fails", ["start", "close"])
async def test_one_that_fails_leaves_nothing_open(
    fails: str, make_spec: Any, run_spec: Any, monkeypatch: pytest.MonkeyPatch, serve_with: Any
) -> None:
    calls: list[str] = []
    serve_with(Noted(calls, "first", fails), Noted(calls, "second"))
    closed: list[str] = []
    monkeypatch.setattr("engine.actions.calling.workers.Workers.close", lambda workers: closed.append("workers"))
    with pytest.raises(OSError, match=f"first cannot {fails}"):
        await run_spec(make_spec(["It is 42."], user=None, machine="single_turn"))
    started = ["start first"] if fails == "start" else ["start first", "start second"]
    assert calls == ["check first", "check second", *started, "close second", "close first"]
    assert closed == ["workers"]


async def test_one_that_refuses_the_run_lets_nothing_start(make_spec: Any, run_spec: Any, serve_with: Any) -> None:
    calls: list[str] = []
    serve_with(Noted(calls, "first"), Noted(calls, "second", "check"))
    with pytest.raises(OSError, match="second cannot check"):
        await run_spec(make_spec(["It is 42."], user=None, machine="single_turn"))
    assert calls == ["check first", "check second"]


class Visitor(EpisodeService):
    """Answers in place of the user, and writes what it answers in capitals, at once or later."""

    def __init__(self, *, later: bool) -> None:
        self._later = later
        self.tasks: list[str] = []
        self.released: list[str] = []

    async def open(self, task: Task | None, objects: EpisodeObjects) -> None:
        assert task is not None
        self.tasks.append(task.id)
        objects.user = self

    def respond(self, view: EpisodeView) -> UserTurn:
        return UserTurn(content="goodbye", satisfied=True)

    def filter(self, episode: Any, record: Record) -> Record | Awaitable[Record]:
        return self._louder(record) if self._later else _in_capitals(record)

    async def _louder(self, record: Record) -> Record:
        return _in_capitals(record)

    def release(self, episode_id: str) -> None:
        self.released.append(episode_id)


def _in_capitals(record: Record) -> Record:
    if not isinstance(record, UserRecord):
        return record
    return msgspec.structs.replace(record, turn=record.turn.model_copy(update={"content": "GOODBYE"}))


@pytest.mark.parametrize("later", [False, True])
async def test_a_service_replaces_objects_and_records(
    later: bool, make_spec: Any, run_spec: Any, serve_with: Any
) -> None:
    visitor = Visitor(later=later)
    serve_with(visitor)
    run = await run_spec(make_spec(["It is 41."]))
    trajectory = next(iter(run.trajectories.values()))
    assert [(message.role, message.text) for message in trajectory.messages][-1] == ("user", "GOODBYE")
    assert (visitor.tasks, visitor.released) == ([trajectory.task_id], [trajectory.episode_id])
