"""What the ways to send weights to SGLang servers have in common.

Invariant: a push ends when every server that is there samples with the new version, or it raises.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import structlog

from engine.backends.http.outage import growing_pause
from engine.backends.sglang.control import UPDATE_SECONDS
from engine.errors import BackendError, OutageError, TrainError

if TYPE_CHECKING:
    from engine.backends.servers.pool import Server
    from engine.backends.sglang.client import SGLangBackend
    from engine.backends.sglang.control import Load

log = structlog.get_logger(__name__)

PROBE_SECONDS = 30.0
"""Time limit of a server's first reply with new weights, in seconds. After it the server is only asked for its version."""


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


async def check_versions(backend: SGLangBackend, version: int, adapter: str | None = None) -> None:
    """Let every server sample a token, and compare the version that it reports with the one that it was sent.

    Raises:
        TrainError: kind `weights_not_taken`: a server does not sample with this version.
        BackendError: kind `no_server`: every server was lost.
    """
    servers = [server for server in backend.workers if server.healthy]
    outcomes = await asyncio.gather(*(_reported_version(server, adapter) for server in servers), return_exceptions=True)
    there = 0
    for server, outcome in zip(servers, outcomes, strict=True):
        if isinstance(outcome, BackendError):
            if backend.control.servers.lost(server, outcome):
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


def with_retry(load: Load) -> Load:
    """Load once more if the connection failed."""

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


async def post_update(server: Server, path: str, body: dict[str, Any], *, seconds: float = UPDATE_SECONDS) -> None:
    """Send a call of an update of weights.

    Raises:
        BackendError: the server cannot be reached, or refused (kind `update_failed`).
    """
    reply = await server.json("POST", path, body, timeout=seconds)
    if not reply.get("success"):
        raise BackendError(f"{server.url}{path}: {reply.get('message')}", kind="update_failed")


async def ignore_failure(call: Awaitable[None]) -> None:
    """Wait for a call that may fail because there is nothing to do."""
    try:
        await call
    except BackendError as error:
        log.debug("nothing to end", reason=str(error))
