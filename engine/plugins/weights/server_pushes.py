"""What the ways to send weights to SGLang servers have in common.

Invariants:
- A push ends when every server that is there samples with the new version, or it raises.
- Before the first push to a server, the trainer's weights are compared with the headers of the server's safetensors
  files, if its `model_path` is a folder that can be read here: SGLang skips weights whose names it does not know, and
  may stop in the
  middle of a load at a shape that does not fit.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from engine.backends.outage import growing_pause
from engine.errors import BackendError, OutageError, TrainError
from engine.train.files import tensor_facts

if TYPE_CHECKING:
    from engine.plugins.servers.pool import Server
    from engine.plugins.sglang.client import SGLangBackend
    from engine.plugins.sglang.control import Load, LoadAll, PauseMode
    from engine.train.policy import Policy

log = structlog.get_logger(__name__)

PROBE_SECONDS = 30.0
"""Time limit of a server's first reply with new weights, in seconds. After it the server is only asked for its
version."""


async def push_loads(
    backend: SGLangBackend, load: LoadAll, version: int, *, source: str, mode: PauseMode, again: bool = True
) -> float:
    """Let every server load a version, and check that it samples with it. Returns the seconds in which no server
    sampled.

    `load`, `source`, `mode` and `again` as in `update_weights` of the backend's control.

    Raises: as `through_outages`.
    """
    paused = backend.control.paused_seconds

    async def update() -> None:
        await backend.control.update_weights(load, version, source=source, mode=mode, again=again)
        await check_versions(backend, version)

    await through_outages(backend, version, update)
    return backend.control.paused_seconds - paused


async def through_outages(backend: SGLangBackend, version: int, update: Callable[[], Awaitable[None]]) -> None:
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
                servers = ", ".join(
                    f"{server.url} ({'samples with ' + str(server.version) if server.healthy else 'is out'})"
                    for server in backend.pool.workers
                )
                raise TrainError(
                    f"version {version} did not reach every server: {error}. Now: {servers}", kind="weights_not_taken"
                ) from error
            left = began + backend.outage.limit - time.monotonic()
            if left <= 0:
                raise OutageError(
                    f"no server took version {version} for {backend.outage.limit:g} s (`backend.wait`): {error}",
                    kind="outage",
                ) from error
            log.warning("no server is there for new weights; they are sent again", version=version, reason=str(error))
            await asyncio.sleep(min(growing_pause(number), left))


async def check_versions(backend: SGLangBackend, version: int, adapter: str | None = None) -> None:
    """Let every server sample a token, and compare the version that it reports with the one that it was sent.

    Raises:
        TrainError: kind `weights_not_taken`: a server does not sample with this version.
        BackendError: kind `no_server`: every server was lost.
    """
    servers = [server for server in backend.pool.workers if server.healthy]
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
                f"{server.url} was sent version {version}, but reports {outcome!r} with its next reply: another "
                "process updates this server as well, or the server does not keep versions",
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


async def load_again(load: Load, server: Server, flush: bool) -> None:
    """Load, and once more if the connection failed."""
    try:
        await load(server, flush)
    except BackendError as error:
        if error.kind != "unreachable":
            raise
        log.info("sending weights to a server once more", reason=str(error))
        await load(server, flush)


_TIED = "lm_head.weight"
"""A weight that is in some files of a model with tied embeddings, and not in others."""


async def check_models(backend: SGLangBackend, policy: Policy, fits: set[str], *, adapter: bool = False) -> None:
    """Compare names, shapes and kinds of numbers with each server that was not compared yet.

    Args:
        backend: The backend, started.
        policy: The policy that is trained.
        fits: URLs of the servers that were compared; others are added.
        adapter: Only an adapter is sent: compare the files of its base model.

    Raises:
        TrainError: kind `weights_not_taken`: a server has another model.
    """
    new = [server for server in backend.pool.workers if server.healthy and server.url not in fits]
    if not new:
        return
    trained = await asyncio.to_thread(tensor_facts, policy.net.folder)
    if not trained and not adapter:
        weights = await asyncio.to_thread(policy.weights)
        trained = {name: (tuple(tensor.shape), tensor.is_floating_point()) for name, tensor in weights.items()}
    for server in new:
        try:
            folder = Path(str((await server.json("GET", "/model_info"))["model_path"]))
        except BackendError:  # it is gone: the push finds out
            continue
        theirs = await asyncio.to_thread(tensor_facts, folder)
        if trained and theirs and (problem := difference(trained, theirs)):
            raise TrainError(
                f"{server.url} serves {folder}, which is another model than the one that is trained: {problem}. "
                "Nothing was sent. Start it with the folder of `model.path`",
                kind="weights_not_taken",
            )
        fits.add(server.url)


def difference(
    own: Mapping[str, tuple[tuple[int, ...], bool]], theirs: Mapping[str, tuple[tuple[int, ...], bool]]
) -> str | None:
    """The first thing in which two models differ, in words; None if the weights of one fit the other.

    Args:
        own: Shape of each weight, and whether it is of a floating-point type.
        theirs: The same of the other model.
    """
    for name in sorted((own.keys() ^ theirs.keys()) - {_TIED}):
        return f"it has no weight `{name}`" if name in own else f"its weight `{name}` is not trained or sent"
    for name in sorted(own.keys() & theirs.keys()):
        if own[name] != theirs[name]:
            (shape, _), (other, floating) = own[name], theirs[name]
            if shape != other:
                return f"`{name}` has shape {list(other)} there and {list(shape)} here"
            return f"`{name}` is {'floating-point' if floating else 'quantized'} there and not here"
    return None
