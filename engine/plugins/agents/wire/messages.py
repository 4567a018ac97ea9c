"""Anthropic's Messages: content blocks to messages, replies to content blocks or to streamed events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from hashlib import sha256
from typing import Any

from engine.plugins.agents.wire import fields
from engine.plugins.agents.wire.fields import Fields, Reader
from engine.plugins.agents.wire.requests import (
    ApiError,
    ModelApi,
    ModelReply,
    ModelRequest,
    Replies,
    Session,
    Stored,
    event,
)
from engine.schemas.message import ContentPart, ImagePart, Message, ToolCall

FIELDS = Fields(
    handled=frozenset({"messages", "model", "output_config", "stream", "system", "thread", "tool_choice", "tools"}),
    without_effect=frozenset(
        {
            "cache_control",
            "diagnostics",
            "inference_geo",
            "metadata",
            "service_tier",
            "speed",
            "user_profile_id",
            "workspace_id",
        }
    ),
    sampling={
        "max_tokens": "max_tokens",
        "stop_sequences": "stop",
        "temperature": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
    },
    decided=frozenset({"thinking"}),
    neutral={"context_management": ({"edits": []}, {}), "mcp_servers": ([],)},
)
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
_TOOL_KEYS = frozenset({"cache_control", "eager_input_streaming", "type"})
"""Keys of a tool that change nothing of the reply."""


class Messages(ModelApi):
    """Anthropic's Messages. See `ModelApi`."""

    path = "/v1/messages"
    count_path = "/v1/messages/count_tokens"
    required_header = "anthropic-version"
    fault_name = "error"

    def read(self, body: Any, session: Session) -> ModelRequest:
        """See `ModelApi`."""
        request = self.counted(body, session)
        most = body.get("max_tokens")
        if type(most) is not int or most < 1:
            raise ApiError("`max_tokens` must be an integer of at least 1", param="max_tokens")
        return request

    def counted(self, body: Any, session: Session) -> ModelRequest:
        """Read a request for the number of its tokens: `max_tokens` may be missing.

        Raises:
            ApiError: As `read`.
        """
        reader = Reader(body, FIELDS, session)
        _choice(reader)
        if (stored := _thread(body, session)) is not None:
            before, tools = stored
            reader.body = body = body | {"tools": tools}
            said = [*before]
        else:
            system = fields.content(body.get("system"), "system", fields.content_part)
            said = [Message(role="system", content=system)] if system else []
        messages = fields.objects(body.get("messages"), "messages")
        if not messages:
            raise ApiError("`messages` must be a list of at least one message", param="messages")
        for at, item in messages:
            said += _messages(item, at)
        if messages[-1][1]["role"] == "assistant":
            text = "`messages` must not end with a message of the assistant: a reply cannot be begun for the model"
            raise ApiError(text, param="messages")
        return reader.request(said, lambda tool, at: _tool(reader, tool, at))

    def whole(self, request: ModelRequest, answer: Replies, session: Session) -> dict[str, Any]:
        """See `ModelApi`."""
        [reply] = answer.replies
        if request.body.get("thread") is not None:
            session.stored[f"msg_{answer.id}"] = [*request.messages, reply.message], request.body.get("tools")
        return _frame(request, answer, session) | {
            "content": _blocks(reply, request.body.get("thinking")),
            "stop_reason": _reason(reply, request),
            "stop_sequence": reply.stopped if _reason(reply, request) == "stop_sequence" else None,
            "usage": _usage(reply, reply.reply_tokens),
        }

    def events(self, request: ModelRequest, answer: Replies, session: Session) -> Iterator[bytes]:
        """See `ModelApi`."""
        message = self.whole(request, answer, session)
        steps: list[dict[str, Any]] = [{"type": "message_start", "message": _frame(request, answer, session)}]
        for index, block in enumerate(message["content"]):
            begun, deltas = _DELTAS[block["type"]](block)
            steps.append({"type": "content_block_start", "index": index, "content_block": begun})
            steps += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
            steps.append({"type": "content_block_stop", "index": index})
        ended = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        steps += [{"type": "message_delta", "delta": ended, "usage": message["usage"]}, {"type": "message_stop"}]
        for data in steps:
            yield event(data, data["type"])

    def fault(self, fault: ApiError) -> dict[str, Any]:
        """See `ModelApi`. `param` and `code` are of this endpoint; Anthropic's API has the message alone."""
        kind = _ERRORS.get(fault.status, "invalid_request_error" if fault.status < 500 else "api_error")
        error: dict[str, Any] = {"type": kind, "message": fault.message, "param": fault.param, "code": fault.code}
        error["details"] = {"error_code": fault.code}  # what the client reads of threads
        return {"type": "error", "error": error}


def _thread(body: Mapping[str, Any], session: Session) -> Stored | None:
    """The conversation that a request continues with its new messages alone; None: it sends all of them."""
    thread = body.get("thread")
    if thread is None or thread == {"type": "create"}:
        return None
    if not isinstance(thread, dict) or thread.get("type") != "continue":
        raise ApiError("`thread.type` must be create or continue", param="thread.type")
    for name in ("system", "tools"):
        if body.get(name) is not None:
            raise ApiError(f"`{name}` is that of the thread: leave it out", param=name)
    before = thread.get("previous_message_id")
    if (stored := session.recall(before, "msg_")) is None:
        text = f"the message {before!r} is not stored in this episode"
        raise ApiError(text, param="thread.previous_message_id", status=404, code="thread_not_found")
    return stored


