"""OpenAI's Chat Completions: a request's JSON to messages, replies to JSON or to streamed events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from engine.plugins.agents.wire import fields
from engine.plugins.agents.wire.fields import Fields, Reader
from engine.plugins.agents.wire.requests import ApiError, ModelApi, ModelReply, ModelRequest, Replies, Session, event
from engine.schemas.message import ImagePart, Message, ToolCall

MOST_REPLIES = 64
"""Maximum of `n`."""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

FIELDS = Fields(
    handled=frozenset({"logprobs", "messages", "model", "n", "stream", "stream_options", "tools", "top_logprobs"}),
    without_effect=frozenset(
        {
            "metadata",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "store",
            "user",
        }
    ),
    sampling={
        "frequency_penalty": "frequency_penalty",
        "max_completion_tokens": "max_tokens",
        "max_tokens": "max_tokens",
        "presence_penalty": "presence_penalty",
        "stop": "stop",
        "temperature": "temperature",
        "top_p": "top_p",
    },
    decided=frozenset({"reasoning_effort", "seed"}),
    neutral={
        "function_call": ("auto",),
        "functions": ([],),
        "logit_bias": ({},),
        "modalities": (["text"],),
        "parallel_tool_calls": (True,),
        "response_format": ({"type": "text"},),
        "tool_choice": ("auto",),
        "verbosity": ("medium",),
    },
    ignorable=frozenset({"parallel_tool_calls", "response_format", "tool_choice", "verbosity"}),
)


class ChatCompletions(ModelApi):
    """OpenAI's Chat Completions. See `ModelApi`."""

    path = "/v1/chat/completions"

    def read(self, body: Any, session: Session) -> ModelRequest:
        """See `ModelApi`."""
        reader = Reader(body, FIELDS, session)
        options = body.get("stream_options") or {}
        if not isinstance(options, dict) or not set(options) <= {"include_usage", "include_obfuscation"}:
            raise ApiError("`stream_options` may have only `include_usage`", param="stream_options")
        reader.flag("include_usage", options)
        replies = 1 if body.get("n") is None else body["n"]
        if type(replies) is not int or not 1 <= replies <= MOST_REPLIES:
            raise ApiError(f"`n` must be an integer from 1 to {MOST_REPLIES}", param="n")
        messages = [_message(reader, item, at) for at, item in fields.objects(body.get("messages"), "messages")]
        if not messages:
            raise ApiError("`messages` must be a list of at least one message", param="messages")
        logprobs = reader.logprobs("logprobs", asked=reader.flag("logprobs"))
        return reader.request(messages, lambda tool, at: _tool(reader, tool, at), replies, logprobs=logprobs)

    def whole(self, request: ModelRequest, answer: Replies, session: Session) -> dict[str, Any]:
        """See `ModelApi`."""
        return {
            "id": f"chatcmpl-{answer.id}",
            "object": "chat.completion",
            "created": answer.created,
            "model": session.model,
            "choices": [
                {"index": index, "message": _written(reply.message), "finish_reason": reply.finish}
                | {"logprobs": _logprobs(request, reply)}
                for index, reply in enumerate(answer.replies)
            ],
            "usage": _usage(answer.replies),
        }

    def events(self, request: ModelRequest, answer: Replies, session: Session) -> Iterator[bytes]:
        """See `ModelApi`."""
        frame = {
            "id": f"chatcmpl-{answer.id}",
            "object": "chat.completion.chunk",
            "created": answer.created,
            "model": session.model,
        }
        for index, reply in enumerate(answer.replies):
            message = _written(reply.message)
            calls = [{"index": at, **call} for at, call in enumerate(message.pop("tool_calls", ()))]
            deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
            deltas += [{name: message[name]} for name in ("reasoning_content", "content") if message.get(name)]
            deltas += [{"tool_calls": [call]} for call in calls]
            first = next((delta for delta in deltas if delta.get("content")), deltas[0])
            for delta, finish in [*((delta, None) for delta in deltas), ({}, reply.finish)]:
                logprobs = _logprobs(request, reply) if delta is first else None
                choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
                yield event(frame | {"choices": [choice]})
        if (request.body.get("stream_options") or {}).get("include_usage"):
            yield event(frame | {"choices": [], "usage": _usage(answer.replies)})
        yield event("[DONE]")


def _message(reader: Reader, item: dict[str, Any], at: str) -> Message:
    role: Any = _ROLES.get(str(item.get("role")))
    if role is None:
        raise ApiError(f"`{at}.role` must be one of {', '.join(_ROLES)}", param=f"{at}.role")
    for name in ("audio", "function_call", "refusal"):
        reader.neutral(f"{at}.{name}", item.get(name) or None, ())
    if role != "tool":
        reader.neutral(f"{at}.name", item.get("name") or None, (), "name", "messages.name")
    content = fields.content(
        item.get("content"),
        f"{at}.content",
        partial(fields.content_part, images={"image_url": _image} if role in ("user", "tool") else None),
        null=role in ("assistant", "tool"),
    )
    if role == "tool":
        answered = fields.identifier(item.get("tool_call_id"), f"{at}.tool_call_id")
        return Message(role=role, content=content, tool_call_id=answered)
    if role != "assistant":
        return Message(role=role, content=content)
    reasoning = item.get("reasoning_content") or item.get("reasoning") or None
    if reasoning is not None:
        reasoning = fields.text(reasoning, f"{at}.reasoning_content")
    calls = [_call(call, place) for place, call in fields.objects(item.get("tool_calls"), f"{at}.tool_calls")]
    return Message(role=role, content=content, reasoning=reasoning, tool_calls=calls)


def _image(part: dict[str, Any], at: str) -> ImagePart:
    image = part.get("image_url")
    if isinstance(image, dict) and image.get("detail") not in (None, "auto"):
        raise ApiError(f"`{at}.image_url.detail` is not supported: leave it out", param=f"{at}.image_url.detail")
    return fields.image(image.get("url") if isinstance(image, dict) else image, f"{at}.image_url.url")


def _call(item: dict[str, Any], at: str) -> ToolCall:
    function = item.get("function")
    if not isinstance(function, dict):
        raise ApiError(f"`{at}.function` is missing", param=f"{at}.function")
    keys = ("id", "function.name", "function.arguments")
    return fields.call(item.get("id"), function.get("name"), function.get("arguments"), at, keys)


def _tool(reader: Reader, tool: dict[str, Any], at: str) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or tool.get("type") != "function":
        raise ApiError(f"`{at}` must be {{type: function, function: {{…}}}}", param=at)
    return reader.tool(f"{at}.function", function, "parameters", frozenset())


def _written(message: Message) -> dict[str, Any]:
    written: dict[str, Any] = {"role": "assistant", "content": message.text or None, "refusal": None}
    if not message.text and not message.tool_calls:
        written["content"] = ""
    if message.reasoning:
        written["reasoning_content"] = message.reasoning
    if message.tool_calls:
        written["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for call in message.tool_calls
        ]
    return written


def _logprobs(request: ModelRequest, reply: ModelReply) -> dict[str, Any] | None:
    return {"content": [token.written() for token in reply.sampled], "refusal": None} if request.logprobs else None


def _usage(replies: Sequence[ModelReply]) -> dict[str, int]:
    prompt, sampled = replies[0].prompt_tokens, sum(reply.reply_tokens for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
