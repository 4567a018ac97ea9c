"""Sends new weights to SGLang servers: through a folder, through shared memory, or as a LoRA adapter.

Invariants:
- A server that did not load the weights gets no requests until it has (`engine.backends.sglang.control`). If a server dies
  during a push, the push goes on with the others; if all are gone, it begins again when one is back.
- Weights that do not fit a server's model are refused before anything is sent (`server_models.py`).
- Files that a server may still read stay in the folder: the newest weights, and adapters that running requests name.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import shutil
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import structlog

from engine.backends.http.retries import growing_pause
from engine.backends.sglang.client import PolicyAdapter, SGLangBackend
from engine.backends.sglang.control import UPDATE_SECONDS, PauseMode, from_disk
from engine.errors import BackendError, OutageError, TrainError
from engine.train.server_models import ServerModels
from engine.train.shared_tensors import SharedBuffer, buckets, buffer_bytes

if TYPE_CHECKING:
    from engine.backends.sglang.server import Server
    from engine.schemas.episode import EpisodeSpec
    from engine.train.policy import Policy
    from engine.train.sync import WeightSync

log = structlog.get_logger(__name__)

PROBE_SECONDS = 30.0
"""Time limit of a server's first reply with new weights, in seconds. After it the server is only asked for its version."""


def open_sglang_sync(spec: EpisodeSpec, backend: SGLangBackend, folder: Path, *, lora: bool) -> WeightSync:
    """See `engine.train.sync.open_sync`.

    Raises:
        TrainError: the backend cannot take weights in the way that the spec asks for.
    """
    assert spec.train is not None
    weights = spec.train.weight_sync
    method = spec.backend.sync_method(weights.method, lora=lora)
    if spec.backend.adapter_name is not None:
        raise TrainError(
            f"`backend.adapter: {spec.backend.adapter_name}` cannot be used with `train`: the trainer starts from the base "
            "model; merge the adapter into the model and set `model.path` to the result",
            kind="train_setup",
        )
    # Several trainings can use one folder.
    place = Path(weights.folder).expanduser() / folder.name if weights.folder is not None else folder / "weights"
    mode: PauseMode = "retract" if weights.pause_generation else "in_place"
    if method == "disk":
        return DiskSync(backend, place.resolve(), mode)
    if method == "tensors":
        _same_host([server.url for server in backend.workers])
        return TensorSync(backend, mode)
    if not lora:
        raise TrainError(
            "`train.weight_sync.method: adapter` needs `train.lora`; without one all weights change: use `disk` or `tensors`",
            kind="train_setup",
        )
    if "lora_path" in backend.dropped:
        raise TrainError(
            "the router drops `lora_path`: name the servers themselves in `backend.urls`", kind="train_setup"
        )
    return AdapterSync(backend, place.resolve())


class DiskSync:
    """Through a folder that every server reads."""

    def __init__(self, backend: SGLangBackend, folder: Path, mode: PauseMode) -> None:
        self._backend = backend
        self._folder = folder
        self._mode = mode
        self._fit = ServerModels(backend)

    async def push(self, policy: Policy, version: int) -> None:
        """See `WeightSync`. The folder stays until the next one is loaded, so that a server that comes back can read it."""
        await self._fit.check(policy)
        target = self._folder / f"version-{version}"
        await asyncio.to_thread(policy.save, target)
        load = _with_retry(from_disk(str(target), version))

        async def update() -> None:
            source = f"weights from {target}"
            await self._backend.control.update_weights(load, version, source=source, mode=self._mode)
            await _check_versions(self._backend, version)

        await _through_outages(self._backend, version, update)
        await asyncio.to_thread(_remove_others, self._folder, "version-*", {target.name})


