"""A process that joins as SGLang does receives what the trainer broadcasts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import distributed as dist

from engine.errors import TrainError
from engine.plugins.weights import sync_collective
from engine.plugins.weights.sync_collective import BroadcastGroup, own_address
from engine.schemas.train import WeightSyncSpec

SERVER = Path(__file__).with_name("joining_server.py")
TENSORS = [
    torch.arange(12.0).reshape(3, 4).t(),
    torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    torch.tensor(7),
    torch.zeros(0, 3),
]


def joined(group: BroadcastGroup, *extra: str) -> list[subprocess.Popen[str]]:
    """The other processes of a group, once each of them is connected to all others."""
    servers = [
        subprocess.Popen(
            [sys.executable, SERVER, group.host, str(group.port), str(group.size), str(rank), group.name, *extra],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(1, group.size)
    ]
    group.join()
    for server in servers:
        assert server.stdout is not None
        assert server.stdout.readline() == "joined\n"
    return servers


@pytest.mark.slow
def test_processes_that_join_as_sglang_does_receive_the_tensors() -> None:
    """The trainer has a default group of its own at the same time, as in a training of several processes."""
    facts = [f"{str(tensor.dtype).removeprefix('torch.')}:{','.join(map(str, tensor.shape))}" for tensor in TENSORS]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = BroadcastGroup("episode-engine", "gloo", "127.0.0.1", None, 3)
        servers = joined(group, *facts)
        group.broadcast(TENSORS, torch.device("cpu"))
        for server in servers:
            out, _ = server.communicate(timeout=60)
            wanted = [(str(tensor.dtype), tuple(tensor.shape), tensor.float().tolist()) for tensor in TENSORS]
            assert out == f"{wanted}\n"
        group.close()
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["killed", "closed"])
def test_a_broadcast_ends_when_a_process_is_lost_or_the_group_is_closed(
    lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither side waits for ever: the trainer gets an error, and so do the processes that are left."""
    monkeypatch.setattr(sync_collective, "BROADCAST_SECONDS", 20.0)
    group = BroadcastGroup("episode-engine", "gloo", "127.0.0.1", None, 3)
    servers = joined(group, *[f"float32:{1 << 22}"] * 4)
    if lost == "killed":
        servers[0].kill()
        servers[0].wait()
        with pytest.raises(RuntimeError):
            group.broadcast([torch.zeros(1 << 22)] * 4, torch.device("cpu"))
    group.close()
    for server in servers:
        out, _ = server.communicate(timeout=60)
        if not (lost == "killed" and server is servers[0]):
            assert out.startswith("failed")
    with pytest.raises(RuntimeError, match="closed"):
        group.broadcast([torch.zeros(1)], torch.device("cpu"))


def test_a_port_that_is_taken_is_an_error_that_says_what_to_do() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        with pytest.raises(TrainError, match=r"Set `train\.weight_sync\.port` to a free port") as caught:
            BroadcastGroup("episode-engine", "gloo", "127.0.0.1", other.getsockname()[1], 2)
    assert caught.value.kind == "train_setup"


@pytest.mark.parametrize(
    ("urls", "address"),
    [
        (["http://127.0.0.1:30000", "http://localhost:30001"], "127.0.0.1"),
        (["http://[::1]:30000"], "::1"),
        (["http://no-such-host.invalid:1"], "127.0.0.1"),
    ],
)
def test_the_address_is_that_of_the_route_to_the_servers(urls: list[str], address: str) -> None:
    assert own_address(urls) == address


@pytest.mark.parametrize("address", ["trainer-0", "10.0.0.7", "gpu_1.cluster.local", "::1", "fe80::1"])
def test_hosts_are_addresses(address: str) -> None:
    assert WeightSyncSpec(address=address).address == address


@pytest.mark.parametrize(
    "changes",
    [{"address": text} for text in ("", "http://a", "a:29600", "a/b", "a b", "-", "[::1]")]
    + [{"port": port} for port in (0, -1, 65536)],
)
def test_what_is_no_host_or_port_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        WeightSyncSpec(**changes)


def test_threads_are_not_left_behind() -> None:
    before = threading.active_count()
    for _ in range(3):
        BroadcastGroup("episode-engine", "gloo", "127.0.0.1", None, 2).close()
    assert threading.active_count() == before


class Late:
    """A broadcast of NCCL that is done when it was asked for the n-th time."""

    def __init__(self, asks: int) -> None:
        self.asks = asks
        self.waited = False

    def is_completed(self) -> bool:
        self.asks -= 1
        return self.asks <= 0

    def wait(self, limit: Any) -> None:
        self.waited = True


class StandInNCCL:
    """torch's class on a machine without NCCL: what it is made with."""

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.handling = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")
        self.made = (rank, size, options._timeout)
        self.works: list[Late] = []
        self.left = False

    class Options:
        _timeout: Any = None

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Late:
        assert (options.rootRank, options.rootTensor) == (0, 0)
        return self.works.pop(0)

    def abort(self) -> None:
        self.left = True


@pytest.mark.parametrize("before", [None, "3"])
def test_nccls_watchdog_does_not_end_the_training_and_a_late_bucket_is_an_error(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    if before is None:
        monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    else:
        monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", before)
    monkeypatch.setattr(sync_collective.dist, "ProcessGroupNCCL", StandInNCCL, raising=False)
    group = BroadcastGroup("episode-engine", "nccl", "127.0.0.1", None, 2)
    group.join()
    made = group._group
    assert made.handling == "0"
    assert made.made == (0, 2, timedelta(days=1))
    assert os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == before

    good = [Late(3), Late(1)]
    made.works = list(good)
    group.broadcast([torch.ones(2)] * 2, torch.device("cpu"))
    assert [work.waited for work in good] == [True, True]

    monkeypatch.setattr(sync_collective, "BROADCAST_SECONDS", 0.05)
    made.works = [Late(1 << 60)]
    with pytest.raises(RuntimeError, match=r"a bucket was not received in 0\.05 s"):
        group.broadcast([torch.ones(2)], torch.device("cpu"))
    group.close()
    assert made.left


def test_a_group_that_is_closed_while_it_is_joined_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(StandInNCCL):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)
            group.close()

    made: list[Slow] = []
    monkeypatch.setattr(sync_collective.dist, "ProcessGroupNCCL", Slow, raising=False)
    group = BroadcastGroup("episode-engine", "nccl", "127.0.0.1", None, 2)
    with pytest.raises(RuntimeError, match="closed"):
        group.join()
    assert made[0].left
    assert group._group is None
