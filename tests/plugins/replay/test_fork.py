"""Forks share another run's journal up to a turn, and are resumed as any run is."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import code_for_tests as spec_code
import pytest
from endings import ONE, filled
from stopping import Resumed, content, dead_after

from engine.errors import StoreError
from engine.plugins.replay.command import fork

TALK = ["no", "still no", "It is 42."]


async def source_of(make_spec: Any, tmp_path: Path, replies: Any = TALK, **changes: Any) -> Resumed:
    """A finished run in `tmp_path / "whole"`; the counts of its calls are cleared."""
    resumed = Resumed(make_spec(replies, rewards=ONE, **changes))
    await resumed.run(tmp_path / "whole")
    spec_code.CALLS.clear()
    return resumed


def forked(resumed: Resumed, tmp_path: Path, turn: int) -> Resumed:
    """The run begun as a fork of it, in `tmp_path / "fork"`."""
    with resumed.store(tmp_path / "whole") as source:
        loaded, _, store = fork(source, tmp_path / "fork", turn, 1)
    store.close()
    resumed.loaded = loaded
    return resumed


@pytest.mark.slow  # by default: test_resume stops episodes at any commit
async def test_a_fork_stopped_at_any_commit_shares_the_same(make_spec: Any, tmp_path: Path) -> None:
    for commit in range(1, 40):
        place = tmp_path / str(commit)
        resumed = forked(await source_of(make_spec, place), place, 1)
        with dead_after(commit):
            try:
                await resumed.run(place / "fork")
                whole = True
            except StoreError:
                whole = False
        with resumed.store(place / "whole") as source:
            shared = source.journal("a/0")[:3]  # reset, a reply, the user's answer
            (wanted,) = source.trajectories()
        shutil.rmtree(place / "whole")  # a fork needs its source no more
        assert (await resumed.run(place / "fork")).faults == []
        with resumed.store(place / "fork") as store:
            assert [each.json() for each in store.journal("a/0")[:3]] == [each.json() for each in shared]
            (trajectory,) = store.trajectories()
            assert (store.header.fork.run, store.header.fork.turn) == (wanted.run_id, 1)
        assert content(trajectory) == content(wanted)
        assert await resumed.differences(place / "fork") == []
        assert spec_code.CALLS["asked"] <= 4  # twice in each of two attempts at most: never for what is shared
        if whole:
            assert (spec_code.CALLS["asked"], spec_code.CALLS["one"]) == (2, 1)
            return
    raise AssertionError("more than 40 commits")


async def test_an_episode_that_never_came_to_the_turn_is_taken_over_whole(make_spec: Any, tmp_path: Path) -> None:
    resumed = forked(await source_of(make_spec, tmp_path), tmp_path, 7)
    assert (await resumed.run(tmp_path / "fork")).faults == []
    with resumed.store(tmp_path / "fork") as store, resumed.store(tmp_path / "whole") as source:
        assert [content(each) for each in store.trajectories()] == [content(each) for each in source.trajectories()]
    assert spec_code.CALLS == {}


async def test_what_was_called_outside_cannot_be_shared(make_spec: Any, tmp_path: Path) -> None:
    """The episode is a fault, in the fork and in each resume of it; the others go on."""
    replies, changes = filled("an external tool", str(tmp_path / "log"))
    script = [{"task": "a", "replies": replies}, {"task": "b", "replies": TALK}]
    changes["tasks"] = {"rows": [{"id": "a"}, {"id": "b"}]}
    resumed = forked(await source_of(make_spec, tmp_path, script, **changes), tmp_path, 1)
    driven = (tmp_path / "log").read_text()
    for _ in range(2):
        (fault,) = (await resumed.run(tmp_path / "fork")).faults
        assert "a/0: the call in AWAITING_TOOL cannot be repeated" in fault
        assert "it cannot share turns with a fork of its run" in fault
    assert (tmp_path / "log").read_text() == driven
    with resumed.store(tmp_path / "fork") as store:
        assert store.finished() == {"b/0"}


async def test_a_fork_that_begins_anew_begins_at_its_turn(make_spec: Any, tmp_path: Path) -> None:
    """Stopped inside of an external call behind the fork's turn: what is shared is kept."""
    drive = {"tool_calls": [{"name": "Odometer", "arguments": {"miles": 3}}]}
    tools = [{"use": "code_for_tests:Odometer", "with": {"log": str(tmp_path / "log")}, "effects": "external"}]
    resumed = forked(await source_of(make_spec, tmp_path, ["no", drive, "It is 42."], tools=tools), tmp_path, 1)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def strike() -> None:
        loop.call_soon_threadsafe(stop.set)
        spec_code.GATE.wait(5)

    spec_code.ON_CALL.append(strike)
    await resumed.run(tmp_path / "fork", stop)
    spec_code.GATE.set()
    spec_code.ON_CALL.clear()
    spec_code.CALLS.clear()
    assert (await resumed.run(tmp_path / "fork")).faults == []
    with resumed.store(tmp_path / "fork") as store, resumed.store(tmp_path / "whole") as source:
        assert store.episode("a/0").attempt == 1
        assert [content(each) for each in store.trajectories()] == [content(each) for each in source.trajectories()]
        assert [each.at for each in store.journal("a/0")[:3]] == [each.at for each in source.journal("a/0")[:3]]
    assert spec_code.CALLS["asked"] == 1  # after turn 2; what it said after turn 0 is shared
