"""A JSON request to one of few servers -> its reply, over HTTP/1.1 connections that stay open.

No redirects, cookies, compression, proxies.

Invariant: a connection serves one request at a time. It becomes free only after a whole reply was read and no byte is
left over; in every other case it is closed. So a reply can never be given to another request.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections import deque
from itertools import groupby
from typing import Any, cast
from urllib.parse import urlsplit

from engine.errors import BackendError
from engine.masking import remember
from engine.plugins.servers.http.reply import (
    MAX_BODY,
    HttpFailure,
    HttpReply,
    KnownHeads,
    MalformedReply,
    ReplyReader,
    retry_seconds,
)

_READ_BYTES = 256 * 1024
"""Bytes that are read at once."""
_LONG_PIECE = 64 * 1024
"""A piece of a request with so many bytes is not joined with others."""
_OUTBOX = 8
"""Maximum number of requests that wait for the end of the loop's round: many replies at once make a round long."""


class HttpCall:
    """One request, and what becomes of it: exactly one of `received` and `lost` is called, unless it is given up."""

    __slots__ = ("connection", "fresh", "most", "opening", "over", "pieces")

    def __init__(self, pieces: tuple[bytes, ...] = (), most: int = MAX_BODY) -> None:
        """
        Args:
            pieces: The whole request.
            most: Maximum size of the reply's body in bytes.
        """
        self.pieces = pieces
        self.most = most
        self.over: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        """What the caller waits for. Once it is done, or was cancelled, the request is not sent any more."""
        self.connection: Connection | None = None
        """The connection that serves it."""
        self.opening: asyncio.Task[None] | None = None
        """Opens a connection for it."""
        self.fresh = False
        """It goes to a new connection, because the server had closed an idle one."""

    def received(self, status: int, body: bytes | bytearray, retry_after: float | None, head: bytes) -> bool:
        """Take the whole reply, in the callback in which its bytes arrive. It must not raise.

        Returns:
            Whether the connection may be used again: False if the reply may belong to another request.
        """
        raise NotImplementedError

    def lost(self, failure: HttpFailure) -> None:
        """No whole reply arrived. It must not raise."""
        raise NotImplementedError


class SharedBuffer:
    """Memory for arriving bytes, and requests that wait to be sent. All connections of a client share one: bytes are
    read out of it before others arrive."""

    __slots__ = ("bytes", "outbox", "view")

    def __init__(self) -> None:
        self.bytes = bytearray(_READ_BYTES)
        self.view = memoryview(self.bytes)
        self.outbox: list[tuple[Connection, HttpCall]] = []
        """The requests of one round of the event loop, which are sent together at its end. Sending wakes a sleeping
        server; many requests in a row wake it once."""

    def send_all(self) -> None:
        """Send the waiting requests, except those that were given up. Only the short pieces of one are joined, and
        nothing of it is kept until the reply arrives."""
        outbox, self.outbox = self.outbox, []
        for connection, call in outbox:
            transport = connection.transport
            if connection.call is not call or call.over.done() or transport is None:
                continue
            if max(map(len, call.pieces)) < _LONG_PIECE:
                transport.write(b"".join(call.pieces))
                continue
            for is_long, group in groupby(call.pieces, lambda piece: len(piece) >= _LONG_PIECE):
                for data in group if is_long else (b"".join(group),):
                    transport.write(data)


