"""A process group that reaches from the trainer into the processes of servers, to broadcast tensors from the trainer.

SGLang joins with its own helper `init_custom_process_group` (sglang/srt/utils/common.py), which makes a second group
beside a process's default group, of processes that have different default groups; `torch.distributed.new_group` cannot
do that. The helper uses private functions of torch. Here the same group is made of torch's public classes (`TCPStore`,
`PrefixStore`, `ProcessGroupGloo`, `ProcessGroupNCCL`): it is not registered in this process, so that it cannot collide
with the group
of a training of several processes, and it can be given up and made again at any time. Only the names under which the
processes find each other in the store must be those of the helper; `_prefixes` says which ones they are.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
from torch import distributed

from engine.errors import TrainError

dist: Any = distributed
"""torch declares its public classes of stores and groups only in a private module."""

GroupKind = Literal["gloo", "nccl"]
JOIN_SECONDS = 60.0
"""Time in which all servers must have joined, in seconds."""
BROADCAST_SECONDS = 60.0
"""Time limit for one bucket, in seconds. A server that hangs delays the others by no more than this."""


class BroadcastGroup:
    """A group in which this process has rank 0 and the processes of the servers have the others.

    Args:
        name: Name of the group, as the servers are told.
        kind: The library that moves the tensors.
        host: Name or address of this host, as the servers reach it.
        port: Port of the store through which the processes find each other; None: a free one.
        size: Number of processes, with this one.

    Raises:
        TrainError: kind `train_setup`: the port cannot be opened.
    """

    def __init__(self, name: str, kind: GroupKind, host: str, port: int | None, size: int) -> None:
        self.name, self.kind, self.host, self.size = name, kind, host, size
        try:
            self._store: Any = dist.TCPStore(
                host, port or 0, size, is_master=True, timeout=timedelta(seconds=JOIN_SECONDS), wait_for_workers=False
            )
        except RuntimeError as error:
            raise TrainError(
                f"port {port or 'of any number'} of {host} cannot be opened for "
                "`train.weight_sync.method: collective`: "
                f"{str(error).splitlines()[0]}. Set `train.weight_sync.port` to a free port, or remove it",
                kind="train_setup",
            ) from error
        self.port: int = self._store.port
        self._group: Any = None

    def join(self) -> None:
        """Wait for the other processes. With NCCL they are waited for at the first broadcast.

        Raises:
            RuntimeError: they did not join in `JOIN_SECONDS`, or the group was closed meanwhile.
        """
        # A connection of its own: when `close` ends the store itself, this process stops waiting as the others do.
        store = dist.TCPStore(self.host, self.port, self.size, is_master=False, timeout=timedelta(seconds=JOIN_SECONDS))
        for prefix in _prefixes(self.name, self.kind):
            store = dist.PrefixStore(prefix, store)
        seconds = timedelta(seconds=JOIN_SECONDS)
        group = dist.ProcessGroupGloo(store, 0, self.size, seconds) if self.kind == "gloo" else _nccl(store, self.size)
        self._group = group
        if self._store is None:
            self.close()
            raise RuntimeError("the group is closed")

    def broadcast(self, tensors: Iterable[torch.Tensor], device: torch.device) -> None:
        """Send tensors of any shapes to the other processes, one after another.

        Args:
            tensors: The tensors.
            device: For NCCL: a GPU of this process, to which each tensor is copied first.

        Raises:
            RuntimeError: not all of them were received in `BROADCAST_SECONDS`.
        """
        group, options = self._group, dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=BROADCAST_SECONDS)
        if group is None:
            raise RuntimeError("the group is closed")
        to = device if self.kind == "nccl" else torch.device("cpu")
        works: list[Any] = []
        failed: str | None = None
        try:
            sent = [tensor.detach().to(to).contiguous() for tensor in tensors]
            works += [group.broadcast([tensor], options) for tensor in sent]
            until = time.monotonic() + BROADCAST_SECONDS
            for number in range(len(works)):
                # With NCCL `wait` returns when the work is queued, and torch's own time limit would end this process.
                while self.kind == "nccl" and not works[number].is_completed():
                    if time.monotonic() > until:
                        raise RuntimeError(f"a bucket was not received in {BROADCAST_SECONDS:g} s")
                    time.sleep(0.001)
                works[number].wait(timedelta(seconds=BROADCAST_SECONDS))
        except RuntimeError as error:
            failed = str(error)
        # gloo closes its connections when nothing refers to the group any more: an error's traceback must not do so.
        works.clear()
        del group
        if failed is not None:
            raise RuntimeError(failed)

    def close(self) -> None:
        """Leave the group. Processes that wait in it get an error. Running broadcasts of this process fail."""
        group, self._group, self._store = self._group, None, None
        if group is not None:
            with contextlib.suppress(RuntimeError):  # it failed before
                group.abort()


def _nccl(store: Any, size: int) -> Any:
    """A group of NCCL with rank 0 here. A lost server must not end the training. Torch's watchdog ends a process whose
    broadcast failed or is late, so it is switched off (TORCH_NCCL_ASYNC_ERROR_HANDLING=0); `broadcast` has the time
    limits."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=1)
    before = os.environ.get(_NCCL_ERRORS)
    os.environ[_NCCL_ERRORS] = "0"  # read when the group is made
    try:
        return dist.ProcessGroupNCCL(store, 0, size, options)
    finally:
        if before is None:
            del os.environ[_NCCL_ERRORS]
        else:
            os.environ[_NCCL_ERRORS] = before


_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def _prefixes(name: str, kind: GroupKind) -> tuple[str, ...]:
    """Prefixes of the keys in the store, the outermost first: SGLang's helper adds the first one, torch the others."""
    return name, f"{name}/", "cpu/" if kind == "gloo" else "cuda/"


def own_address(urls: Iterable[str]) -> str:
    """The address of this host on its route to servers: that of the first one on another host, else the loopback
    address."""
    host_address = "127.0.0.1"
    for url in urls:
        parts = urlsplit(url)
        try:
            family, _, _, _, address = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as trial:
                trial.connect(address)  # a datagram socket: nothing is sent
                host_address = trial.getsockname()[0]
        except OSError:
            continue
        if not host_address.startswith("127.") and host_address != "::1":
            break
    return host_address


def bind_here(host: str) -> None:
    """Bind a socket to a host's address, which must be one of this host. Raises: OSError: it is not."""
    family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as trial:
        trial.bind(address)
