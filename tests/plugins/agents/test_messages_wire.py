"""Anthropic's Messages with its own package against the real endpoint, and every history that its types can make of our replies."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_kit import PNG, REPLY, URI, Answers, Talk, endpoint, replies

from engine.plugins.agents import server
from engine.plugins.agents.wire.messages import Messages
from engine.plugins.agents.wire.requests import ApiError, ModelReply, Replies, Session
from engine.schemas.message import ImagePart, Message, TextPart

API = Messages()
TOOL: Any = {"name": "f", "input_schema": {"type": "object", "properties": {}}, "cache_control": {"type": "ephemeral"}}
ASK: dict[str, Any] = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "Q"}]}
THINKING = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


@pytest.fixture
async def client() -> AsyncIterator[tuple[Any, Answers]]:
    anthropic = pytest.importorskip("anthropic")
    async with (
        endpoint() as (address, answers),
        anthropic.AsyncAnthropic(base_url=address, api_key="key", max_retries=0) as client,
    ):
        yield client, answers


@pytest.mark.slow  # importing the package takes 2 s
async def test_a_reply_comes_back_whole_and_its_echo_is_read(client: tuple[Any, Answers]) -> None:
    from anthropic.types import Message as Answer

    sdk, answers = client
    made = await sdk.messages.create(**ASK, **THINKING, tools=[TOOL], system="S")
    made = Answer.model_validate(made.to_dict(), strict=False)
    assert (made.id, made.model, made.stop_reason, made.usage.input_tokens) == ("msg_1", "policy", "tool_use", 5)
    assert [block.type for block in made.content] == ["thinking", "text", "tool_use", "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "r"} for block in made.content[2:]]
    history = [*ASK["messages"], {"role": "assistant", "content": made.content}, {"role": "user", "content": results}]
    await sdk.messages.create(**(ASK | {"messages": history}), system=[{"type": "text", "text": "S"}])
    assert answers.asked[0].tools[0]["function"]["name"] == "f"
    assert answers.asked[0].overruled == ["max_tokens", "thinking"]
    assert answers.asked[1].messages == [
        Message(role="system", content="S"),
        Message(role="user", content="Q"),
        REPLY,
        *(Message(role="tool", content="r", tool_call_id=call.id) for call in REPLY.tool_calls),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("slow", [False, True], ids=["at once", "with keep-alive"])
async def test_a_streamed_reply_is_the_same(
    client: tuple[Any, Answers], slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sdk, answers = client
    monkeypatch.setattr(server, "KEEP_ALIVE_SECONDS", 0.02)
    answers.wait = 0.2 if slow else 0.0
    whole = await sdk.messages.create(**ASK, **THINKING)
    async with sdk.messages.stream(**ASK, **THINKING) as stream:
        streamed = await stream.get_final_message()
    said = {"id"}
    assert streamed.model_dump(exclude=said, exclude_none=True) == whole.model_dump(exclude=said, exclude_none=True)


@pytest.mark.slow
async def test_tokens_are_counted_and_models_are_listed(client: tuple[Any, Answers]) -> None:
    sdk, answers = client
    counted = await sdk.messages.count_tokens(model="policy", messages=ASK["messages"], system="S", tools=[TOOL])
    assert counted.input_tokens == 102
    assert [model.id async for model in sdk.models.list()] == ["policy"]
    assert (await sdk.models.retrieve("policy")).display_name == "policy"
    assert answers.asked == []


@pytest.mark.slow
@pytest.mark.parametrize("wait", [0.0, 0.2], ids=["at once", "after keep-alive"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_of_the_episode_reaches_the_program(
    client: tuple[Any, Answers], stream: bool, wait: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    import anthropic

    sdk, answers = client
    monkeypatch.setattr(server, "KEEP_ALIVE_SECONDS", 0.02)
    answers.fault, answers.wait = ApiError("the episode is over", code="episode_over"), wait

    async def ask() -> None:
        made = await sdk.messages.create(**ASK, stream=stream)
        async for _ in made:
            pass

    with pytest.raises(anthropic.APIStatusError, match="the episode is over") as caught:
        await ask()
    assert caught.value.body["error"]["code"] == "episode_over"


@pytest.mark.parametrize(
    ("headers", "path", "change", "expected"),
    [
        ({}, "/v1/messages", {}, (200, "")),
        ({"authorization": "Bearer key", "x-api-key": ""}, "/v1/messages?beta=true", {}, (200, "")),
        ({"x-api-key": "other"}, "/v1/messages", {}, (401, "authentication_error")),
        ({"anthropic-version": ""}, "/v1/messages", {}, (400, "invalid_request_error")),
        ({}, "/v1/messages", {"model": "claude"}, (404, "not_found_error")),
        ({}, "/v1/messages/batches", {}, (404, "not_found_error")),
        ({}, "/v1/messages/count_tokens", {"max_tokens": None}, (200, "")),
        ({}, "/v1/messages/count_tokens", {"messages": []}, (400, "invalid_request_error")),
    ],
)
async def test_headers_paths_and_forms_of_errors(
    headers: dict[str, str], path: str, change: dict[str, Any], expected: tuple[int, str]
) -> None:
    given = {"x-api-key": "key", "anthropic-version": "2023-06-01"} | headers
    async with endpoint() as (address, _), httpx.AsyncClient(base_url=address, trust_env=False) as plain:
        answer = await plain.post(
            path, json=ASK | change, headers={name: value for name, value in given.items() if value}
        )
    found = answer.json()
    assert (answer.status_code, found.get("error", {}).get("type", "")) == expected
    assert (found.get("type") == "error") == bool(expected[1])


def test_what_sdks_send_is_read() -> None:
    parts = [
        {"type": "text", "text": "See", "cache_control": {"type": "ephemeral"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
    ]
    messages: list[Any] = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "x", "content": parts, "is_error": True},
                {"type": "text", "text": "And"},
                {"type": "text", "text": " now?"},
            ],
        },
        {"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": URI}}]},
    ]
    asked = API.read(
        ASK
        | {
            "messages": messages,
            "system": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}],
            "metadata": {"user_id": "me"},
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
            "output_config": {"effort": "low"},
            "top_k": 5,
        },
        Session(),
    )
    shown: list[Any] = [TextPart(text="See"), ImagePart(image=URI)]
    assert [(message.role, message.content) for message in asked.messages] == [
        ("system", "AB"),
        ("user", shown),
        ("assistant", ""),
        ("tool", shown),
        ("user", "And now?"),
        ("system", "S"),
        ("user", [ImagePart(image=URI)]),
    ]
    assert asked.overruled == ["max_tokens", "output_config.effort", "top_k"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"stop_sequences": ["x"]}, "stop_sequences"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "tool_choice.disable_parallel_tool_use"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"container": "c"}, "container"),
        ({"context_management": {"edits": [{"type": "clear"}]}}, "context_management"),
        ({"mcp_servers": [{"name": "m"}]}, "mcp_servers"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0]"),
        ({"tools": [TOOL | {"strict": True}]}, "tools[0].strict"),
        ({"tools": [TOOL | {"input_examples": [{}]}]}, "tools[0].input_examples"),
        ({"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "Well,"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}
                ]
            },
            "messages[0].content[0].source.url",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
            "messages[0].content[0]",
        ),
        ({"frobnicate": 1}, "frobnicate"),
    ],
)
def test_what_is_not_supported_is_refused_with_its_field(change: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        API.read(ASK | change, Session())
    assert caught.value.param == param


def test_a_stop_sequence_and_a_cut_reply_are_reported() -> None:
    session = Session(allow=frozenset({"stop", "max_tokens"}))
    request = API.read(ASK | {"stop_sequences": ["X"]}, session)
    assert request.sampling == {"max_tokens": 9, "stop": ["X"]}
    plain = ModelReply(message=Message(role="assistant", content="a"), finish="stop", prompt_tokens=1, reply_tokens=1)
    for reply, reason in (
        (replace(plain, stopped="X"), ("stop_sequence", "X")),
        (replace(plain, stopped="Y"), ("end_turn", None)),  # of the spec
        (replace(plain, finish="length"), ("max_tokens", None)),
    ):
        made = API.whole(request, Replies(id="1", created=7, replies=[reply]), session)
        assert (made["stop_reason"], made["stop_sequence"]) == reason


def test_a_stored_thread_is_continued_with_its_system_prompt_and_tools() -> None:
    talk = Talk(API)
    reply = ModelReply(message=REPLY, finish="tool_calls", prompt_tokens=1, reply_tokens=1)
    request, made = talk.ask(ASK | {"system": "S", "tools": [TOOL], "thread": {"type": "create"}}, reply)
    for _ in range(2):
        name = API.whole(request, made, talk.session)["id"]
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "r"} for call in REPLY.tool_calls]
        more: dict[str, Any] = {"thread": {"type": "continue", "previous_message_id": name}}
        more["messages"] = [{"role": "user", "content": results}]
        request, made = talk.ask(ASK | more, reply)
    talk.check_one_tape()
    assert request.messages[0] == Message(role="system", content="S")
    assert request.tools[0]["function"]["name"] == "f"
    talk.session.stored["resp_1"] = [], None  # of another API
    for change, param in (
        ({"tools": [TOOL]}, "tools"),
        ({"thread": {"type": "continue", "previous_message_id": "x"}}, "thread.previous_message_id"),
        ({"thread": {"type": "continue", "previous_message_id": "resp_1"}}, "thread.previous_message_id"),
        ({"thread": {"type": "fork"}}, "thread.type"),
    ):
        with pytest.raises(ApiError) as caught:
            API.read(ASK | more | change, talk.session)
        assert caught.value.param == param


# --- histories --------------------------------------------------------------------------------------------


@st.composite
def blocks(draw: st.DrawFn, reply: ModelReply, thinking: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages that a program adds after a reply: its blocks, and the results of its calls."""
    whole = API.whole(API.read(ASK | thinking, Session()), Replies(id="1", created=7, replies=[reply]), Session())
    content: Any = whole["content"]
    if draw(st.booleans()):
        content = [{key: value for key, value in block.items() if value is not None} for block in content]
    if draw(st.booleans()):
        content = [block for block in content if block["type"] != "thinking"]
    if draw(st.booleans()):  # the API refuses empty texts
        content = [block for block in content if block.get("text") != ""]
    if draw(st.booleans()):
        content = [block | {"cache_control": {"type": "ephemeral"}} for block in content]
    calls = [block["id"] for block in content if block["type"] == "tool_use"]
    if draw(st.booleans()) and all(block["type"] == "text" for block in content):
        content = "".join(block["text"] for block in content)
    answer: list[dict[str, Any]] = [{"type": "tool_result", "tool_use_id": call, "content": "r"} for call in calls]
    if not answer or draw(st.booleans()):
        answer.append({"type": "text", "text": "next"})
    return [{"role": "assistant", "content": content}, {"role": "user", "content": answer}]


@given(st.data(), st.sampled_from([{}, THINKING, {"thinking": {"type": "adaptive", "display": "omitted"}}]))
def test_every_history_of_our_replies_is_an_echo(data: Any, thinking: dict[str, Any]) -> None:
    talk = Talk(API)
    history: list[dict[str, Any]] = [*ASK["messages"]]
    for turn in range(3):
        reply = data.draw(replies(turn))
        talk.ask(ASK | {"messages": history, "system": "S"} | thinking, reply)
        history += data.draw(blocks(reply, thinking))
    talk.check_one_tape()