def _choice(reader: Reader) -> None:
    """Read `tool_choice`, and `output_config`, which have parts."""
    for at in ("tool_choice", "output_config", "thinking"):
        if not isinstance(reader.body.get(at) or {}, dict):
            raise ApiError(f"`{at}` must be an object", param=at)
    choice = dict(reader.body.get("tool_choice") or {"type": "auto"})
    alone = choice.pop("disable_parallel_tool_use", None)
    reader.neutral("tool_choice", choice, ({"type": "auto"},), "tool_choice")
    reader.neutral("tool_choice.disable_parallel_tool_use", alone, (False,), "parallel_tool_calls")
    for name, value in (reader.body.get("output_config") or {}).items():
        at = f"output_config.{name}"
        if name == "effort" and value is not None:
            reader.overruled.add(at)
        else:
            reader.neutral(at, value, (), "response_format" if name == "format" else "")


def _tool(reader: Reader, tool: dict[str, Any], at: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise ApiError(f"`{at}` has the type {tool.get('type')!r}; only custom tools are supported", param=at)
    return reader.tool(at, tool, "input_schema", _TOOL_KEYS)


# --- messages of a history --------------------------------------------------------------------------------


def _messages(item: dict[str, Any], at: str) -> list[Message]:
    """One message of the API as messages: each result of a tool is one."""
    role = item.get("role")
    if role == "assistant":
        return [_reply(item, at)]
    if role not in ("user", "system"):
        raise ApiError(f"`{at}.role` must be user, assistant or system", param=f"{at}.role")
    if role == "system" or not isinstance(item.get("content"), list):
        part = _text_or_image if role == "user" else fields.content_part
        return [Message(role=role, content=fields.content(item.get("content"), f"{at}.content", part, null=False))]
    messages: list[Message] = []
    parts: list[ContentPart] = []
    for place, block in fields.objects(item["content"], f"{at}.content"):
        if block.get("type") != "tool_result":
            parts.append(_text_or_image(block, place))
            continue
        if parts:
            messages.append(Message(role="user", content=fields.joined(parts)))
            parts = []
        content = fields.content(block.get("content"), f"{place}.content", _text_or_image)
        answered = fields.identifier(block.get("tool_use_id"), f"{place}.tool_use_id")
        messages.append(Message(role="tool", content=content, tool_call_id=answered))
    return [*messages, Message(role="user", content=fields.joined(parts))] if parts or not messages else messages


def _reply(item: dict[str, Any], at: str) -> Message:
    thinking: list[str] = []
    calls: list[ToolCall] = []

    def part(block: dict[str, Any], place: str) -> ContentPart | None:
        if block.get("type") == "thinking":
            thinking.append(fields.text(block.get("thinking"), f"{place}.thinking"))
        elif block.get("type") == "tool_use":
            keys = ("id", "name", "input")
            calls.append(fields.call(block.get("id"), block.get("name"), block.get("input"), place, keys))
        else:
            return fields.content_part(block, place)
        return None

    content = fields.content(item.get("content"), f"{at}.content", part, null=False)
    return Message(role="assistant", content=content, reasoning="".join(thinking) or None, tool_calls=calls)


def _image(block: dict[str, Any], at: str) -> ImagePart:
    source = block.get("source")
    if isinstance(source, dict) and source.get("type") == "base64":
        media, data = source.get("media_type"), source.get("data")
        if isinstance(media, str) and isinstance(data, str):
            return fields.image(f"data:{media};base64,{data}", f"{at}.source")
    if isinstance(source, dict) and source.get("type") == "url":
        return fields.image(source.get("url"), f"{at}.source.url")
    raise ApiError(f"`{at}.source` must be base64 data with its media type", param=f"{at}.source")


_text_or_image = partial(fields.content_part, images={"image": _image})


# --- replies ----------------------------------------------------------------------------------------------


def _frame(request: ModelRequest, answer: Replies, session: Session) -> dict[str, Any]:
    """A message that has begun."""
    [reply] = answer.replies
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": session.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(reply, 0),
    }


def _usage(reply: ModelReply, sampled: int) -> dict[str, int]:
    return {
        "input_tokens": reply.prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": sampled,
    }


def _reason(reply: ModelReply, request: ModelRequest) -> str:
    if reply.finish == "stop":
        return "stop_sequence" if reply.stopped in request.sampling.get("stop", ()) else "end_turn"
    return {"length": "max_tokens", "tool_calls": "tool_use"}[reply.finish]


def _blocks(reply: ModelReply, thinking: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The content of a reply. Programs that did not ask for thinking expect none."""
    message = reply.message
    blocks: list[dict[str, Any]] = []
    asked = thinking is not None and thinking.get("type") != "disabled"
    if message.reasoning and asked:
        shown = "" if thinking is not None and thinking.get("display") == "omitted" else message.reasoning
        signature = sha256(message.reasoning.encode()).hexdigest()
        blocks.append({"type": "thinking", "thinking": shown, "signature": signature})
    if message.text or not message.tool_calls:
        blocks.append({"type": "text", "text": message.text, "citations": None})
    for call in message.tool_calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments})
    return blocks


_DELTAS: dict[str, Any] = {
    "text": lambda block: (
        block | {"text": ""},
        [{"type": "text_delta", "text": block["text"]}] if block["text"] else [],
    ),
    "thinking": lambda block: (
        block | {"thinking": "", "signature": ""},
        [
            *([{"type": "thinking_delta", "thinking": block["thinking"]}] if block["thinking"] else []),
            {"type": "signature_delta", "signature": block["signature"]},
        ],
    ),
    "tool_use": lambda block: (
        block | {"input": {}},
        [{"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}],
    ),
}
"""By type: a block that has begun, and the rest of it."""
