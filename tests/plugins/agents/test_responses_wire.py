"""Responses with OpenAI's own package against the real endpoint, and with every history that its types can make of our replies."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slow_cases import each_once
from wire_kit import REPLY, URI, Answers, Talk, endpoint, replies

from engine.plugins.agents import server
from engine.plugins.agents.wire.requests import ApiError, ModelReply, Session
from engine.plugins.agents.wire.responses import Responses
from engine.schemas.message import ImagePart, Message, TextPart

openai = pytest.importorskip("openai")

TOOL: Any = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": False}
API = Responses()


@pytest.fixture
async def api() -> AsyncIterator[tuple[Any, Answers]]:
    async with (
        endpoint() as (address, answers),
        openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="key", max_retries=0) as client,
    ):
        yield client.responses, answers


def strict(value: Any) -> Any:
    """A response, validated against its type."""
    from openai.types.responses import Response

    return Response.model_validate(value.to_dict(), strict=False)


async def test_a_reply_comes_back_whole_and_its_echo_is_read(api: tuple[Any, Answers]) -> None:
    client, answers = api
    made = strict(await client.create(model="policy", input="Q", instructions="I", tools=[TOOL], include=[]))
    assert (made.id, made.status, made.created_at, made.model) == ("resp_1", "completed", 7.0, "policy")
    assert (made.usage.input_tokens, made.usage.output_tokens, made.usage.total_tokens) == (5, 3, 8)
    assert [item.type for item in made.output] == ["reasoning", "message", "function_call", "function_call"]
    assert made.output_text == "Ä\n"
    assert [(call.call_id, json.loads(call.arguments)) for call in made.output[2:]] == [
        (call.id, call.arguments) for call in REPLY.tool_calls
    ]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "r"} for call in made.output[2:]]
    history = [{"role": "user", "content": "Q"}, *(item.model_dump() for item in made.output), *results]
    await client.create(model="policy", input=history, instructions="I")
    assert answers.asked[0].tools[0]["function"]["name"] == "f"
    assert answers.asked[1].messages == [
        Message(role="system", content="I"),
        Message(role="user", content="Q"),
        REPLY,
        *(Message(role="tool", content="r", tool_call_id=call.id) for call in REPLY.tool_calls),
    ]


@pytest.mark.parametrize(("slow", "finish"), each_once([False, True], ["tool_calls", "length"]))
async def test_a_streamed_reply_is_the_same(
    api: tuple[Any, Answers], slow: bool, finish: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, answers = api
    monkeypatch.setattr(server, "KEEP_ALIVE_SECONDS", 0.02)
    answers.wait = 0.2 if slow else 0.0
    answers.reply = replace(answers.reply, finish=finish)
    whole = await client.create(model="policy", input="Q")
    events = [event async for event in await client.create(model="policy", input="Q", stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    item = ["response.output_item.added", "response.content_part.added"]
    call = ["added", "delta", "done", "done"]
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        *item,
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        *item,
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        *2 * [f"response.{kind}.{end}" for kind, end in zip(
            ["output_item", "function_call_arguments", "function_call_arguments", "output_item"], call, strict=True
        )],
        "response.incomplete" if finish == "length" else "response.completed",
    ]  # fmt: skip
    said = {"id"}
    assert [item.model_dump(exclude=said) for item in strict(events[-1].response).output] == [
        item.model_dump(exclude=said) for item in strict(whole).output
    ]
    assert events[-1].response.output == [event.item for event in events if event.type == "response.output_item.done"]
    if finish != "length":
        async with client.stream(model="policy", input="Q") as stream:
            assert (await stream.get_final_response()).output_text == "Ä\n"  # the package checks the order itself


async def test_a_stored_response_is_continued_without_its_instructions(api: tuple[Any, Answers]) -> None:
    client, answers = api
    one = await client.create(model="policy", input="Q", instructions="I")
    result = {"type": "function_call_output", "call_id": "call_0_0", "output": "r"}
    two = await client.create(model="policy", input=[result], previous_response_id=one.id, store=False)
    assert answers.asked[1].messages == [
        Message(role="user", content="Q"),
        REPLY,
        Message(role="tool", content="r", tool_call_id="call_0_0"),
    ]
    with pytest.raises(openai.BadRequestError, match="is not stored") as caught:
        await client.create(model="policy", input="Q", previous_response_id=two.id)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")


async def test_what_sdks_send_is_read(api: tuple[Any, Answers]) -> None:
    client, answers = api
    content = [{"type": "input_text", "text": "See"}, {"type": "input_image", "detail": "auto", "image_url": URI}]
    given: list[Any] = [
        {"role": "developer", "content": "D"},
        {"type": "message", "role": "user", "content": content},
        {"role": "assistant", "content": "A"},
        {"type": "function_call", "call_id": "x", "name": "f", "arguments": ""},
        {"type": "function_call_output", "call_id": "x", "output": content},
    ]
    await client.create(
        model="policy",
        input=given,
        reasoning={"effort": "low"},
        max_output_tokens=9,
        metadata={},
        truncation="disabled",
    )
    [asked] = answers.asked
    parts = [TextPart(text="See"), ImagePart(image=URI)]
    assert [message.role for message in asked.messages] == ["system", "user", "assistant", "tool"]
    assert [message.content for message in asked.messages] == ["D", parts, "A", parts]
    assert asked.overruled == ["max_output_tokens", "reasoning"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"frobnicate": 1}}, "text.frobnicate"),
        ({"include": ["message.output_text.logprobs", "x"]}, "include[1]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [TOOL | {"strict": True}]}, "tools[0].strict"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input[0].content[0]"),
        (
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_image", "detail": "auto", "image_url": "file:///x"}]}
                ]
            },
            "input[0].content[0].image_url",
        ),
        ({"input": [{"type": "function_call_output", "output": "r"}]}, "input[0].call_id"),
        ({"top_k": 5}, "top_k"),
    ],
)
def test_what_is_not_supported_is_refused_with_its_field(change: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        API.read({"model": "policy", "input": "Q"} | change, Session())
    assert (caught.value.param, caught.value.status) == (param, 400)


async def test_a_refusal_reaches_the_program(api: tuple[Any, Answers]) -> None:
    client, answers = api
    with pytest.raises(openai.BadRequestError) as caught:
        await client.create(model="policy", input="Q", extra_body={"top_k": 5})
    assert caught.value.param == "top_k"
    assert answers.asked == []


@pytest.mark.parametrize("wait", [0.0, 0.2], ids=["at once", "after keep-alive"])
async def test_an_error_of_the_episode_reaches_the_reader_of_a_stream(
    api: tuple[Any, Answers], wait: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, answers = api
    monkeypatch.setattr(server, "KEEP_ALIVE_SECONDS", 0.02)
    answers.fault, answers.wait = ApiError("the episode is over", code="episode_over"), wait

    async def ask() -> None:
        async for _ in await client.create(model="policy", input="Q", stream=True):
            pass

    with pytest.raises(openai.APIError, match="the episode is over") as caught:
        await ask()
    assert caught.value.code == "episode_over"


# --- histories --------------------------------------------------------------------------------------------


@st.composite
def items(draw: st.DrawFn, reply: ModelReply, encrypted: bool) -> list[dict[str, Any]]:
    """The items of a reply as programs send them back, with the results of its calls."""
    from openai.types.responses import Response

    request = API.read(
        {"model": "policy", "input": "Q"} | ({"include": [_ENCRYPTED]} if encrypted else {}), Talk(API).session
    )
    turn = reply.message.tool_calls[0].id.split("_")[1] if reply.message.tool_calls else "x"
    whole = Response.model_validate(API.whole(request, _made(reply, turn), Talk(API).session))
    dump: dict[str, Any] = draw(st.sampled_from([{}, {"exclude_none": True}, {"exclude_unset": True}]))
    found = [item.model_dump(**dump) for item in whole.output]
    if draw(st.booleans()):
        found = [item for item in found if item["type"] != "reasoning"]
    for item in found:
        for key in ("id", "status"):
            if draw(st.booleans()):
                item.pop(key, None)
        if item["type"] == "reasoning" and encrypted and draw(st.booleans()):
            item["content"] = None
        if item["type"] == "function_call":
            item["arguments"] = json.dumps(json.loads(item["arguments"]), indent=draw(st.sampled_from([None, 2])))
        if item["type"] == "message" and draw(st.booleans()):  # as an easy message
            item["content"] = item["content"][0]["text"]
            item.pop("type")
    calls = [item for item in found if item.get("type") == "function_call"]
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "r"} for call in calls]
    if draw(st.booleans()):  # each result directly after its call
        return [item for item in found if item not in calls] + [
            item for pair in zip(calls, results, strict=True) for item in pair
        ]
    return [*found, *results]


_ENCRYPTED = "reasoning.encrypted_content"


def _made(reply: ModelReply, name: str) -> Any:
    from engine.plugins.agents.wire.requests import Replies

    return Replies(id=name, created=7, replies=[reply])


@given(st.data(), st.booleans(), st.booleans())
def test_every_history_of_our_replies_is_an_echo(data: Any, encrypted: bool, reasoned: bool) -> None:
    talk = Talk(API)
    history: list[dict[str, Any]] = [{"role": "user", "content": "Q"}]
    for turn in range(3):
        reply = data.draw(replies(turn))
        talk.ask({"input": history, "instructions": "I"}, reply)
        history += data.draw(items(reply, encrypted))
        if not reply.message.tool_calls or data.draw(st.booleans()):
            history.append({"role": "user", "content": "next"})
    talk.check_one_tape()


@given(st.data())
def test_stored_responses_are_echoes(data: Any) -> None:
    talk = Talk(API)
    before: dict[str, Any] = {}
    for turn in range(3):
        reply = data.draw(replies(turn))
        request, made = talk.ask({"input": "next", "instructions": "I"} | before, reply)
        before = {"previous_response_id": API.whole(request, made, talk.session)["id"]}
    talk.check_one_tape()
