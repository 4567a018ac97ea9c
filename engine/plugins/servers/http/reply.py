"""Bytes of a connection -> a reply, or why none came: it ends by its `Content-Length`, by its chunks, or with the
connection. A reply that refuses a request -> the typed error that says why.

Written by hand: `httptools` takes 12 % more CPU time per request (bench/http_framing.py compares them).
"""

from __future__ import annotations

import re
import time
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import ClassVar

import msgspec

from engine.errors import BackendError, ContextOverflow


class HttpFailure(Exception):
    """No whole reply arrived.

    Args:
        answered: A first byte of the reply had arrived.
        reused: The connection had served a request before.
        sent: The request may have reached the server; False if no connection could be opened.
    """

    def __init__(self, message: str, *, answered: bool = False, reused: bool = False, sent: bool = True) -> None:
        self.answered = answered
        self.reused = reused
        self.sent = sent
        super().__init__(message)


class MalformedReply(HttpFailure):
    """The server's bytes are not an HTTP/1.1 reply, or the reply is too large."""

    def __init__(self, message: str) -> None:
        super().__init__(message, answered=True)


class HttpReply(msgspec.Struct, frozen=True):
    """A whole reply."""

    status: int
    body: bytes
    retry_after: float | None = None
    """Seconds until the next request, from the header `Retry-After`; only with status 429, 503 and 529."""
    head: bytes = b""
    """The status line and the headers."""


def retry_seconds(value: bytes, now: float | None = None) -> float | None:
    """Seconds to wait, from a `Retry-After` header: a number of seconds or an HTTP date (RFC 9110, section 10.2.3).

    Args:
        value: The header's value.
        now: Seconds since the epoch; default: the clock.

    Returns:
        0 or more; None if the value is neither.
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


UNAVAILABLE = (502, 503, 504, 529)
"""Statuses that say that nobody works on the request: the server, or the one behind a proxy, is not there or overloaded
(529)."""
_TOO_LONG = re.compile(
    r"context length|longer than the model|maximum allowed length|max_req_input_len|prompt is too long|exceed context "
    r"limit",
    re.IGNORECASE,
)
_KINDS = {401: "unauthorized", 403: "unauthorized", 404: "not_found"}


def error_text(reply: HttpReply, most: int = 500) -> str:
    """The error message of a reply, in any of the forms that SGLang, its router and OpenAI-compatible servers use.

    Args:
        reply: With an error status.
        most: Maximum length in characters.
    """
    text = reply.body.decode(errors="replace").strip()
    try:
        data = msgspec.json.decode(reply.body)
    except msgspec.DecodeError:
        data = None
    while isinstance(data, dict):
        inner = data.get("error", data.get("message", data.get("detail")))
        if inner is None:
            break
        data = inner
    if isinstance(data, str):
        text = data
    return text if len(text) <= most else f"{text[:most]}…"


def refusal(url: str, reply: HttpReply) -> BackendError:
    """The error of a reply whose status is not 200.

    Returns:
        ContextOverflow: The prompt is too long. BackendError: Kinds `rate_limited`, `unavailable`, `server_error` (all
        retryable), `unauthorized`, `not_found`, `bad_request`.
    """
    text = error_text(reply)
    message = f"{url} answered {reply.status}: {text}"
    if reply.status == 400 and _TOO_LONG.search(text):
        return ContextOverflow(message)
    if reply.status in (429, *UNAVAILABLE):
        kind = "rate_limited" if reply.status == 429 else "unavailable"
        return BackendError(message, kind=kind, retryable=True, refused=True, retry_after=reply.retry_after)
    # SGLang says "Duplicate request ID" if the connection was lost while it worked, and the request was sent again.
    if reply.status >= 500 or reply.status in (408, 425) or "Duplicate request ID" in text:
        return BackendError(message, kind="server_error", retryable=True)
    return BackendError(message, kind=_KINDS.get(reply.status, "bad_request"))


MAX_HEAD = 64 * 1024
"""Maximum size of a reply's status line and headers, in bytes."""
MAX_BODY = 64 << 20
"""Maximum size of a reply's body in bytes, if the request sets none."""
MAX_HELD = 1 << 30
"""Maximum size in bytes of all incomplete bodies, over all connections of the process."""
MAX_INTERIM = 16
"""Maximum number of interim replies (status 1xx) before a reply."""
MAX_LINE = 64 * 1024
"""Maximum size of a chunk's size line, and of all trailers together, in bytes."""
RETRY_AFTER_STATUSES = (429, 503, 529)
"""Statuses of replies whose `Retry-After` is read."""
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)(?=\r\n|\Z)", re.IGNORECASE)
_RETRY_AFTER = re.compile(rb"\r\nretry-after: *([^\r\n]*)", re.IGNORECASE)
_EMPTY = (204, 304)
"""Statuses of replies without a body, whatever length they name."""
_MAX_KNOWN_HEADS = 64
_IN_HEAD = -1
_UNTIL_CLOSED = -2

