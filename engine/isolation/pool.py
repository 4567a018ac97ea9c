"""Who gets which worker: a pool for each entry point of a spec.

An object holds its worker for as long as it lives; a function takes one for each call. Workers are used again by later
episodes. Waiting for a worker is no part of a call's deadline. An episode takes the workers of its objects in one order
(environment, user, tools) and calls of functions wait for nothing while they hold one, so waiting cannot deadlock.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from engine.isolation.child import RAISED, VALUE
from engine.isolation.remote import (
    START_SECONDS,
    Cell,
    Origin,
    RemoteCallable,
    RemoteObject,
    RemoteTool,
    read_told,
    shape_from,
)
from engine.isolation.server import IsolationError, Limits, Server, in_a_loop_of_its_own
from engine.isolation.worker import Worker, WorkerLost
from engine.spec.entry import EntryError
from engine.spec.signature import ToolShape

if TYPE_CHECKING:
    from engine.schemas.entry import Effects, IsolationSpec
    from engine.schemas.environment import EpisodeView
    from engine.schemas.trajectory import Blame

log = structlog.get_logger(__name__)

_EFFECTS: Mapping[str, Effects] = {"pure": "pure", "replayable": "replayable", "external": "external"}
MEMORY = 4 * 10**9
OUTPUT = 16 * 10**6
FUNCTION_WORKERS = 64
"""Most workers of one function where `isolation.workers` gives none."""


@dataclass(frozen=True)
class Described:
    """What can be known of an entry point without building it."""

    is_class: bool
    events: tuple[str, ...] | None
    effects: Effects
    shape: ToolShape | None
    """A function's, as a tool."""
    problem: str | None
    """Why a function is no tool."""


class Pool:
    """The workers of one entry point."""

    def __init__(self, server: Server, limits: Limits, most: int | None) -> None:
        self._server = server
        self._limits = limits
        self._most = None if most is None else asyncio.Semaphore(most)
        self._idle: list[tuple[Cell, RemoteObject | None]] = []

    async def take(self) -> tuple[Cell, RemoteObject | None]:
        """A place for a worker, and the function that lives there already; waits where there are too many."""
        if self._most is not None:
            await self._most.acquire()
        while self._idle:
            cell, function = self._idle.pop()
            if cell.reusable:
                return cell, function
            cell.kill()
        return Cell(self._server, self._limits), None

    async def hold(self, origin: Origin, *, pure: bool, blame: Blame) -> HeldObject:
        """An object that is not yet built, with a place that it holds until it is released."""
        cell, _ = await self.take()
        return HeldObject(origin, cell, self, pure=pure, blame=blame)

    def give(self, cell: Cell, function: RemoteObject | None = None) -> None:
        """Give a place back."""
        if self._most is not None:
            self._most.release()
        if cell.reusable:
            self._idle.append((cell, function))
        else:
            cell.kill()


class HeldObject(RemoteObject):
    """An object of one episode, with the worker that it holds."""

    def __init__(self, origin: Origin, cell: Cell, pool: Pool | None, *, pure: bool, blame: Blame) -> None:
        super().__init__(origin, cell, pure=pure, blame=blame)
        self._pool = pool

    async def release(self, seconds: float) -> None:
        """Close it and give its worker back. Raises a WorldError where its `close` failed."""
        try:
            await self.let_go(seconds)
        except BaseException:
            self._cell.kill()
            raise
        finally:
            pool, self._pool = self._pool, None
            if pool is not None:
                pool.give(self._cell)


class RemoteFunction(RemoteCallable):
    """A function in workers: a scorer, or an action of the spec's own."""

    def __init__(self, origin: Origin, pool: Pool, expects: str) -> None:
        self._origin = origin
        self._pool = pool
        self._expects = expects

    @asynccontextmanager
    async def leased(self, blame: Blame) -> AsyncIterator[RemoteObject]:
        """The function in a worker that nobody else uses meanwhile."""
        cell, function = await self._pool.take()
        function = function or RemoteObject(self._origin, cell, pure=True, blame=blame)
        try:
            if not function.opened:
                await function.open(START_SECONDS)
            yield function
        finally:
            self._pool.give(cell, function)

    async def call(self, arguments: Sequence[Any], *, seconds: float | None, blame: Blame, what: str) -> Any:
        """See `RemoteObject.ask`."""
        async with self.leased(blame) as function:
            return await function.ask("__call__", arguments, self._expects, seconds=seconds, blame=blame, what=what)