class Connection(asyncio.BufferedProtocol):
    """One connection: one request, its reply, and then the next."""

    __slots__ = ("_buffer", "_loop", "_owner", "_reader", "call", "closing", "served", "transport")

    def __init__(self, buffer: SharedBuffer, reader: ReplyReader, owner: HttpClient) -> None:
        self._buffer = buffer
        self._reader = reader
        self._owner = owner
        self.transport: asyncio.Transport | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.served = 0
        """Number of replies read."""
        self.call: HttpCall | None = None
        """The request that it serves."""
        self.closing = False
        """The connection takes no more requests."""

    def send(self, call: HttpCall) -> None:
        """Send a whole request, at the latest at the end of the loop's round."""
        assert self.call is None, "a connection serves one request at a time"
        self._reader.start(call.most)
        self.call = call
        outbox = self._buffer.outbox
        if not outbox:
            asyncio.get_running_loop().call_soon(self._buffer.send_all)
        outbox.append((self, call))
        if len(outbox) >= _OUTBOX:
            self._buffer.send_all()

    def close(self) -> None:
        """Close the connection without waiting for a reply. Its event loop may be closed already."""
        self.closing = True
        self.call = None
        self._reader.release()
        if self.transport is not None and self._loop is not None and not self._loop.is_closed():
            self.transport.abort()

    def fail(self, failure: HttpFailure) -> None:
        """Close the connection; its request is lost."""
        call = self.call
        self.close()
        if call is not None:
            self._owner.failed(self, call, failure)

    # -- asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # other event loops have transports of their own
        self._loop = asyncio.get_running_loop()
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            # The kernel notices within a minute that a host has disappeared.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer.view

    def buffer_updated(self, nbytes: int) -> None:
        if self.call is None:  # nobody asked, so the next reply could not be told apart from these bytes
            self.close()
            return
        try:
            complete = self._reader.feed(self._buffer.bytes, self._buffer.view, nbytes)
        except MalformedReply as error:
            self.fail(error)
        except ValueError as error:
            self.fail(MalformedReply(str(error)))
        else:
            if complete:
                self._done(self.call)

    def eof_received(self) -> bool | None:
        if self.call is None:
            self.closing = True
        elif self._reader.end():
            self._done(self.call)
        return None  # the transport closes itself, and connection_lost follows

    def connection_lost(self, exc: Exception | None) -> None:
        self.closing = True
        if self.call is None:
            return
        if exc is None and self._reader.end():
            self._done(self.call)
            return
        answered = self._reader.started
        where = "in the middle of a reply" if answered else "before a reply came"
        reason = f" ({exc})" if exc is not None else ""
        self.fail(HttpFailure(f"the connection was lost {where}{reason}", answered=answered, reused=self.served > 0))

    def _done(self, call: HttpCall) -> None:
        """Give the request its reply. The connection is free before, so that what the request starts next may use
        it."""
        reader = self._reader
        self.call = None
        self.served += 1
        body, reader.body = reader.body, b""
        if usable := reader.keep and not reader.surplus:
            if reader.held:
                reader.release()
        else:
            self.close()
        self._owner.ended(self, usable=usable and not self.closing)
        wait = None if reader.retry_after is None else retry_seconds(reader.retry_after)
        if not call.received(reader.status, body, wait, reader.head):
            self.close()


