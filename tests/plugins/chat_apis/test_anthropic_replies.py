"""Replies of the Messages API, its errors and its rate limits: each becomes a generation, another try or a wait."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest
from anthropic_kit import HIDDEN, body, is_valid, never_asked, reply, result, served, text, use, user
from api_server import THOUGHT
from test_openai import TOOL, request

from engine.errors import BackendError, ContextOverflow
from engine.plugins.chat_apis.anthropic import AnthropicBackend
from engine.plugins.chat_apis.backend import Pace
from engine.plugins.servers.http.reply import HttpReply
from engine.schemas.generation import FinishReason
from engine.schemas.message import MalformedCall, Message, ToolCall
from engine.tokens.template import ChatTemplate


@pytest.fixture
def made(chat_format: ChatTemplate) -> Callable[..., AnthropicBackend]:
    """A backend that is never asked."""
    return partial(never_asked, chat_format)


async def test_parallel_calls_come_back_with_the_engine_s_ids_and_the_counts_of_the_cache(
    chat_format: ChatTemplate,
) -> None:
    prices = {"input": 3, "cached": 0.3, "cache_write": 3.75, "output": 15}
    answer = reply(text("So"), text(":"), use("toolu_1", a=1), use("toolu_2"), stop="tool_use")
    async with served(chat_format, answer, prices=prices) as (_, backend):
        generation = await backend.generate(request(tools=[TOOL], turn=3))
        assert (backend.stats()["cache_write_tokens"], backend.stats()["cached_tokens"]) == (30, 100)
    assert generation.calls == [
        ToolCall(id="call_3_0", name="add", arguments={"a": 1}),
        ToolCall(id="call_3_1", name="add", arguments={}),
    ]
    assert (generation.text, generation.reasoning, generation.signed) == ("So:", None, None)
    assert (generation.prompt_tokens, generation.cached_tokens, generation.sampled_tokens) == (142, 100, 5)
    assert generation.cost == pytest.approx((12 * 3 + 100 * 0.3 + 30 * 3.75 + 5 * 15) / 1e6, rel=1e-12)


@pytest.mark.parametrize(
    ("stop", "more", "expected"),
    [
        ("end_turn", {}, FinishReason(type="stop")),
        ("tool_use", {}, FinishReason(type="stop")),
        ("stop_sequence", {"stop_sequence": "x"}, FinishReason(type="stop", matched="x")),
        ("max_tokens", {}, FinishReason(type="length")),
        ("model_context_window_exceeded", {}, FinishReason(type="length")),
        ("refusal", {}, FinishReason(type="abort", message="refusal")),
        ("refusal", {"stop_details": {"type": "refusal", "category": "bio", "explanation": None}},
         FinishReason(type="abort", message="refusal: bio")),
        ("pause_turn", {}, FinishReason(type="abort", message="pause_turn")),
    ],
)  # fmt: skip
async def test_why_a_reply_ended(
    chat_format: ChatTemplate, stop: str, more: dict[str, Any], expected: FinishReason
) -> None:
    async with served(chat_format, reply(text("a"), stop=stop, **more)) as (_, backend):
        assert (await backend.generate(request())).finish == expected


@pytest.mark.parametrize("content", [[], [text("")], [{"type": "a_new_kind", "data": 1}]], ids=str)
async def test_a_reply_without_text_is_empty(chat_format: ChatTemplate, content: list[dict[str, Any]]) -> None:
    async with served(chat_format, reply(*content)) as (_, backend):
        generation = await backend.generate(request())
    assert (generation.text, generation.calls, generation.sampled_tokens) == ("", [], 5)


@pytest.mark.parametrize("arguments", [{}, {"a": 17}])
async def test_a_call_that_is_cut_off_is_malformed(chat_format: ChatTemplate, arguments: dict[str, Any]) -> None:
    answer = reply(use("t1", a=1), use("t2", **arguments), stop="max_tokens")
    async with served(chat_format, answer) as (_, backend):
        whole, cut = (await backend.generate(request(tools=[TOOL]))).calls
    assert whole == ToolCall(id="call_0_0", name="add", arguments={"a": 1})
    assert isinstance(cut, MalformedCall)


async def test_signed_reasoning_is_sent_back_unchanged_and_in_its_place(chat_format: ChatTemplate) -> None:
    blocks = [THOUGHT, text("First"), HIDDEN, use("toolu_1", a=17, b=4), text(".")]
    async with served(chat_format, reply(*blocks, stop="tool_use"), thinking="adaptive") as (_, backend):
        generation = await backend.generate(request(tools=[TOOL]))
        assert (generation.text, generation.reasoning) == ("First.", "17 and 4.")
        message = Message(
            role="assistant", content=generation.text or "", tool_calls=generation.calls, signed=generation.signed
        )
        assert Message.read_json(message.json()) == message
        sent = body(backend, [user("a"), message, result("call_0_0")], tools=[TOOL])
        assert sent["messages"][1]["content"] == [
            THOUGHT, text("First"), HIDDEN, use("call_0_0", a=17, b=4), text("."),
        ]  # fmt: skip
        assert is_valid(sent)
        # A message that was changed, as one with a malformed call is, keeps its reasoning.
        changed = Message(role="assistant", content="Else.", signed=generation.signed)
        sent = body(backend, [user("a"), changed, user("b")], tools=[TOOL])
        assert sent["messages"][1]["content"] == [THOUGHT, HIDDEN, text("Else.")]


@pytest.mark.parametrize(
    ("error", "kind", "tries"),
    [
        ("overloaded_error", None, 2),
        ("rate_limit_error", None, 2),
        ("api_error", None, 2),
        ("invalid_request_error", "bad_request", 1),
        ("authentication_error", "unauthorized", 1),
        ("permission_error", "unauthorized", 1),
        ("not_found_error", "not_found", 1),
    ],
)
@pytest.mark.usefixtures("short_pauses")
async def test_an_error_inside_a_reply_with_status_200_is_that_error(
    chat_format: ChatTemplate, error: str, kind: str | None, tries: int
) -> None:
    inside = {"type": "error", "error": {"type": error, "message": "Why."}, "request_id": "req_1"}
    async with served(chat_format, (200, {}, json.dumps(inside).encode())) as (server, backend):
        if kind is None:
            assert (await backend.generate(request())).text == "It is 21."
        else:
            with pytest.raises(BackendError, match=r"Why\.") as caught:
                await backend.generate(request())
            assert caught.value.kind == kind
        assert len(server.requests) == tries


@pytest.mark.parametrize(
    "body_", [b"{}", b"<html>", b'{"content": []}', b'{"content": [{"type": "text"}], "stop_reason": "x"}']
)
@pytest.mark.usefixtures("short_pauses")
async def test_another_try_follows_a_reply_that_cannot_be_used(chat_format: ChatTemplate, body_: bytes) -> None:
    async with served(chat_format, (200, {}, body_)) as (server, backend):
        assert (await backend.generate(request())).text == "It is 21."
        assert (len(server.requests), backend.stats()["bad_replies"]) == (2, 1)


@pytest.mark.parametrize(
    "words",
    [
        "prompt is too long: 210000 tokens > 200000 maximum",
        "input length and `max_tokens` exceed context limit: 199000 + 8192 > 200000, decrease input length",
    ],
)
async def test_too_long_a_conversation_is_a_limit(chat_format: ChatTemplate, words: str) -> None:
    error = {"type": "error", "error": {"type": "invalid_request_error", "message": words}}
    async with served(chat_format, (400, {}, json.dumps(error).encode())) as (_, backend):
        with pytest.raises(ContextOverflow):
            await backend.generate(request())


def head(**limits: tuple[int, float]) -> bytes:
    lines = []
    for name, (remaining, seconds) in limits.items():
        reset = datetime.fromtimestamp(datetime.now(UTC).timestamp() + seconds, UTC).isoformat()
        name = name.replace("_", "-")
        lines += [
            f"anthropic-ratelimit-{name}-remaining: {remaining}",
            f"Anthropic-RateLimit-{name}-Reset: {reset[:-6]}Z",
        ]
    return "\r\n".join(["HTTP/1.1 200 OK", *lines, "content-length: 2"]).encode()


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, None),
        ({"requests": (3, 30.0)}, None),
        ({"requests": (0, 30.0), "tokens": (1000, 50.0)}, 30.0),
        ({"requests": (0, 20.0), "output_tokens": (0, 40.0)}, 40.0),
        ({"input_tokens": (0, 86400.0)}, 60.0),
        ({"input_tokens": (0, -5.0)}, 0.0),
    ],
)
def test_nothing_is_sent_until_a_used_up_limit_is_reset(
    made: Callable[..., AnthropicBackend], limits: dict[str, tuple[int, float]], expected: float | None
) -> None:
    found = made().pause(HttpReply(200, b"", head=head(**limits)))
    assert found == (None if expected is None else pytest.approx(expected, abs=5.0))


async def test_a_reply_that_used_up_a_limit_makes_the_next_request_wait(chat_format: ChatTemplate) -> None:
    now, waited = [0.0], list[float]()

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        now[0] += seconds

    spent = {
        "anthropic-ratelimit-requests-remaining": "0",
        "anthropic-ratelimit-requests-reset": "2099-01-01T00:00:00Z",
    }
    _, _, whole = reply(text("a"))
    async with served(chat_format, (200, spent, whole)) as (server, backend):
        backend._pace = Pace(None, None, clock=lambda: now[0], sleep=sleep)
        for _ in range(3):
            await backend.generate(request())
        assert (len(server.requests), waited) == (3, [60.0])


async def test_a_refusal_without_retry_after_is_repeated_when_the_limit_is_reset(chat_format: ChatTemplate) -> None:
    limited = {"anthropic-ratelimit-tokens-remaining": "0", "anthropic-ratelimit-tokens-reset": "2000-01-01T00:00:00Z"}
    error = b'{"type":"error","error":{"type":"rate_limit_error","message":"Slow down."}}'
    async with served(chat_format, (429, limited, error)) as (server, backend):
        rests: list[float | None] = []
        rest = backend.outage.rest
        backend.outage.rest = lambda reason, seconds=None: (rests.append(seconds), rest(reason, seconds))[1]  # type: ignore[method-assign]
        assert (await backend.generate(request())).text == "It is 21."
        assert (len(server.requests), rests) == (2, [0.0])
