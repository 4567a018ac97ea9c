"""Any JSON body is read or refused with an `ApiError`: no other exception, whatever stands in the place of a part."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_kit import URI

from engine.plugins.agents.server import APIS
from engine.plugins.agents.wire.requests import ApiError, Session
from engine.schemas.message import Message
from engine.storable import refusal

TOOL = {"name": "f", "description": "d", "strict": False}
SHAPE = {"type": "object", "properties": {}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "policy",
        "messages": [
            {"role": "system", "content": "S"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "Q"}, {"type": "image_url", "image_url": {"url": URI}}],
            },
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "r"},
        ],
        "tools": [{"type": "function", "function": TOOL | {"parameters": SHAPE}}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "stop": ["x"],
        "n": 2,
        "response_format": {"type": "text"},
    },
    "/v1/responses": {
        "model": "policy",
        "instructions": "I",
        "input": [
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "Q"}, {"type": "input_image", "image_url": URI}],
            },
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
            {"type": "function_call", "call_id": "call_0_0", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_0_0", "output": "r"},
        ],
        "tools": [{"type": "function"} | TOOL | {"parameters": SHAPE}],
        "include": ["reasoning.encrypted_content"],
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
        "previous_response_id": "resp_1",
        "max_output_tokens": 5,
    },
    "/v1/messages": {
        "model": "policy",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "S"}],
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "A"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r"}]},
        ],
        "tools": [{"name": "f", "input_schema": SHAPE}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tool_choice": {"type": "auto"},
        "output_config": {"effort": "low"},
        "thread": {"type": "create"},
        "stop_sequences": ["x"],
        "top_k": 3,
    },
}
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2**70)
    | st.floats(allow_nan=True)
    | st.sampled_from(["", "text", "auto", "\ud800", "data:,", "call_1_0", "tool", "assistant", "function_call"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["type", "text", "role", "content", "x"]), inner, max_size=2)
    ),
    max_leaves=4,
)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, item in inner for place in places(item, (*at, key)))]


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("value", [[], {}, 5, "x", None, [[]], [{}], {"type": []}], ids=str)
def test_any_part_may_be_of_another_type(path: str, value: Any) -> None:
    for place in places(BODIES[path])[1:]:
        body: Any = copy.deepcopy(BODIES[path])
        inside = body
        for key in place[:-1]:
            inside = inside[key]
        inside[place[-1]] = value
        with suppress(ApiError):
            APIS[path].read(body, Session(stored={"resp_1": ([Message(role="user", content="Q")], None)}))


@pytest.mark.parametrize("path", APIS)
@given(st.data())
def test_any_body_is_read_or_refused(path: str, data: Any) -> None:
    session = Session(
        allow=frozenset({"temperature", "stop", "max_tokens", "top_k"}),
        stored={"resp_1": ([Message(role="user", content="Q")], None)},
    )
    holder = {"body": copy.deepcopy(BODIES[path])}
    assert APIS[path].read(holder["body"], session).messages
    for _ in range(data.draw(st.integers(1, 2))):
        *most, last = ("body", *data.draw(st.sampled_from(places(holder["body"]))))
        inside: Any = holder
        for key in most:
            inside = inside[key]
        inside[last] = data.draw(VALUES)
    try:
        request = APIS[path].read(holder["body"], session)
    except ApiError:
        return
    assert request.messages
    for message in request.messages:
        assert refusal(message.plain()) is None
    assert refusal(request.tools) is None
    assert refusal(request.sampling) is None
