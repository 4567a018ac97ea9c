"""Sends new weights to SGLang servers by broadcasts in one process group.

Process 0 of the training and every tensor-parallel process of every server are in one group. Servers get names,
number types and shapes of a bucket, and receive its tensors; the last bucket names the version.

Invariants:
- A failure ends the group for all of its processes. It is made again with the servers that are there, which get all
  buckets again.
- A server that is lost during a push, or was away, stays out of the pool until it has the weights of a later push.

SGLang joins with its own helper `init_custom_process_group` (sglang/srt/utils/common.py), which makes a second group
beside a process's default group, of processes that have different default groups; `torch.distributed.new_group` cannot
do that. The helper uses private functions of torch. Here the same group is made of torch's public classes (`TCPStore`,
`PrefixStore`, `ProcessGroupGloo`, `ProcessGroupNCCL`): it is not registered in this process, so that it cannot collide
with the group
of a training of several processes, and it can be given up and made again at any time. Only the names under which the
processes find each other in the store must be those of the helper; `_prefixes` says which ones they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import structlog
import torch
from torch import distributed

from engine.errors import BackendError, TrainError
from engine.plugins.sglang.control import PauseMode, post_update
from engine.plugins.weights.server_pushes import check_models, push_loads
from engine.plugins.weights.shared_tensors import buckets
from engine.train.sync import Pushed, tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.plugins.servers.pool import Server
    from engine.plugins.sglang.client import SGLangBackend
    from engine.train.policy import Policy

log = structlog.get_logger(__name__)

GROUP = "episode-engine"
"""Name of the group. A server has the group of a training that was killed until it is told to destroy it."""
ANSWER_SECONDS = 10.0
"""After a failed broadcast: time in which a server must answer, in seconds. One that does not is out."""
BUCKET_SECONDS = 120.0
"""Time in which a server must have received and loaded a bucket, in seconds."""
CONNECT_SECONDS = 2.0
"""After a failure: time in which the other servers have connected to the group, in seconds."""
BUCKET_BYTES = 256 << 20
"""Maximum bytes of tensors that a server receives before it loads them. A larger tensor is sent by itself."""

_SILENT = "silent"
"""Kind of the error of a server that did not end its part of a collective operation that the others ended."""
Bucket = list[tuple[str, "torch.Tensor"]]
Outcomes = dict["Server", BackendError]
"""The error of each server that had one."""


class CollectiveSync:
    """By broadcasts: servers may be on any host that reaches process 0 of the training, and no file is written.

    Args:
        backend: The backend, started.
        mode: What becomes of replies that are being sampled.
        address: Address of this host for the servers; None: that of the route to them.
        port: Port for the servers; None: a free one.

    Raises:
        TrainError: kind `train_setup`: the address is not one of this host.
    """

    def __init__(self, backend: SGLangBackend, mode: PauseMode, address: str | None, port: int | None) -> None:
        if address is not None:
            try:
                bind_here(address)
            except OSError as error:
                raise TrainError(
                    f"`train.weight_sync.address: {address}` is not an address of this host ({error}): set it to the "
                    "address of process 0 of the training, or remove it",
                    kind="train_setup",
                ) from None
        self._backend = backend
        self._mode = mode
        self._address, self._port = address, port
        self._fits: set[str] = set()
        self._group: BroadcastGroup | None = None
        self._members: list[Server] = []
        backend.at_close.append(self.close)

    async def push(self, policy: Policy, version: int) -> Pushed:
        """See `WeightSync`. A server that was not there stays out until the next push."""
        await check_models(self._backend, policy, self._fits)
        weights = await asyncio.to_thread(policy.serving_weights)
        pieces = list(buckets(weights, BUCKET_BYTES))

        async def load(servers: list[Server], flush: bool) -> list[BaseException | None]:
            failures = await self._load(servers, pieces, version, flush, policy.device)
            return [failures.get(server) for server in servers]

        source = f"broadcasts of version {version}"
        paused = await push_loads(self._backend, load, version, source=source, mode=self._mode, again=False)
        return Pushed(bytes=tensor_bytes(weights.values()), pause_seconds=paused)

    async def close(self) -> None:
        """End the group on the servers too: NCCL may end a process whose peer is gone."""
        if self._group is None:
            return
        members = self._members
        ends = asyncio.ensure_future(
            _each(members, "/destroy_weights_update_group", {"group_name": GROUP}, seconds=ANSWER_SECONDS)
        )
        await asyncio.sleep(0)  # the calls are sent first: ranks of NCCL leave a group together
        await asyncio.to_thread(self._leave)
        for server, error in (await ends).items():
            log.debug("a server did not leave the group", server=server.url, reason=str(error))

    async def _load(
        self, servers: list[Server], pieces: list[Bucket], version: int, flush: bool, device: torch.device
    ) -> Outcomes:
        """Send all buckets; without the servers that are lost on the way. Returns the errors."""
        lost: Outcomes = {}
        failures: Outcomes = {}
        again = True
        while left := [server for server in servers if server not in lost]:
            failures = await self._try(left, pieces, version, flush, device)
            if not failures:
                break
            self._leave()
            gone = await _gone(failures)
            lost |= gone
            if not gone and not again:
                break  # they are there, and refused twice
            again = bool(gone)
            log.info(
                "a broadcast of weights failed and begins again",
                version=version,
                without=[server.url for server in gone],
                reasons=[str(error) for error in failures.values()],
            )
        else:
            failures = {}
        if failures:
            await _each(left, "/end_weight_update", {})
            message = "was not sent all weights, because another server refused"
            failures = {s: failures.get(s) or BackendError(f"{s.url} {message}", kind="update_failed") for s in left}
        return lost | failures

    async def _try(
        self, servers: list[Server], pieces: list[Bucket], version: int, flush: bool, device: torch.device
    ) -> Outcomes:
        if failures := await self._join(servers, device):
            return failures
        await _each(servers, "/end_weight_update", {})  # of a push that was interrupted
        if failures := await _each(servers, "/begin_weight_update", {}):
            return failures
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1
            body: dict[str, Any] = {
                "names": [name for name, _ in piece],
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in piece],
                "shapes": [list(tensor.shape) for _, tensor in piece],
                "group_name": GROUP,
                "flush_cache": flush and last,
            }
            # The version comes with the last bucket, so a server with only some of them does not report it.
            if last:
                body["weight_version"] = str(version)
            group = self._group
            assert group is not None
            send = partial(group.broadcast, [tensor for _, tensor in piece], device)
            bodies = dict.fromkeys(servers, body)
            if failures := await self._together(send, "/update_weights_from_distributed", bodies):
                return failures
        return await _each(servers, "/end_weight_update", {})

    async def _join(self, servers: list[Server], device: torch.device) -> Outcomes:
        """Make the group of these servers, unless it exists."""
        if self._group is not None and self._members == servers:
            return {}
        self._leave()
        ranks: dict[Server, int] = {}
        failures: Outcomes = {}
        on_gpus = device.type == "cuda"
        for server in servers:
            try:
                facts = await server.json("GET", "/server_info")
                ranks[server] = _processes(server, facts)
                on_gpus &= facts.get("device") == "cuda"
            except BackendError as error:
                failures[server] = error
        if failures:
            return failures
        host = self._address or own_address(server.url for server in servers)
        kind: GroupKind = "nccl" if on_gpus else "gloo"
        group = await asyncio.to_thread(BroadcastGroup, GROUP, kind, host, self._port, 1 + sum(ranks.values()))
        self._group, self._members = group, list(servers)
        await _each(servers, "/destroy_weights_update_group", {"group_name": GROUP})  # of a training that was killed
        bodies: dict[Server, dict[str, Any]] = {}
        first = 1
        for server, count in ranks.items():
            bodies[server] = {
                "master_address": group.host,
                "master_port": group.port,
                "rank_offset": first,
                "world_size": group.size,
                "group_name": GROUP,
                "backend": kind,
            }
            first += count
        return await self._together(group.join, "/init_weights_update_group", bodies)

    async def _together(self, own: Callable[[], None], path: str, bodies: dict[Server, dict[str, Any]]) -> Outcomes:
        """Do this process's part of a collective operation while the servers do theirs. Returns the errors of the
        servers."""
        mine = _in_thread(own)
        calls = {server: asyncio.ensure_future(post_update(server, path, body)) for server, body in bodies.items()}
        try:
            _, waiting = await asyncio.wait(
                [mine, *calls.values()], timeout=BUCKET_SECONDS, return_when=asyncio.FIRST_EXCEPTION
            )
            if not waiting and not mine.exception() and not any(call.exception() for call in calls.values()):
                return {}
            # A server that connects to a store that is gone tries for half an hour; one that is connected stops waiting
            # at once.
            await asyncio.wait([*calls.values()], timeout=CONNECT_SECONDS)
            self._leave()
            await asyncio.wait([*calls.values()], timeout=ANSWER_SECONDS)
            return {server: _failure(server, path, call, mine) for server, call in calls.items()}
        finally:
            for call in calls.values():
                call.cancel()
            mine.add_done_callback(lambda done: done.cancelled() or done.exception())  # read, so that nobody complains
            if not mine.done():
                self._leave()

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group, self._members = None, []


def _in_thread(function: Callable[[], None]) -> asyncio.Future[None]:
    """Run a function in a thread that does not keep this process from ending: NCCL may wait in it for ever."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def end(error: Exception | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        error = None
        try:
            function()
        except Exception as caught:  # noqa: BLE001  (whoever waits for `done` gets it)
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(end, error)

    threading.Thread(target=run, name="broadcasts", daemon=True).start()
    return done


