"""Sends new weights to SGLang servers: through a folder, through shared memory, by broadcasts, or as a LoRA adapter.

Invariants:
- A server that did not load the weights gets no requests until it has (`engine.plugins.sglang.control`). If a server
  dies during a push, the push goes on with the others; if all are gone, it begins again when one is back.
- Weights that do not fit a server's model are refused before anything is sent (`check_models`).
- Files that a server may still read stay in the folder: the newest weights, and adapters that running requests name.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import structlog
import torch

from engine.backends.backend import PolicyAdapter
from engine.errors import BackendError, TrainError
from engine.plugins.sglang.client import SGLangBackend
from engine.plugins.sglang.control import UPDATE_SECONDS, PauseMode, load_each, load_from_disk, post_update
from engine.plugins.weights.server_pushes import (
    check_models,
    check_versions,
    load_again,
    push_loads,
    through_outages,
)
from engine.plugins.weights.shared_tensors import DeviceBuffer, SharedBlock, buckets, buffer_bytes
from engine.plugins.weights.sync_collective import CollectiveSync, bind_here
from engine.train.sync import Pushed, tensor_bytes

if TYPE_CHECKING:
    from engine.plugins.servers.pool import Server
    from engine.schemas.backend import LaunchSpec
    from engine.schemas.episode import EpisodeSpec
    from engine.train.policy import Policy
    from engine.train.sync import WeightSync

log = structlog.get_logger(__name__)


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
            f"`backend.adapter: {spec.backend.adapter_name}` cannot be used with `train`: the trainer starts from the "
            "base model; merge the adapter into the model and set `model.path` to the result",
            kind="train_setup",
        )
    # Several trainings can use one folder.
    place = Path(weights.folder).expanduser() / folder.name if weights.folder is not None else folder / "weights"
    mode: PauseMode = "retract" if weights.pause_generation else "in_place"
    if method == "disk":
        return DiskSync(backend, place.resolve(), mode)
    if method == "tensors":
        for url in (server.url for server in backend.pool.workers):
            try:
                bind_here(urlsplit(url).hostname or "")
            except OSError:
                raise TrainError(
                    f"`train.weight_sync.method: tensors` uses shared memory, and {url} is not on this host: use "
                    "`disk` with a folder that both hosts share (`train.weight_sync.folder`)",
                    kind="train_setup",
                ) from None
        return TensorSync(backend, mode, _launched_gpus(getattr(spec.backend, "launch", None), backend))
    if method == "collective":
        if lora:
            raise TrainError(
                "`train.weight_sync.method: collective` sends all weights, but only an adapter is trained: use "
                "`adapter`",
                kind="train_setup",
            )
        if getattr(spec.backend, "router", False):
            raise TrainError(
                "`train.weight_sync.method: collective` needs the servers themselves in `backend.urls`, not a router",
                kind="train_setup",
            )
        return CollectiveSync(backend, mode, weights.address, weights.port)
    if not lora:
        raise TrainError(
            "`train.weight_sync.method: adapter` needs `train.lora`; without one all weights change: use `disk`, "
            "`tensors` or `collective`",
            kind="train_setup",
        )
    if "lora_path" in backend.dropped:
        raise TrainError(
            "the router drops `lora_path`: name the servers themselves in `backend.urls`", kind="train_setup"
        )
    return AdapterSync(backend, place.resolve())


@dataclass(eq=False)
class DiskSync:
    """Through a folder that every server reads."""

    backend: SGLangBackend
    folder: Path
    mode: PauseMode
    fits: set[str] = field(default_factory=set)

    async def push(self, policy: Policy, version: int) -> Pushed:
        """See `WeightSync`. The folder stays until the next one is loaded, so that a server that comes back can read
        it."""
        await check_models(self.backend, policy, self.fits)
        target = self.folder / f"version-{version}"
        await asyncio.to_thread(policy.save, target, serving=True)
        load = partial(load_each, partial(load_again, partial(load_from_disk, str(target), version)))
        paused = await push_loads(self.backend, load, version, source=f"weights from {target}", mode=self.mode)
        for older in self.folder.glob("version-*"):
            if older.name != target.name:
                await asyncio.to_thread(shutil.rmtree, older, ignore_errors=True)
        return Pushed(bytes=_file_bytes(target), pause_seconds=paused)


@dataclass(eq=False)
class TensorSync:
    """Through memory of this host: no file is written, and one bucket at a time is in memory twice.

    A launched server that sees the GPU of a training of one process reads this GPU's memory (CUDA IPC), every other one
    shared memory.

    Args:
        backend: The backend, started.
        mode: What becomes of replies that are being sampled.
        gpus: URL of a launched server -> indexes of the GPUs that it sees, as this process counts them.
    """

    backend: SGLangBackend
    mode: PauseMode
    gpus: Mapping[str, Collection[int]] = field(default_factory=dict)
    fits: set[str] = field(default_factory=set)

    async def push(self, policy: Policy, version: int) -> Pushed:
        """See `WeightSync`. A server that was not there stays out until the next push."""
        await check_models(self.backend, policy, self.fits)
        weights = await asyncio.to_thread(policy.serving_weights)
        pieces = list(buckets(weights))

        async def end(server: Server) -> None:
            """End an update that was interrupted."""
            await self.backend.control.attempt(server, "/end_weight_update", {}, seconds=UPDATE_SECONDS)

        async def load(server: Server, flush: bool) -> None:
            facts = await server.json("GET", "/server_info")
            ranks = int(facts.get("tp_size") or 1)
            await end(server)
            await post_update(server, "/begin_weight_update", {})
            try:
                buffer = self._buffer(server, facts, policy, max(map(buffer_bytes, pieces)))
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
                    await post_update(server, "/update_weights_from_tensor", body)
            except BaseException:
                await end(server)
                raise
            await post_update(server, "/end_weight_update", {})

        loads, source = partial(load_each, partial(load_again, load)), f"tensors of version {version}"
        paused = await push_loads(self.backend, loads, version, source=source, mode=self.mode, again=False)
        return Pushed(bytes=tensor_bytes(weights.values()), pause_seconds=paused)

    def _buffer(self, server: Server, facts: dict[str, Any], policy: Policy, size: int) -> DeviceBuffer | SharedBlock:
        gpu = None  # that of a training of one process; with several, process 0 gathers weights on the CPU
        if policy.device.type == "cuda" and policy.net.process_group.size == 1:
            gpu = torch.cuda.current_device() if policy.device.index is None else policy.device.index
        same = gpu is not None and facts.get("device") == "cuda" and gpu in self.gpus.get(server.url, ())
        log.debug("weights are sent", server=server.url, through="CUDA IPC" if same else "shared memory")
        return DeviceBuffer(policy.device) if same else SharedBlock(size)


def _launched_gpus(launch: LaunchSpec | None, backend: SGLangBackend) -> dict[str, list[int]]:
    """URL of each launched server -> indexes of its GPUs among those that this process sees."""
    if launch is None:
        return {}
    indexes, count = launch.indexes, launch.tp
    return {server.url: indexes[number * count :][:count] for number, server in enumerate(backend.pool.workers)}


@dataclass(eq=False)
class AdapterSync:
    """Only the LoRA adapter, under a new name for each version.

    Nothing is paused: a reply keeps the adapter with which it began, and carries the version of that adapter.
    """

    backend: SGLangBackend
    folder: Path
    stem: str = field(default_factory=lambda: f"policy-{secrets.token_hex(4)}")
    old: list[str] = field(default_factory=list)
    fits: set[str] = field(default_factory=set)

    async def push(self, policy: Policy, version: int) -> Pushed:
        """See `WeightSync`. Older adapters are unloaded at this push or a later one, when no request names them any
        more."""
        backend = self.backend
        name = f"{self.stem}-{version}"
        target = self.folder / name
        await check_models(backend, policy, self.fits, adapter=True)
        await asyncio.to_thread(_write_adapter, policy, target)

        async def update() -> None:
            await backend.control.load_adapter(name, str(target))
            await check_versions(backend, version, adapter=name)

        await through_outages(backend, version, update)
        before = backend.policy
        backend.policy = PolicyAdapter(name=name, version=version)
        if before is not None and before.name != name:
            self.old.append(before.name)
        for old in list(self.old):
            if backend.adapter_uses[old]:
                continue
            self.old.remove(old)
            try:
                await backend.control.unload_adapter(old)
            except BackendError as error:  # it uses memory of the server, but no request names it
                log.warning("an old adapter was not unloaded", adapter=old, reason=str(error))
            await asyncio.to_thread(shutil.rmtree, self.folder / old, True)
        return Pushed(bytes=_file_bytes(target), pause_seconds=0.0)


def _write_adapter(policy: Policy, target: Path) -> None:
    draft = target.with_name(f".{target.name}.part")
    shutil.rmtree(draft, ignore_errors=True)
    draft.parent.mkdir(parents=True, exist_ok=True)
    policy.save_adapter(draft)
    shutil.rmtree(target, ignore_errors=True)
    draft.rename(target)


def _file_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
