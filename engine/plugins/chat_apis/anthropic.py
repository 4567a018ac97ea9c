"""Anthropic's Messages API (`/messages`), with tools as its own blocks.

Invariant: each request has the form that the API requires. The first message is of the user, roles alternate, the
results of calls begin the message after them, and no text block is blank. Where a conversation cannot be sent so,
`NO_TEXT` fills the gap.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import takewhile
from typing import Any

import msgspec

from engine.errors import BackendError
from engine.plugins.chat_apis.backend import ApiAnswer, ApiBackend
from engine.plugins.chat_apis.budget import Usage
from engine.plugins.chat_apis.spec import AnthropicBackendSpec
from engine.plugins.servers.http.reply import HttpReply, refusal
from engine.plugins.servers.wire import ReplyError
from engine.schemas.generation import FinishReason, GenerateRequest, SamplingParams
from engine.schemas.message import Message, TextPart

NO_TEXT = "(no text)"
"""Stands for a message of the user that is blank or missing, which the API refuses."""
MAX_WAIT = 60.0
"""Longest pause in seconds that a rate-limit header can cause. All limits of the API are by the minute."""
_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
_THINKING = ("thinking", "redacted_thinking")
_NOT_IN_NAMES = re.compile("[^a-zA-Z0-9_-]")
_RATE = re.compile(
    rb"\r\nanthropic-ratelimit-(requests|tokens|input-tokens|output-tokens)-(remaining|reset): *([^\r\n]*)",
    re.IGNORECASE,
)
_STATUSES = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "timeout_error": 504,
    "overloaded_error": 529,
}
"""Status that the API sends with each type of error; all others are 500."""


class _Usage(msgspec.Struct):
    input_tokens: int = 0
    output_tokens: int = 0
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None


class _Reply(msgspec.Struct):
    type: str = "message"
    content: list[dict[str, Any]] | None = None
    stop_reason: str | None = None
    stop_sequence: str | None = None
    stop_details: dict[str, Any] | None = None
    usage: _Usage | None = None
    error: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(_Reply)


class AnthropicBackend(ApiBackend):
    """Sends requests to `/messages`."""

    declared = AnthropicBackendSpec
    path = "/messages"
    _spec: AnthropicBackendSpec

    def headers(self, api_key: str | None) -> dict[str, str]:
        """See `ApiBackend.headers`."""
        version: dict[str, str] = {"anthropic-version": self._spec.version}
        if self._spec.version == "2023-06-01" and api_key is not None:
            return version | {"x-api-key": api_key}
        return version | super().headers(api_key)

    def body(self, request: GenerateRequest, messages: list[Message]) -> dict[str, Any]:
        """See `ApiBackend.body`.

        Raises:
            BackendError: The API does not take this request (kinds `bad_request`, `unsupported`); the message says why.
        """
        said = list(takewhile(lambda message: message.role == "system", messages))
        body: dict[str, Any] = {
            "model": self._spec.model,
            "max_tokens": request.max_new_tokens,
            "messages": _messages(messages[len(said) :], self.image_url),
            **_sampling(request.sampling),
        }
        if system := [block for message in said for block in _texts(message)]:
            body["system"] = system
        tools = []
        for function in (tool["function"] for tool in request.tools or ()):
            described = {"description": function["description"]} if function.get("description") else {}
            schema = {"type": "object"} | (function.get("parameters") or {})
            tools.append({"name": function["name"], **described, "input_schema": schema})
        if tools:
            body["tools"] = tools
        elif called := dict.fromkeys(_name(call.name) for message in messages for call in message.tool_calls):
            # The API refuses calls in the history of a request without tools.
            body["tools"] = [{"name": name, "input_schema": {"type": "object"}} for name in called]
            body["tool_choice"] = {"type": "none"}
        thinking = self._spec.thinking
        if isinstance(thinking, int):
            if thinking >= request.max_new_tokens:
                raise BackendError(
                    f"`backend.thinking` is {thinking} tokens, and the reply may have {request.max_new_tokens}: the "
                    "API counts thinking as part of the reply; raise `sampling.max_new_tokens` or `limits.turn_tokens`",
                    kind="bad_request",
                )
            body["thinking"] = {"type": "enabled", "budget_tokens": thinking}
        elif thinking is not None:
            body["thinking"] = {"type": thinking}
        if self._spec.cache is not None:
            _mark(body, {"type": "ephemeral"} | ({} if self._spec.cache == "5m" else {"ttl": self._spec.cache}))
        return body

    def read(self, body: bytes) -> ApiAnswer:
        """See `ApiBackend.read`.

        Raises:
            BackendError: An error that the API sent with status 200.
        """
        reply = _decoder.decode(body)
        if reply.type == "error" or reply.error is not None:
            status = _STATUSES.get(str((reply.error or {}).get("type")), 500)
            raise refusal(self._spec.url, HttpReply(status, body))
        if reply.content is None or reply.stop_reason is None:
            raise ReplyError("it has no `content` or no `stop_reason`")
        finish = _finish(reply)
        texts: list[str] = []
        calls: list[tuple[str, Any]] = []
        thoughts: list[str] = []
        order: list[dict[str, Any]] = []
        for block in reply.content:
            kind = block.get("type")
            if kind == "text":
                texts.append(_string(block, "text"))
                order.append(_text(texts[-1]))
            elif kind == "tool_use":
                calls.append((_string(block, "name"), block.get("input")))
                order.append({"type": "tool_use"})
            elif kind in _THINKING:
                order.append(block)
                if kind == "thinking" and (thought := _string(block, "thinking")):
                    thoughts.append(thought)
        if finish.type == "length" and calls and reply.content[-1].get("type") == "tool_use":
            name, arguments = calls[-1]
            calls[-1] = name, msgspec.json.encode(arguments).decode()[:-1]  # cut off: not a whole object
        usage = None
        if (counted := reply.usage) is not None:
            cached, written = counted.cache_read_input_tokens or 0, counted.cache_creation_input_tokens or 0
            prompt = counted.input_tokens + cached + written
            usage = Usage(prompt=prompt, cached=cached, cache_write=written, output=counted.output_tokens)
        return ApiAnswer(
            text="".join(texts),
            finish=finish,
            usage=usage,
            reasoning="\n".join(thoughts) or None,
            calls=calls,
            signed=order if any(block["type"] in _THINKING for block in order) else None,
        )

    def pause(self, reply: HttpReply) -> float | None:
        """See `ApiBackend.pause`: until the limit is reset of which nothing remains."""
        values = {(limit.lower(), what.lower()): value.strip() for limit, what, value in _RATE.findall(reply.head)}
        used_up = [limit for (limit, what), value in values.items() if what == b"remaining" and value == b"0"]
        resets = [values[limit, b"reset"] for limit in used_up if (limit, b"reset") in values]
        waits = []
        for reset in resets:
            with suppress(ValueError):  # it is no time in RFC 3339
                when = datetime.fromisoformat(reset.decode("latin-1"))
                if when.tzinfo is not None:
                    waits.append(min(MAX_WAIT, max(0.0, when.timestamp() - time.time())))
        return max(waits, default=None)


def _string(block: dict[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise ReplyError(f"a block of type `{block['type']}` has no text in `{name}`")
    return value


def _finish(reply: _Reply) -> FinishReason:
    if reply.stop_reason in ("max_tokens", "model_context_window_exceeded"):
        return FinishReason(type="length")
    if reply.stop_reason in ("end_turn", "tool_use", "stop_sequence"):
        return FinishReason(type="stop", matched=reply.stop_sequence)
    category = (reply.stop_details or {}).get("category")
    return FinishReason(type="abort", message=": ".join(str(part) for part in (reply.stop_reason, category) if part))


def _sampling(sampling: SamplingParams) -> dict[str, Any]:
    """Only what differs from the API's defaults: newer models and versions refuse `temperature`, `top_p` and
    `top_k`."""
    fields = {name: getattr(sampling, name) for name in ("top_p", "top_k") if getattr(sampling, name) is not None}
    if fields.get("top_k") == -1:
        del fields["top_k"]
    if sampling.temperature != 1.0:
        fields["temperature"] = sampling.temperature
    if sampling.stop:
        fields["stop_sequences"] = sampling.stop
    return fields


def _messages(messages: Sequence[Message], url_of: Callable[[str], str]) -> list[dict[str, Any]]:
    """Messages in which roles alternate, the first is of the user, and results come before everything else of
    theirs."""
    sent: list[dict[str, Any]] = []
    for message in messages:
        if message.role == "assistant":
            role, blocks = "assistant", _reply_blocks(message)
            if not blocks:
                continue  # an empty reply, which the API refuses; the messages around it become one
        else:
            role, blocks = "user", _content(message, url_of)
            if message.role == "tool":
                result = {"type": "tool_result", "tool_use_id": message.tool_call_id}
                blocks = [result | ({"content": blocks} if blocks else {})]
        if not sent and role == "assistant":
            sent.append({"role": "user", "content": [_text(NO_TEXT)]})
        if sent and sent[-1]["role"] == role:
            sent[-1]["content"] += blocks
        else:
            sent.append({"role": role, "content": blocks})
    for message_sent in sent:
        message_sent["content"] = message_sent["content"] or [_text(NO_TEXT)]
    return sent or [{"role": "user", "content": [_text(NO_TEXT)]}]


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _texts(message: Message) -> list[dict[str, Any]]:
    """The text blocks of a message that has only text, without blank ones.

    Raises:
        BackendError: Kind `unsupported`: it has an image.
    """
    if message.images:
        raise BackendError(
            f"the anthropic backend takes images only in messages of users and tools, not of the {message.role}",
            kind="unsupported",
        )
    return _content(message, str)


def _content(message: Message, url_of: Callable[[str], str]) -> list[dict[str, Any]]:
    """Text and images of a message of a user or tool (or of the system, after the first message), without blank
    texts."""
    if isinstance(message.content, str):
        return [_text(message.content)] if message.content.strip() else []
    return [
        _text(part.text) if isinstance(part, TextPart) else _image(url_of(part.image))
        for part in message.content
        if not isinstance(part, TextPart) or part.text.strip()
    ]


def _image(url: str) -> dict[str, Any]:
    """An image block.

    Raises:
        BackendError: Kind `unsupported`: an image of a type that the API does not take.
    """
    if not url.startswith("data:"):
        return {"type": "image", "source": {"type": "url", "url": url}}
    media, _, data = url.removeprefix("data:").partition(";base64,")
    if media not in _TYPES:
        raise BackendError(
            f"the anthropic backend takes images as {', '.join(_TYPES)}, not {media or 'without a type'}",
            kind="unsupported",
        )
    return {"type": "image", "source": {"type": "base64", "media_type": media, "data": data}}


def _reply_blocks(message: Message) -> list[dict[str, Any]]:
    """The blocks of a reply: in the order in which the API sent them, if it signed some."""
    calls: list[dict[str, Any]] = [
        {"type": "tool_use", "id": call.id, "name": _name(call.name), "input": call.arguments}
        for call in message.tool_calls
    ]
    signed = message.signed or []
    used = sum(block["type"] == "tool_use" for block in signed)
    said = "".join(block["text"] for block in signed if block["type"] == "text")
    if not signed or said != message.text or used != len(calls):  # also a malformed call, which the message has as text
        return [block for block in signed if block["type"] in _THINKING] + _texts(message) + calls
    left = iter(calls)
    blocks = [next(left) if block["type"] == "tool_use" else block for block in signed]
    return [block for block in blocks if block["type"] != "text" or block["text"].strip()]


def _name(name: str) -> str:
    """A tool's name as the API accepts it. The model may have called a tool that does not exist by a name that cannot
    exist."""
    return _NOT_IN_NAMES.sub("_", name)[:64] or "_"


def _mark(body: dict[str, Any], marker: dict[str, str]) -> None:
    """Mark what the API is to cache: tools and system, the prompt before the newest reply, and the whole prompt.

    The API looks for a cached prefix at each marker and up to 20 blocks before it. A turn with more blocks than that
    still finds the prompt before, because it has a marker of its own. At most three of the four markers that are
    allowed are used.
    """
    asked = [message for message in body["messages"] if message["role"] == "user"]
    ends = [message["content"] for message in asked[-2:]]
    for blocks in (body.get("system") or body.get("tools"), *ends):
        if blocks:
            blocks[-1] = blocks[-1] | {"cache_control": marker}
