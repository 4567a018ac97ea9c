"""Code of a worker process: imports entry points, builds objects, calls them, and answers in JSON.

Requests are pickled tuples from the engine, which a worker may trust; answers are never pickled. While a worker waits
for a request its event loop runs, so that background tasks of `async` objects continue. A plain method is called
outside of the loop, so it may run its own loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import inspect
import json
import pickle
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from engine.errors import EngineError
from engine.processes.system import limit_cpu
from engine.schemas.environment import ProgramSettings, Reset, Step, UserTurn
from engine.schemas.reward import RewardEvent
from engine.spec.code.entry import load_entry
from engine.spec.code.signature import ToolShape, explain, reply_of, shape_of, waits
from engine.storable import refusal

METHODS = ("reset", "program", "step", "score", "tools", "respond", "close", "__call__")
_WANTED: dict[str, type] = {
    "reset": Reset,
    "program": ProgramSettings,
    "step": Step,
    "user": UserTurn,
    "text": str,
}
MAX_CHILDREN = 16
"""Maximum number of child processes with which a worker may serve another episode: modules may keep helper
processes."""
_HELPER_THREADS = ("asyncio_", "tqdm_monitor")
"""Beginnings of the names of threads with which a worker may serve another episode: idle threads of asyncio's pool, and
the thread that tqdm starts once in a process for its progress bars."""
_MAX_LEFT = 200
_MAX_TEXT = 16_384

VALUE, RAISED, WRONG, INVALID, UNFIT = b"V", b"R", b"W", b"A", b"U"
"""First byte of an answer: a value, an exception, a value of a wrong type, invalid arguments, a value that JSON cannot
hold."""


def _shape_fields(shape: ToolShape) -> dict[str, Any]:
    return {"name": shape.name, "schema": shape.schema, "view": shape.view}


class _Answered(Exception):
    """An answer that is not a value."""

    def __init__(self, kind: bytes, text: str) -> None:
        self.kind, self.text = kind, text


def _encoded(value: Any, expects: str) -> bytes:
    """Encode a value as JSON of the expected type."""
    if expects == "none":
        return b"null"
    if expects == "tool":
        try:
            return _json(reply_of(value))
        except (TypeError, ValidationError) as error:
            raise _Answered(UNFIT, f"{type(value).__name__}; {_text(error)}") from error
    if expects == "rewards":
        right = isinstance(value, list) and all(isinstance(item, RewardEvent) for item in value)
    else:
        right = isinstance(value, _WANTED[expects])
    if not right:
        raise _Answered(WRONG, type(value).__name__)
    if expects == "rewards":
        return b"[" + b",".join(map(_json, value)) + b"]"
    return json.dumps(value).encode() if expects == "text" else _json(value)


def _json(value: BaseModel) -> bytes:
    """Encode a value as JSON after the engine's check, because JSON would silently convert bytes, sets and keys."""
    if problem := refusal(getattr(value, "facts", {})):
        raise _Answered(UNFIT, f"facts: {problem}")
    try:
        return value.model_dump_json(fallback=_converted).encode()
    except Exception as error:
        raise _Answered(UNFIT, _text(error)) from error


def _converted(value: Any) -> Any:
    """Convert NumPy scalars and arrays to plain values, as for code in threads."""
    if callable(convert := getattr(value, "tolist", None)):
        return convert()
    raise TypeError(f"JSON cannot hold a {type(value).__name__}")


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()[:_MAX_TEXT]


def _error_answer(error: BaseException) -> bytes:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    fields = {
        "type": type(error).__name__,
        "message": _encodable(_text(error)),
        "trace": _encodable("".join(traceback.format_exception(type(error), error, trace))[-_MAX_TEXT:]),
        "kind": error.kind if isinstance(error, EngineError) else None,
    }
    return RAISED + json.dumps(fields).encode()


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  (user code defines `__str__`)
        return "<its message cannot be read>"


