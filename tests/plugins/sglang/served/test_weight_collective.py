"""Broadcasts to real servers: one is lost, hangs or lost the group in the middle of a push, or the trainer was killed there."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.plugins.sglang.client import SGLangBackend
from engine.plugins.sglang.spec import SGLangBackendSpec
from engine.plugins.weights import sync_collective
from engine.plugins.weights.sync_collective import BroadcastGroup
from engine.schemas.generation import SamplingParams
from engine.tokens.template import ChatTemplate
from engine.train.sync import open_sync

sys.path.insert(0, str(Path(__file__).parent))

from test_weight_sync import PROMPT, by_transformers, nudge, policy_of, request, spans, spec_of, started

Running = Any
COLLECTIVE = {"method": "collective"}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several buckets for the tiny model, and short deadlines."""
    monkeypatch.setattr(sync_collective, "BUCKET_BYTES", 100_000)
    monkeypatch.setattr(sync_collective, "ANSWER_SECONDS", 5.0)
    monkeypatch.setattr(sync_collective, "BROADCAST_SECONDS", 15.0)


def at_broadcast(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], None]) -> list[int]:
    """Do something before the n-th broadcast from now on. Returns a list that grows with each one."""
    true = BroadcastGroup.broadcast
    seen: list[int] = []

    def broadcast(self: BroadcastGroup, tensors: Any, device: torch.device) -> None:
        seen.append(self.size)
        if len(seen) == number:
            act()
        true(self, tensors, device)

    monkeypatch.setattr(BroadcastGroup, "broadcast", broadcast)
    return seen


async def assert_samples(backend: SGLangBackend, saved: Path, version: int, episodes: int) -> None:
    """Every reply has this version and the log-probs of these weights."""
    for number in range(episodes):
        reply = await backend.generate(request(episode_id=f"e{version}-{number}"))
        assert spans(reply) == [(version, 24)]
        wanted = by_transformers(saved, PROMPT, reply.output_ids.tolist())
        np.testing.assert_allclose(reply.logprobs, wanted, atol=1e-4)


def scheduler_of(server: Running) -> int:
    """The process of a server that holds the model."""
    leader = int((server.state / f"{server.url.rpartition(':')[2]}.pid").read_text())
    for folder in Path("/proc").iterdir():
        try:
            number = int(folder.name)
            if os.getpgid(number) == leader and b"scheduler" in (folder / "cmdline").read_bytes():
                return number
        except (ValueError, OSError):
            continue
    raise AssertionError("no scheduler found")


@pytest.mark.slow
async def test_a_push_goes_on_without_a_server_that_hangs_or_dies(
    sglang_server: Running,
    second_server: Running,
    chat_format: ChatTemplate,
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one that hangs gets the weights of the next push; the one that was killed gets none."""
    backend = await started(chat_format, tiny_model_dir, sglang_server, second_server, wait=60)
    policy = policy_of(tiny_model_dir)
    sync = open_sync(spec_of(tiny_model_dir, weight_sync=COLLECTIVE), backend, tmp_path, lora=False)
    await sync.push(policy, 1)

    model = scheduler_of(second_server)
    with monkeypatch.context() as patch:
        seen = at_broadcast(patch, 2, lambda: os.kill(model, signal.SIGSTOP))
        nudge(policy, 2)
        await sync.push(policy, 2)
    assert seen[:2] == [3, 3]
    assert seen[-1] == 2  # the group was made again without it
    policy.save(tmp_path / "saved-2")
    assert [server.healthy for server in backend.pool.workers] == [True, False]
    await assert_samples(backend, tmp_path / "saved-2", 2, 2)

    os.kill(model, signal.SIGCONT)
    nudge(policy, 3)
    await sync.push(policy, 3)
    policy.save(tmp_path / "saved-3")
    assert [server.version for server in backend.pool.workers] == ["3", "3"]
    await assert_samples(backend, tmp_path / "saved-3", 3, 2)

    for version, number in ((4, 2), (5, 1)):
        with monkeypatch.context() as patch:
            seen = at_broadcast(patch, number, second_server.kill if version == 4 else lambda: None)
            nudge(policy, version)
            await sync.push(policy, version)
        assert seen[-1] == 2
        policy.save(tmp_path / f"saved-{version}")
        assert [server.healthy for server in backend.pool.workers] == [True, False]
        await assert_samples(backend, tmp_path / f"saved-{version}", version, 2)
    await backend.close()


async def test_a_server_that_lost_the_group_is_called_again(
    sglang_server: Running, chat_format: ChatTemplate, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """As one that was started again between two pushes."""
    backend = await started(chat_format, tiny_model_dir, sglang_server)
    policy = policy_of(tiny_model_dir)
    sync = open_sync(spec_of(tiny_model_dir, weight_sync=COLLECTIVE), backend, tmp_path, lora=False)
    await sync.push(policy, 1)
    (server,) = backend.pool.workers
    await server.json("POST", "/destroy_weights_update_group", {"group_name": sync_collective.GROUP})
    nudge(policy)
    await sync.push(policy, 2)
    policy.save(tmp_path / "saved")
    await assert_samples(backend, tmp_path / "saved", 2, 1)
    await backend.control.update_weights_from_disk(str(tiny_model_dir), 0)
    await backend.close()


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from types import SimpleNamespace

import test_weight_collective as kit
from engine.schemas.model import ModelSpec
from engine.tokens.loading import load_format
from engine.plugins.weights import sync_collective
from engine.plugins.weights.sync_collective import BroadcastGroup

url, model, folder, number = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
sync_collective.BUCKET_BYTES = 100_000
count, true = 0, BroadcastGroup.broadcast

def broadcast(self, tensors, device):
    global count
    count += 1
    if count == number:
        os.kill(os.getpid(), signal.SIGKILL)
    true(self, tensors, device)

BroadcastGroup.broadcast = broadcast

async def main():
    format = load_format(ModelSpec(path=str(model)), model)
    backend = await kit.started(format, model, SimpleNamespace(url=url))
    spec = kit.spec_of(model, weight_sync=kit.COLLECTIVE)
    sync = kit.open_sync(spec, backend, folder, lora=False)
    await sync.push(kit.policy_of(model), 1)
    await sync.push(kit.policy_of(model), 2)

asyncio.run(main())
"""


@pytest.mark.slow
async def test_the_push_after_a_killed_trainer_makes_the_group_again(
    sglang_server: Running, chat_format: ChatTemplate, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """It was killed in the middle of its second push: the server is paused, has the group, an open session and some buckets."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    result = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, script, sglang_server.url, tiny_model_dir, tmp_path / "run", "8"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == -signal.SIGKILL, result.stderr[-2000:]
    backend = SGLangBackend(
        SGLangBackendSpec(urls=[sglang_server.url]),
        chat_format,
        sampling=SamplingParams(),
        model=str(tiny_model_dir),
    )
    backend.training = True
    await backend.start()
    policy = policy_of(tiny_model_dir)
    nudge(policy)
    sync = open_sync(spec_of(tiny_model_dir, weight_sync=COLLECTIVE), backend, tmp_path, lora=False)
    await sync.push(policy, 2)
    policy.save(tmp_path / "saved")
    await assert_samples(backend, tmp_path / "saved", 2, 1)
    await backend.control.update_weights_from_disk(str(tiny_model_dir), 0)
    await backend.close()