class HttpClient:
    """Requests to one server.

        client = HttpClient("http://127.0.0.1:30000", headers={"Authorization": "Bearer …"})
        reply = await client.request("POST", "/generate", b'{"input_ids":[1]}')
        reply.status, reply.body
        await client.close()

    Connections are opened when they are needed, and the one used last is used next. If the server closed a connection
    while it was idle, the request is sent once more on a fresh one.
    """

    def __init__(self, url: str, *, headers: dict[str, str] | None = None, connect_timeout: float = 10.0) -> None:
        """Nothing is opened yet.

        Args:
            url: `http://host:port` or `https://host:port`, with a path that all requests share.
            headers: Sent with every request.
            connect_timeout: Time limit for opening a connection, in seconds.

        Raises:
            ValueError: The URL is not of this form, or a header holds a line break.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"{url!r} is not the URL of a server; write http://host:port")
        self.url = url.rstrip("/")
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        self._connect_timeout = connect_timeout
        lines = {"Host": parts.netloc.rpartition("@")[2], "Content-Type": "application/json", **(headers or {})}
        for name, value in lines.items():
            if any(character in f"{name}{value}" for character in "\r\n"):
                raise ValueError(f"the header {name} holds a line break")
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._heads: dict[tuple[str, str], bytes] = {}
        self._buffer = SharedBuffer()
        self._known_heads: KnownHeads = {}
        self._free: deque[Connection] = deque()
        self._busy: set[Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self.opened = 0
        """Number of connections opened so far."""

    async def request(self, method: str, path: str, *body: bytes, most: int = MAX_BODY) -> HttpReply:
        """Send one request and read its whole reply, whatever its status. Cancelling it closes its connection.

        Args:
            method: Such as `POST`.
            path: Added to the URL's own path.
            body: The pieces of the body.
            most: Maximum size of the reply's body in bytes.

        Returns:
            The reply.

        Raises:
            HttpFailure: No connection could be opened, or it was lost.
            MalformedReply: The server's bytes are not HTTP, or the reply is too large.
        """
        call = _AwaitedCall(self.pieces(method, path, *body), most)
        self.start(call)
        try:
            reply: HttpReply = await call.over
            return reply
        except asyncio.CancelledError:
            self.give_up(call)
            raise

    def pieces(self, method: str, path: str, *body: bytes) -> tuple[bytes, ...]:
        """A whole request: its head and the pieces of its body."""
        head = self._heads.get((method, path))
        if head is None:
            text = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}Content-Length: "
            head = self._heads[method, path] = text.encode("latin-1")
        return (head, b"%d\r\n\r\n" % sum(map(len, body)), *body)

    def start(self, call: HttpCall) -> None:
        """Send a request on the free connection that was used last, or on a new one."""
        while self._free and not call.fresh:
            connection = self._free.pop()
            if not connection.closing:
                self._busy.add(connection)
                call.connection = connection
                connection.send(call)
                return
        call.opening = asyncio.get_running_loop().create_task(self._open_for(call))
        self._opening.add(call.opening)
        call.opening.add_done_callback(self._opening.discard)

    def give_up(self, call: HttpCall) -> None:
        """Close the connection of a request whose reply is not wanted any more."""
        if (opening := call.opening) is not None:
            call.opening = None
            opening.cancel()
        if call.connection is not None and call.connection.call is call:
            self._busy.discard(call.connection)
            call.connection.close()

    async def _open_for(self, call: HttpCall) -> None:
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(self._buffer, ReplyReader(self._known_heads), self),
                    self._host,
                    self._port,
                    ssl=self._tls,
                )
        except TimeoutError:
            failure = f"{self.url} did not accept a connection within {self._connect_timeout:g} s"
        except OSError as error:
            failure = f"{self.url} cannot be reached: {error}"
        except asyncio.CancelledError:
            if call.opening is not None:  # it was not given up
                call.lost(HttpFailure("the client was closed", sent=False))
            raise
        else:
            self.opened += 1
            call.opening = None
            self._busy.add(connection)
            call.connection = connection
            connection.send(call)
            return
        call.opening = None
        call.lost(HttpFailure(failure, sent=False))

    # -- what a connection tells it

    def ended(self, connection: Connection, *, usable: bool) -> None:
        """A connection has read a whole reply."""
        self._busy.discard(connection)
        if usable:
            self._free.append(connection)

    def failed(self, connection: Connection, call: HttpCall, failure: HttpFailure) -> None:
        """A connection was lost before it had read the whole reply to a call. One that the server had closed while it
        was idle: send it once more."""
        self._busy.discard(connection)
        call.connection = None
        if call.fresh or failure.answered or not failure.reused:
            call.lost(failure)
        else:
            call.fresh = True
            self.start(call)

    def drop_idle(self) -> None:
        """Close the connections that no request uses."""
        while self._free:
            self._free.pop().close()

    def abandon(self, reason: str) -> None:
        """Close every connection; requests in flight fail with `reason`."""
        self.drop_idle()
        for connection in list(self._busy):
            connection.fail(HttpFailure(reason))

    async def close(self) -> None:
        """Close every connection. Requests in flight fail."""
        self.abandon("the client was closed")
        for opening in list(self._opening):
            opening.cancel()
        await asyncio.sleep(0)  # transports report their end in the next round of the loop


class _AwaitedCall(HttpCall):
    """A request whose reply a coroutine waits for."""

    __slots__ = ()

    def received(self, status: int, body: bytes | bytearray, retry_after: float | None, head: bytes) -> bool:
        if not self.over.done():
            self.over.set_result(HttpReply(status, bytes(body), retry_after, head))
        return True

    def lost(self, failure: HttpFailure) -> None:
        if not self.over.done():
            self.over.set_exception(failure)


def read_key(variable: str | None) -> str | None:
    """The API key in an environment variable, which is masked in logs and stores from now on; None without a variable.

    Raises:
        BackendError: Kind `unauthorized`: the variable is not set.
    """
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise BackendError(f"the environment variable {variable} (backend.api_key_env) is not set", kind="unauthorized")
    remember(variable, key)
    return key


def key_headers(key: str | None) -> dict[str, str]:
    """The header that sends a key."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}
