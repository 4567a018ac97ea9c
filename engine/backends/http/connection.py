"""One HTTP/1.1 connection: a request is sent, its reply is read, then the next.

Invariant: a connection serves one request at a time, and it is closed if what arrived is not exactly one reply.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, cast

from engine.backends.http.framing import MAX_BODY, ReplyReader
from engine.backends.http.reply import HttpFailure, HttpReply, MalformedReply, retry_seconds

_READ_BYTES = 256 * 1024
"""Bytes that are read at once."""
_OUTBOX = 8
"""Maximum number of requests that wait for the end of the loop's round: many replies at once make a round long."""


class SharedBuffer:
    """Memory for arriving bytes, and requests that wait to be sent. All connections of a client share one: bytes are read
    out of it before others arrive."""

    __slots__ = ("bytes", "outbox", "view")

    def __init__(self) -> None:
        self.bytes = bytearray(_READ_BYTES)
        self.view = memoryview(self.bytes)
        self.outbox: list[tuple[Connection, bytes]] = []
        """The requests of one round of the event loop, which are sent together at its end. Sending wakes a sleeping server;
        many requests in a row wake it once."""

    def send_all(self) -> None:
        """Send the waiting requests."""
        outbox, self.outbox = self.outbox, []
        for connection, data in outbox:
            connection.send_now(data)


class Connection(asyncio.BufferedProtocol):
    """One connection: one request, its reply, and then the next."""

    __slots__ = ("_buffer", "_loop", "_read", "_reader", "_waiter", "closing", "served", "transport")

    def __init__(self, buffer: SharedBuffer, reader: ReplyReader) -> None:
        self._buffer = buffer
        self._reader = reader
        self.transport: asyncio.Transport | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.served = 0
        """Number of replies read."""
        self._waiter: asyncio.Future[HttpReply] | None = None
        self._read: Callable[[int, bytes], Any] | None = None
        self.closing = False
        """The connection takes no more requests."""

    @property
    def usable(self) -> bool:
        """Whether another request may be sent."""
        return not self.closing and self.transport is not None and not self.transport.is_closing()

    def send(
        self,
        pieces: tuple[bytes, ...],
        loop: asyncio.AbstractEventLoop,
        read: Callable[[int, bytes], Any] | None = None,
        most: int = MAX_BODY,
    ) -> asyncio.Future[HttpReply]:
        """Send a whole request. The future is its reply, or HttpFailure.

        The pieces are joined here, so that the joined bytes are not kept until the reply arrives.

        Args:
            pieces: Head and body.
            loop: The running event loop.
            read: See `HttpClient.request`.
            most: Maximum size of the reply's body in bytes.
        """
        assert self.transport is not None
        assert self._waiter is None, "a connection serves one request at a time"
        self._reader.start(most)
        self._waiter = loop.create_future()
        self._read = read
        outbox = self._buffer.outbox
        if not outbox:
            loop.call_soon(self._buffer.send_all)
        outbox.append((self, b"".join(pieces)))
        if len(outbox) >= _OUTBOX:
            self._buffer.send_all()
        return self._waiter

    def send_now(self, data: bytes) -> None:
        """Send a request, unless its caller has given it up."""
        waiter, transport = self._waiter, self.transport
        if waiter is not None and not waiter.done() and transport is not None and not transport.is_closing():
            transport.write(data)

    def close(self) -> None:
        """Close the connection without waiting for a reply. Its event loop may be closed already."""
        self.closing = True
        self._waiter = None
        self._reader.release()
        if self.transport is not None and self._loop is not None and not self._loop.is_closed():
            self.transport.abort()

    def fail(self, error: HttpFailure) -> None:
        """Close the connection; the waiting caller gets this error."""
        waiter = self._waiter
        self.close()
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)

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
        if self._waiter is None:  # nobody asked, so the next reply could not be told apart from these bytes
            self.close()
            return
        try:
            whole = self._reader.feed(self._buffer.bytes, self._buffer.view, nbytes)
        except MalformedReply as error:
            self.fail(error)
        except ValueError as error:
            self.fail(MalformedReply(str(error)))
        else:
            if whole:
                self._done()

    def eof_received(self) -> bool | None:
        if self._waiter is not None and self._reader.end():
            self._done()
        return None  # the transport closes itself, and connection_lost follows

    def connection_lost(self, exc: Exception | None) -> None:
        self.closing = True
        if self._waiter is None:
            return
        if exc is None and self._reader.end():
            self._done()
            return
        answered = self._reader.started
        where = "in the middle of a reply" if answered else "before a reply came"
        reason = f" ({exc})" if exc is not None else ""
        self.fail(HttpFailure(f"the connection was lost {where}{reason}", answered=answered, reused=self.served > 0))

    def _done(self) -> None:
        """Give the caller its reply."""
        reader = self._reader
        waiter, self._waiter = self._waiter, None
        self.served += 1
        if reader.surplus or not reader.keep:
            self.close()
        else:
            reader.release()
        if waiter is not None and not waiter.done():
            status, body, read = reader.status, bytes(reader.body), self._read
            wait = None if reader.retry_after is None else retry_seconds(reader.retry_after)
            try:
                waiter.set_result(
                    HttpReply(status, body, None, wait, reader.head)
                    if read is None
                    else HttpReply(status, b"", read(status, body), wait, reader.head)
                )
            except Exception as error:  # noqa: BLE001  (the caller gets it, not the event loop)
                waiter.set_exception(error)
        reader.body = b""


def _keep_alive(sock: socket.socket) -> None:
    """Have the kernel notice within a minute that a host has disappeared."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
