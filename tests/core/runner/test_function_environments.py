"""The four forms of `@environment` give the same episodes, in threads and in worker processes, and resume after every commit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import function_worlds as worlds
import pytest
from stopping import Resumed, content

from engine.schemas.trajectory import Trajectory

FORMS = ["generator", "async_generator", "function", "async_function"]
PEEK = {"tool_calls": [{"name": "peek", "arguments": {}}]}
REPLIES = ["1", PEEK, {"text": "A very long", "finish": "length"}, "7"]
MAX_COMMITS = 40


def settings(form: str, **more: Any) -> dict[str, Any]:
    """A spec's changes for one of the forms."""
    effects = "replayable" if "generator" in form else "pure"
    environment = {"use": f"function_worlds:{form}", "with": {"bonus": 0.5}, "effects": effects, **more}
    rows = {"source": "inline", "rows": [{"id": "a", "secret": 7}], "id": "id"}
    return {"user": None, "tools": None, "tasks": rows, "environment": environment, "machine": "tools_and_step"}


def check(episode: Trajectory) -> None:
    """What the game comes to."""
    assert [event for _, event, _ in episode.path] == [
        "ready", "answered", "continue", "tool_calls", "results", "truncated", "continue", "answered", "done"
    ]  # fmt: skip
    assert [turn.rewards for turn in episode.turns] == [
        {"miss": -0.1, "late": -0.01},
        {},
        {"miss": -0.1, "late": -0.02},
        {"won": 1.5},
    ]
    assert episode.facts == {"tries": 3, "solved": True, "peeked": True}
    assert [message.text for message in episode.messages if message.role != "assistant"][-3:] == [
        "Wrong, 1.", "1 tries", "Wrong, 2."
    ]  # fmt: skip
    assert episode.outcome.solved


@pytest.mark.parametrize("form", FORMS)
async def test_each_form_gives_the_same_episode(make_spec: Any, run_spec: Any, form: str) -> None:
    check((await run_spec(make_spec(REPLIES, **settings(form)))).only)


@pytest.mark.slow  # by default: test_resume stops episodes of an environment
@pytest.mark.parametrize("form", FORMS)
async def test_a_form_stopped_at_any_commit_comes_to_the_same(make_spec: Any, tmp_path: Path, form: str) -> None:
    resumed = Resumed(make_spec(REPLIES, **settings(form)))
    await resumed.run(tmp_path / "whole")
    with resumed.store(tmp_path / "whole") as store:
        (whole,) = store.trajectories()
    check(whole)
    for commit in range(1, MAX_COMMITS):
        out = tmp_path / str(commit)
        struck = await resumed.starved(out, commit)
        assert (await resumed.run(out)).faults == []
        with resumed.store(out) as store:
            (trajectory,) = store.trajectories()
        assert content(trajectory) == content(whole), commit
        assert await resumed.differences(out) == []
        if not struck:
            return
    raise AssertionError(f"more than {MAX_COMMITS} commits")


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
async def test_a_form_runs_in_a_worker_process(make_spec: Any, run_spec: Any, form: str) -> None:
    check((await run_spec(make_spec(REPLIES, **settings(form, isolation="process")))).only)


async def test_a_generator_is_closed_where_the_episode_ends_before_it(make_spec: Any, run_spec: Any) -> None:
    worlds.CLOSED.clear()
    changes = settings("generator") | {"limits": {"assistant_turns": 1}}
    ran = await run_spec(make_spec(["1"], **changes))
    assert (ran.only.outcome.limit, worlds.CLOSED) == ("assistant_turns", ["a"])


async def test_a_generator_that_is_said_to_be_pure_fails_at_a_resume_and_says_what_to_write(
    make_spec: Any, tmp_path: Path
) -> None:
    resumed = Resumed(make_spec(REPLIES, **settings("generator", effects="pure")))
    assert await resumed.starved(tmp_path / "runs", 4)  # after the first step
    await resumed.run(tmp_path / "runs")
    with resumed.store(tmp_path / "runs") as store:
        (trajectory,) = store.trajectories()
    failure = trajectory.outcome.failure
    assert failure is not None
    assert (failure.kind, failure.blame) == ("environment_error", "environment")
    assert "write `effects: replayable` in the spec" in failure.message