KnownHeads = dict[bytes, tuple[int, bool, bytes | None]]
"""Heads without the value of `Content-Length` -> status, whether the connection stays open, `Retry-After`."""


class ReplyReader:
    """Reads the replies of one connection, one after the other.

    reader = ReplyReader({})
    reader.start(most=1000)
    whole = reader.feed(buffer, memoryview(buffer), count)      # True when the reply is complete
    reader.status, reader.body, reader.surplus
    """

    __slots__ = (
        "_chunks",
        "_collected",
        "_head",
        "_interim",
        "_known",
        "_left",
        "_most",
        "body",
        "head",
        "held",
        "keep",
        "retry_after",
        "status",
        "surplus",
    )
    all_held: ClassVar[int] = 0
    """Bytes of incomplete bodies, over all connections of the process."""

    def __init__(self, known: KnownHeads) -> None:
        """`known`: heads that were parsed before; shared by the connections to one server."""
        self._known = known
        self.held = 0
        self.start(MAX_BODY)

    def start(self, most: int) -> None:
        """Expect a new reply, whose body may have `most` bytes."""
        self._most = most
        self._head = b""
        self._chunks: ChunkedBody | None = None
        self._collected: bytearray | None = None
        self._left = _IN_HEAD
        """Bytes that the body lacks, or `_IN_HEAD`, or `_UNTIL_CLOSED`."""
        self._interim = 0
        self.body: bytes | bytearray = b""
        self.head = b""
        """The status line and the headers of the reply."""
        self.status = 0
        self.keep = True
        """The connection may be used again after this reply."""
        self.retry_after: bytes | None = None
        """Value of the header `Retry-After`."""
        self.surplus = False
        """Bytes arrived after the end of the reply."""

    @property
    def started(self) -> bool:
        """Whether a byte of the reply has arrived."""
        return bool(self._head) or self._left != _IN_HEAD

    def release(self) -> None:
        """Drop an incomplete body from the count of all connections."""
        if self.held:
            ReplyReader.all_held -= self.held
            self.held = 0

    def feed(self, buffer: bytearray, view: memoryview, count: int) -> bool:
        """Read the first `count` bytes of a buffer.

        Args:
            buffer: Holds the bytes; it is used again afterwards.
            view: The same memory.
            count: Number of bytes that arrived.

        Returns:
            Whether the reply is complete.

        Raises:
            MalformedReply: The bytes are not HTTP/1.1, or a size limit is exceeded.
        """
        if self._left == _IN_HEAD and not self._head:
            end = buffer.find(b"\r\n\r\n", 0, count)
            if end >= 0:  # the whole head in one piece, as is usual
                head, body = bytes(view[:end]), bytes(view[end + 4 : count])
                sized = _LENGTH.search(head)
                if sized is not None and int(sized[1]) == count - end - 4 <= self._most:
                    meaning = self._known.get(head[: sized.start(1)] + head[sized.end(1) :])
                    if meaning is not None:  # a head as before, and the whole body: no copy
                        self.status, self.keep, self.retry_after = meaning
                        self.head = self._head = head
                        self._left, self.body = count - end - 4, body
                        return True
                return self._take_head(head, body)
        if self._left > count and self._chunks is None:  # the middle of a long body
            self._collect(view[:count])
            self._left -= count
            return False
        return self._take(bytes(view[:count]))

    def end(self) -> bool:
        """The server has closed the connection. Returns whether that completes the reply."""
        if self._left != _UNTIL_CLOSED:
            return False
        self._finish(b"")
        return True

    def _take(self, data: bytes) -> bool:
        if self._left != _IN_HEAD:
            return self._take_body(data)
        data = self._head + data
        end = data.find(b"\r\n\r\n")
        if end >= 0:
            return self._take_head(data[:end], data[end + 4 :])
        if len(data) > MAX_HEAD:
            raise MalformedReply(f"the headers are longer than {MAX_HEAD} bytes")
        self._head = data
        return False

    def _take_head(self, head: bytes, rest: bytes) -> bool:
        self._head = head
        if self._read_head(head):
            if len(rest) == self._left and self._chunks is None:  # the whole body in one piece, as is usual: no copy
                self.body = rest
                return True
            return self._take_body(rest)
        self._head = b""  # an interim reply, such as 100 Continue: the reply follows
        self._interim += 1
        if self._interim > MAX_INTERIM:
            raise MalformedReply(f"more than {MAX_INTERIM} interim replies (status 1xx) before a reply")
        return self._take(rest) if rest else False

    def _take_body(self, data: bytes) -> bool:
        if self._chunks is not None:
            self._hold(len(data))
            rest = self._chunks.feed(data)
            if rest is None:
                return False
            self._collected = self._chunks.data
            return self._finish(rest)
        if self._left == _UNTIL_CLOSED:
            self._collect(data)
            if self._collected is not None and len(self._collected) > self._most:
                raise too_large(self._most)
            return False
        if len(data) >= self._left:
            self._collect(data[: self._left])
            return self._finish(data[self._left :])
        self._collect(data)
        self._left -= len(data)
        return False

    def _finish(self, rest: bytes) -> bool:
        if self._collected is not None:
            self.body = self._collected
        self.surplus = bool(rest)
        return True

    def _collect(self, data: bytes | memoryview) -> None:
        self._hold(len(data))
        if self._collected is None:
            self._collected = bytearray(data)
        else:
            self._collected += data

    def _hold(self, count: int) -> None:
        """Count bytes of an incomplete body.

        Raises:
            MalformedReply: The incomplete bodies of all connections together are too large.
        """
        if ReplyReader.all_held + count > MAX_HELD:
            raise MalformedReply(f"the incomplete replies of all connections are larger than {MAX_HELD} bytes")
        ReplyReader.all_held += count
        self.held += count

    def _read_head(self, head: bytes) -> bool:
        """Read the head of a reply. Returns False for an interim reply."""
        # The heads of one server differ only in their length, so the meaning of the rest is kept.
        self.head = head
        sized = _LENGTH.search(head)
        if sized is None:
            return self._parse_head(head)
        rest = head[: sized.start(1)] + head[sized.end(1) :]
        if (meaning := self._known.get(rest)) is not None:
            self.status, self.keep, self.retry_after = meaning
            self._left = _length(sized[1], self._most)
            return True
        final = self._parse_head(head)
        sized_by_it = self._chunks is None and self.status not in _EMPTY and self._left == int(sized[1])
        if sized_by_it and rest.lower().count(b"content-length") == 1:
            if len(self._known) >= _MAX_KNOWN_HEADS:
                self._known.clear()
            self._known[rest] = self.status, self.keep, self.retry_after
        return final

    def _parse_head(self, head: bytes) -> bool:
        lines = head.split(b"\r\n")
        version, _, rest = lines[0].partition(b" ")
        if not version.startswith(b"HTTP/1.") or not rest[:3].isdigit() or rest[3:4] not in (b"", b" "):
            raise MalformedReply(f"{lines[0][:60]!r} is not an HTTP status line")
        status = int(rest[:3])
        if 100 <= status < 200:
            return False
        self.status = status
        self.keep = version != b"HTTP/1.0"
        length: int | None = None
        chunked = False
        for line in lines[1:]:
            name, colon, value = line.partition(b":")
            if not colon:
                raise MalformedReply(f"{line[:60]!r} is not a header")
            name = name.lower()
            if name == b"content-length":
                value = value.strip()
                if length is not None and length != _length(value, self._most):
                    raise MalformedReply("two different headers `Content-Length`")
                length = _length(value, self._most)
            elif name == b"transfer-encoding":
                if value.strip().lower() != b"chunked":
                    raise MalformedReply(f"unsupported transfer encoding {value.strip()[:60]!r}")
                chunked = True
            elif name == b"connection":
                self.keep = value.strip().lower() != b"close" and (self.keep or value.strip().lower() == b"keep-alive")
        if status in RETRY_AFTER_STATUSES and (pause := _RETRY_AFTER.search(head)) is not None:
            self.retry_after = pause[1]
        if chunked:
            self._chunks = ChunkedBody(self._most)
            self._left = 0
        elif status in _EMPTY:
            self._left = 0
        elif length is not None:
            self._left = length
        else:
            self._left, self.keep = _UNTIL_CLOSED, False
        return True


