"""OpenAI's Responses: input items to messages, replies to output items or to streamed events.

A reply is up to one `reasoning` item, up to one `message` and its `function_call` items, in this order, so the items of
a history can be put together into replies again: the ids of items are not needed.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
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
    event,
)
from engine.schemas.message import ImagePart, Message

FIELDS = Fields(
    handled=frozenset(
        {
            "include",
            "input",
            "instructions",
            "model",
            "previous_response_id",
            "store",
            "stream",
            "stream_options",
            "text",
            "tools",
            "top_logprobs",
        }
    ),
    without_effect=frozenset(
        {
            "metadata",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "user",
        }
    ),
    sampling={"max_output_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p"},
    decided=frozenset({"reasoning"}),
    neutral={
        "background": (False,),
        "parallel_tool_calls": (True,),
        "tool_choice": ("auto",),
        "truncation": ("disabled",),
    },
    ignorable=frozenset({"parallel_tool_calls", "tool_choice"}),
)
_ENCRYPTED, _LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
_INCLUDED = frozenset(
    {
        _ENCRYPTED,
        _LOGPROBS,
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
"""Values of `include`: reasoning, log-probs, and parts of items that no reply has."""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_OWN_CALL = re.compile(r"call_(\d+)_\d+")
"""Ids of calls that the engine writes; the number is the turn."""


class Responses(ModelApi):
    """OpenAI's Responses. See `ModelApi`."""

    path = "/v1/responses"

    def read(self, body: Any, session: Session) -> ModelRequest:
        """See `ModelApi`."""
        reader = Reader(body, FIELDS, session)
        _options(reader)
        asked, before = body.get("input"), body.get("previous_response_id")
        stored = session.recall(before, "resp_")
        if before is not None and stored is None:
            text = f"the response {before!r} is not stored in this episode"
            raise ApiError(text, param="previous_response_id", code="previous_response_not_found")
        if isinstance(asked, str):
            new = [Message(role="user", content=fields.text(asked, "input"))]
        else:
            new = _messages(fields.objects(asked, "input"))
        said = [*(stored[0] if stored is not None else ()), *new]
        if not said:
            raise ApiError("`input` must be a text or a list of at least one item", param="input")
        instructions = body.get("instructions")
        if instructions is not None:
            system = Message(role="system", content=fields.text(instructions, "instructions"))
            said = [system, *said]
        logprobs = reader.logprobs("include", asked=_LOGPROBS in (body.get("include") or ()))
        return reader.request(said, lambda tool, at: _tool(reader, tool, at), logprobs=logprobs)

    def whole(self, request: ModelRequest, answer: Replies, session: Session) -> dict[str, Any]:
        """See `ModelApi`."""
        [reply] = answer.replies
        body = request.body
        if body.get("store") is not False:
            began = 1 if body.get("instructions") is not None else 0
            # without instructions
            session.stored[f"resp_{answer.id}"] = [*request.messages[began:], reply.message], None
        response = _frame(request, answer, session)
        cut = reply.finish == "length"
        response |= {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "completed_at": float(answer.created),
            "output": _items(
                reply, answer.id, encrypted=_ENCRYPTED in (body.get("include") or ()), logprobs=request.logprobs
            ),
            "usage": {
                "input_tokens": reply.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": reply.reply_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": reply.prompt_tokens + reply.reply_tokens,
            },
        }
        return response

    def events(self, request: ModelRequest, answer: Replies, session: Session) -> Iterator[bytes]:
        """See `ModelApi`."""
        response = self.whole(request, answer, session)
        begun = _frame(request, answer, session)
        steps: list[tuple[str, dict[str, Any]]] = [
            ("response.created", {"response": begun}),
            ("response.in_progress", {"response": begun}),
        ]
        for index, item in enumerate(response["output"]):
            steps += _item_events(item, index)
        ending = "response.completed" if response["status"] == "completed" else "response.incomplete"
        steps.append((ending, {"response": response}))
        for number, (kind, data) in enumerate(steps):
            yield event({"type": kind, "sequence_number": number, **data}, kind)

    def fault_event(self, fault: ApiError) -> bytes:
        """See `ModelApi`. The client raises an error where the event has `error`."""
        data = {"type": "error", "code": fault.code, "message": fault.message, "param": fault.param}
        return event(data | {"sequence_number": 0} | self.fault(fault), "error")


