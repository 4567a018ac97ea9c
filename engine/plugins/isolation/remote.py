"""Objects and functions that live in worker processes, and the calls that reach them.

A `CellPool` has the workers of one entry point: an object holds one for as long as it lives; a function takes one for
each call. Later episodes reuse workers. Waiting for a worker does not count for a call's deadline. A `Cell` holds one
worker. The next call replaces a dead worker by a new one. An object whose worker died is built again there if it has no
state between calls (`effects: pure`); any other object has lost its state and stays lost.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Self

import structlog
from pydantic import TypeAdapter, ValidationError

from engine.actions.calling.host import CodeOrigin, HostedCallable, HostedObject, HostedTool, InvalidArguments
from engine.errors import SpecCodeError
from engine.plugins.isolation.child import INVALID, RAISED, UNFIT, VALUE, WRONG
from engine.plugins.isolation.workers import CodeWorker, Limits, WorkerLost, ZygoteClient
from engine.schemas.environment import EpisodeView, ProgramSettings, Reset, Step, ToolReply, UserTurn
from engine.schemas.reward import RewardEvent
from engine.spec.code.entry import EntryError
from engine.spec.code.signature import ToolShape

if TYPE_CHECKING:
    from engine.schemas.trajectory import Blame

log = structlog.get_logger(__name__)

START_SECONDS = 120.0
"""Deadline for importing modules in a new worker; it does not count for the deadline of a constructor or call."""

_ANSWERS: Mapping[str, tuple[TypeAdapter[Any], str]] = {
    "reset": (TypeAdapter(Reset), "a Reset"),
    "program": (TypeAdapter(ProgramSettings), "ProgramSettings"),
    "step": (TypeAdapter(Step), "a Step"),
    "user": (TypeAdapter(UserTurn), "a UserTurn"),
    "rewards": (TypeAdapter(list[RewardEvent]), "a list of RewardEvent"),
    "text": (TypeAdapter(str), "a text"),
    "tool": (TypeAdapter(ToolReply), "a ToolReply"),
    "none": (TypeAdapter(Any), "anything"),
}
EXPECTS = {"reset": "reset", "step": "step", "score": "rewards", "respond": "user", "program": "program"}
"""Return types of the methods of environments and users."""
_KIND = re.compile(r"[a-z_]{1,40}")
_ids = count(1)


class Cell:
    """Holds one worker at a time."""

    def __init__(self, zygote: ZygoteClient, limits: Limits) -> None:
        self._zygote = zygote
        self._limits = limits
        self.memory = limits.memory
        self.cause: SpecCodeError | None = None
        """Why its last worker died."""
        self.worker: CodeWorker | None = None
        self.lock = asyncio.Lock()
        """Held during a call: a worker serves one call at a time, and a call's deadline starts when it holds the
        lock."""

    async def live(self) -> CodeWorker:
        """Return the worker, or a new one if it died."""
        if self.worker is None or not self.worker.alive:
            self.worker = None
            self.worker = await CodeWorker(self._zygote, self._limits).start()
        return self.worker

    @property
    def reusable(self) -> bool:
        """Whether another episode may use it."""
        worker = self.worker
        return worker is None or not worker.alive or (not worker.left and worker.loop is asyncio.get_running_loop())

    @property
    def left(self) -> str | None:
        """What keeps its worker from serving another episode, in words; None: nothing, or the worker has ended."""
        return self.worker.left if self.worker is not None and self.worker.alive else None

    def kill(self) -> None:
        """Kill its worker."""
        if self.worker is not None and self.worker.alive:
            self.worker.kill("no longer needed")


class CellPool:
    """The workers of one entry point."""

    def __init__(self, zygote: ZygoteClient, limits: Limits, most: int | None) -> None:
        self._zygote = zygote
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
        return Cell(self._zygote, self._limits), None

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


class RemoteObject(HostedObject):
    """One object in a worker. Its methods are attributes, like those of the object itself.

    Args:
        origin: Its entry point.
        cell: Its worker.
        pure: Whether it has no state between calls.
        blame: Whose fault an error of its constructor is.
        returned: Called at its end with the cell and the entry point.
    """

    def __init__(
        self,
        origin: CodeOrigin,
        cell: Cell,
        *,
        pure: bool,
        blame: Blame,
        returned: Callable[[Cell, str], None] | None = None,
    ) -> None:
        self._origin = origin
        self._cell = cell
        self._pure = pure
        self._blame = blame
        self._returned = returned
        self._id = next(_ids)
        self._worker: CodeWorker | None = None
        self._has: frozenset[str] = frozenset()
        self.shapes: list[ToolShape] = []
        """Shapes of the tool that it is, or of the tools that it offers."""
        self.opened = False

    @property
    def lost(self) -> bool:
        """Whether it had state in a worker that has ended."""
        return not self._pure and self.opened and (self._worker is None or not self._worker.alive)

    def __getattr__(self, name: str) -> HostedCallable:
        if name.startswith("_") or name not in self._has:
            raise AttributeError(f"`{self._origin.use}` has no method `{name}`")
        return HostedCallable(partial(self.ask, name, EXPECTS.get(name, "none")))

    def offered(self) -> list[tuple[HostedTool, ToolShape]]:
        """See `HostedObject.offered`."""
        return [(RemoteTool(self, shape.name), shape) for shape in self.shapes]

    async def open(self, seconds: float | None) -> Self:
        """Build it.

        Raises:
            SpecCodeError: its constructor raised, timed out or killed its process.
            EntryError: it cannot be imported.
        """
        async with self._cell.lock:
            await self._build(seconds)
        return self

    async def open_or_release(self, seconds: float) -> Self:
        """Build it; if that fails, its worker is returned. Raises as `open`."""
        try:
            return await self.open(seconds)
        except BaseException:
            await self.release(seconds)
            raise

    async def _build(self, seconds: float | None) -> None:
        worker = await self._cell.live()
        origin, base = self._origin, str(self._origin.base)
        if origin.use not in worker.imported:
            await self._asked(
                worker,
                "importing",
                ("prepare", origin.use, base, dict(origin.with_), origin.loads),
                None if seconds is None else max(seconds, START_SECONDS),
            )
            worker.imported.add(origin.use)
        request = ("build", self._id, origin.use, base, dict(origin.with_), origin.role, origin.name)
        text = await self._asked(worker, "building", request, seconds)
        try:
            description = json.loads(text)
            self._has = frozenset(str(name) for name in description["has"])
            self.shapes = [shape_from(item) for item in description["tools"]]
        except (ValueError, KeyError, TypeError) as error:
            raise self._bad("building it", f"described itself wrongly: {error}", self._blame) from None
        self._worker, self.opened = worker, True

    async def _asked(self, worker: CodeWorker, doing: str, request: tuple[Any, ...], seconds: float | None) -> bytes:
        """Send a request that comes before the first call; return the value of its answer. Raises as `open`."""
        use = self._origin.use
        try:
            data = await worker.request(*request, seconds=seconds)
        except WorkerLost as lost:
            raise self._failure(lost, f"{doing} `{use}`", self._blame) from None
        kind, text = data[:1], data[1:]
        if kind == RAISED:
            report = read_error(text)
            if report["kind"] == EntryError.kind:
                raise EntryError(report["message"])
            error = SpecCodeError(
                f"`{use}` could not be built: {report['type']}: {report['message']}",
                blame=self._blame,
                kind=f"{self._blame}_error",
                trace=report["trace"],
            )
            raise error from RuntimeError(report["message"])
        if kind != VALUE:
            raise self._bad(f"{doing} it", "answered in a form that breaks the protocol", self._blame)
        return text

    async def _ready(self, what: str, blame: Blame) -> CodeWorker:
        """Return the worker that holds the object; a pure object is built again if its worker died."""
        worker = self._worker
        if worker is not None and worker.alive and worker is self._cell.worker:
            return worker
        if self.opened and not self._pure:
            cause = self._cell.cause
            guilty = blame if cause is None else cause.blame
            raise SpecCodeError(
                f"{what} cannot answer: the process that held its state has ended{f': {cause}' if cause else ''}",
                blame=guilty,
                kind=f"{guilty}_crashed" if cause is None else cause.kind,
            )
        await self._build(START_SECONDS)
        assert self._worker is not None
        return self._worker

    async def ask(
        self, method: str, expects: str, arguments: Sequence[Any], *, seconds: float | None, blame: Blame, what: str
    ) -> Any:
        """Call a method and validate its answer.

        Raises:
            SpecCodeError: see `engine.actions.calling.code_call.call_spec_code`; and kinds `<blame>_crashed`, `_cpu`
                and `_output` if the worker died or exceeded a limit.
        """
        sent = [_plain(argument) for argument in arguments]
        async with self._cell.lock:
            worker = await self._ready(what, blame)
            try:
                data = await worker.request("call", self._id, method, sent, expects, seconds=seconds)
            except WorkerLost as lost:
                raise self._failure(lost, what, blame) from None
        return self._value(data, expects, what, blame)

    async def ask_tool(
        self,
        name: str,
        arguments: Mapping[str, Any],
        view: EpisodeView | None,
        calls: bool,
        *,
        seconds: float,
        what: str,
    ) -> Any:
        """Check a tool's arguments and, if `calls`, call it. Raises as `ask`, and `InvalidArguments`."""
        async with self._cell.lock:
            worker = await self._ready(what, "tool")
            try:
                data = await worker.request(
                    "tool", self._id, name, dict(arguments), _plain(view), calls, seconds=seconds
                )
            except WorkerLost as lost:
                raise self._failure(lost, what, "tool") from None
        return self._value(data, "tool" if calls else "none", what, "tool")

    def _value(self, data: bytes, expects: str, what: str, blame: Blame) -> Any:
        kind, text = data[:1], data[1:]
        adapter, wanted = _ANSWERS[expects]
        if kind == VALUE:
            try:
                return adapter.validate_json(text)
            except ValidationError as error:
                raise self._bad(what, f"returned an invalid {wanted}: {error}", blame) from None
        if kind == RAISED:
            report = read_error(text)
            memory = f" (isolation.memory is {self._cell.memory} bytes)" if report["type"] == "MemoryError" else ""
            error_kind, message = f"{blame}_error", f"{what} raised {report['type']}: {report['message']}{memory}"
            if report["kind"] is not None and _KIND.fullmatch(report["kind"]):
                error_kind, message = report["kind"], report["message"]
            cause = RuntimeError(f"{report['message'] or report['type']}{memory}")
            raise SpecCodeError(message, blame=blame, kind=error_kind, trace=report["trace"]) from cause
        try:
            words = str(json.loads(text))
        except ValueError:
            words = "?"
        if kind == INVALID:
            raise InvalidArguments(words)
        if kind == WRONG:
            raise self._bad(what, f"returned {words}; it must return {wanted}", blame)
        if kind == UNFIT:
            raise self._bad(what, f"returned a value that JSON cannot hold: {words}", blame)
        raise self._bad(what, "answered in a form that breaks the protocol", blame)

    def _bad(self, what: str, words: str, blame: Blame) -> SpecCodeError:
        return SpecCodeError(
            f"{what} {words}", blame=blame, kind=f"{blame}_bad_result" if blame == "tool" else f"{blame}_bad_reply"
        )

    def _failure(self, lost: WorkerLost, what: str, blame: Blame) -> SpecCodeError:
        hint = "; give it a longer deadline or make it faster" if lost.why == "timeout" else ""
        printed = f"printed last:\n{lost.printed}" if lost.printed else None
        error = SpecCodeError(f"{what} {lost.words}{hint}", blame=blame, kind=f"{blame}_{lost.why}", trace=printed)
        error.__cause__ = RuntimeError(f"it {lost.words}")
        if not lost.later:
            self._cell.cause = error
        return error

    @property
    def close(self) -> HostedCallable:
        """Closes it and returns its worker."""
        return HostedCallable(lambda _, *, seconds, **named: self.release(seconds))

    async def release(self, seconds: float) -> None:
        """Call its `close`, if it has one, delete it in its worker, and return the worker.

        Raises:
            SpecCodeError: its `close` failed; the worker is then killed.
        """
        try:
            worker = self._worker
            if worker is None or not worker.alive or worker is not self._cell.worker:
                return
            what = f"`{self._origin.use}`.close"
            async with self._cell.lock:
                try:
                    data = await worker.request("drop", self._id, "close" in self._has, seconds=seconds)
                except WorkerLost as lost:
                    raise self._failure(lost, what, self._blame) from None
            if data[:1] != VALUE:
                self._value(data, "none", what, self._blame)
        except BaseException:
            self._cell.kill()
            raise
        finally:
            returned, self._returned = self._returned, None
            if returned is not None:
                returned(self._cell, self._origin.use)


