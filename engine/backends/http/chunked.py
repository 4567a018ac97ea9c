"""Bytes of a chunked body (RFC 9112, section 7.1) -> the body, and where it ends."""

from __future__ import annotations

from engine.backends.http.reply import MalformedReply

MAX_LINE = 64 * 1024
"""Maximum size of a chunk's size line, and of all trailers together, in bytes."""


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
            self._left = _chunk_size(line)
            if len(self.data) + self._left > self._most:
                raise too_large(self._most)
            self._state = "data" if self._left else "trailer"
        del pending[:at]
        return None


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    if not digits or not all(byte in b"0123456789abcdefABCDEF" for byte in digits):
        raise MalformedReply(f"{digits[:20]!r} is not a chunk size")
    return int(digits, 16)


def too_large(most: int) -> MalformedReply:
    """The error of a body that is larger than its request allows."""
    return MalformedReply(f"the reply's body is larger than {most} bytes")
