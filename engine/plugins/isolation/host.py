"""The host of the mode `process`: loads entry points, whose objects and functions live in workers.

An episode takes the workers of its objects in one order (environment, user, tools) and calls of functions do not wait
while they hold one, so there is no deadlock.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from msgspec.structs import replace

from engine.actions.calling.host import (
    CodeHost,
    CodeOrigin,
    EpisodeHost,
    HostedCallable,
    HostedTool,
    SpecCode,
)
from engine.errors import EngineError
from engine.plugins.isolation.child import RAISED, VALUE
from engine.plugins.isolation.remote import (
    START_SECONDS,
    Cell,
    CellPool,
    RemoteFunction,
    RemoteObject,
    RemoteTool,
    read_error,
    shape_from,
)
from engine.plugins.isolation.workers import CodeWorker, Limits, WorkerLost, ZygoteClient
from engine.schemas.entry import IsolationSpec
from engine.spec.code.entry import EntryError
from engine.spec.code.signature import ToolShape

if TYPE_CHECKING:
    from engine.schemas.entry import Effects
    from engine.schemas.trajectory import Blame

log = structlog.get_logger(__name__)

_EFFECTS: Mapping[str, Effects] = {"pure": "pure", "replayable": "replayable", "external": "external"}
MEMORY = 4 * 10**9
OUTPUT = 16 * 10**6
FUNCTION_WORKERS = 64
"""Maximum number of workers of one function if `isolation.workers` is not set."""


class ProcessCode(SpecCode):
    """An entry point that is imported and built only in worker processes.

    Args:
        origin: The entry point.
        description: What a worker says of it (`WorkerCode.describe`).
        limits: The limits of its workers.
        zygote: Starts them.
        workers: Maximum number of its workers; None: that of a function for a function, and none for a class.

    Raises:
        EngineError: the description is not one.
    """

    def __init__(
        self, origin: CodeOrigin, description: bytes, limits: Limits, zygote: ZygoteClient, workers: int | None
    ) -> None:
        super().__init__(origin)
        try:
            answer = json.loads(description)
            self.is_class = bool(answer["is_class"])
            self.events = tuple(str(event) for event in answer["events"] or ())
            self.effects = _EFFECTS[answer["effects"]]
            self._shape = None if answer["tool"] is None else shape_from(answer["tool"])
            self._problem = str(answer["problem"] or "it cannot be called")
        except (ValueError, KeyError, TypeError) as error:
            words = f"the worker that imported `{origin.use}` described it wrongly: {error}"
            raise EngineError(words, kind="isolation", blame="spec") from error
        is_function = origin.role == "function" or (origin.role == "tool" and not self.is_class)
        self.pool = CellPool(zygote, limits, workers or (FUNCTION_WORKERS if is_function else None))

    def function(self, answer: str) -> HostedCallable:
        """See `SpecCode.function`."""
        return HostedCallable(RemoteFunction(self.origin, self.pool, answer).ask)

    def tool(self) -> tuple[HostedTool, ToolShape]:
        """See `SpecCode.tool`. Raises: EngineError: it is no valid tool."""
        if self._shape is None:
            raise EngineError(f"tools: `{self.origin.use}`: {self._problem}", kind="bad_tool", blame="spec")
        return RemoteTool(RemoteFunction(self.origin, self.pool, "tool"), self._shape.name), self._shape

    async def build(self, blame: Blame, effects: Effects, seconds: float) -> RemoteObject:
        """See `SpecCode.build`."""
        cell, _ = await self.pool.take()
        held = RemoteObject(self.origin, cell, pure=effects == "pure", blame=blame, returned=self.pool.give)
        return await held.open_or_release(seconds)


class CodeInCell(SpecCode):
    """Code in the one worker of an episode."""

    def __init__(self, code: SpecCode, cell: Cell) -> None:
        super().__init__(code.origin)
        self.is_class, self.events, self.effects = code.is_class, code.events, code.effects
        self._code, self._cell = code, cell

    def function(self, answer: str) -> HostedCallable:
        """See `SpecCode.function`."""
        function = RemoteObject(self.origin, self._cell, pure=True, blame="environment")
        return HostedCallable(partial(function.ask, "__call__", answer))

    def tool(self) -> tuple[HostedTool, ToolShape]:
        """See `SpecCode.tool`."""
        _, shape = self._code.tool()
        owner = RemoteObject(self.origin, self._cell, pure=True, blame="tool")
        return RemoteTool(owner, shape.name), replace(shape, arguments=None)

    async def build(self, blame: Blame, effects: Effects, seconds: float) -> RemoteObject:
        """See `SpecCode.build`."""
        held = RemoteObject(self.origin, self._cell, pure=effects == "pure", blame=blame)
        return await held.open_or_release(seconds)


class Isolation(CodeHost):
    """Worker processes for the code of one or several specs. `close` kills them all."""

    def __init__(self) -> None:
        self._zygote = ZygoteClient()
        self._warned = False

    def load(self, origin: CodeOrigin, isolation: IsolationSpec) -> ProcessCode:
        """See `CodeHost.load`.

        Raises:
            EntryError: it cannot be imported, or importing it ends the process or takes too long.
            EngineError: a limit cannot take effect here.
        """
        self._zygote.folders.update((str(origin.base.resolve()), str(Path().resolve())))
        limits = self.limits_of(isolation)
        with ThreadPoolExecutor(1, thread_name_prefix="isolation-start") as thread:  # a loop may run in this one
            description = thread.submit(lambda: asyncio.run(self._describe(origin, limits))).result()
        if self._zygote.reads_as_root and not self._warned:
            self._warned = True
            log.warning(
                "workers may read every file that root can read, because only root can read the engine's files",
                fix="chmod o+rx the folders above the interpreter and the spec",
            )
        return ProcessCode(origin, description, limits, self._zygote, isolation.workers)

    def apart(self, base: Path) -> EpisodeHost:
        """See `CodeHost.apart`. All code of the episode runs in one worker."""
        self._zygote.folders.update((str(base.resolve()), str(Path().resolve())))
        cell = Cell(self._zygote, self.limits_of(IsolationSpec(mode="process", user="engine")))
        return EpisodeHost(load=partial(CodeInCell, cell=cell), close=cell.kill)

    def limits_of(self, spec: IsolationSpec) -> Limits:
        """A spec's limits, with defaults for omitted ones."""
        return Limits(spec.memory or MEMORY, spec.cpu, spec.output or OUTPUT, spec.processes, spec.user)

    async def _describe(self, origin: CodeOrigin, limits: Limits) -> bytes:
        """Import an entry point in a worker, which describes it."""
        worker = CodeWorker(self._zygote, limits)
        try:
            await worker.start()
            try:
                data = await worker.request(
                    "describe", origin.use, str(origin.base), origin.name, seconds=START_SECONDS
                )
            except WorkerLost as lost:
                printed = f"; it printed: {lost.printed.strip()[-400:]}" if lost.printed.strip() else ""
                raise EntryError(f"importing `{origin.use}` in a worker process {lost.words}{printed}") from None
        finally:
            worker.kill("described")
            self._zygote.detach()
        if data[:1] == RAISED:
            raised = read_error(data[1:])
            raise EntryError(
                raised["message"] if raised["kind"] == EntryError.kind else f"`{origin.use}`: {raised['message']}"
            )
        return data[1:] if data[:1] == VALUE else b"{}"

    def close(self) -> None:
        """Kill every worker. A second call has no effect."""
        self._zygote.close()