class RemoteFunction:
    """A function in workers: a scorer, a custom action or a tool. It has no state, so the end of a worker loses only
    one call."""

    lost = False

    def __init__(self, origin: CodeOrigin, pool: CellPool, expects: str) -> None:
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

    async def ask(self, arguments: Sequence[Any], *, seconds: float | None, blame: Blame, what: str) -> Any:
        """Call it, as `RemoteObject.ask` calls a method."""
        async with self.leased(blame) as function:
            return await function.ask("__call__", self._expects, arguments, seconds=seconds, blame=blame, what=what)

    async def ask_tool(self, *request: Any, seconds: float, what: str) -> Any:
        """See `RemoteObject.ask_tool`."""
        async with self.leased("tool") as function:
            return await function.ask_tool(*request, seconds=seconds, what=what)


class RemoteTool(HostedTool):
    """A tool of an object in a worker."""

    def __init__(self, owner: RemoteObject | RemoteFunction, name: str) -> None:
        self._owner, self._name = owner, name

    @property
    def lost(self) -> bool:
        """Whether it had state in a worker that has ended."""
        return self._owner.lost

    async def check(self, arguments: Mapping[str, Any], *, seconds: float, what: str) -> None:
        """Raise `InvalidArguments` where they do not fit."""
        await self._owner.ask_tool(self._name, arguments, None, False, seconds=seconds, what=what)

    async def call(self, arguments: Mapping[str, Any], view: EpisodeView | None, *, seconds: float, what: str) -> Any:
        """Check the arguments and call it: a ToolReply."""
        return await self._owner.ask_tool(self._name, arguments, view, True, seconds=seconds, what=what)