def _options(reader: Reader) -> None:
    """Read the fields that have parts."""
    body = reader.body
    included = body.get("include") or []
    if not isinstance(included, list):
        raise ApiError("`include` must be a list", param="include")
    for number, name in enumerate(included):
        if not isinstance(name, str) or name not in _INCLUDED:
            at = f"include[{number}]"
            raise ApiError(f"`{at}`: {name!r} is not supported: leave it out", param=at)
    reader.flag("store")
    for at, keys in (("stream_options", {"include_obfuscation"}), ("text", {"format", "verbosity"})):
        value = body.get(at) or {}
        if not isinstance(value, dict):
            raise ApiError(f"`{at}` must be an object", param=at)
        if other := next((key for key in value if key not in keys), None):
            raise ApiError(f"`{at}.{other}` is not supported: leave it out", param=f"{at}.{other}")
    text = body.get("text") or {}
    reader.neutral("text.format", text.get("format"), ({"type": "text"},), "response_format")
    reader.neutral("text.verbosity", text.get("verbosity"), ("medium",), "verbosity")


def _tool(reader: Reader, tool: dict[str, Any], at: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise ApiError(f"`{at}` has the type {tool.get('type')!r}; only functions are supported", param=at)
    return reader.tool(at, tool, "parameters", frozenset({"type"}))


# --- items of a history -----------------------------------------------------------------------------------


def _messages(items: Sequence[tuple[str, dict[str, Any]]]) -> list[Message]:
    """Items as messages: those of one reply become one message."""
    messages: list[Message] = []
    draft: Message | None = None
    for at, item in items:
        kind = item.get("type") or "message"
        assistant = kind == "message" and item.get("role") == "assistant"
        if kind in ("reasoning", "function_call") or assistant:
            part = _reply_part(item, kind, at)
            if draft is None and part.tool_calls and (place := _reply_of(messages, part)) is not None:
                messages[place] = _merged(messages[place], part)
            elif draft is not None and _is_one_reply(draft, part, spoken=assistant):
                draft = _merged(draft, part)
            else:
                messages += [] if draft is None else [draft]
                draft = part
            continue
        messages += [] if draft is None else [draft]
        draft = None
        messages.append(_other(item, kind, at))
    return messages if draft is None else [*messages, draft]


def _reply_part(item: dict[str, Any], kind: str, at: str) -> Message:
    """One item of a reply as a message of its own. The text of reasoning is its content, or what this API wrote as its
    encrypted content."""
    if kind == "reasoning":
        parts = [
            fields.text(part.get("text"), f"{place}.text")
            for place, part in fields.objects(item.get("content"), f"{at}.content")
        ]
        hidden, at = item.get("encrypted_content"), f"{at}.encrypted_content"
        if not parts and hidden is not None:
            try:
                parts = [b64decode(fields.text(hidden, at), validate=True).decode()]
            except (Base64Error, ValueError):
                raise ApiError(f"`{at}` is not of this API", param=at) from None
        return Message(role="assistant", reasoning="".join(parts) or None)
    if kind == "function_call":
        keys = ("call_id", "name", "arguments")
        call = fields.call(item.get("call_id"), item.get("name"), item.get("arguments"), at, keys)
        return Message(role="assistant", tool_calls=[call])
    said = partial(fields.content_part, texts=("output_text", "input_text", "text"))
    return Message(role="assistant", content=fields.content(item.get("content"), f"{at}.content", said))


def _is_one_reply(draft: Message, part: Message, *, spoken: bool) -> bool:
    """Whether an item belongs to the reply before it."""
    if part.tool_calls:
        turns = {turn for call in (*draft.tool_calls[-1:], *part.tool_calls) if (turn := _turn(call.id)) is not None}
        return len(turns) <= 1
    return spoken and not draft.text and not draft.tool_calls


def _reply_of(messages: Sequence[Message], part: Message) -> int | None:
    """The reply to which a call belongs that comes after the result of another of its calls."""
    turn = _turn(part.tool_calls[0].id)
    place = next((at for at in range(len(messages) - 1, -1, -1) if messages[at].role != "tool"), None)
    if turn is None or place is None or place == len(messages) - 1 or not messages[place].tool_calls:
        return None
    return place if _turn(messages[place].tool_calls[-1].id) == turn else None


def _turn(call_id: str) -> str | None:
    match = _OWN_CALL.fullmatch(call_id)
    return match[1] if match else None


def _merged(reply: Message, part: Message) -> Message:
    return replace(reply, content=part.content or reply.content, tool_calls=[*reply.tool_calls, *part.tool_calls])


def _other(item: dict[str, Any], kind: str, at: str) -> Message:
    if kind == "function_call_output":
        output = fields.content(item.get("output"), f"{at}.output", _text_or_image)
        return Message(
            role="tool", content=output, tool_call_id=fields.identifier(item.get("call_id"), f"{at}.call_id")
        )
    if kind != "message":
        raise ApiError(f"`{at}` has the type {kind!r}, which is not supported here", param=at)
    role: Any = _ROLES.get(str(item.get("role")))
    if role is None:
        raise ApiError(f"`{at}.role` must be one of {', '.join(_ROLES)}", param=f"{at}.role")
    part = _text_or_image if role == "user" else partial(_text_or_image, images=None)
    content = fields.content(item.get("content"), f"{at}.content", part, null=False)
    return Message(role=role, content=content)


def _image(part: dict[str, Any], at: str) -> ImagePart:
    if part.get("detail") not in (None, "auto"):
        raise ApiError(f"`{at}.detail` is not supported: leave it out", param=f"{at}.detail")
    if part.get("file_id"):
        raise ApiError(f"`{at}.file_id` is not supported: use `image_url`", param=f"{at}.file_id")
    return fields.image(part.get("image_url"), f"{at}.image_url")


_text_or_image = partial(fields.content_part, texts=("input_text",), images={"input_image": _image})


# --- replies ----------------------------------------------------------------------------------------------


def _frame(request: ModelRequest, answer: Replies, session: Session) -> dict[str, Any]:
    """A response that has begun."""
    body = request.body
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": float(answer.created),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "model": session.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": body.get("reasoning"),
        "store": body.get("store") is not False,
        "temperature": body.get("temperature"),
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p"),
        "truncation": "disabled",
        "usage": None,
    }


