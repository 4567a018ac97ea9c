"""The host of the mode `process`: pools of workers, one for each entry point of a spec.

An object holds its worker for as long as it lives; a function takes one for each call. Later episodes reuse
workers. Waiting for a worker does not count for a call's deadline. An episode takes the workers of its objects in one order
(environment, user, tools) and calls of functions do not wait while they hold one, so there is no deadlock.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from msgspec.structs import replace

from engine.actions.calling.host import (
    CodeHost,
    CodeOrigin,
    EpisodeHost,
    HostedCallable,
    HostedTool,
    SpecCode,
    bad_tool,
)
from engine.plugins.isolation.child import RAISED, VALUE
from engine.plugins.isolation.remote import (
    START_SECONDS,
    Cell,
    RemoteMethod,
    RemoteObject,
    RemoteTool,
    read_error,
    shape_from,
)
from engine.plugins.isolation.server import IsolationError, Limits, Server, run_in_new_loop
from engine.plugins.isolation.worker import Worker, WorkerLost
from engine.schemas.base import Struct
from engine.schemas.entry import IsolationSpec
from engine.spec.code.entry import EntryError
from engine.spec.code.signature import ToolShape

if TYPE_CHECKING:
    from engine.schemas.entry import Effects
    from engine.schemas.environment import EpisodeView
    from engine.schemas.trajectory import Blame

log = structlog.get_logger(__name__)

_EFFECTS: Mapping[str, Effects] = {"pure": "pure", "replayable": "replayable", "external": "external"}
MEMORY = 4 * 10**9
OUTPUT = 16 * 10**6
FUNCTION_WORKERS = 64
"""Maximum number of workers of one function if `isolation.workers` is not set."""


class Described(Struct, frozen=True, kw_only=True):
    """Description of an entry point that has not been built."""

    is_class: bool
    events: tuple[str, ...]
    effects: Effects
    shape: ToolShape | None
    """Shape of a function as a tool."""
    problem: str | None
    """Reason why a function is not a tool."""


class Pool:
    """The workers of one entry point."""

    def __init__(self, server: Server, limits: Limits, most: int | None) -> None:
        self._server = server
        self._limits = limits
        self._most = None if most is None else asyncio.Semaphore(most)
        self._idle: list[tuple[Cell, RemoteObject | None]] = []
        self._warned = False

    async def take(self) -> tuple[Cell, RemoteObject | None]:
        """Take a cell for a worker, with the function that it holds already; waits for a cell if all are in use."""
        if self._most is not None:
            await self._most.acquire()
        while self._idle:
            cell, function = self._idle.pop()
            if cell.reusable:
                return cell, function
            cell.kill()
        return Cell(self._server, self._limits), None

    async def hold(self, origin: CodeOrigin, *, pure: bool, blame: Blame) -> HeldObject:
        """Return an unbuilt object with a cell that it holds until its release."""
        cell, _ = await self.take()
        return HeldObject(origin, cell, self, pure=pure, blame=blame)

    def give(self, cell: Cell, use: str, function: RemoteObject | None = None) -> None:
        """Return a cell that held `use` to the pool."""
        if self._most is not None:
            self._most.release()
        if cell.left and not self._warned:
            self._warned = True
            log.warning(
                "workers are not used again, so each episode imports the code anew",
                use=use,
                still_running=cell.left,
                fix="end it in `close`",
            )
        if cell.reusable:
            self._idle.append((cell, function))
        else:
            cell.kill()


class HeldObject(RemoteObject):
    """An object of one episode, with the worker that it holds."""

    def __init__(self, origin: CodeOrigin, cell: Cell, pool: Pool | None, *, pure: bool, blame: Blame) -> None:
        super().__init__(origin, cell, pure=pure, blame=blame)
        self._pool = pool

    @property
    def close(self) -> Release:
        """Closes it and returns its worker."""
        return Release(self)

    async def release(self, seconds: float) -> None:
        """Close it and return its worker. Raises a SpecCodeError if its `close` failed."""
        try:
            await self.discard(seconds)
        except BaseException:
            self._cell.kill()
            raise
        finally:
            pool, self._pool = self._pool, None
            if pool is not None:
                pool.give(self._cell, self._origin.use)


class Release(HostedCallable):
    """The end of an object that holds a worker."""

    def __init__(self, held: HeldObject) -> None:
        self._held = held

    async def call(self, arguments: Sequence[Any], *, seconds: float | None, blame: Blame, what: str) -> None:
        """See `HeldObject.release`."""
        assert seconds is not None
        await self._held.release(seconds)


class RemoteFunction(HostedCallable):
    """A function in workers: a scorer, or a custom action."""

    def __init__(self, origin: CodeOrigin, pool: Pool, expects: str) -> None:
        self._origin = origin
        self._pool = pool
        self._expects = expects

    @asynccontextmanager
    async def leased(self, blame: Blame) -> AsyncIterator[RemoteObject]:
        """The function in a worker that is reserved for the block."""
        cell, function = await self._pool.take()
        function = function or RemoteObject(self._origin, cell, pure=True, blame=blame)
        try:
            if not function.opened:
                await function.open(START_SECONDS)
            yield function
        finally:
            self._pool.give(cell, self._origin.use, function)

    async def call(self, arguments: Sequence[Any], *, seconds: float | None, blame: Blame, what: str) -> Any:
        """See `RemoteObject.ask`."""
        async with self.leased(blame) as function:
            return await function.ask("__call__", arguments, self._expects, seconds=seconds, blame=blame, what=what)


class FunctionTool(RemoteTool):
    """A plain function as a tool. It has no state, so the end of a worker loses only one call."""

    def __init__(self, function: RemoteFunction, name: str) -> None:
        self._function = function
        self._name = name

    @property
    def lost(self) -> bool:
        """Always False, because it has no state."""
        return False

    async def check(self, arguments: Mapping[str, Any], *, seconds: float, what: str) -> None:
        """Raise `InvalidArguments` if they do not match the signature."""
        async with self._function.leased("tool") as function:
            await function.ask_tool(self._name, arguments, None, False, seconds=seconds, what=what)

    async def call(self, arguments: Mapping[str, Any], view: EpisodeView | None, *, seconds: float, what: str) -> Any:
        """Check the arguments, call it and return its ToolReply."""
        async with self._function.leased("tool") as function:
            return await function.ask_tool(self._name, arguments, view, True, seconds=seconds, what=what)


class ProcessCode(SpecCode):
    """An entry point that is imported and built only in worker processes."""

    def __init__(self, origin: CodeOrigin, described: Described, pool: Pool) -> None:
        super().__init__(origin)
        self.is_class, self.events, self.effects = described.is_class, described.events, described.effects
        self.described = described
        self._pool = pool

    def function(self, answer: str) -> HostedCallable:
        """See `SpecCode.function`."""
        return RemoteFunction(self.origin, self._pool, answer)

    def tool(self) -> tuple[HostedTool, ToolShape]:
        """See `SpecCode.tool`."""
        shape = self.described.shape
        if shape is None:
            raise bad_tool(f"tools: `{self.origin.use}`", self.described.problem or "it cannot be called")
        return FunctionTool(RemoteFunction(self.origin, self._pool, "tool"), shape.name), shape

    async def build(self, blame: Blame, effects: Effects, seconds: float) -> HeldObject:
        """See `SpecCode.build`."""
        return await _opened(await self._pool.hold(self.origin, pure=effects == "pure", blame=blame), seconds)


class CodeInCell(SpecCode):
    """Code in the one worker of an episode."""

    def __init__(self, code: SpecCode, cell: Cell) -> None:
        super().__init__(code.origin)
        self.is_class, self.events, self.effects = code.is_class, code.events, code.effects
        self._code, self._cell = code, cell

    def function(self, answer: str) -> HostedCallable:
        """See `SpecCode.function`."""
        function = RemoteObject(self.origin, self._cell, pure=True, blame="environment")
        return RemoteMethod(function, "__call__", answer)

    def tool(self) -> tuple[HostedTool, ToolShape]:
        """See `SpecCode.tool`."""
        _, shape = self._code.tool()
        owner = RemoteObject(self.origin, self._cell, pure=True, blame="tool")
        return RemoteTool(owner, shape.name), replace(shape, arguments=None)

    async def build(self, blame: Blame, effects: Effects, seconds: float) -> HeldObject:
        """See `SpecCode.build`."""
        held = HeldObject(self.origin, self._cell, None, pure=effects == "pure", blame=blame)
        return await _opened(held, seconds)


class OneWorker(EpisodeHost):
    """All code of one episode in one worker."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    def load(self, code: SpecCode) -> SpecCode:
        """See `EpisodeHost.load`."""
        return CodeInCell(code, self._cell)

    def close(self) -> None:
        """See `EpisodeHost.close`."""
        self._cell.kill()


