"""What a worker process does: imports entry points, builds objects, calls them, and answers in JSON.

Requests are pickled tuples of the engine's, which a worker may trust; nothing pickled goes back. While a worker waits for
a request its event loop runs, so that background tasks of `async` objects go on. A plain method is called outside of the
loop, so it may run one of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import inspect
import json
import math
import pickle
import resource
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
from engine.schemas.environment import Reset, Step, UserTurn
from engine.schemas.reward import RewardEvent
from engine.spec.entry import load_entry
from engine.spec.signature import ToolShape, checked_arguments, explain, reply_of, shape_of, waits
from engine.storable import refusal

METHODS = ("reset", "step", "score", "tools", "respond", "close", "__call__")
_CONTRACTS: dict[str, type[BaseModel]] = {"reset": Reset, "step": Step, "user": UserTurn}
MAX_CHILDREN = 16
"""Child processes that a worker may have and still serve another episode: modules keep helpers warm."""
_MAX_WORDS = 16_384

VALUE, RAISED, WRONG, INVALID, UNFIT = b"V", b"R", b"W", b"A", b"U"
"""What an answer begins with: a value, an exception, a value of another type, arguments that do not fit, a value that JSON
cannot hold."""


class Served:
    """The objects of one worker."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.objects: dict[int, Any] = {}
        self.tools: dict[tuple[int, str], tuple[Callable[..., Any], ToolShape]] = {}

    def describe(self, use: str, base: str, name: str | None) -> dict[str, Any]:
        """What can be known of an entry point without building it."""
        target = load_entry(use, Path(base))
        events = getattr(target, "events", None)
        found: dict[str, Any] = {
            "is_class": inspect.isclass(target),
            "events": [str(event) for event in events] if isinstance(events, list | tuple) else None,
            "effects": str(getattr(target, "effects", "pure")),
            "tool": None,
            "problem": None,
        }
        if not found["is_class"] and callable(target):
            try:
                found["tool"] = _told(shape_of(target, name))
            except (TypeError, NameError, AttributeError, ValueError) as error:
                found["problem"] = str(error)
        return found

    def build(self, id: int, use: str, base: str, with_: dict[str, Any], role: str, name: str | None) -> dict[str, Any]:
        """Import an entry point, and build the object where it is a class."""
        target = load_entry(use, Path(base))
        if role in ("environment", "user") or (role == "tool" and inspect.isclass(target)):
            thing = self._loop.run_until_complete(_made(target, with_)) if waits(target) else target(**with_)
        else:
            thing = partial(target, **with_) if with_ else target
        self.objects[id] = thing
        found: dict[str, Any] = {"has": [name for name in METHODS if callable(getattr(thing, name, None))], "tools": []}
        if role == "tool":
            found["tools"].append(self._tool(id, "", thing, name))
        elif role == "environment" and "tools" in found["has"]:
            found["tools"] += [self._tool(id, "", function, None) for function in thing.tools()]
        return found

    def _tool(self, id: int, where: str, function: Callable[..., Any], name: str | None) -> dict[str, Any]:
        shape = shape_of(function, name)
        self.tools[id, shape.name] = (function, shape)
        return _told(shape)

    def drop(self, id: int) -> None:
        """Let go of an object."""
        self.objects.pop(id, None)
        for key in [key for key in self.tools if key[0] == id]:
            del self.tools[key]


def _told(shape: ToolShape) -> dict[str, Any]:
    return {"name": shape.name, "schema": shape.schema, "view": shape.view}


class _Answered(Exception):
    """An answer that is not a value."""

    def __init__(self, kind: bytes, words: str) -> None:
        self.kind, self.words = kind, words


def _encoded(value: Any, expects: str) -> bytes:
    """A value as the JSON of what is expected."""
    if expects == "none":
        return b"null"
    if expects == "rewards":
        if not isinstance(value, list) or not all(isinstance(item, RewardEvent) for item in value):
            raise _Answered(WRONG, type(value).__name__)
        return b"[" + b",".join(map(_json, value)) + b"]"
    if expects == "tool":
        try:
            return _json(reply_of(value))
        except (TypeError, ValidationError) as error:
            raise _Answered(UNFIT, f"{type(value).__name__}; {_text(error)}") from error
    contract = _CONTRACTS[expects]
    if not isinstance(value, contract):
        raise _Answered(WRONG, type(value).__name__)
    return _json(value)