def _processes(server: Server, facts: dict[str, Any]) -> int:
    """Number of processes of a server that join.

    Raises:
        BackendError: kind `update_failed`: SGLang cannot do it with the server's layout.
    """
    for key, name in (("pp_size", "pipeline"), ("dp_size", "data")):
        if int(facts.get(key) or 1) > 1:
            raise BackendError(
                f"{server.url} has {key} {facts[key]}: SGLang takes broadcasts of weights only without {name} "
                "parallelism; use `train.weight_sync.method: disk`",
                kind="update_failed",
            )
    return int(facts.get("tp_size") or 1)


def _failure(server: Server, path: str, call: asyncio.Future[None], mine: asyncio.Future[None]) -> BackendError:
    if not call.done():
        message = f"{server.url}{path} did not answer within {ANSWER_SECONDS:g} s after the group was closed"
        return BackendError(message, kind=_SILENT, retryable=True, refused=True)
    error = call.exception()
    if isinstance(error, BackendError):
        return error
    if error is not None:
        raise error
    failure = mine.exception() if mine.done() else None
    return BackendError(
        f"{server.url}{path}: the group failed: {failure or 'another server failed'}", kind="update_failed"
    )


async def _gone(failures: Outcomes) -> Outcomes:
    """The servers that cannot be asked any more, with an error that says so."""

    async def ask(server: Server, error: BackendError) -> BackendError | None:
        if error.kind == _SILENT:
            return error
        try:
            await server.json("GET", "/model_info", timeout=ANSWER_SECONDS)
        except BackendError as failure:
            return failure if failure.retryable else None
        return None

    answers = await asyncio.gather(*(ask(server, error) for server, error in failures.items()))
    return {server: answer for server, answer in zip(failures, answers, strict=True) if answer is not None}


async def _each(servers: list[Server], path: str, body: dict[str, Any], *, seconds: float | None = None) -> Outcomes:
    """POST to each server. Returns the errors."""
    outcomes = await asyncio.gather(
        *(post_update(server, path, body, seconds=seconds or JOIN_SECONDS) for server in servers),
        return_exceptions=True,
    )
    failures: Outcomes = {}
    for server, outcome in zip(servers, outcomes, strict=True):
        if isinstance(outcome, BackendError):
            failures[server] = outcome
        elif outcome is not None:
            raise outcome
    return failures


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
        name: The name of the group that the servers get.
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
