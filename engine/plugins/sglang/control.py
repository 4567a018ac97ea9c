"""Weights, adapters and pauses on every server at once.

Invariant: a server that has not loaded what the others have loaded is out of the pool until it has. So all servers that
get requests sample with the same weights and have the same adapters.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import structlog

from engine.backends.backend import GivenWeights, ServerWeights
from engine.errors import BackendError
from engine.plugins.servers.pool import Pool, Server
from engine.schemas.base import Struct

log = structlog.get_logger(__name__)

UPDATE_SECONDS = 600.0
"""Time limit for loading weights or an adapter, in seconds."""

Load = Callable[[Server, bool], Awaitable[None]]
"""Gives a server weights; the bool says whether the prefixes that it has cached are dropped. Raises BackendError."""
LoadAll = Callable[[list[Server], bool], Awaitable[list[BaseException | None]]]
"""Gives several servers weights at once, as `Load`. Returns the error of each server, in order; None: it has them."""


async def load_each(load: Load, servers: list[Server], flush: bool) -> list[BaseException | None]:
    """Load each server by itself, all at once. With its first argument it is a `LoadAll`."""
    return await asyncio.gather(*(load(server, flush) for server in servers), return_exceptions=True)


async def post_update(server: Server, path: str, body: dict[str, Any], *, seconds: float = UPDATE_SECONDS) -> None:
    """Send a call of an update of weights.

    Raises:
        BackendError: the server cannot be reached, or refused (kind `update_failed`).
    """
    reply = await server.json("POST", path, body, timeout=seconds)
    if not reply.get("success"):
        raise BackendError(f"{server.url}{path}: {reply.get('message')}", kind="update_failed")


async def load_from_disk(path: str, version: int, server: Server, flush: bool) -> None:
    """Load the weights of a folder on a server. With its first two arguments it is a `Load`."""
    body: dict[str, Any] = {"model_path": path, "weight_version": str(version), "flush_cache": flush}
    await post_update(server, "/update_weights_from_disk", body)


class NoServerError(BackendError):
    """No server is left for a call that concerns all of them. Kind `no_server`."""


PauseMode = Literal["in_place", "retract", "abort"]
PAUSE_SECONDS = 60.0
_RESUME = {"torch_empty_cache": False}
"""Emptying torch's cache needs CUDA; it is a hint, and the next allocation does without."""


class _Weights(Struct, frozen=True, kw_only=True):
    name: str
    load: LoadAll
    again: bool
    """Whether they can be loaded later, on a server that was not available."""
    source: str


class KeptMemory:
    """The GPU memory of the servers, which they keep. A plugin that has them lend it puts a subclass in its place."""

    async def prepare(self, folder: Path | None) -> None:
        """Called before the first request. `folder`: that of the training's servers, for what must outlive a kill."""

    async def resume(self, *parts: Literal["weights", "kv_cache"]) -> None:
        """Have the servers take back these parts of what they lent, or all of it."""

    async def catch_up(self, server: Server) -> None:
        """Bring the memory of a server that is back in line with that of the others, before it gets weights or
        requests.

        Raises:
            BackendError: It must wait until the servers have their memory back (kind `memory_released`).
        """


