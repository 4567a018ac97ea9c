"""A connection to an MCP server: its session, its list of tools, and the task that holds both open."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import tempfile
from contextlib import AsyncExitStack
from typing import Any

import structlog

from engine.errors import AdapterError
from engine.masking import mask_credentials
from engine.plugins.adapters.base import library

log = structlog.get_logger(__name__)


CLOSE_SECONDS = 10.0
_STDERR = 2000
"""Characters of a server's stderr that an error shows."""
STDERR_BYTES = 1_000_000
"""Size from which the file that a server's stderr is written to is emptied."""
_TRIM_SECONDS = 1.0
MAX_TOOLS = 4096
"""Maximum number of tools of a server."""
logging.getLogger("mcp").setLevel(
    logging.CRITICAL
)  # a traceback for each message of a server that is none; `_pump` logs three


class Connection:
    """A session and the task that holds it open. The library wants both opened and closed by the same task."""

    def __init__(self, transport: Any) -> None:
        loop = asyncio.get_running_loop()
        self.session: Any = None
        self.ready: asyncio.Future[list[dict[str, Any]]] = loop.create_future()
        """The list of tools."""
        self.doubtful = False
        """A call got no answer."""
        self.broken = False
        self._stop = asyncio.Event()
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed when the connection ends)
        # The server appends, so the file can be emptied while it writes.
        fcntl.fcntl(self._stderr, fcntl.F_SETFL, fcntl.fcntl(self._stderr, fcntl.F_GETFL) | os.O_APPEND)
        self._last = ""
        self.over: asyncio.Task[None] = loop.create_task(self._hold(transport))

    @property
    def usable(self) -> bool:
        """Whether it takes calls, as far as is known."""
        return self.ready.done() and not (self.over.done() or self.broken or self.doubtful)

    async def alive(self, seconds: float) -> bool:
        """Whether it takes calls; a server that left a call without an answer must answer a ping in some seconds."""
        if self.over.done() or self.broken:
            return False
        if self.doubtful:
            try:
                await asyncio.wait_for(self.session.send_ping(), seconds)
            except Exception:  # noqa: BLE001  (any error here means that the server does not answer)
                return False
            self.doubtful = False
        return True

    async def end(self) -> None:
        """Close it; a server that was started ends with it."""
        self._stop.set()
        done, _ = await asyncio.wait({self.over}, timeout=CLOSE_SECONDS)
        if not done:
            self.over.cancel()
            await asyncio.wait({self.over}, timeout=CLOSE_SECONDS)

    def stderr(self) -> str:
        """The end of what the server wrote to stderr, for an error's message."""
        with contextlib.suppress(ValueError, OSError):  # closed: `_last` is what it wrote
            size = os.fstat(self._stderr.fileno()).st_size
            text = os.pread(self._stderr.fileno(), _STDERR, max(0, size - _STDERR))
            self._last = text.decode("utf-8", "replace").strip()
        return f"; its stderr ends with: {mask_credentials(self._last)}" if self._last else ""

    async def _hold(self, transport: Any) -> None:
        try:
            async with AsyncExitStack() as stack:
                stack.callback(self._stderr.close)
                stack.callback(self.stderr)
                anyio = library("mcp", "anyio")
                read, write = await stack.enter_async_context(transport(self._stderr))
                into, out = anyio.create_memory_object_stream(0)
                pump = asyncio.ensure_future(self._pump(read, into))
                stack.push_async_callback(cancelled, pump)
                self.session = await stack.enter_async_context(library("mcp", "mcp").ClientSession(out, write))
                opening = asyncio.ensure_future(self._opened())
                stack.push_async_callback(cancelled, opening)
                await _first(opening, pump, self._stop.wait())
                if opening.done() and not self.ready.done():
                    self.ready.set_result(opening.result())
                if opening.done():
                    await _first(pump, self._stop.wait(), self._trimmed())
        except Exception as error:  # noqa: BLE001  (the waiting caller gets it)
            if not self.ready.done():
                self.ready.set_exception(error)
            else:
                log.warning("MCP server lost", error=error_words(error))
        finally:
            if not self.ready.done():
                self.ready.set_exception(AdapterError("it ended before it had answered"))
            self.ready.exception()

    async def _trimmed(self) -> None:
        """Empty the file of the server's stderr whenever it is large."""
        while True:
            await asyncio.sleep(_TRIM_SECONDS)
            if os.fstat(self._stderr.fileno()).st_size > STDERR_BYTES:
                os.ftruncate(self._stderr.fileno(), 0)

    async def _opened(self) -> list[dict[str, Any]]:
        await self.session.initialize()
        found: list[dict[str, Any]] = []
        cursor = None
        while True:
            kind = library("mcp", "mcp.types").PaginatedRequestParams
            page = await self.session.list_tools(params=kind(cursor=cursor) if cursor else None)
            found += [_item(tool) for tool in page.tools]
            if len(found) > MAX_TOOLS:
                raise AdapterError(f"it offers more than {MAX_TOOLS} tools")
            cursor = either_field(page, "next_cursor", "nextCursor")
            if not cursor:
                return found

    async def _pump(self, read: Any, into: Any) -> None:
        """Pass on what the server says, until it has ended: so its end is seen at once. What is no message is logged."""
        told = 0
        async with into:
            async for message in read:
                if isinstance(message, Exception):
                    told += 1
                    if told <= 3:
                        log.warning("an MCP server wrote what is no message", error=error_words(message)[:300])
                    continue
                await into.send(message)


def _item(tool: Any) -> dict[str, Any]:
    notes = getattr(tool, "annotations", None)
    return {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": dict(either_field(tool, "input_schema", "inputSchema") or {}),
        "reads_only": bool(either_field(notes, "read_only_hint", "readOnlyHint")),
    }


def either_field(thing: Any, new: str, old: str) -> Any:
    """A field that version 2 of the package spells in another way than version 1."""
    return getattr(thing, new, getattr(thing, old, None))


def error_words(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


async def cancelled(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # already reported through `ready`; read here so that asyncio logs no warning


async def _first(*waits: Any) -> None:
    """Wait until one has ended; a coroutine among them is cancelled then."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, wait in zip(tasks, waits, strict=True):
            if task is not wait:
                task.cancel()