class TensorSync:
    """Through shared memory: no file is written, and one bucket at a time is in memory twice."""

    def __init__(self, backend: SGLangBackend, mode: PauseMode) -> None:
        self._backend = backend
        self._mode = mode
        self._fit = ServerModels(backend)

    async def push(self, policy: Policy, version: int) -> None:
        """See `WeightSync`. A server that was not there stays out until the next push."""
        await self._fit.check(policy)
        pieces = list(buckets(await asyncio.to_thread(policy.weights)))

        async def load(server: Server, flush: bool) -> None:
            ranks = int((await server.json("GET", "/server_info")).get("tp_size") or 1)
            await _ignore_failure(_post(server, "/end_weight_update", {}))  # of a push that was interrupted
            await _post(server, "/begin_weight_update", {})
            try:
                buffer = SharedBuffer(max(map(buffer_bytes, pieces)))
                for number, piece in enumerate(pieces):
                    await asyncio.to_thread(buffer.write, piece)
                    last = number == len(pieces) - 1
                    body: dict[str, Any] = {
                        "serialized_named_tensors": [buffer.serialize() for _ in range(ranks)],
                        "flush_cache": flush and last,
                    }
                    # The version comes with the last bucket, so a server with only some of them does not report it.
                    if last:
                        body["weight_version"] = str(version)
                    await _post(server, "/update_weights_from_tensor", body)
            except BaseException:
                await _ignore_failure(_post(server, "/end_weight_update", {}))
                raise
            await _post(server, "/end_weight_update", {})

        async def update() -> None:
            source = f"tensors of version {version}"
            await self._backend.control.update_weights(
                _with_retry(load), version, source=source, mode=self._mode, again=False
            )
            await _check_versions(self._backend, version)

        await _through_outages(self._backend, version, update)


class AdapterSync:
    """Only the LoRA adapter, under a new name for each version.

    Nothing is paused: a reply keeps the adapter with which it began, and carries the version of that adapter.
    """

    def __init__(self, backend: SGLangBackend, folder: Path) -> None:
        self._backend = backend
        self._folder = folder
        self._stem = f"policy-{secrets.token_hex(4)}"
        self._old: list[str] = []
        self._fit = ServerModels(backend)

    async def push(self, policy: Policy, version: int) -> None:
        """See `WeightSync`. Older adapters are unloaded at this push or a later one, when no request names them any more."""
        backend = self._backend
        name = f"{self._stem}-{version}"
        target = self._folder / name
        await self._fit.check(policy, adapter=True)
        await asyncio.to_thread(_write_adapter, policy, target)

        async def update() -> None:
            await backend.control.load_adapter(name, str(target))
            await _check_versions(backend, version, adapter=name)

        await _through_outages(backend, version, update)
        before = backend.policy
        backend.policy = PolicyAdapter(name, version)
        if before is not None and before.name != name:
            self._old.append(before.name)
        for old in list(self._old):
            if backend.adapter_uses[old]:
                continue
            self._old.remove(old)
            try:
                await backend.control.unload_adapter(old)
            except BackendError as error:  # it uses memory of the server, but no request names it
                log.warning("an old adapter was not unloaded", adapter=old, reason=str(error))
            await asyncio.to_thread(shutil.rmtree, self._folder / old, True)


Load = Callable[["Server", bool], Awaitable[None]]


async def _through_outages(backend: SGLangBackend, version: int, update: Callable[[], Awaitable[None]]) -> None:
    """Update, again and again while no server is there.

    Raises:
        OutageError: no server took the weights for `backend.wait`.
        TrainError: kind `weights_not_taken`: a server refused them.
    """
    began = time.monotonic()
    for number in itertools.count():
        try:
            await update()
            return
        except BackendError as error:
            if error.kind != "no_server":
                raise _update_failed(backend, version, error) from error
            left = began + backend.outage.limit - time.monotonic()
            if left <= 0:
                raise OutageError(
                    f"no server took version {version} for {backend.outage.limit:g} s (`backend.wait`): {error}",
                    kind="outage",
                ) from error
            log.warning("no server is there for new weights; they are sent again", version=version, reason=str(error))
            await asyncio.sleep(min(growing_pause(number), left))


