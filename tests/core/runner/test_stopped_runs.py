"""Runs that were stopped are resumed, and runs that have ended are replayed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import code_for_tests as spec_code
import pytest
from scripted_replies import ADD, call

from engine.backends.registry import open_backend
from engine.runner.replay import Replayer, first_difference
from engine.runner.runner import Runner
from engine.spec.tasks import load_tasks
from engine.store import RunStore


async def test_replay_rebuilds_the_same_bytes(make_spec, run_spec) -> None:
    rows = [{"id": f"t{n}"} for n in range(3)]
    ran = await run_spec(
        make_spec(
            [ADD, "<tool_call>{", "no", "It is 42."],
            tasks={"rows": rows},
            environment={"use": "code_for_tests:Board"},
        )
    )
    replayer = Replayer(ran.loaded, ran.template, ran.store)
    spec_code.CALLS.clear()
    for trajectory in ran.trajectories.values():
        assert (await replayer.check(trajectory, ran.store.task(trajectory.task_id))).difference is None
    replayer.close()
    assert spec_code.CALLS["reset"] == spec_code.CALLS["asked"] == spec_code.CALLS["add"] == 0


async def test_replay_tells_the_first_difference(make_spec, run_spec) -> None:
    ran = await run_spec(make_spec(["no", "It is 42."]))
    trajectory = ran.only
    branch = trajectory.branches[0]
    changed = branch.input_ids.copy()
    changed[5] += 1
    other = replace(trajectory, branches=[replace(branch, input_ids=changed)])
    assert first_difference(trajectory, other) == f"branches[0].input_ids[5]: {changed[5] - 1} now, {changed[5]} stored"
    assert first_difference(trajectory, trajectory) is None


async def stop_when(stop: asyncio.Event, condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  (it looks at counters of code in other threads)
        await asyncio.sleep(0.005)
    stop.set()


async def test_stopping_leaves_what_is_finished_and_resume_does_the_rest(make_spec, run_spec, tmp_path) -> None:
    rows = [{"id": f"t{n}"} for n in range(6)]
    replies = [ADD, call("wait", seconds=0.05), "no", "It is 42."]
    path = make_spec(replies, tasks={"rows": rows}, rollout={"live_episodes": 2})
    whole = await run_spec(path)

    stop = asyncio.Event()
    part, _ = await asyncio.gather(
        run_spec(path, stop=stop), stop_when(stop, lambda: spec_code.CALLS["asked"] > 12 + 4)
    )
    done = set(part.trajectories)
    assert part.result.interrupted
    assert len(done) < 6
    spec_code.CALLS.clear()

    store = RunStore.open(part.store.folder)
    kept = {key: store.journal(key) for key, status in store.statuses().items() if status == "running"}
    backend = open_backend(part.loaded, part.template)
    runner = Runner(part.loaded, load_tasks(part.loaded), part.template, backend, store)
    result = await runner.run()
    assert result.summary.episodes == 6
    assert not result.interrupted
    for key, entries in kept.items():
        assert [entry.json() for entry in store.journal(key)[: len(entries)]] == [entry.json() for entry in entries]
    for trajectory in store.trajectories():
        same = whole.trajectories[trajectory.episode_id]
        assert [branch.json() for branch in trajectory.branches] == [branch.json() for branch in same.branches]
        assert trajectory.outcome == same.outcome
    store.close()


@pytest.mark.parametrize(("effects", "resets", "attempts"), [("replayable", 2, 1), ("external", 2, 2), ("pure", 1, 1)])
async def test_effects_say_what_a_resume_may_do(make_spec, run_spec, effects, resets, attempts) -> None:
    path = make_spec(
        [call("wait", seconds=0.3), "It is 42."],
        environment={"use": "code_for_tests:Board", "effects": effects},
    )
    stop = asyncio.Event()
    part, _ = await asyncio.gather(run_spec(path, stop=stop), stop_when(stop, lambda: spec_code.ACTIVE["wait"] > 0))
    assert part.result.summary.episodes == 0

    store = RunStore.open(part.store.folder)
    backend = open_backend(part.loaded, part.template)
    result = await Runner(part.loaded, load_tasks(part.loaded), part.template, backend, store).run()
    assert result.summary.solved == 1
    assert spec_code.CALLS["reset"] == resets
    assert store.episode("a/0").attempt == attempts - 1
    store.close()