def _length(value: bytes, most: int) -> int:
    if not value.isdigit():
        raise MalformedReply(f"{value[:60]!r} is not a length")
    if len(value) > 12 or int(value) > most:
        raise MalformedReply(f"the reply has {value[:60].decode()} bytes; at most {most} are read")
    return int(value)


class ChunkedBody:
    """Reads a chunked body piece by piece; the pieces may be cut anywhere.

    >>> body = ChunkedBody(1000)
    >>> body.feed(b"3\\r\\nab")
    >>> body.feed(b"c\\r\\n0\\r\\n\\r\\nrest")
    b'rest'
    >>> bytes(body.data)
    b'abc'
    """

    __slots__ = ("_left", "_most", "_pending", "_state", "_trailers", "data")

    def __init__(self, most: int) -> None:
        """`most`: maximum size of the body in bytes."""
        self.data = bytearray()
        self._most = most
        self._trailers = 0
        self._pending = bytearray()
        self._left = 0
        self._state = "size"

    def feed(self, piece: bytes | bytearray) -> bytes | None:
        """Add a piece. Returns the bytes after the body when the body is complete, else None.

        Raises:
            MalformedReply: The bytes are not a chunked body, or the body is too large.
        """
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
                    raise MalformedReply("a chunk is longer than its size")
                at += 2
                self._state = "size"
            end = pending.find(b"\r\n", at)
            if end < 0:
                if len(pending) - at > MAX_LINE:
                    raise MalformedReply(f"a chunk's size line is longer than {MAX_LINE} bytes")
                break
            line = bytes(pending[at:end])
            at = end + 2
            if self._state == "trailer":
                if not line:
                    return bytes(pending[at:])
                self._trailers += len(line)
                if self._trailers > MAX_LINE:
                    raise MalformedReply(f"the trailers are longer than {MAX_LINE} bytes")
                continue
            digits = line.partition(b";")[0].strip()
            if not digits or not all(byte in b"0123456789abcdefABCDEF" for byte in digits):
                raise MalformedReply(f"{digits[:20]!r} is not a chunk size")
            self._left = int(digits, 16)
            if len(self.data) + self._left > self._most:
                raise too_large(self._most)
            self._state = "data" if self._left else "trailer"
        del pending[:at]
        return None


def too_large(most: int) -> MalformedReply:
    """The error of a body that is larger than its request allows."""
    return MalformedReply(f"the reply's body is larger than {most} bytes")