class FunctionTool(RemoteTool):
    """A plain function as a tool: it keeps nothing, so a dead worker costs one call."""

    def __init__(self, function: RemoteFunction, name: str) -> None:
        self._function = function
        self._name = name

    @property
    def lost(self) -> bool:
        """Never: there is nothing to lose."""
        return False

    async def check(self, arguments: Mapping[str, Any], *, seconds: float, what: str) -> None:
        """Raise `InvalidArguments` where they do not fit."""
        async with self._function.leased("tool") as function:
            await function.ask_tool(self._name, arguments, None, False, seconds=seconds, what=what)

    async def call(self, arguments: Mapping[str, Any], view: EpisodeView | None, *, seconds: float, what: str) -> Any:
        """Check the arguments and call it: a ToolReply."""
        async with self._function.leased("tool") as function:
            return await function.ask_tool(self._name, arguments, view, True, seconds=seconds, what=what)


class Isolation:
    """Worker processes for the code of one or several specs. `close` kills them all."""

    def __init__(self) -> None:
        self._server = Server()
        self._told = False

    def limits_of(self, spec: IsolationSpec) -> Limits:
        """A spec's limits, with what it leaves out."""
        return Limits(spec.memory or MEMORY, spec.cpu, spec.output or OUTPUT, spec.processes, spec.user)

    def describe(self, use: str, base: Path, spec: IsolationSpec, name: str | None = None) -> Described:
        """Import an entry point in a worker and say what it is. Blocks; for the start of a run.

        Raises:
            EntryError: it cannot be imported, or importing it ends the process or takes too long.
            IsolationError: a limit cannot bind here.
        """
        self._server.folders.update((str(base.resolve()), str(Path().resolve())))
        found: Described = in_a_loop_of_its_own(lambda: self._describe(use, base, self.limits_of(spec), name))
        if self._server.reads_as_root and not self._told:
            self._told = True
            log.warning(
                "workers may read every file that root can read: the engine's files are readable to root alone",
                fix="chmod o+rx the folders above the interpreter and the spec",
            )
        return found

    async def _describe(self, use: str, base: Path, limits: Limits, name: str | None) -> Described:
        worker = Worker(self._server, limits)
        try:
            await worker.start()
            try:
                data = await worker.request("describe", use, str(base), name, seconds=START_SECONDS)
            except WorkerLost as lost:
                printed = f"; it printed: {lost.printed.strip()[-400:]}" if lost.printed.strip() else ""
                raise EntryError(f"importing `{use}` in a worker process {lost.words}{printed}") from None
        finally:
            worker.kill("described")
            self._server.detach()
        if data[:1] == RAISED:
            raised = read_told(data[1:])
            raise EntryError(
                raised["message"] if raised["kind"] == EntryError.kind else f"`{use}`: {raised['message']}"
            )
        try:
            found = json.loads(data[1:]) if data[:1] == VALUE else {}
            events = found["events"]
            return Described(
                bool(found["is_class"]),
                None if events is None else tuple(str(event) for event in events),
                _EFFECTS[found["effects"]],
                None if found["tool"] is None else shape_from(found["tool"]),
                None if found["problem"] is None else str(found["problem"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise IsolationError(f"the worker that imported `{use}` described it wrongly: {error}") from error

    def pool(self, spec: IsolationSpec, *, functions: bool) -> Pool:
        """The workers of one entry point."""
        return Pool(self._server, self.limits_of(spec), spec.workers or (FUNCTION_WORKERS if functions else None))

    def cell(self, spec: IsolationSpec, base: Path) -> Cell:
        """A place for one worker that belongs to no pool: all objects of an episode that runs alone live in it."""
        self._server.folders.update((str(base.resolve()), str(Path().resolve())))
        return Cell(self._server, self.limits_of(spec))

    def close(self) -> None:
        """Kill every worker. Doing it twice is harmless."""
        self._server.close()
