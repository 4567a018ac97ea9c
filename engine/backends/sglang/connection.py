"""One HTTP/1.1 connection: a request goes out, its reply is read, then the next.

It reads replies with `Content-Length`, chunked ones in whatever pieces they come, and ones that end with the connection.

Invariant: a connection serves one request at a time, and is closed where what came is not exactly one reply.
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Callable
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any, cast

import msgspec

MAX_HEAD = 64 * 1024
"""Most bytes of a reply's status line and headers."""
MAX_BODY = 64 << 20
"""Most bytes of a reply's body, where the request does not say how many it may have."""
MAX_HELD = 1 << 30
"""Most bytes of bodies that have begun to arrive, over all connections of the process."""
MAX_INTERIM = 16
"""Most heads with a status of 1xx before a reply."""
_ROOM = 256 * 1024
"""Bytes that are read at once."""
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)(?=\r\n|\Z)", re.IGNORECASE)
_RETRY_AFTER = re.compile(rb"\r\nretry-after: *([^\r\n]*)", re.IGNORECASE)
ASKS_TO_WAIT = (429, 503)
"""Statuses of replies whose `Retry-After` is read."""
_EMPTY = (204, 304)
"""Statuses of replies without a body, whatever length is named."""
_OUTBOX = 8
"""Most requests that wait for the end of the loop's round: many replies at once make for a long one."""
_HEADS = 64
"""Most heads that a client remembers."""


class HttpFailure(Exception):
    """No whole reply came.

    Args:
        answered: a first byte of the reply had come.
        reused: the connection had served a request before.
        sent: the request may have reached the server; False where no connection could be opened.
    """

    def __init__(self, message: str, *, answered: bool = False, reused: bool = False, sent: bool = True) -> None:
        self.answered = answered
        self.reused = reused
        self.sent = sent
        super().__init__(message)


class MalformedReply(HttpFailure):
    """What came is no HTTP/1.1 reply."""

    def __init__(self, message: str) -> None:
        super().__init__(message, answered=True)


class HttpReply(msgspec.Struct, frozen=True):
    """A whole reply."""

    status: int
    body: bytes
    read: Any = None
    """What the request's `read` made of it."""
    retry_after: float | None = None
    """Seconds after which the server wants to be asked again, from the header `Retry-After`; for 429 and 503 alone."""


class ChunkedBody:
    """Reads a chunked body piece by piece, wherever the pieces are cut.

    >>> body = ChunkedBody()
    >>> body.feed(b"3\\r\\nab")
    >>> body.feed(b"c\\r\\n0\\r\\n\\r\\nrest")
    b'rest'
    >>> bytes(body.data)
    b'abc'
    """

    __slots__ = ("_left", "_most", "_pending", "_state", "_trailers", "data")

    def __init__(self, most: int = MAX_BODY) -> None:
        self.data = bytearray()
        self._most = most
        self._trailers = 0
        self._pending = bytearray()
        self._left = 0
        self._state = "size"

    def feed(self, piece: bytes | bytearray) -> bytes | None:
        """Take in a piece. The bytes after the body once it is whole, None before."""
        pending = self._pending
        pending += piece
        at = 0
        while True:
            if self._state == "data":
                take = min(self._left, len(pending) - at)
                self.data += memoryview(pending)[at : at + take]
                at += take
                self._left -= take
                if self._left or len(pending) - at < 2:
                    break
                if pending[at : at + 2] != b"\r\n":
                    raise MalformedReply("a chunk is longer than it says")
                at += 2
                self._state = "size"
            end = pending.find(b"\r\n", at)
            if end < 0:
                if len(pending) - at > MAX_HEAD:
                    raise MalformedReply("a chunk's size has no end")
                break
            line = bytes(pending[at:end])
            at = end + 2
            if self._state == "trailer":
                if not line:
                    return bytes(pending[at:])
                self._trailers += len(line)
                if self._trailers > MAX_HEAD:
                    raise MalformedReply(f"trailers of over {MAX_HEAD} bytes")
                continue
            self._left = _chunk_size(line)
            if len(self.data) + self._left > self._most:
                raise _too_large(self._most)
            self._state = "data" if self._left else "trailer"
        del pending[:at]
        return None


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    if not digits or not all(byte in b"0123456789abcdefABCDEF" for byte in digits):
        raise MalformedReply(f"{digits[:20]!r} is no chunk size")
    return int(digits, 16)