def _json(value: BaseModel) -> bytes:
    """A value as JSON, refused by the predicate that the engine uses, because JSON would silently turn bytes, sets and keys into others."""
    if problem := refusal(getattr(value, "facts", {})):
        raise _Answered(UNFIT, f"facts: {problem}")
    try:
        return value.model_dump_json(fallback=_converted).encode()
    except Exception as error:
        raise _Answered(UNFIT, _text(error)) from error


def _converted(value: Any) -> Any:
    """NumPy's scalars and arrays as plain values, which are stored so where code runs in threads, too."""
    if callable(convert := getattr(value, "tolist", None)):
        return convert()
    raise TypeError(f"a {type(value).__name__} is nothing that JSON can hold")


def _words(text: str) -> str:
    return text.encode("utf-8", "replace").decode()[:_MAX_WORDS]


def _raised(error: BaseException) -> bytes:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    told = {
        "type": type(error).__name__,
        "message": _words(_text(error)),
        "trace": _words("".join(traceback.format_exception(type(error), error, trace))[-_MAX_WORDS:]),
        "kind": error.kind if isinstance(error, EngineError) else None,
    }
    return RAISED + json.dumps(told).encode()


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  (a `__str__` of the user's own)
        return "<its text cannot be read>"


class Server:
    """One worker: requests in, answers out, one after the other."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._served = Served(self._loop)

    def run(self) -> None:
        """Until the engine closes the channel."""
        while True:
            request = self._loop.run_until_complete(self._receive())
            if request is None:
                return
            try:
                answer = self._answer(pickle.loads(request))
            except _Answered as other:
                answer = other.kind + json.dumps(_words(other.words)).encode()
            except BaseException as error:  # noqa: BLE001  (told to the engine, whatever it is)
                answer = _raised(error)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            self._send(bytes([_clean()]) + answer)

    async def _receive(self) -> bytes | None:
        self._channel.setblocking(False)
        header = await self._exactly(4)
        return None if header is None else await self._exactly(struct.unpack("<I", header)[0])

    async def _exactly(self, count: int) -> bytes | None:
        parts = []
        while count > 0:
            part = await self._loop.sock_recv(self._channel, min(count, 1 << 20))
            if not part:
                return None
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _send(self, answer: bytes) -> None:
        self._channel.setblocking(True)
        self._channel.sendall(struct.pack("<I", len(answer)) + answer)

    def _answer(self, request: tuple[Any, ...]) -> bytes:
        what, cpu, *rest = request
        _allow(cpu)
        if what == "describe":
            return VALUE + json.dumps(self._served.describe(*rest)).encode()
        if what == "build":
            return VALUE + json.dumps(self._served.build(*rest)).encode()
        if what == "drop":
            id, closes = rest
            if closes:
                self._finished(self._served.objects[id].close)
            self._served.drop(id)
            return VALUE + b"null"
        if what == "tool":
            return VALUE + self._call_tool(*rest)
        id, method, arguments, expects = rest
        target = self._served.objects[id]
        function = target if method == "__call__" else getattr(target, method)
        return VALUE + _encoded(self._finished(function, *arguments), expects)

    def _call_tool(self, id: int, name: str, arguments: dict[str, Any], view: Any, calls: bool) -> bytes:
        function, shape = self._served.tools[id, name]
        try:
            checked = checked_arguments(shape, arguments)
        except ValidationError as error:
            raise _Answered(INVALID, explain(error)) from None
        if not calls:
            return b"null"
        if shape.view:
            checked[shape.view] = view
        return _encoded(self._finished(function, **checked), "tool")

    def _finished(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """What a call returns; waited for, where it is `async`."""
        value = function(*arguments, **named)
        return self._loop.run_until_complete(_waited(value)) if inspect.isawaitable(value) else value


async def _made(target: Callable[..., Any], with_: dict[str, Any]) -> Any:
    """An object that is built inside of the loop, so that it may open sessions there."""
    return target(**with_)


async def _waited(value: Any) -> Any:
    return await value


def _allow(cpu: float | None) -> None:
    """Let this call use so many seconds of CPU time; past them the kernel ends the process with SIGXCPU."""
    if cpu is None:
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime + cpu)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _clean() -> int:
    """1 where the worker may serve another episode: no thread and few processes of an object's run on."""
    threads = threading.enumerate()
    if not all(thread is threading.main_thread() or thread.name.startswith("asyncio_") for thread in threads):
        return 0
    try:
        children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text()
    except OSError:
        return 1
    return int(len(children.split()) <= MAX_CHILDREN)


def serve(channel: socket.socket) -> None:
    """Serve until the channel closes."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    faulthandler.enable()
    Server(channel).run()
