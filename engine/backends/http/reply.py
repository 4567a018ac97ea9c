"""A reply, and what can go wrong with one."""

from __future__ import annotations

import time
from datetime import UTC
from email.utils import parsedate_to_datetime

import msgspec


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