def _length(value: bytes, most: int) -> int:
    if not value.isdigit():
        raise MalformedReply(f"{value[:60]!r} is no length")
    if len(value) > 12 or int(value) > most:
        raise MalformedReply(f"a reply of {value[:60].decode()} bytes; at most {most} are read")
    return int(value)


def _too_large(most: int) -> MalformedReply:
    return MalformedReply(f"a reply of over {most} bytes")


def retry_seconds(value: bytes, now: float | None = None) -> float | None:
    """Seconds to wait, from a `Retry-After` header: a number of seconds or an HTTP date (RFC 9110, section 10.2.3).

    Args:
        value: the header's value.
        now: seconds since the epoch; the clock when left out.

    Returns:
        0 or more; None where the value is neither.
    """
    text = value.strip().decode("latin-1")
    if text.isascii() and text.replace(".", "", 1).isdigit():
        return float(text) if len(text) < 16 else None
    try:
        date = parsedate_to_datetime(text)
        if date.tzinfo is None:
            date = date.replace(tzinfo=UTC)
        return max(0.0, date.timestamp() - (time.time() if now is None else now))
    except (ValueError, OverflowError, TypeError):
        return None


class _Held:
    """Bytes of bodies that have begun to arrive, over all connections of the process."""

    __slots__ = ("bytes",)

    def __init__(self) -> None:
        self.bytes = 0


HELD = _Held()


class Room:
    """Where replies arrive: one for all connections of a client, since what came is taken before anything else comes."""

    __slots__ = ("bytes", "outbox", "view")

    def __init__(self) -> None:
        self.bytes = bytearray(_ROOM)
        self.view = memoryview(self.bytes)
        self.outbox: list[tuple[Connection, bytes]] = []
        """What one round of the loop has to send, all of it at the round's end: to send is to wake a server that sleeps, and
        one that is sent much in a row is woken once."""

    def post(self) -> None:
        """Send it."""
        outbox, self.outbox = self.outbox, []
        for connection, data in outbox:
            connection.post(data)