class WorkerCode:
    """The objects of one worker: reads a request, writes its answer, then reads the next."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._objects: dict[int, Any] = {}
        self._tools: dict[tuple[int, str], tuple[Callable[..., Any], ToolShape]] = {}

    def run(self) -> None:
        """Serve until the engine closes the channel."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
        faulthandler.enable()
        while True:
            request = self._loop.run_until_complete(self._receive())
            if request is None:
                return
            try:
                answer = self._answer(pickle.loads(request))
            except _Answered as other:
                answer = other.kind + json.dumps(_encodable(other.text)).encode()
            except BaseException as error:  # noqa: BLE001  (every exception is reported to the engine)
                answer = _error_answer(error)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            left = _left().encode("utf-8", "replace")[:_MAX_LEFT]
            reply = bytes([len(left)]) + left + answer
            self._channel.setblocking(True)
            self._channel.sendall(struct.pack("<I", len(reply)) + reply)

    async def _exactly(self, count: int) -> bytes | None:
        """So many bytes from the channel; None: it is closed."""
        self._channel.setblocking(False)
        parts = []
        while count > 0:
            part = await self._loop.sock_recv(self._channel, min(count, 1 << 20))
            if not part:
                return None
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    async def _receive(self) -> bytes | None:
        header = await self._exactly(4)
        return None if header is None else await self._exactly(struct.unpack("<I", header)[0])

    def _answer(self, request: tuple[Any, ...]) -> bytes:
        what, cpu, *rest = request
        if cpu is not None:
            limit_cpu(cpu)
        if what in ("call", "tool"):
            return VALUE + (self._call if what == "call" else self._call_tool)(*rest)
        done: dict[str, Callable[..., Any]] = {
            "describe": self.describe,
            "prepare": self.prepare,
            "build": self.build,
            "drop": self.drop,
        }
        return VALUE + json.dumps(done[what](*rest)).encode()

    def _call(self, id: int, method: str, arguments: list[Any], expects: str) -> bytes:
        target = self._objects[id]
        function = target if method == "__call__" else getattr(target, method)
        return _encoded(self._finished(function, *arguments), expects)

    def _call_tool(self, id: int, name: str, arguments: dict[str, Any], view: Any, calls: bool) -> bytes:
        function, shape = self._tools[id, name]
        try:
            assert shape.arguments is not None
            checked = vars(shape.arguments.model_validate(arguments))
        except ValidationError as error:
            raise _Answered(INVALID, explain(error)) from None
        if not calls:
            return b"null"
        if shape.view:
            checked[shape.view] = view
        return _encoded(self._finished(function, **checked), "tool")

    def _finished(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Return the result of a call; an `async` one is awaited."""
        value = function(*arguments, **named)
        return self._loop.run_until_complete(_waited(value)) if inspect.isawaitable(value) else value

    # --- what requests ask for

    def describe(self, use: str, base: str, name: str | None) -> dict[str, Any]:
        """Describe an entry point without building it."""
        target = load_entry(use, Path(base))
        events = getattr(target, "events", None)
        description: dict[str, Any] = {
            "is_class": inspect.isclass(target),
            "events": [str(event) for event in events] if isinstance(events, list | tuple) else None,
            "effects": str(getattr(target, "effects", "pure")),
            "tool": None,
            "problem": None,
        }
        if not description["is_class"] and callable(target):
            try:
                description["tool"] = _shape_fields(shape_of(target, name))
            except (TypeError, NameError, AttributeError, ValueError) as error:
                description["problem"] = str(error)
        return description

    def prepare(self, use: str, base: str, with_: dict[str, Any], loads: str | None) -> None:
        """Import an entry point, and load what all of its objects share."""
        load_entry(use, Path(base))
        if loads is not None:
            load_entry(loads, Path(base))(**with_)

    def build(self, id: int, use: str, base: str, with_: dict[str, Any], role: str, name: str | None) -> dict[str, Any]:
        """Import an entry point, and build the object if it is a class."""
        target = load_entry(use, Path(base))
        if role in ("environment", "user") or (role == "tool" and inspect.isclass(target)):
            thing = self._loop.run_until_complete(_made(target, with_)) if waits(target) else target(**with_)
        else:
            thing = partial(target, **with_) if with_ else target
        self._objects[id] = thing
        has = [method for method in METHODS if callable(getattr(thing, method, None))]
        tools = [self._tool(id, thing, name)] if role == "tool" else []
        if role == "environment" and "tools" in has:
            tools = [self._tool(id, function, None) for function in thing.tools()]
        return {"has": has, "tools": tools}

    def _tool(self, id: int, function: Callable[..., Any], name: str | None) -> dict[str, Any]:
        shape = shape_of(function, name)
        self._tools[id, shape.name] = (function, shape)
        return _shape_fields(shape)

    def drop(self, id: int, closes: bool) -> None:
        """Delete the references to an object, after its `close` if it has one."""
        if closes:
            self._finished(self._objects[id].close)
        self._objects.pop(id, None)
        for key in [key for key in self._tools if key[0] == id]:
            del self._tools[key]


async def _made(target: Callable[..., Any], with_: dict[str, Any]) -> Any:
    """Build an object inside of the loop, so that it may open sessions there."""
    return target(**with_)


async def _waited(value: Any) -> Any:
    return await value


def _left() -> str:
    """What an object left running, in words; empty if the worker may serve another episode."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.name.startswith(_HELPER_THREADS):
            return f"the thread `{thread.name}`"
    try:
        children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    except OSError:
        return ""
    return f"{len(children)} child processes" if len(children) > MAX_CHILDREN else ""