class Control(GivenWeights):
    """Calls that change a whole server.

        async with backend.control.paused():
            await backend.control.update_weights_from_disk("/models/step-10", version=10)
        await backend.control.load_adapter("tutor", "/adapters/tutor")

    The mode of a pause decides about running replies:

    - `retract` (default): they wait, and continue after their KV cache was computed again with the new weights.
    - `in_place`: they wait, and continue with the KV cache of the old weights: later log-probs depend on both.
    - `abort`: they are returned as they are, and the client requests the rest after the pause.

    In every mode each token carries the version that sampled it.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.gone: set[Server] = set()
        """Servers that could not be asked any more during the newest update."""
        self.adapters: dict[str, dict[str, Any]] = {}
        """The LoRA adapters that every server has, by name: the call that loads each. A request names one; one that
        names none gets the base model."""
        self.unloaded: set[str] = set()
        """Adapters that were taken out. SGLang loads one again when a request names it; the backend refuses such a
        request."""
        self.memory = KeptMemory()
        self.features = secrets.token_hex(8)
        """Goes into the hashes of images, and changes with the weights: SGLang keeps an image's features by its hash,
        over updates too. Not a version: another training gives the same servers other weights of that name, and scales
        the same files to other pixels."""
        self._weights: _Weights | None = None
        self.paused_seconds = 0.0
        """Seconds in which sampling was paused, in total."""
        self._changing = asyncio.Lock()
        """Held while every server is given weights or an adapter."""
        self._paused: PauseMode | None = None
        """The mode of the pause that `paused` holds."""

    # -- the servers of the pool

    def reachable(self) -> list[Server]:
        """Return the servers that are there."""
        return [server for server in self._pool.workers if server.healthy]

    def out(self, server: Server, reason: str) -> None:
        """Take a server out of the pool."""
        if server in self._pool.servers:
            self._pool.failed(server, reason)
        else:
            log.error("a server behind the router is out of step", server=server.url, reason=reason)

    def lost(self, server: Server, error: BaseException) -> bool:
        """Take a server out if it cannot be asked any more.

        Returns:
            False if the server is there and refused, or is behind a router, which may still send it requests.
        """
        if not isinstance(error, BackendError) or not error.retryable or server not in self._pool.servers:
            return False
        self.gone.add(server)
        self.out(server, str(error))
        return True

    async def each(self, servers: list[Server], path: str, body: Any, *, seconds: float = 30.0) -> list[Server]:
        """POST to each server, and take out those that are lost. Returns the others.

        Raises:
            BackendError: a server refused (kind `control_failed`), or all were lost (kind `no_server`).
        """
        outcomes = await asyncio.gather(
            *(server.json("POST", path, body, timeout=seconds) for server in servers), return_exceptions=True
        )
        there: list[Server] = []
        reasons: list[str] = []
        refused: list[str] = []
        for server, outcome in zip(servers, outcomes, strict=True):
            if not isinstance(outcome, BaseException):
                there.append(server)
            elif isinstance(outcome, BackendError):
                (reasons if self.lost(server, outcome) else refused).append(str(outcome))
            else:
                raise outcome
        if refused:
            raise BackendError(f"{path} failed: {'; '.join(refused)}", kind="control_failed")
        if not there:
            raise NoServerError(f"{path}: {'; '.join(reasons) or 'no sglang server is there'}", kind="no_server")
        return there

    async def attempt(self, server: Server, path: str, body: Any, *, seconds: float = 30.0) -> None:
        """POST to a server that may be away, or have nothing to do: it is left as it is if the call fails."""
        try:
            await server.json("POST", path, body, timeout=seconds)
        except BackendError as error:
            log.debug("a call was not needed, or not possible", server=server.url, path=path, reason=str(error))

    # -- pauses

    @asynccontextmanager
    async def paused(self, mode: PauseMode = "retract") -> AsyncIterator[None]:
        """Sampling is paused inside the block, and continues afterwards in any case.

        Raises:
            BackendError: a server did not pause; sampling goes on.
        """
        async with self._stopped(mode, self.reachable()):
            self._paused = mode
            try:
                yield
            finally:
                self._paused = None

    @asynccontextmanager
    async def _stopped(self, mode: PauseMode, servers: list[Server]) -> AsyncIterator[list[Server]]:
        """Pause servers; yields those that are still there. A server that is lost while paused is resumed by `wake`."""
        paused = servers
        began = time.monotonic()
        try:
            paused = await self.each(servers, "/pause_generation", {"mode": mode}, seconds=PAUSE_SECONDS)
            yield paused
        finally:
            there = [server for server in paused if server.healthy or server not in self._pool.servers]
            try:
                with contextlib.suppress(NoServerError):
                    await self.each(there, "/continue_generation", _RESUME, seconds=PAUSE_SECONDS)
            finally:
                self.paused_seconds += time.monotonic() - began
                # These are out: they refused the weights, or were away and have taken them.
                out = [server for server in paused if server not in there and server not in self.gone]
                continued = (self.attempt(server, "/continue_generation", _RESUME, seconds=5.0) for server in out)
                await asyncio.gather(*continued)

    # -- weights

    async def update_weights_from_disk(self, path: str, version: int, *, mode: PauseMode = "retract") -> None:
        """Load weights on every server, and have its replies carry `version` from there on.

        Pauses sampling unless it is paused already. Prefixes that were computed with the old weights are
        dropped; under `in_place`, where replies still need them, they are kept from later requests. A request
        that is sent after this returns is sampled with these weights alone; a server that answers it with
        others is taken out.

        Args:
            path: a folder that every server can read.
            version: not negative; a training step, say.
            mode: what becomes of replies that are being sampled.

        Raises:
            BackendError: a server refused them (kind `update_failed`), or no server is there (kind `no_server`). A
                server that dies meanwhile is out of the pool, and is given them before it comes back; the others go on.
        """
        load = partial(load_each, partial(load_from_disk, str(path), version))
        await self.update_weights(load, version, source=f"weights from {path}", mode=mode)

    async def update_weights(
        self, load: LoadAll, version: int, *, source: str, mode: PauseMode = "retract", again: bool = True
    ) -> None:
        """Give every server weights, however that is done; otherwise as `update_weights_from_disk`.

        Args:
            load: Gives them to servers, under the name `str(version)`.
            version: not negative.
            source: what they are, for errors.
            mode: what becomes of replies that are being sampled.
            again: whether `load` may be called later, for a server that was away. Without it such a server stays out
                until it is given newer weights: it is asked each time, whether it is there again.
        """
        if version < 0:
            raise ValueError(f"a weight version is not negative; got {version}")
        async with self._changing:
            weights = _Weights(name=str(version), load=load, again=again, source=source)
            self.gone.clear()
            self.expected = None  # until every server has them, either version is right
            await self.memory.resume("weights")
            servers = await self._takers(again)
            pause = self._stopped(mode, servers) if self._paused is None else contextlib.nullcontext(servers)
            mode = self._paused or mode
            try:
                async with pause as there:
                    await self._load_everywhere(weights, there, flush=mode != "in_place")
            finally:
                if self._weights is not None:
                    self.expected = self._weights.name
                    if mode == "in_place":
                        self.prefixes = self._weights.name

    async def _load_everywhere(self, weights: _Weights, servers: list[Server], *, flush: bool) -> None:
        previous, self._weights = self._weights, weights
        self.features = secrets.token_hex(8)  # sampling is paused: later requests are sampled with the new weights
        outcomes = await self._load(servers, weights, flush)
        await self.memory.resume()
        failures = [(s, o) for s, o in zip(servers, outcomes, strict=True) if isinstance(o, BaseException)]
        nobody = len(failures) == len(servers)
        if nobody and weights.again:
            self._weights = previous  # what was there is still what everybody has
        refusals = []
        for server, error in failures:
            if not self.lost(server, error):
                refusals.append(error)
                if not (nobody and weights.again):
                    self.out(server, f"did not take weights {weights.name!r}: {error}")
        if refusals:
            reasons = "; ".join(map(str, refusals))
            raise BackendError(f"{weights.source} were not loaded everywhere: {reasons}", kind="update_failed")
        if nobody:
            reasons = "; ".join(str(error) for _, error in failures) or "no server is there"
            raise NoServerError(f"no server loaded {weights.source}: {reasons}", kind="no_server")

    async def _takers(self, again: bool) -> list[Server]:
        """The servers that are there; where it is now or never, also those that were away and whose model answers
        again."""
        there = self.reachable()
        if again:
            return there
        away = [server for server in self._pool.workers if not server.healthy]
        answers = await asyncio.gather(
            *(server.json("GET", "/server_info", timeout=5.0) for server in away), return_exceptions=True
        )
        return [*there, *(s for s, answer in zip(away, answers, strict=True) if isinstance(answer, dict))]

    async def _load(self, servers: list[Server], weights: _Weights, flush: bool) -> list[BaseException | None]:
        outcomes = await weights.load(servers, flush) if servers else []
        for server, outcome in zip(servers, outcomes, strict=True):
            if outcome is None:
                server.version = weights.name
        return outcomes

    # -- adapters

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter on every server.

        Args:
            name: how requests call it. A name that is loaded already is replaced.
            path: a folder that every server can read.

        Raises:
            BackendError: a server refused it (was it started with `--enable-lora`?); it is loaded nowhere. Or no server
                is there (kind `no_server`). A server that dies meanwhile is given it when it is back.
        """
        async with self._changing:
            await self.memory.resume()
            if name in self.adapters:
                await self._unload(name)
            call = {"lora_name": name, "lora_path": str(path)}
            asked: list[Server] = []
            # A server that comes back meanwhile does not know of this adapter: it is asked as well.
            while (servers := [server for server in self.reachable() if server not in asked]) or not asked:
                asked += servers
                try:
                    await self.each(servers, "/load_lora_adapter", call, seconds=UPDATE_SECONDS)
                except NoServerError:
                    if not any(server.healthy for server in asked):
                        raise
                except BackendError:
                    unload, there = {"lora_name": name}, self.reachable()
                    attempts = (self.attempt(server, "/unload_lora_adapter", unload) for server in there)
                    await asyncio.gather(*attempts)
                    raise
            self.adapters[name] = call
            self.unloaded.discard(name)

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter on all servers.

        Raises:
            BackendError: a server does not know it.
        """
        async with self._changing:
            await self._unload(name)

    async def _unload(self, name: str) -> None:
        self.adapters.pop(name, None)  # also where a server is lost: it must not be given it again when it is back
        self.unloaded.add(name)
        with contextlib.suppress(NoServerError):
            servers = self.reachable()
            await self.each(servers, "/unload_lora_adapter", {"lora_name": name}, seconds=UPDATE_SECONDS)

    # -- servers that come back

    async def wake(self, server: Server) -> None:
        """Have a server that is out sample again: its health check samples a token, and it may have been lost while it
        was paused.

        Raises:
            BackendError: It cannot be reached, or must wait: for the end of an update (kind `updating`), or until the
                trainer gives its memory back (kind `memory_released`).
        """
        self._refuse_during_update(server)
        await self.memory.catch_up(server)
        if self._paused is None:
            await server.json("POST", "/continue_generation", _RESUME, timeout=PAUSE_SECONDS)

    async def wake_all(self) -> None:
        """`wake` all servers. One that cannot be reached is left as it is."""
        outcomes = await asyncio.gather(*map(self.wake, self.reachable()), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BackendError):
                log.debug("a server was not continued", reason=str(outcome))
            elif outcome is not None:
                raise outcome

    async def catch_up(self, server: Server) -> None:
        """Load on a server that is back what the others have loaded meanwhile. It may be used as soon as this returns.

        Raises:
            BackendError: It cannot load it now, or the others were given something else meanwhile (kind `updating`); it
                stays out of the pool.
        """
        weights = self._weights
        self._refuse_during_update(server)
        await self.memory.catch_up(server)
        if weights is not None:
            version = await _version_of(server)
            if version != weights.name and not weights.again:
                raise BackendError(
                    f"{server.url} has weights {version!r}, not {weights.name!r}, and waits for the next ones",
                    kind="stale_weights",
                )
            if version != weights.name:
                (failure,) = await self._load([server], weights, flush=True)
                if failure is not None:
                    raise failure
        adapters = dict(self.adapters)
        for call in adapters.values():
            try:
                await server.json("POST", "/load_lora_adapter", call, timeout=UPDATE_SECONDS)
            except BackendError as error:
                if "already" not in str(error):
                    raise
        if self.adapters != adapters or self._weights is not weights:
            raise BackendError(f"{server.url} missed an update while it loaded the one before", kind="updating")
        self._refuse_during_update(server)

    def _refuse_during_update(self, server: Server) -> None:
        if self._changing.locked():
            raise BackendError(f"{server.url} waits for the end of an update of the others", kind="updating")


class FollowedWeights(GivenWeights):
    """What a trainer in another process gives the servers, which it also pauses and continues. Nothing is sent from
    here."""

    def __init__(self) -> None:
        self.version = -1
        self.features = ""
        """See `Control.features`."""

    def follow(self, weights: ServerWeights) -> None:
        """See `Backend.follow`. A version that arrives late does not replace a newer one."""
        if weights.version < self.version:
            return
        if weights.version > self.version:
            self.features = secrets.token_hex(8)
        self.version, self.expected, self.prefixes = weights.version, str(weights.version), weights.prefixes

    def accepts(self, version: str, expected: str) -> bool:
        """See `GivenWeights`. The servers may have newer ones: a version is reported after its push."""
        return version == expected or (version.isdigit() and int(version) > int(expected))

    async def check(self, server: Server) -> None:
        """Raise BackendError if a server that is back has older weights; it stays out of the pool."""
        version = await _version_of(server)
        if not self.accepts(version, str(self.version)):
            raise BackendError(
                f"{server.url} has weights {version!r}, not {self.expected!r}, and waits for the trainer's",
                kind="stale_weights",
            )


async def _version_of(server: Server) -> str:
    return str((await server.json("GET", "/model_info"))["weight_version"])