class Connection(asyncio.BufferedProtocol):
    """One connection: one request, its reply, and then the next."""

    __slots__ = (
        "_body",
        "_chunks",
        "_head",
        "_heads",
        "_held",
        "_interim",
        "_keep",
        "_loop",
        "_most",
        "_need",
        "_read",
        "_retry_after",
        "_room",
        "_status",
        "_waiter",
        "closing",
        "served",
        "transport",
    )

    def __init__(self, room: Room, heads: dict[bytes, tuple[int, bool, bytes | None]]) -> None:
        self._room = room
        self._heads = heads
        self.transport: asyncio.Transport | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.served = 0
        self._waiter: asyncio.Future[HttpReply] | None = None
        self._read: Callable[[int, bytes], Any] | None = None
        self.closing = False
        """It takes no more requests."""
        self._most = MAX_BODY
        self._held = 0
        self._reset()

    def _reset(self) -> None:
        self._head = b""
        self._body: bytes | bytearray = b""
        self._chunks: ChunkedBody | None = None
        self._need = -1
        """Bytes that the body still lacks; -1 before the head is whole, -2 when it ends with the connection."""
        self._status = 0
        self._keep = True
        self._interim = 0
        self._retry_after: bytes | None = None

    def _hold(self, count: int) -> None:
        """Count bytes of a body that is not whole yet.

        Raises:
            MalformedReply: the bodies of all connections together would be too large.
        """
        if HELD.bytes + count > MAX_HELD:
            raise MalformedReply(f"unfinished replies of over {MAX_HELD} bytes over all connections")
        HELD.bytes += count
        self._held += count

    def _release(self) -> None:
        HELD.bytes -= self._held
        self._held = 0

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
        """Send a whole request; the future is its reply, or HttpFailure. `most`: bytes that the reply's body may have.

        It is put together here, so that it is not kept beside its pieces for as long as the reply takes.
        """
        assert self.transport is not None
        assert self._waiter is None, "a connection serves one request at a time"
        self._reset()
        self._waiter = loop.create_future()
        self._read = read
        self._most = most
        outbox = self._room.outbox
        if not outbox:
            loop.call_soon(self._room.post)
        outbox.append((self, b"".join(pieces)))
        if len(outbox) >= _OUTBOX:
            self._room.post()
        return self._waiter

    def post(self, data: bytes) -> None:
        """Send what is still waited for."""
        waiter, transport = self._waiter, self.transport
        if waiter is not None and not waiter.done() and transport is not None and not transport.is_closing():
            transport.write(data)

    def close(self) -> None:
        """Drop the connection at once; a reply on its way is not waited for. Its loop may be closed by then."""
        self.closing = True
        self._waiter = None
        if self._held:
            self._release()
        if self.transport is not None and self._loop is not None and not self._loop.is_closed():
            self.transport.abort()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # other event loops have transports of their own
        self._loop = asyncio.get_running_loop()
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            _keep_alive(sock)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._room.view

    def buffer_updated(self, nbytes: int) -> None:
        if self._waiter is None:  # nobody asked: whatever it is, the next reply could not be told from it
            self.close()
            return
        try:
            if self._need == -1 and not self._head:
                end = self._room.bytes.find(b"\r\n\r\n", 0, nbytes)
                if end >= 0:  # its head came in one piece, as most do
                    self._take_head(bytes(self._room.view[:end]), bytes(self._room.view[end + 4 : nbytes]))
                    return
            self._take(bytes(self._room.view[:nbytes]))
        except MalformedReply as error:
            self.fail(error)
        except ValueError as error:
            self.fail(MalformedReply(str(error)))

    def eof_received(self) -> bool | None:
        if self._waiter is not None and self._need == -2:
            self._done(b"")
        return None  # the transport closes itself, and connection_lost follows

    def connection_lost(self, exc: Exception | None) -> None:
        self.closing = True
        if self._waiter is not None:
            if self._need == -2 and exc is None:
                self._done(b"")
                return
            answered = bool(self._head) or self._need != -1
            where = "in the middle of a reply" if answered else "before a reply came"
            reason = f" ({exc})" if exc is not None else ""
            self.fail(
                HttpFailure(f"the connection was lost {where}{reason}", answered=answered, reused=self.served > 0)
            )

    # -- reading

    def _take(self, data: bytes) -> None:
        if self._need != -1:
            self._take_body(data)
            return
        data = self._head + data
        end = data.find(b"\r\n\r\n")
        if end >= 0:
            self._take_head(data[:end], data[end + 4 :])
            return
        if len(data) > MAX_HEAD:
            raise MalformedReply(f"headers of over {MAX_HEAD} bytes")
        self._head = data

    def _take_head(self, head: bytes, rest: bytes) -> None:
        self._head = head
        if self._read_head(head):
            if len(rest) == self._need and self._chunks is None:  # it came in one piece, as most do: no copy
                self._body = rest
                self._done(b"")
            else:
                self._take_body(rest)
            return
        self._head = b""  # 100 Continue and its like: the reply follows
        self._interim += 1
        if self._interim > MAX_INTERIM:
            raise MalformedReply(f"over {MAX_INTERIM} interim replies (status 1xx) before a reply")
        if rest:
            self._take(rest)

    def _take_body(self, data: bytes) -> None:
        if self._chunks is not None:
            self._hold(len(data))
            rest = self._chunks.feed(data)
            if rest is not None:
                self._body = self._chunks.data
                self._done(rest)
        elif self._need == -2:
            self._grow(data)
            if len(self._body) > self._most:
                raise _too_large(self._most)
        elif len(data) >= self._need:
            data, rest = data[: self._need], data[self._need :]
            self._grow(data)
            self._done(rest)
        else:
            self._grow(data)
            self._need -= len(data)

    def _grow(self, data: bytes) -> None:
        self._hold(len(data))
        if isinstance(self._body, bytearray):
            self._body += data
        else:
            self._body = bytearray(data)

    def _read_head(self, head: bytes) -> bool:
        """Read a reply's head; False for one that only announces it."""
        # A server's heads are alike but for the length: what the rest of one says is kept.
        sized = _LENGTH.search(head)
        if sized is None:
            return self._parse_head(head)
        rest = head[: sized.start(1)] + head[sized.end(1) :]
        known = self._heads.get(rest)
        if known is not None:
            self._status, self._keep, self._retry_after = known
            self._need = _length(sized[1], self._most)
            return True
        final = self._parse_head(head)
        sized_by_it = self._chunks is None and self._status not in _EMPTY and self._need == int(sized[1])
        if sized_by_it and rest.lower().count(b"content-length") == 1:
            if len(self._heads) >= _HEADS:
                self._heads.clear()
            self._heads[rest] = self._status, self._keep, self._retry_after
        return final

    def _parse_head(self, head: bytes) -> bool:
        lines = head.split(b"\r\n")
        version, _, rest = lines[0].partition(b" ")
        if not version.startswith(b"HTTP/1.") or not rest[:3].isdigit() or rest[3:4] not in (b"", b" "):
            raise MalformedReply(f"{lines[0][:60]!r} is no HTTP status line")
        status = int(rest[:3])
        if 100 <= status < 200:
            return False
        self._status = status
        self._keep = version != b"HTTP/1.0"
        length: int | None = None
        chunked = False
        for line in lines[1:]:
            name, colon, value = line.partition(b":")
            if not colon:
                raise MalformedReply(f"{line[:60]!r} is no header")
            name = name.lower()
            if name == b"content-length":
                value = value.strip()
                if length is not None and length != _length(value, self._most):
                    raise MalformedReply(f"{value[:60]!r} is no length")
                length = _length(value, self._most)
            elif name == b"transfer-encoding":
                if value.strip().lower() != b"chunked":
                    raise MalformedReply(f"transfer encoding {value.strip()[:60]!r} is not read here")
                chunked = True
            elif name == b"connection":
                self._keep = value.strip().lower() != b"close" and (
                    self._keep or value.strip().lower() == b"keep-alive"
                )
        if status in ASKS_TO_WAIT and (told := _RETRY_AFTER.search(head)) is not None:
            self._retry_after = told[1]
        if chunked:
            self._chunks = ChunkedBody(self._most)
            self._need = 0
        elif status in _EMPTY:
            self._need = 0
        elif length is not None:
            self._need = length
        else:
            self._need, self._keep = -2, False
        return True

    def _done(self, rest: bytes) -> None:
        waiter, self._waiter = self._waiter, None
        self.served += 1
        if rest or not self._keep:
            self.close()
        elif self._held:
            self._release()
        if waiter is not None and not waiter.done():
            status, body, read = self._status, bytes(self._body), self._read
            wait = None if self._retry_after is None else retry_seconds(self._retry_after)
            try:
                waiter.set_result(
                    HttpReply(status, body, None, wait)
                    if read is None
                    else HttpReply(status, b"", read(status, body), wait)
                )
            except Exception as error:  # noqa: BLE001  (told to whoever asked, not to the event loop)
                waiter.set_exception(error)
        self._body = b""

    def fail(self, error: HttpFailure) -> None:
        """Close, and give whoever waits this error."""
        waiter = self._waiter
        self.close()
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)


def _keep_alive(sock: socket.socket) -> None:
    """Have the kernel notice within a minute that a host is gone without a word."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
