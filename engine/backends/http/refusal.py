"""A reply that refuses a request -> the typed error that says why."""

from __future__ import annotations

import re

import msgspec

from engine.backends.http.reply import HttpReply
from engine.errors import BackendError, ContextOverflow

UNAVAILABLE = (502, 503, 504, 529)
"""Statuses that say that nobody works on the request: the server, or the one behind a proxy, is not there or overloaded (529)."""
_TOO_LONG = re.compile(
    r"context length|longer than the model|maximum allowed length|max_req_input_len|prompt is too long|exceed context limit",
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
