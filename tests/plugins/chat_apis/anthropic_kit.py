"""A server with the Messages API, and what is said to it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import UnionType
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin

import pytest
from api_server import ApiServer, Fault
from test_openai import request
from typing_extensions import get_type_hints, is_typeddict

from engine.plugins.chat_apis.anthropic import AnthropicBackend
from engine.plugins.chat_apis.backend import paired
from engine.plugins.chat_apis.spec import AnthropicBackendSpec
from engine.schemas.message import Message, ToolCall
from engine.tokens.template import ChatTemplate

HIDDEN = {"type": "redacted_thinking", "data": "EmwKAhgBEgy3va3pzix"}


PICTURE = "data:image/png;base64,AA=="


def never_asked(form: ChatTemplate, **spec: Any) -> AnthropicBackend:
    """A backend whose server is not there."""
    given = {"url": "http://h/v1", "model": "m", **spec}
    return AnthropicBackend(AnthropicBackendSpec.model_validate(given), form)


@asynccontextmanager
async def served(form: ChatTemplate, *replies: Fault, **spec: Any) -> AsyncIterator[tuple[ApiServer, AnthropicBackend]]:
    with ApiServer() as server:
        server.faults = list(replies)
        given = {"url": server.url, "model": "m", "timeout": 10, **spec}
        backend = AnthropicBackend(AnthropicBackendSpec.model_validate(given), form, api_key="secret")
        try:
            yield server, backend
        finally:
            await backend.close()


def reply(*content: dict[str, Any], stop: str = "end_turn", **more: Any) -> Fault:
    usage = {
        "input_tokens": 12, "cache_creation_input_tokens": 30, "cache_read_input_tokens": 100, "output_tokens": 5,
    }  # fmt: skip
    whole = {
        "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": list(content),
        "stop_reason": stop, "stop_sequence": None, "usage": usage, **more,
    }  # fmt: skip
    return 200, {}, json.dumps(whole).encode()


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def use(id_: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id_, "name": "add", "input": arguments}


def user(words: str) -> Message:
    return Message(role="user", content=words)


def called(*ids: str, words: str = "") -> Message:
    calls = [ToolCall(id=id_, name="add", arguments={"a": 1}) for id_ in ids]
    return Message(role="assistant", content=words, reasoning="hm", tool_calls=calls)


def result(id_: str, content: Any = "1") -> Message:
    return Message(role="tool", content=content, tool_call_id=id_, name="add")


def body(backend: AnthropicBackend, messages: list[Message], **more: Any) -> dict[str, Any]:
    return backend.body(request(messages, **more), paired(messages))


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a type of the API's own client, without any key that the type does not have."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Annotated, Required, NotRequired):
        return fits(value, arguments[0])
    if origin in (Union, UnionType):
        return any(fits(value, each) for each in arguments)
    if origin is Literal:
        return value in arguments
    if is_typeddict(kind):
        hints = get_type_hints(kind)
        named = isinstance(value, dict) and kind.__required_keys__ <= set(value) <= set(hints)
        return named and all(fits(each, hints[key]) for key, each in value.items())
    if origin is dict:
        return isinstance(value, dict)
    if origin is not None:  # an iterable
        return isinstance(value, list) and all(fits(each, arguments[0]) for each in value)
    return kind in (Any, object) or (isinstance(kind, type) and isinstance(value, kind))


def is_valid(sent: dict[str, Any]) -> bool:
    types = pytest.importorskip("anthropic.types.message_create_params")
    return fits(sent, types.MessageCreateParamsNonStreaming)
