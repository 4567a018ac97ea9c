"""A reply of a server as it came, or why none came; one that refuses a request -> the typed error that says why."""

from __future__ import annotations

import re
import time
from datetime import UTC
from email.utils import parsedate_to_datetime

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