async def _opened(held: HeldObject, seconds: float) -> HeldObject:
    """Build an object in its worker; if that fails, the worker is returned."""
    try:
        return await held.open(seconds)
    except BaseException:
        await held.release(seconds)
        raise


class Isolation(CodeHost):
    """Worker processes for the code of one or several specs. `close` kills them all."""

    def __init__(self) -> None:
        self._server = Server()
        self._warned = False

    def load(self, origin: CodeOrigin, isolation: IsolationSpec) -> ProcessCode:
        """See `CodeHost.load`.

        Raises:
            EntryError: it cannot be imported, or importing it ends the process or takes too long.
            IsolationError: a limit cannot take effect here.
        """
        described = self.describe(origin.use, origin.base, isolation, origin.name)
        functions = origin.role == "function" or (origin.role == "tool" and not described.is_class)
        return ProcessCode(origin, described, self.pool(isolation, functions=functions))

    def apart(self, base: Path) -> OneWorker:
        """See `CodeHost.apart`."""
        self._server.folders.update((str(base.resolve()), str(Path().resolve())))
        return OneWorker(Cell(self._server, self.limits_of(IsolationSpec(mode="process", user="engine"))))

    def limits_of(self, spec: IsolationSpec) -> Limits:
        """A spec's limits, with defaults for omitted ones."""
        return Limits(spec.memory or MEMORY, spec.cpu, spec.output or OUTPUT, spec.processes, spec.user)

    def describe(self, use: str, base: Path, spec: IsolationSpec, name: str | None = None) -> Described:
        """Import an entry point in a worker and describe it. Blocks; for use at the start of a run.

        Raises:
            EntryError: it cannot be imported, or importing it ends the process or takes too long.
            IsolationError: a limit cannot take effect here.
        """
        self._server.folders.update((str(base.resolve()), str(Path().resolve())))
        described: Described = run_in_new_loop(lambda: self._describe(use, base, self.limits_of(spec), name))
        if self._server.reads_as_root and not self._warned:
            self._warned = True
            log.warning(
                "workers may read every file that root can read, because only root can read the engine's files",
                fix="chmod o+rx the folders above the interpreter and the spec",
            )
        return described

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
            raised = read_error(data[1:])
            raise EntryError(
                raised["message"] if raised["kind"] == EntryError.kind else f"`{use}`: {raised['message']}"
            )
        try:
            answer = json.loads(data[1:]) if data[:1] == VALUE else {}
            events = answer["events"]
            return Described(
                is_class=bool(answer["is_class"]),
                events=() if events is None else tuple(str(event) for event in events),
                effects=_EFFECTS[answer["effects"]],
                shape=None if answer["tool"] is None else shape_from(answer["tool"]),
                problem=None if answer["problem"] is None else str(answer["problem"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise IsolationError(f"the worker that imported `{use}` described it wrongly: {error}") from error

    def pool(self, spec: IsolationSpec, *, functions: bool) -> Pool:
        """Return the pool of one entry point."""
        return Pool(self._server, self.limits_of(spec), spec.workers or (FUNCTION_WORKERS if functions else None))

    def close(self) -> None:
        """Kill every worker. A second call has no effect."""
        self._server.close()