def _items(reply: ModelReply, id_: str, *, encrypted: bool, logprobs: bool) -> list[dict[str, Any]]:
    message, status = reply.message, "incomplete" if reply.finish == "length" else "completed"
    items: list[dict[str, Any]] = []
    if message.reasoning:
        parts = [{"type": "reasoning_text", "text": message.reasoning}]
        hidden = b64encode(message.reasoning.encode()).decode() if encrypted else None
        items.append(
            {"id": f"rs_{id_}", "type": "reasoning", "summary": [], "content": parts, "encrypted_content": hidden}
        )
    if message.text or not message.tool_calls or logprobs:  # only this item has a place for log-probs
        sampled = [token.written() for token in reply.sampled] if logprobs else []
        content = [{"type": "output_text", "text": message.text, "annotations": [], "logprobs": sampled}]
        items.append({"id": f"msg_{id_}", "type": "message", "role": "assistant", "status": status, "content": content})
    for index, call in enumerate(message.tool_calls):
        item = {"id": f"fc_{id_}_{index}", "type": "function_call", "status": status, "call_id": call.id}
        items.append(item | {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)})
    return items


def _item_events(item: dict[str, Any], index: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of one item, without their sequence numbers."""
    place: dict[str, Any] = {"output_index": index}
    begun = item if item["type"] == "reasoning" else item | {"status": "in_progress"}
    if item["type"] == "function_call":
        yield "response.output_item.added", place | {"item": begun | {"arguments": ""}}
        at, arguments = place | {"item_id": item["id"]}, item["arguments"]
        yield "response.function_call_arguments.delta", at | {"delta": arguments}
        yield "response.function_call_arguments.done", at | {"arguments": arguments, "name": item["name"]}
    else:
        kind = "reasoning_text" if item["type"] == "reasoning" else "output_text"
        [part] = item["content"]
        extra: dict[str, Any] = {} if item["type"] == "reasoning" else {"logprobs": part["logprobs"]}
        none: dict[str, Any] = {name: [] for name in extra}
        yield "response.output_item.added", place | {"item": begun | {"content": []}}
        at = place | {"item_id": item["id"], "content_index": 0}
        yield "response.content_part.added", at | {"part": part | {"text": ""} | none}
        if part["text"]:
            yield f"response.{kind}.delta", at | {"delta": part["text"]} | extra
        yield f"response.{kind}.done", at | {"text": part["text"]} | extra
        yield "response.content_part.done", at | {"part": part}
    yield "response.output_item.done", place | {"item": item}
