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
from pathlib import Path
from typing import Any, Literal

import structlog

from engine.backends.servers.pool import Pool, Server
from engine.backends.weights import ServerWeights
from engine.errors import BackendError
from engine.schemas.base import Struct

log = structlog.get_logger(__name__)

UPDATE_SECONDS = 600.0
"""Time limit for loading weights or an adapter, in seconds."""

Load = Callable[[Server, bool], Awaitable[None]]
"""Gives a server weights; the bool says whether the prefixes that it has cached are dropped. Raises BackendError."""
LoadAll = Callable[[list[Server], bool], Awaitable[list[BaseException | None]]]
"""Gives several servers weights at once, as `Load`. Returns the error of each server, in order; None: it has them."""


def separately(load: Load) -> LoadAll:
    """Load each server by itself, all at once."""

    async def load_all(servers: list[Server], flush: bool) -> list[BaseException | None]:
        return await asyncio.gather(*(load(server, flush) for server in servers), return_exceptions=True)

    return load_all


def from_disk(path: str, version: int, load_format: str | None = None) -> Load:
    """A function that loads the weights of a folder on a server."""

    async def load(server: Server, flush: bool) -> None:
        body: dict[str, Any] = {"model_path": path, "weight_version": str(version), "flush_cache": flush}
        if load_format is not None:
            body["load_format"] = load_format
        reply = await server.json("POST", "/update_weights_from_disk", body, timeout=UPDATE_SECONDS)
        if not reply.get("success"):
            raise BackendError(f"{server.url}: {reply.get('message')}", kind="update_failed")

    return load


class NoServerError(BackendError):
    """No server is left for a call that concerns all of them. Kind `no_server`."""


