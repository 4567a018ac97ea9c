"""Tools of MCP servers: a process over stdio, or streamable HTTP, by the package `mcp` in its versions 1 and 2.

    tools:
      - {adapter: mcp, use: "python server.py"}
      - {adapter: mcp, use: "http://127.0.0.1:8000/mcp", with: {headers: {Authorization: "Bearer ${TOKEN}"}, only:
        [search]}}

One connection serves all episodes of a run. It is opened when the first episode begins and closed with the run. The
list of tools is read then; a server that offers other tools after a restart is refused, because prompts were rendered
with the first list.

The session lives on an event loop in a thread of its own, so nothing that the library or a server does blocks the
engine. A call that fails is an error result for the model. A server that died is started again for the next call; the
call that was interrupted is never repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import shlex
import tempfile
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import orjson
import structlog

from engine.actions.calling.code_call import on_main_loop
from engine.errors import AdapterError
from engine.masking import mask_credentials
from engine.plugins.adapters.base import library
from engine.schemas.environment import ToolReply
from engine.schemas.message import ContentPart, ImagePart, TextPart
from engine.spec.code.signature import DescribedTool

log = structlog.get_logger(__name__)
T = TypeVar("T")

_NAME = re.compile(r"[\w./:-]{1,128}")
CLOSED = -32000
"""JSON-RPC code with which the library fails requests of a connection that has ended."""
CLOSE_SECONDS = 10.0
_STDERR = 2000
"""Characters of a server's stderr that an error shows."""
STDERR_BYTES = 1_000_000
"""Size from which the file that a server's stderr is written to is emptied."""
_TRIM_SECONDS = 1.0
MAX_TOOLS = 4096
"""Maximum number of tools of a server."""
# The library logs a traceback for each message of a server that is none; `_pump` logs three.
logging.getLogger("mcp").setLevel(logging.CRITICAL)


