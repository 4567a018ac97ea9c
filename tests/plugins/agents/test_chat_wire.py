"""Chat Completions with OpenAI's own package against the real endpoint: what is sent, what comes back, what is refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slow_cases import each_once
from wire_kit import REPLY, Answers, Talk, endpoint, replies

from engine.plugins.agents import server
from engine.plugins.agents.wire.chat import ChatCompletions
from engine.plugins.agents.wire.requests import ApiError, ModelReply, Replies, Session
from engine.schemas.message import ImagePart, Message, TextPart

openai = pytest.importorskip("openai")

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
ASK: list[Any] = [{"role": "user", "content": "Q"}]


@pytest.fixture
async def api() -> AsyncIterator[tuple[Any, Answers]]:
    async with (
        endpoint() as (address, answers),
        openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="key", max_retries=0) as client,
    ):
        yield client, answers


async def test_a_reply_comes_back_whole_and_its_echo_is_read(api: tuple[Any, Answers]) -> None:
    client, answers = api
    made = await client.chat.completions.create(model="policy", messages=ASK, tools=[TOOL], n=2)
    assert (made.id, made.created, made.model) == ("chatcmpl-1", 7, "policy")
    assert made.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}) == {
        "prompt_tokens": 5,
        "completion_tokens": 6,
        "total_tokens": 11,
    }
    assert [choice.index for choice in made.choices] == [0, 1]
    message = made.choices[0].message
    assert (message.content, message.reasoning_content, made.choices[0].finish_reason) == ("Ä\n", "hm", "tool_calls")
    history = [*ASK, message.model_dump(), {"role": "tool", "tool_call_id": "call_0_0", "content": "r"}]
    await client.chat.completions.create(model="policy", messages=history)
    assert answers.asked[0].tools[0]["function"]["name"] == "f"
    assert answers.asked[1].messages == [
        Message(role="user", content="Q"),
        REPLY,
        Message(role="tool", content="r", tool_call_id="call_0_0"),
    ]


@pytest.mark.parametrize("slow", [False, True], ids=["at once", "with keep-alive"])
async def test_a_streamed_reply_is_the_same(
    api: tuple[Any, Answers], slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, answers = api
    monkeypatch.setattr(server, "KEEP_ALIVE_SECONDS", 0.02)
    answers.wait = 0.3 if slow else 0.0
    stream = await client.chat.completions.create(
        model="policy", messages=ASK, stream=True, stream_options={"include_usage": True}
    )
    text, reasoning, finish = "", "", None
    usage: Any = None
    calls: dict[int, list[str]] = {}
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            finish = choice.finish_reason or finish
            for call in choice.delta.tool_calls or ():
                calls[call.index] = [call.id, call.function.name, call.function.arguments]
    assert (text, reasoning, finish, usage.total_tokens) == ("Ä\n", "hm", "tool_calls", 8)
    assert calls == {at: [f"call_0_{at}", "f", f'{{"x": "é\\n", "n": {at}}}'] for at in range(2)}


async def test_what_sdks_send_is_read(api: tuple[Any, Answers]) -> None:
    client, answers = api
    url = "data:image/png;base64,AAAA"
    messages: list[Any] = [
        {"role": "developer", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]},
        {
            "role": "user",
            "content": [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": url}}],
        },
        {"role": "assistant", "content": None, "tool_calls": [], "provider_specific_fields": {}},
        {"role": "user", "content": "?", "name": None},
    ]
    await client.chat.completions.create(
        model="policy", messages=messages, user="me", metadata={"a": "b"}, service_tier="auto", seed=1, max_tokens=9
    )
    [asked] = answers.asked
    assert asked.messages == [
        Message(role="system", content="AB"),
        Message(role="user", content=[TextPart(text="See"), ImagePart(image=url)]),
        Message(role="assistant", content=""),
        Message(role="user", content="?"),
    ]
    assert asked.overruled == ["max_tokens", "seed"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"stop": ["x"]}, "stop"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"n": 65}, "n"),
        ({"top_k": 5}, "top_k"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "r"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}]},
            "messages[0].content[0].image_url.url",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "["}}]}
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"messages": [{"role": "user", "content": "Q", "name": "Bob"}]}, "messages[0].name"),
        ({"stream_options": {"include_all": True}}, "stream_options"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
            "tools[0].function.strict",
        ),
    ],
)
def test_what_is_not_supported_is_refused_with_its_field(change: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        ChatCompletions().read({"model": "policy", "messages": ASK} | change, Session())
    assert (caught.value.param, caught.value.status) == (param, 400)


async def test_a_refusal_reaches_the_program(api: tuple[Any, Answers]) -> None:
    client, answers = api
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="policy", messages=ASK, extra_body={"top_k": 5})
    assert caught.value.param == "top_k"
    assert answers.asked == []


async def test_keys_models_and_paths(api: tuple[Any, Answers]) -> None:
    client, answers = api
    assert [model.id async for model in client.models.list()] == ["policy"]
    assert (await client.models.retrieve("policy")).id == "policy"
    with pytest.raises(openai.NotFoundError, match="the only model is 'policy'"):
        await client.models.retrieve("gpt-9")
    with pytest.raises(openai.NotFoundError, match="the only model is 'policy'"):
        await client.chat.completions.create(model="gpt-9", messages=ASK)
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model="policy", input="x")
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="other").chat.completions.create(model="policy", messages=ASK)
    assert answers.asked == []


def test_names_of_speakers_are_refused_with_the_way_out_and_ignored_where_the_spec_says_so() -> None:
    roles = ("system", "user", "assistant", "user")
    messages = [{"role": role, "content": role, "name": "Ada"} for role in roles]
    body = {"model": "policy", "messages": messages}
    with pytest.raises(ApiError) as refused:
        ChatCompletions().read(body, Session())
    assert refused.value.param == "messages[0].name"
    assert refused.value.message.endswith(
        "or write `ignore: [name]` in the spec's `agent` to answer as if it were left out"
    )
    request = ChatCompletions().read(body, Session(ignore=frozenset({"name"})))
    assert request.messages == [Message(role=role, content=role) for role in roles]
    assert request.overruled == ["messages.name"]


@pytest.mark.parametrize(("wait", "stream"), each_once([0.0, 0.3], [False, True]))
async def test_an_error_of_the_episode_reaches_the_program(
    api: tuple[Any, Answers], stream: bool, wait: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, answers = api
    monkeypatch.setattr(server, "KEEP_ALIVE_SECONDS", 0.02)
    answers.fault, answers.wait = ApiError("the episode is over", code="episode_over"), wait

    async def ask() -> None:
        made = await client.chat.completions.create(model="policy", messages=ASK, stream=stream)
        async for _ in made:
            pass

    with pytest.raises(openai.APIError, match="the episode is over") as caught:
        await ask()
    assert caught.value.code == "episode_over"


# --- histories --------------------------------------------------------------------------------------------


@st.composite
def messages(draw: st.DrawFn, reply: ModelReply) -> list[dict[str, Any]]:
    """The messages that a program adds after a reply: it, as its types write it, and the results of its calls."""
    from openai.types.chat import ChatCompletion

    api, session = ChatCompletions(), Session()
    request = api.read({"model": "policy", "messages": ASK}, session)
    made = (
        ChatCompletion.model_validate(api.whole(request, Replies(id="1", created=7, replies=[reply]), session))
        .choices[0]
        .message
    )
    said = made.model_dump(**draw(st.sampled_from([{}, {"exclude_none": True}, {"exclude_unset": True}])))
    if draw(st.booleans()):
        said.pop("reasoning_content", None)
    if "tool_calls" in said and said["tool_calls"] is not None:
        for call in said["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(arguments, indent=draw(st.sampled_from([None, 2])))
    content = said.get("content")
    if content and draw(st.booleans()):
        said["content"] = [{"type": "text", "text": content}]
    elif not content:
        said["content"] = draw(st.sampled_from([None, "", []]))
    if draw(st.booleans()):
        said |= {"provider_specific_fields": {}, "annotations": []}
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "r"} for call in said.get("tool_calls") or ()]
    if not results or draw(st.booleans()):
        results.append({"role": "user", "content": "next"})
    return [said, *results]


@given(st.data())
def test_every_history_of_our_replies_is_an_echo(data: Any) -> None:
    talk = Talk(ChatCompletions())
    history = [*ASK]
    for turn in range(3):
        reply = data.draw(replies(turn))
        talk.ask({"messages": history}, reply)
        history += data.draw(messages(reply))
    talk.check_one_tape()
