"""Whole episodes against the real server: the same tokens as here, replayed to the byte, nothing left running."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
from ended_runs import run_to_end
from written_specs import save_spec

from engine.runner.replay import Replayer
from engine.runner.summary import RunResult
from engine.spec.load import LoadedSpec
from engine.store import RunStore
from engine.tokens.template import ChatTemplate

Running = Any


def write_spec(folder: Path, model: Path, backend: dict[str, Any], **changes: Any) -> Path:
    """Three attempts at each of four problems, greedy: the user asks again whatever was said."""
    spec = {
        "spec": "episode/v1",
        "name": f"served-{backend['kind']}",
        "model": {"path": str(model), "context": 2048},
        "backend": backend,
        "sampling": {"temperature": 0.0},
        "tasks": {"source": "inline", "rows": [{"id": f"t{n}", "answer": str(n)} for n in range(4)], "id": "id"},
        "prompt": [{"role": "user", "content": "What is {{id}} plus 25?"}],
        "user": {
            "use": "engine.environments.users.attempts:Attempts",
            "with": {"until": "counted", "attempts": 4, "wrong": "Again.", "grade": "exact"},
        },
        "machine": {
            "preset": "retry_with_feedback",
            "transitions": [{"trigger": "truncated", "source": "GENERATING", "dest": "AWAITING_USER_FEEDBACK"}],
        },
        "limits": {"assistant_turns": 3, "turn_tokens": 24},
    } | changes
    return save_spec(folder / f"{spec['name']}.yaml", spec)


async def played(
    path: Path, folder: Path, stop: asyncio.Event | None = None
) -> tuple[LoadedSpec, ChatTemplate, RunStore, RunResult, dict[str, Any]]:
    ran = await run_to_end(path, folder, stop=stop)
    return ran.loaded, ran.template, ran.store, ran.result, ran.stats


async def test_one_spec_gives_the_same_episodes_here_and_there(
    sglang_server: Running, tiny_model_dir: Path, tmp_path: Path
) -> None:
    local = {"kind": "local", "device": "cpu", "dtype": "float32"}
    here = await played(write_spec(tmp_path, tiny_model_dir, local), tmp_path)
    served = {"kind": "sglang", "urls": [sglang_server.url]}
    there = await played(write_spec(tmp_path, tiny_model_dir, served), tmp_path)
    mine = {trajectory.episode_id: trajectory for trajectory in here[2].trajectories()}
    assert len(mine) == 4
    for trajectory in there[2].trajectories():
        same = mine[trajectory.episode_id]
        assert trajectory.path == same.path
        assert len(trajectory.turns) == 3
        assert [message.text for message in trajectory.messages] == [message.text for message in same.messages]
        for theirs, ours in zip(trajectory.branches, same.branches, strict=True):
            assert theirs.input_ids.tolist() == ours.input_ids.tolist()
            assert theirs.loss_mask.tolist() == ours.loss_mask.tolist()
            np.testing.assert_allclose(theirs.logprobs, ours.logprobs, atol=1e-4)


async def test_served_episodes_are_certified_and_replayed_to_the_byte(
    sglang_server: Running, tiny_model_dir: Path, tmp_path: Path
) -> None:
    backend = {"kind": "sglang", "urls": [sglang_server.url]}
    loaded, form, store, result, told = await played(write_spec(tmp_path, tiny_model_dir, backend), tmp_path)
    assert result.faults == []
    turns = sum(len(trajectory.turns) for trajectory in store.trajectories())
    assert turns == 12
    assert told["certificate"] == {"turns_checked": turns, "turns_unchecked": 0, "prompt_mismatches": 0}
    replayer = Replayer(loaded, form, store)
    for trajectory in store.trajectories():
        assert (await replayer.check(trajectory, store.task(trajectory.task_id))).difference is None
    replayer.close()


def running_requests(url: str) -> int:
    with urllib.request.urlopen(f"{url}/v1/loads", timeout=20) as reply:
        loads = json.load(reply)
    return sum(load["num_running_reqs"] for load in loads["loads"])


async def test_a_run_that_is_stopped_leaves_no_request_on_the_server(
    sglang_server: Running, tiny_model_dir: Path, tmp_path: Path
) -> None:
    backend = {"kind": "sglang", "urls": [sglang_server.url]}
    path = write_spec(
        tmp_path,
        tiny_model_dir,
        backend,
        sampling={"temperature": 0.0, "ignore_eos": True},
        limits={"assistant_turns": 3, "turn_tokens": 1500},
    )
    stop = asyncio.Event()
    run = asyncio.create_task(played(path, tmp_path, stop))
    async with asyncio.timeout(60):
        while not await asyncio.to_thread(running_requests, sglang_server.url):  # noqa: ASYNC110  (the server's count)
            await asyncio.sleep(0.1)
    stop.set()
    _, _, store, result, _ = await run
    assert result.interrupted
    assert not store.finished()
    async with asyncio.timeout(30):
        while await asyncio.to_thread(running_requests, sglang_server.url):  # noqa: ASYNC110  (as above)
            await asyncio.sleep(0.1)
