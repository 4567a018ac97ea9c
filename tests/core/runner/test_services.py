"""Services of plugins beside a run: all are closed, whatever one of them does."""

from __future__ import annotations

from typing import Any

import pytest

from engine.actions.services import EpisodeService


class Noted(EpisodeService):
    """Notes its calls; `fails` raises."""

    def __init__(self, calls: list[str], name: str, fails: str = "") -> None:
        self._calls, self._name, self._fails = calls, name, fails

    def _call(self, what: str) -> None:
        self._calls.append(f"{what} {self._name}")
        if what == self._fails:
            raise OSError(f"{self._name} cannot {what}")

    async def start(self, backends: Any) -> None:
        self._call("start")

    async def close(self) -> None:
        self._call("close")


@pytest.mark.parametrize("fails", ["start", "close"])
async def test_one_that_fails_leaves_nothing_open(
    fails: str, make_spec: Any, run_spec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    services = [Noted(calls, "first", fails), Noted(calls, "second")]
    monkeypatch.setattr("engine.runner.runner.open_services", lambda loaded, shared: services)
    closed: list[str] = []
    monkeypatch.setattr("engine.actions.role_models.RoleModels.close", _noting(closed, "roles"))
    monkeypatch.setattr("engine.actions.calling.workers.Workers.close", lambda workers: closed.append("workers"))
    with pytest.raises(OSError, match=f"first cannot {fails}"):
        await run_spec(make_spec(["It is 42."], user=None, machine="single_turn"))
    started = ["start first"] if fails == "start" else ["start first", "start second"]
    assert calls == [*started, "close first", "close second"]
    assert closed == ["workers", "roles"]


def _noting(closed: list[str], what: str) -> Any:
    async def close(roles: Any) -> None:
        closed.append(what)

    return close