def shape_from(answer: Any) -> ToolShape:
    """Read a tool's shape from a worker's answer.

    Raises:
        ValueError: it is not a valid shape.
    """
    name, schema, view = answer["name"], answer["schema"], answer["view"]
    function = schema["function"]
    if not isinstance(name, str) or function["name"] != name or not isinstance(function["parameters"], dict):
        raise ValueError(f"not a tool's schema: {schema!r:.200}")
    return ToolShape(name=name, schema=schema, arguments=None, view=view if isinstance(view, str) else None)


def read_error(text: bytes) -> dict[str, Any]:
    """Read a worker's report of an exception of its code."""
    try:
        report = json.loads(text)
        return {key: None if report[key] is None else str(report[key]) for key in ("type", "message", "trace", "kind")}
    except (ValueError, KeyError, TypeError):
        return {"type": "?", "message": "its exception cannot be read", "trace": None, "kind": None}


def _plain(argument: Any) -> Any:
    """Convert an argument to plain contracts: until here, a view's messages are the engine's own list."""
    if isinstance(argument, EpisodeView):
        return replace(
            argument,
            messages=list(argument.messages),
            calls=list(argument.calls),
            malformed=list(argument.malformed),
            facts=dict(argument.facts),
            rewards=[float(value) for value in argument.rewards],
        )
    return argument
