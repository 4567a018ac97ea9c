"""OpenAI-compatible chat endpoints (`/chat/completions`), with tools in the protocol's own form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from engine.plugins.chat_apis.backend import ApiAnswer, ApiBackend
from engine.plugins.chat_apis.budget import Usage
from engine.plugins.chat_apis.spec import OpenAIBackendSpec
from engine.plugins.servers.http.reply import HttpReply
from engine.plugins.servers.wire import ReplyError
from engine.schemas.generation import FinishReason, GenerateRequest
from engine.schemas.message import Message, TextPart


class _Function(msgspec.Struct):
    name: str = ""
    arguments: str | dict[str, Any] | None = ""


class _Call(msgspec.Struct):
    function: _Function


class _Message(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_Call] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None
    matched_stop: int | str | None = None


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Cached | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


_decoder = msgspec.json.Decoder(_Completion)


class OpenAIBackend(ApiBackend):
    """Sends requests to `/chat/completions`."""

    declared = OpenAIBackendSpec
    path = "/chat/completions"
    _length_name = "max_tokens"

    def body(self, request: GenerateRequest, messages: list[Message]) -> dict[str, Any]:
        """See `ApiBackend.body`."""
        sampling, names = request.sampling, ("top_p", "frequency_penalty", "presence_penalty", "logit_bias")
        body: dict[str, Any] = {
            "model": self._spec.model,
            "messages": [_message(message, self.image_url) for message in messages],
            self._length_name: request.max_new_tokens,
            "seed": request.seed % 2**31,  # the range that every endpoint accepts
            **{name: getattr(sampling, name) for name in names if getattr(sampling, name) is not None},
            "temperature": sampling.temperature,
        }
        if sampling.stop:
            body["stop"] = sampling.stop
        if request.tools:
            body["tools"] = request.tools
        return body

    def adapts(self, reply: HttpReply, sent: bytes) -> bool:
        """Use the newer name of the length, which some endpoints require."""
        if reply.status == 400 and b"max_completion_tokens" in reply.body and b',"max_tokens":' in sent:
            self._length_name = "max_completion_tokens"
            return True
        return False

    def read(self, body: bytes) -> ApiAnswer:
        """See `ApiBackend.read`."""
        completion = _decoder.decode(body)
        if not completion.choices:
            raise ReplyError("it has no choices")
        choice = completion.choices[0]
        message, usage = choice.message, None
        if (counted := completion.usage) is not None:
            details = counted.prompt_tokens_details
            cached = 0 if details is None else details.cached_tokens or 0
            usage = Usage(prompt=counted.prompt_tokens, cached=cached, output=counted.completion_tokens)
        finish = FinishReason(type="stop", matched=choice.matched_stop)
        if choice.finish_reason == "length":
            finish = FinishReason(type="length")
        elif choice.finish_reason in ("content_filter", "abort"):
            finish = FinishReason(type="abort", message=choice.finish_reason)
        return ApiAnswer(
            text=message.content or "",
            finish=finish,
            usage=usage,
            reasoning=message.reasoning_content or message.reasoning or None,
            calls=[(call.function.name, call.function.arguments or "") for call in message.tool_calls or ()],
        )


def _message(message: Message, url_of: Callable[[str], str]) -> dict[str, Any]:
    """A message in the form of the protocol. Reasoning is left out: endpoints do not accept it."""
    content: Any = message.content
    if not isinstance(content, str):
        content = [
            {"type": "text", "text": part.text}
            if isinstance(part, TextPart)
            else {"type": "image_url", "image_url": {"url": url_of(part.image)}}
            for part in content
        ]
    made: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": msgspec.json.encode(call.arguments).decode()},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    return made
