"""Bytes of a request -> the bytes of its reply, on one HTTP/1.1 connection, one request at a time.

Invariant: a connection serves one request at a time, and it is closed if what arrived is not exactly one reply.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Protocol, cast

from engine.backends.http.framing import MAX_BODY, ReplyReader
from engine.backends.http.reply import HttpFailure, MalformedReply, retry_seconds

_READ_BYTES = 256 * 1024
"""Bytes that are read at once."""
_OUTBOX = 8
"""Maximum number of requests that wait for the end of the loop's round: many replies at once make a round long."""


class HttpCall:
    """One request, and what becomes of it: exactly one of `received` and `lost` is called, unless it is given up."""

    __slots__ = ("connection", "fresh", "most", "opening", "over", "pieces")

    def __init__(self, pieces: tuple[bytes, ...] = (), most: int = MAX_BODY) -> None:
        """
        Args:
            pieces: The whole request; they are joined when they are sent.
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

    def received(self, status: int, body: bytes, retry_after: float | None, head: bytes) -> bool:
        """Take the whole reply, in the callback in which its bytes arrive. It must not raise.

        Returns:
            Whether the connection may be used again: False if the reply may belong to another request.
        """
        raise NotImplementedError

    def lost(self, failure: HttpFailure) -> None:
        """No whole reply arrived. It must not raise."""
        raise NotImplementedError


class ConnectionOwner(Protocol):
    """What connections belong to."""

    def ended(self, connection: Connection, *, usable: bool) -> None:
        """A connection has read a whole reply."""

    def failed(self, connection: Connection, call: HttpCall, failure: HttpFailure) -> None:
        """A connection was lost before it had read the whole reply to a call."""


class SharedBuffer:
    """Memory for arriving bytes, and requests that wait to be sent. All connections of a client share one: bytes are read
    out of it before others arrive."""

    __slots__ = ("bytes", "outbox", "view")

    def __init__(self) -> None:
        self.bytes = bytearray(_READ_BYTES)
        self.view = memoryview(self.bytes)
        self.outbox: list[tuple[Connection, HttpCall, bytes]] = []
        """The requests of one round of the event loop, which are sent together at its end. Sending wakes a sleeping server;
        many requests in a row wake it once."""

    def send_all(self) -> None:
        """Send the waiting requests, except those that were given up."""
        outbox, self.outbox = self.outbox, []
        for connection, call, data in outbox:
            if connection.call is call and not call.over.done() and connection.transport is not None:
                connection.transport.write(data)


class Connection(asyncio.BufferedProtocol):
    """One connection: one request, its reply, and then the next."""

    __slots__ = ("_buffer", "_loop", "_owner", "_reader", "call", "closing", "served", "transport")

    def __init__(self, buffer: SharedBuffer, reader: ReplyReader, owner: ConnectionOwner) -> None:
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
        """Send a whole request. The pieces are joined here, so that the joined bytes are not kept until the reply arrives."""
        assert self.call is None, "a connection serves one request at a time"
        self._reader.start(call.most)
        self.call = call
        outbox = self._buffer.outbox
        if not outbox:
            asyncio.get_running_loop().call_soon(self._buffer.send_all)
        outbox.append((self, call, b"".join(call.pieces)))
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
        self.transport = cast(asyncio.Transport, transport)  # other event loops have transports of their own
        self._loop = asyncio.get_running_loop()
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            _keep_alive(sock)

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
        """Give the request its reply. The connection is free before, so that what the request starts next may use it."""
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
        if not call.received(reader.status, bytes(body), wait, reader.head):
            self.close()


def _keep_alive(sock: socket.socket) -> None:
    """Have the kernel notice within a minute that a host has disappeared."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