class McpServer:
    """One MCP server of a run.

    Args:
        use: A command line, or an `http://` or `https://` address.
        base: The spec's folder, in which the command runs.
        env: Environment variables of the command, beside the few that the library passes on (PATH, HOME, …).
        headers: Sent with each HTTP request.
        only: Names of the tools to offer; all when left out.
        prefix: Put before each tool's name, to keep the names of several servers apart.
        start_seconds: Deadline for starting the server and reading its list of tools.
        ping_seconds: A server that left a call without an answer must answer a ping in this time, or it is started
            again.

    Raises:
        AdapterError: `use` is empty, or a key does not belong to this kind of server.
    """

    def __init__(
        self,
        use: str,
        base: str = ".",
        env: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        only: Sequence[str] | None = None,
        prefix: str = "",
        start_seconds: float = 30.0,
        ping_seconds: float = 5.0,
    ) -> None:
        self._url = use if use.startswith(("http://", "https://")) else None
        self._command = [] if self._url else shlex.split(use)
        if not self._url and not self._command:
            raise AdapterError("`use` of an MCP server is a command line or an http address; it is empty")
        if self._url and env:
            raise AdapterError("`env` is for servers that are started by a command, not for an address")
        if not self._url and headers:
            raise AdapterError("`headers` are for servers with an address, not for a command")
        self._who, self._base = f"the MCP server `{use}`", base
        self._env, self._headers = dict(env or {}), dict(headers or {})
        self._only, self._prefix, self._start_seconds = only, prefix, start_seconds
        self._ping_seconds = ping_seconds
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"mcp {use[:40]}", daemon=True)
        self._connection: McpConnection | None = None
        self._connecting: asyncio.Task[McpConnection] | None = None
        self._listed: list[dict[str, Any]] | None = None

    async def open(self) -> list[McpTool]:
        """Start the server and read its list of tools.

        Raises:
            AdapterError: `mcp` is not installed, the server did not start, or it lacks a tool of `only`.
        """
        library("mcp", "mcp")
        self._thread.start()
        await self._there(self._connected())
        tools = [McpTool(self, self._prefix + item["name"], item) for item in self._listed or []]
        names = [tool.tool for tool in tools]
        missing = [name for name in self._only or () if name not in names]
        if missing:
            raise AdapterError(f"{self._who} has no tool `{missing[0]}`; it has {', '.join(names) or 'none'}")
        chosen = [tool for tool in tools if self._only is None or tool.tool in self._only]
        for tool in chosen:
            if not _NAME.fullmatch(tool.name):
                raise AdapterError(
                    f"{self._who} offers a tool with the name {tool.name[:80]!r}, which a model cannot call; choose "
                    "its tools by `only`"
                )
        return chosen

    async def call(self, tool: str, arguments: dict[str, Any]) -> ToolReply:
        """Call a tool.

        Raises:
            AdapterError: the server answered with an error, or is gone.
        """
        return await self._there(self._call(tool, arguments))

    def close(self) -> None:
        """End the connection, and with it the server that was started."""
        if not self._thread.is_alive():
            return
        ended = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        with contextlib.suppress(Exception):
            ended.result(CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        """What work on this server's own loop gives."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _connected(self) -> McpConnection:
        """The connection; a new one where the last has ended or does not answer.

        All calls wait for one task, which goes on when the deadline of a call passes.
        """
        if self._connection is not None and self._connection.usable:
            return self._connection
        return await asyncio.shield(self._check())

    def _check(self) -> asyncio.Task[McpConnection]:
        """Ping the server or start it again, where nothing does so already."""
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.ensure_future(self._connect())
            self._connecting.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._connecting

    async def _connect(self) -> McpConnection:
        if self._connection is not None and await self._connection.alive(self._ping_seconds):
            return self._connection
        await self._end()
        connection = self._connection = McpConnection(self._transport)
        try:
            listed = await asyncio.wait_for(asyncio.shield(connection.ready), self._start_seconds)
        except Exception as error:
            await self._end()
            late = f"no answer within {self._start_seconds:g} s"
            words = late if isinstance(error, TimeoutError) else error_words(error)
            raise AdapterError(f"{self._who} did not start: {words}{connection.stderr()}") from error
        if self._listed is None:
            self._listed = listed
        elif listed != self._listed:
            await self._end()
            raise AdapterError(f"{self._who} offers other tools than before its restart")
        return connection

    async def _end(self) -> None:
        if self._connection is not None:
            await self._connection.end()
            self._connection = None

    async def _call(self, tool: str, arguments: dict[str, Any]) -> ToolReply:
        connection = await self._connected()
        call = asyncio.ensure_future(connection.session.call_tool(tool, arguments))
        try:
            await asyncio.wait({call, connection.over}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise EOFError
            result = call.result()
        except asyncio.CancelledError:
            connection.doubtful = True  # it did not answer in time
            self._check()
            raise
        except Exception as error:
            problem = getattr(error, "error", None)
            if problem is not None and problem.code != CLOSED:
                raise AdapterError(str(problem.message)) from error  # its own answer
            connection.broken = problem is not None or isinstance(error, EOFError)
            connection.doubtful = True
            if connection.broken:
                raise AdapterError(f"{self._who} ended during the call{connection.stderr()}") from error
            raise AdapterError(f"{self._who} failed: {error_words(error)}{connection.stderr()}") from error
        finally:
            call.cancel()
        parts: list[ContentPart] = [_part(block) for block in result.content]
        text = "\n".join(part.text for part in parts if isinstance(part, TextPart))
        if either_field(result, "is_error", "isError"):
            raise AdapterError(text or "the server gave no reason")
        if not parts:
            structured = either_field(result, "structured_content", "structuredContent")
            return ToolReply(content="" if structured is None else orjson.dumps(structured).decode())
        return ToolReply(content=text if all(isinstance(part, TextPart) for part in parts) else parts)

    @contextlib.asynccontextmanager
    async def _transport(self, stderr: Any) -> AsyncIterator[tuple[Any, Any]]:
        async with AsyncExitStack() as stack:
            if self._url:
                make = library("mcp", "mcp.shared._httpx_utils").create_mcp_http_client
                client = await stack.enter_async_context(make(headers=self._headers or None))
                http = library("mcp", "mcp.client.streamable_http").streamable_http_client
                streams = await stack.enter_async_context(http(self._url, http_client=client))
            else:
                stdio = library("mcp", "mcp.client.stdio")
                how = stdio.StdioServerParameters(
                    command=self._command[0], args=self._command[1:], env=self._env or None, cwd=self._base
                )
                streams = await stack.enter_async_context(stdio.stdio_client(how, errlog=stderr))
            yield streams[0], streams[1]


class McpTool(DescribedTool):
    """One tool of a server, as the engine calls tools."""

    def __init__(self, server: McpServer, name: str, item: Mapping[str, Any]) -> None:
        super().__init__(name, item["description"], item["parameters"], server.call)
        self.tool: str = item["name"]
        self.reads_only: bool = item["reads_only"]
        """The server says that calls of it change nothing."""
        self._server = server

    @on_main_loop
    async def __call__(self, **arguments: Any) -> ToolReply:
        """Call it.

        Raises:
            RuntimeError: the call failed, which is a result for the model and no failure of the episode.
        """
        try:
            return await self._server.call(self.tool, arguments)
        except AdapterError as error:
            raise RuntimeError(str(error)) from None


def _part(block: Any) -> ContentPart:
    """A block of an answer. Raises: AdapterError: it is neither text nor an image."""
    kind = getattr(block, "type", None)
    if kind == "text":
        return TextPart(text=block.text)
    if kind == "image":
        mime = either_field(block, "mime_type", "mimeType")
        return ImagePart(image=f"data:{mime};base64,{block.data}", mime=mime)
    if kind == "resource" and getattr(block.resource, "text", None) is not None:
        return TextPart(text=block.resource.text)
    if kind == "resource_link":
        return TextPart(text=str(block.uri))
    raise AdapterError(f"the answer has a part of type `{kind}`, which cannot be shown; only text and images can")


class McpConnection:
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
        tools: list[dict[str, Any]] = []
        cursor = None
        while True:
            kind = library("mcp", "mcp.types").PaginatedRequestParams
            page = await self.session.list_tools(params=kind(cursor=cursor) if cursor else None)
            for tool in page.tools:
                shape = either_field(tool, "input_schema", "inputSchema")
                reads_only = either_field(getattr(tool, "annotations", None), "read_only_hint", "readOnlyHint")
                item = {"name": tool.name, "description": tool.description or "", "parameters": dict(shape or {})}
                tools.append(item | {"reads_only": bool(reads_only)})
            if len(tools) > MAX_TOOLS:
                raise AdapterError(f"it offers more than {MAX_TOOLS} tools")
            cursor = either_field(page, "next_cursor", "nextCursor")
            if not cursor:
                return tools

    async def _pump(self, read: Any, into: Any) -> None:
        """Pass on what the server says, until it has ended: so its end is seen at once. What is no message is
        logged."""
        garbage = 0
        async with into:
            async for message in read:
                if not isinstance(message, Exception):
                    await into.send(message)
                elif (garbage := garbage + 1) <= 3:
                    log.warning("an MCP server wrote what is no message", error=error_words(message)[:300])


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