def _update_failed(backend: SGLangBackend, version: int, error: BackendError) -> TrainError:
    told = ", ".join(
        f"{server.url} ({'samples with ' + str(server.version) if server.healthy else 'is out'})"
        for server in backend.workers
    )
    return TrainError(f"version {version} did not reach every server: {error}. Now: {told}", kind="weights_not_taken")


async def _check_versions(backend: SGLangBackend, version: int, adapter: str | None = None) -> None:
    """Let every server sample a token, and compare the version that it reports with the one that it was sent."""
    servers = [server for server in backend.workers if server.healthy]
    outcomes = await asyncio.gather(*(_reported_version(server, adapter) for server in servers), return_exceptions=True)
    there = 0
    for server, outcome in zip(servers, outcomes, strict=True):
        if isinstance(outcome, BackendError):
            if backend.control.lost(server, outcome):
                continue
            raise TrainError(
                f"{server.url} does not sample with version {version}: {outcome}", kind="weights_not_taken"
            )
        there += 1
        if isinstance(outcome, BaseException):
            raise outcome
        # With an adapter a server reports the version of the base model; that it accepts the adapter is enough.
        if adapter is None and outcome != str(version):
            raise TrainError(
                f"{server.url} was sent version {version}, but reports {outcome!r} with its next reply: another process "
                "updates this server as well, or the server does not keep versions",
                kind="weights_not_taken",
            )
    if servers and not there:
        raise BackendError(f"every server was lost after it was sent version {version}", kind="no_server")


async def _reported_version(server: Server, adapter: str | None) -> str:
    body: dict[str, Any] = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
    if adapter is not None:
        body["lora_path"] = adapter
    try:
        reply = await server.json("POST", "/generate", body, timeout=PROBE_SECONDS)
        return str(reply["meta_info"]["weight_version"])
    except BackendError as error:
        if error.kind != "unreachable":
            raise
    except (KeyError, TypeError):
        return "none"
    # The server has a long queue: the version that it reports without a reply must be enough.
    return str((await server.json("GET", "/model_info")).get("weight_version"))


def _with_retry(load: Load) -> Load:
    async def twice(server: Server, flush: bool) -> None:
        await _retry_once(lambda: load(server, flush))

    return twice


async def _retry_once(call: Callable[[], Awaitable[None]]) -> None:
    """Call again once if the connection failed."""
    try:
        await call()
    except BackendError as error:
        if error.kind != "unreachable":
            raise
        log.info("sending weights to a server once more", reason=str(error))
        await call()


async def _post(server: Server, path: str, body: dict[str, Any]) -> None:
    reply = await server.json("POST", path, body, timeout=UPDATE_SECONDS)
    if not reply.get("success"):
        raise BackendError(f"{server.url}{path}: {reply.get('message')}", kind="update_failed")


async def _ignore_failure(call: Awaitable[None]) -> None:
    try:
        await call
    except BackendError as error:
        log.debug("nothing to end", reason=str(error))


def _write_adapter(policy: Policy, target: Path) -> None:
    draft = target.with_name(f".{target.name}.part")
    shutil.rmtree(draft, ignore_errors=True)
    draft.parent.mkdir(parents=True, exist_ok=True)
    policy.save_adapter(draft)
    shutil.rmtree(target, ignore_errors=True)
    draft.rename(target)


def _remove_others(folder: Path, pattern: str, keep: set[str]) -> None:
    for path in folder.glob(pattern):
        if path.name not in keep:
            shutil.rmtree(path, ignore_errors=True)


def _same_host(urls: list[str]) -> None:
    """Check that all servers are on this host, because shared memory is limited to one host.

    Raises:
        TrainError: kind `train_setup`: a server is on another host.
    """
    for url in urls:
        host = urlsplit(url).hostname or ""
        try:
            family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind) as trial:
                trial.bind(address)  # an address that is this host's own
        except OSError:
            raise TrainError(
                f"`train.weight_sync.method: tensors` uses shared memory, and {url} is not on this host: use `disk` with a "
                "folder that both hosts share (`train.weight_sync.folder`)",
                kind="train_setup",
            ) from None