class AllServers:
    """The servers of a pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.gone: set[Server] = set()
        """Servers that could not be asked any more during the newest update."""

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

    def reachable(self) -> list[Server]:
        """Return the servers that are there."""
        return [server for server in self._pool.workers if server.healthy]

    def out(self, server: Server, reason: str) -> None:
        """Take a server out of the pool."""
        if server in self._pool.servers:
            self._pool.failed(server, reason)
        else:
            log.error("a server behind the router is out of step", server=server.url, reason=reason)

    async def call(
        self, method: str, path: str, body: Any = None, *, seconds: float = 30.0, servers: list[Server] | None = None
    ) -> dict[str, Any]:
        """Send the same call to these servers; default: to all that are there. Returns URL -> reply.

        Raises:
            BackendError: no server is there (kind `unreachable`), or a server did not reply as it should (kind
                `control_failed`).
        """
        servers = self.reachable() if servers is None else servers
        if not servers:
            raise BackendError(f"{path}: no sglang server is there", kind="unreachable")
        replies = await asyncio.gather(
            *(server.json(method, path, body, timeout=seconds) for server in servers), return_exceptions=True
        )
        failures = [reply for reply in replies if isinstance(reply, BaseException)]
        for failure in failures:
            if not isinstance(failure, BackendError):
                raise failure
        if failures:
            raise BackendError(f"{path} failed: " + "; ".join(map(str, failures)), kind="control_failed")
        return {server.url: reply for server, reply in zip(servers, replies, strict=True)}


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


class Control:
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
        self.servers = AllServers(pool)
        self.memory = KeptMemory()
        self.expected: str | None = None
        """Name of the weights that every request sent from now on must be sampled with; None: not known."""
        self.prefixes: str | None = None
        """Name of the weights that computed the cached prefixes that requests may use from now on; None: all of
        them."""
        self.features = secrets.token_hex(8)
        """Goes into the hashes of images, and changes with the weights: SGLang keeps an image's features by its hash,
        over updates too. Not a version: another training gives the same servers other weights of that name, and scales
        the same files to other pixels."""
        self._follows = False
        """Another process gives the servers their weights."""
        self._weights: _Weights | None = None
        self._adapters: dict[str, tuple[str, bool]] = {}
        self.unloaded: set[str] = set()
        """Adapters that were taken out. SGLang loads one again when a request names it; the backend refuses such a
        request."""
        self.paused_seconds = 0.0
        """Seconds in which sampling was paused for updates of weights, in total."""
        self._lock = asyncio.Lock()
        self._paused: PauseMode | None = None

    # -- pauses

    async def pause(self, mode: PauseMode = "retract", servers: list[Server] | None = None) -> None:
        """Pause sampling on these servers; default: on all that are there. New requests wait.

        Raises:
            BackendError: a server did not; sampling goes on everywhere else.
        """
        await self.servers.call("POST", "/pause_generation", {"mode": mode}, seconds=PAUSE_SECONDS, servers=servers)
        self._paused = mode

    async def resume(self, servers: list[Server] | None = None) -> None:
        """Continue sampling on these servers; default: on all that are there."""
        self._paused = None
        await self.servers.call("POST", "/continue_generation", _RESUME, seconds=PAUSE_SECONDS, servers=servers)

    @asynccontextmanager
    async def paused(self, mode: PauseMode = "retract") -> AsyncIterator[None]:
        """Sampling is paused inside the block, and continues afterwards in any case."""
        servers = self.servers.reachable()
        try:
            await self.pause(mode, servers)
            yield
        finally:
            await self.resume(servers)

    # -- weights

    async def update_weights_from_disk(
        self, path: str, version: int, *, mode: PauseMode = "retract", load_format: str | None = None
    ) -> None:
        """Load weights on every server, and have its replies carry `version` from there on.

        Pauses sampling unless it is paused already. Prefixes that were computed with the old weights are
        dropped; under `in_place`, where replies still need them, they are kept from later requests. A request
        that is sent after this returns is sampled with these weights alone; a server that answers it with
        others is taken out.

        Args:
            path: a folder that every server can read.
            version: not negative; a training step, say.
            mode: what becomes of replies that are being sampled.
            load_format: SGLang's; its own choice when left out.

        Raises:
            BackendError: a server refused them (kind `update_failed`), or no server is there (kind `no_server`). A
                server that dies meanwhile is out of the pool, and is given them before it comes back; the others go on.
        """
        load = separately(from_disk(str(path), version, load_format))
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
        async with self._lock:
            weights = _Weights(name=str(version), load=load, again=again, source=source)
            self.servers.gone.clear()
            self.expected = None  # until every server has them, either version is right
            await self.memory.resume("weights")
            servers = await self._takers(again)
            held = self._paused or mode
            try:
                if self._paused is None:
                    async with self._paused_for_update(mode, servers) as paused:
                        await self._load_everywhere(weights, paused, flush=held != "in_place")
                else:
                    await self._load_everywhere(weights, servers, flush=held != "in_place")
            finally:
                if self._weights is not None:
                    self.expected = self._weights.name
                    if held == "in_place":
                        self.prefixes = self._weights.name

    @asynccontextmanager
    async def _paused_for_update(self, mode: PauseMode, servers: list[Server]) -> AsyncIterator[list[Server]]:
        """Pause servers; yields those that are still there. A server that is lost while paused is resumed by `wake`."""
        paused = servers
        began = time.monotonic()
        try:
            paused = await self.servers.each(servers, "/pause_generation", {"mode": mode}, seconds=PAUSE_SECONDS)
            yield paused
        finally:
            there = [server for server in paused if server.healthy or server not in self._pool.servers]
            try:
                with contextlib.suppress(NoServerError):
                    await self.servers.each(there, "/continue_generation", _RESUME, seconds=PAUSE_SECONDS)
            finally:
                self.paused_seconds += time.monotonic() - began
                out = [server for server in paused if server not in there and server not in self.servers.gone]
                await asyncio.gather(*(self._try_to_continue(server) for server in out))

    async def _try_to_continue(self, server: Server) -> None:
        """Continue a server that is out: it refused the weights, or was away and has taken them."""
        try:
            await server.json("POST", "/continue_generation", _RESUME, timeout=5.0)
        except BackendError as error:
            log.debug("a server that is out was not continued", server=server.url, reason=str(error))

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
            if not self.servers.lost(server, error):
                refusals.append(error)
                if not (nobody and weights.again):
                    self.servers.out(server, f"did not take weights {weights.name!r}: {error}")
        if refusals:
            reasons = "; ".join(map(str, refusals))
            raise BackendError(f"{weights.source} were not loaded everywhere: {reasons}", kind="update_failed")
        if nobody:
            reasons = "; ".join(str(error) for _, error in failures) or "no server is there"
            raise NoServerError(f"no server loaded {weights.source}: {reasons}", kind="no_server")

    async def _takers(self, again: bool) -> list[Server]:
        """The servers that are there; where it is now or never, also those that were away and whose model answers
        again."""
        there = self.servers.reachable()
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

    def follow(self, weights: ServerWeights) -> None:
        """See `Backend.follow`. The other process also pauses servers and continues them."""
        if self._follows and int(self.expected or 0) > weights.version:
            return
        if self.expected != str(weights.version):
            self.features = secrets.token_hex(8)
        self._follows = True
        self.expected, self.prefixes = str(weights.version), weights.prefixes

    def accepts(self, version: str, expected: str) -> bool:
        """See `GivenWeights`. Weights of another process may be newer, because it tells their version after it has
        pushed them."""
        return version == expected or (self._follows and version.isdigit() and int(version) > int(expected))

    async def versions(self) -> dict[str, str]:
        """URL -> name of the weights that this server says it has."""
        infos = await self.servers.call("GET", "/model_info")
        return {url: str(info["weight_version"]) for url, info in infos.items()}

    # -- adapters

    async def load_adapter(self, name: str, path: str, *, pinned: bool = False) -> None:
        """Load a LoRA adapter on every server. A request names it; one that names none gets the base model.

        Args:
            name: how requests call it. A name that is loaded already is replaced.
            path: a folder that every server can read.
            pinned: keep it in the servers' memory.

        Raises:
            BackendError: a server refused it (was it started with `--enable-lora`?); it is loaded nowhere. Or no server
                is there (kind `no_server`). A server that dies meanwhile is given it when it is back.
        """
        async with self._lock:
            await self.memory.resume()
            if name in self._adapters:
                await self._unload(name)
            asked: list[Server] = []
            # A server that comes back meanwhile does not know of this adapter: it is asked as well.
            while (servers := [server for server in self.servers.reachable() if server not in asked]) or not asked:
                asked += servers
                try:
                    await self.servers.each(
                        servers, "/load_lora_adapter", _adapter(name, path, pinned), seconds=UPDATE_SECONDS
                    )
                except NoServerError:
                    if not any(server.healthy for server in asked):
                        raise
                except BackendError:
                    await asyncio.gather(*(self._unload_from(server, name) for server in self.servers.reachable()))
                    raise
            self._adapters[name] = (str(path), pinned)
            self.unloaded.discard(name)

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter on all servers.

        Raises:
            BackendError: a server does not know it.
        """
        async with self._lock:
            await self._unload(name)

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters that were loaded here."""
        return list(self._adapters)

    async def _unload(self, name: str) -> None:
        self._adapters.pop(name, None)  # also where a server is lost: it must not be given it again when it is back
        self.unloaded.add(name)
        with contextlib.suppress(NoServerError):
            await self.servers.each(
                self.servers.reachable(), "/unload_lora_adapter", {"lora_name": name}, seconds=UPDATE_SECONDS
            )

    async def _unload_from(self, server: Server, name: str) -> None:
        try:
            await server.json("POST", "/unload_lora_adapter", {"lora_name": name})
        except BackendError as error:
            log.debug("adapter was not there", server=server.url, adapter=name, reason=str(error))

    # -- the rest

    async def running(self) -> dict[str, int]:
        """URL -> requests that this server is working on or has waiting."""
        loads = await self.servers.call("GET", "/v1/loads")
        return {
            url: sum(r["num_running_reqs"] + r["num_waiting_reqs"] for r in load["loads"])
            for url, load in loads.items()
        }

    async def wake(self, server: Server) -> None:
        """Have a server that is out sample again: its health check samples a token, and it may have been lost while it
        was paused.

        Raises:
            BackendError: It cannot be reached, or must wait: for the end of an update (kind `updating`), or until the
                trainer gives its memory back (kind `memory_released`).
        """
        self._refuse_during_update(server)
        if self._follows:
            return
        await self.memory.catch_up(server)
        if self._paused is None:
            await server.json("POST", "/continue_generation", _RESUME, timeout=PAUSE_SECONDS)

    async def wake_all(self) -> None:
        """`wake` all servers. One that cannot be reached is left as it is."""
        outcomes = await asyncio.gather(*map(self.wake, self.servers.reachable()), return_exceptions=True)
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
        weights, adapters = self._weights, dict(self._adapters)
        self._refuse_during_update(server)
        if self._follows:
            version = str((await server.json("GET", "/model_info"))["weight_version"])
            if not self.accepts(version, str(self.expected)):
                raise BackendError(
                    f"{server.url} has weights {version!r}, not {self.expected!r}, and waits for the trainer's",
                    kind="stale_weights",
                )
            return
        await self.memory.catch_up(server)
        if weights is not None:
            info = await server.json("GET", "/model_info")
            if str(info["weight_version"]) != weights.name:
                if not weights.again:
                    raise BackendError(
                        f"{server.url} has weights {info['weight_version']!r}, not {weights.name!r}, and waits for the "
                        "next ones",
                        kind="stale_weights",
                    )
                (failure,) = await self._load([server], weights, flush=True)
                if failure is not None:
                    raise failure
        for name, (path, pinned) in adapters.items():
            try:
                await server.json("POST", "/load_lora_adapter", _adapter(name, path, pinned), timeout=UPDATE_SECONDS)
            except BackendError as error:
                if "already" not in str(error):
                    raise
        if self._weights is not weights or self._adapters != adapters:
            raise BackendError(f"{server.url} missed an update while it loaded the one before", kind="updating")
        self._refuse_during_update(server)

    def _refuse_during_update(self, server: Server) -> None:
        if self._lock.locked():
            raise BackendError(f"{server.url} waits for the end of an update of the others", kind="updating")


def _adapter(name: str, path: str, pinned: bool) -> dict[str, Any]:
    return {"lora_name": name, "lora_path": str(path), "pinned": pinned}
