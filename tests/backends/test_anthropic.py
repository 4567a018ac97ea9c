"""The Messages API: what is sent has the form that the API's own client has, and each kind of reply becomes a generation."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin

import pytest
from api_server import THOUGHT, ApiServer, Fault
from test_openai import TOOL, request
from typing_extensions import get_type_hints, is_typeddict

from engine.backends.anthropic import NO_TEXT, AnthropicBackend
from engine.backends.chat_history import paired
from engine.backends.http.pace import Pace
from engine.backends.http.reply import HttpReply
from engine.errors import BackendError, ContextOverflow
from engine.schemas.backend import AnthropicBackendSpec
from engine.schemas.generation import FinishReason, SamplingParams
from engine.schemas.message import ImagePart, MalformedCall, Message, TextPart, ToolCall
from engine.schemas.model import ModelSpec
from engine.tokens.format import ChatFormat
from engine.tokens.loading import load_format

HIDDEN = {"type": "redacted_thinking", "data": "EmwKAhgBEgy3va3pzix"}
PICTURE = "data:image/png;base64,AA=="


@pytest.fixture(scope="module")
def chat_format(tiny_model_dir: Path) -> ChatFormat:
    return load_format(ModelSpec(path=str(tiny_model_dir)), tiny_model_dir)


@pytest.fixture
def made(chat_format: ChatFormat) -> Callable[..., AnthropicBackend]:
    """A backend that is never asked."""

    def make(**spec: Any) -> AnthropicBackend:
        given = {"url": "http://h/v1", "model": "m", **spec}
        return AnthropicBackend(AnthropicBackendSpec.model_validate(given), chat_format)

    return make


@asynccontextmanager
async def served(form: ChatFormat, *replies: Fault, **spec: Any) -> AsyncIterator[tuple[ApiServer, AnthropicBackend]]:
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


# --- requests -----------------------------------------------------------------------------------------------------------


def test_a_conversation_is_sent_as_blocks(made: Callable[..., AnthropicBackend]) -> None:
    messages = [
        Message(role="system", content="s"),
        Message(role="user", content=[TextPart(text="look"), ImagePart(image=PICTURE), ImagePart(image="http://h/i")]),
        called("c0", "c1", words="So:"),
        result("c0", [TextPart(text="see"), ImagePart(image=PICTURE)]),
        result("c1", ""),
        user("go on"),
    ]
    sampling = SamplingParams(temperature=0.5, top_p=0.9, top_k=5, stop=["x"])
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    sent = body(made(), messages, sampling=sampling, tools=[TOOL])
    assert sent == {
        "model": "m",
        "max_tokens": 9,
        "system": [text("s")],
        "messages": [
            {
                "role": "user",
                "content": [text("look"), image, {"type": "image", "source": {"type": "url", "url": "http://h/i"}}],
            },
            {"role": "assistant", "content": [text("So:"), use("c0", a=1), use("c1", a=1)]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c0", "content": [text("see"), image]},
                    {"type": "tool_result", "tool_use_id": "c1"},
                    text("go on"),
                ],
            },
        ],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "stop_sequences": ["x"],
        "tools": [
            {
                "name": "add",
                "description": "adds",
                "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
            }
        ],
    }
    assert not is_valid(sent)  # the newest version has no sampling parameters
    assert is_valid({key: value for key, value in sent.items() if key not in ("temperature", "top_p", "top_k")})


def test_nothing_is_sent_that_the_newest_models_refuse(made: Callable[..., AnthropicBackend]) -> None:
    assert body(made(), [user("hi")]) == {
        "model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": [text("hi")]}],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], [("user", [NO_TEXT])]),
        ([Message(role="system", content="s")], [("user", [NO_TEXT])]),
        ([called(words="Hi.")], [("user", [NO_TEXT]), ("assistant", ["Hi."])]),
        ([user("a"), called(words=" \n"), user("b")], [("user", ["a", "b"])]),
        ([user("a"), called(words="x"), user(" ")], [("user", ["a"]), ("assistant", ["x"]), ("user", [NO_TEXT])]),
        ([user("a"), Message(role="system", content="s"), user("b")], [("user", ["a", "s", "b"])]),
    ],
    ids=["nothing", "system", "assistant-first", "empty-reply", "blank-user", "late-system"],
)
def test_a_conversation_that_the_api_would_refuse_is_completed(
    made: Callable[..., AnthropicBackend], messages: list[Message], expected: list[tuple[str, list[str]]]
) -> None:
    sent = body(made(), messages)["messages"]
    assert [(each["role"], [block["text"] for block in each["content"]]) for each in sent] == expected


@pytest.mark.parametrize("seed", range(30))
def test_every_conversation_has_the_form_that_the_api_requires(
    made: Callable[..., AnthropicBackend], seed: int
) -> None:
    """The server refuses what the API documents as refused: order of roles, blank texts, calls and results apart, too many markers."""
    chosen = random.Random(seed)
    messages, ids = [], [f"call_{n}_0" for n in range(4)]
    for _ in range(chosen.randrange(12)):
        words = chosen.choice(["", " ", "x"])
        kind = chosen.randrange(5)
        calls = [
            ToolCall(id=id_, name=chosen.choice(["add", "no such.tool"]), arguments={})
            for id_ in chosen.sample(ids, chosen.randrange(3))
        ]
        signed = chosen.choice([None, [THOUGHT, text(words), {"type": "tool_use"}], [HIDDEN, {"type": "tool_use"}]])
        messages.append(
            [
                Message(role="system", content=words),
                user(words),
                Message(role="user", content=[TextPart(text=words), ImagePart(image=PICTURE)]),
                Message(role="assistant", content=words, tool_calls=calls, signed=signed),
                result(chosen.choice(ids), chosen.choice([words, [TextPart(text=words)]])),
            ][kind]
        )
    sent = body(made(cache="1h"), messages, tools=chosen.choice([None, [TOOL]]))
    assert ApiServer()._messages(sent)[0] == ""
    assert is_valid(sent)


def test_calls_of_a_state_without_tools_keep_definitions_that_cannot_be_used(
    made: Callable[..., AnthropicBackend],
) -> None:
    sent = body(made(), [user("a"), called("c"), result("c")])
    assert sent["tools"] == [{"name": "add", "input_schema": {"type": "object"}}]
    assert sent["tool_choice"] == {"type": "none"}


def test_what_is_to_be_cached_is_marked(made: Callable[..., AnthropicBackend]) -> None:
    messages = [
        Message(role="system", content="s"),
        user("a"),
        called(words="b"),
        user("c"),
        called(words="d"),
        user("e"),
    ]
    marker = {"cache_control": {"type": "ephemeral"}}
    sent = body(made(cache="5m"), messages, tools=[TOOL])
    assert sent["system"] == [text("s") | marker]
    assert [message["content"] for message in sent["messages"]] == [
        [text("a")], [text("b")], [text("c") | marker], [text("d")], [text("e") | marker],
    ]  # fmt: skip
    assert "cache_control" not in sent["tools"][0]
    assert is_valid(sent)
    (only,) = body(made(cache="1h"), [user("a")], tools=[TOOL])["tools"]
    assert only["cache_control"] == {"type": "ephemeral", "ttl": "1h"}
    assert "cache_control" not in json.dumps(body(made(), messages, tools=[TOOL]))


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        (None, None),
        ("adaptive", {"type": "adaptive"}),
        ("disabled", {"type": "disabled"}),
        (1024, {"type": "enabled", "budget_tokens": 1024}),
    ],
)
def test_reasoning_is_asked_for(
    made: Callable[..., AnthropicBackend], thinking: Any, expected: dict[str, Any] | None
) -> None:
    sent = body(made(thinking=thinking), [user("a")], max_new_tokens=1025)
    assert sent.get("thinking") == expected
    assert is_valid(sent)


def test_a_reply_shorter_than_its_reasoning_is_refused(made: Callable[..., AnthropicBackend]) -> None:
    with pytest.raises(BackendError, match=r"`backend\.thinking` is 2000 tokens, and the reply may have 9"):
        body(made(thinking=2000), [user("a")])


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (Message(role="user", content=[ImagePart(image="data:image/bmp;base64,AA==")]), "not image/bmp"),
        (Message(role="user", content=[ImagePart(image="a/b.png")]), "takes images as data: or http"),
        (Message(role="system", content=[ImagePart(image=PICTURE)]), "not of the system"),
        (Message(role="assistant", content=[ImagePart(image=PICTURE)]), "not of the assistant"),
    ],
)
def test_images_that_the_api_does_not_take_are_refused_by_name(
    made: Callable[..., AnthropicBackend], message: Message, words: str
) -> None:
    with pytest.raises(BackendError, match=words) as caught:
        body(made(), [message])
    assert caught.value.kind == "unsupported"


def test_parameters_that_the_protocol_lacks_are_refused_by_name(chat_format: ChatFormat) -> None:
    spec = AnthropicBackendSpec(url="http://h/v1", model="m")
    for sampling, words in (
        (SamplingParams(logit_bias={"1": 1.0}, regex="a"), r"`sampling\.regex`, `sampling\.logit_bias`"),
        (
            SamplingParams(temperature=0.5, top_p=0.5, top_k=5),
            r"`sampling\.temperature`, `sampling\.top_p`, `sampling\.top_k`",
        ),
    ):
        loaded: Any = SimpleNamespace(spec=SimpleNamespace(sampling=sampling))
        with pytest.raises(BackendError, match=words):
            AnthropicBackend.open(spec, chat_format, loaded)
    older = AnthropicBackendSpec(url="http://h/v1", model="m", version="2023-06-01")
    loaded.spec.sampling = SamplingParams(temperature=0.5, top_p=0.5, top_k=5)
    AnthropicBackend.open(older, chat_format, loaded)
    loaded.spec.sampling = SamplingParams(temperature=1.2)
    with pytest.raises(BackendError, match=r"`sampling\.temperature` is 1\.2; the anthropic backend takes at most 1"):
        AnthropicBackend.open(older, chat_format, loaded)


# --- replies ------------------------------------------------------------------------------------------------------------


async def test_parallel_calls_come_back_with_the_engine_s_ids_and_the_counts_of_the_cache(
    chat_format: ChatFormat,
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
    chat_format: ChatFormat, stop: str, more: dict[str, Any], expected: FinishReason
) -> None:
    async with served(chat_format, reply(text("a"), stop=stop, **more)) as (_, backend):
        assert (await backend.generate(request())).finish == expected


@pytest.mark.parametrize("content", [[], [text("")], [{"type": "a_new_kind", "data": 1}]], ids=str)
async def test_a_reply_without_text_is_empty(chat_format: ChatFormat, content: list[dict[str, Any]]) -> None:
    async with served(chat_format, reply(*content)) as (_, backend):
        generation = await backend.generate(request())
    assert (generation.text, generation.calls, generation.sampled_tokens) == ("", [], 5)


@pytest.mark.parametrize("arguments", [{}, {"a": 17}])
async def test_a_call_that_is_cut_off_is_malformed(chat_format: ChatFormat, arguments: dict[str, Any]) -> None:
    answer = reply(use("t1", a=1), use("t2", **arguments), stop="max_tokens")
    async with served(chat_format, answer) as (_, backend):
        whole, cut = (await backend.generate(request(tools=[TOOL]))).calls
    assert whole == ToolCall(id="call_0_0", name="add", arguments={"a": 1})
    assert isinstance(cut, MalformedCall)


async def test_signed_reasoning_is_sent_back_unchanged_and_in_its_place(chat_format: ChatFormat) -> None:
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
    chat_format: ChatFormat, error: str, kind: str | None, tries: int
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
async def test_another_try_follows_a_reply_that_cannot_be_used(chat_format: ChatFormat, body_: bytes) -> None:
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
async def test_too_long_a_conversation_is_a_limit(chat_format: ChatFormat, words: str) -> None:
    error = {"type": "error", "error": {"type": "invalid_request_error", "message": words}}
    async with served(chat_format, (400, {}, json.dumps(error).encode())) as (_, backend):
        with pytest.raises(ContextOverflow):
            await backend.generate(request())


# --- rate limits --------------------------------------------------------------------------------------------------------


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


async def test_a_reply_that_used_up_a_limit_makes_the_next_request_wait(chat_format: ChatFormat) -> None:
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


async def test_a_refusal_without_retry_after_is_repeated_when_the_limit_is_reset(chat_format: ChatFormat) -> None:
    limited = {"anthropic-ratelimit-tokens-remaining": "0", "anthropic-ratelimit-tokens-reset": "2000-01-01T00:00:00Z"}
    error = b'{"type":"error","error":{"type":"rate_limit_error","message":"Slow down."}}'
    async with served(chat_format, (429, limited, error)) as (server, backend):
        rests: list[float | None] = []
        rest = backend.outage.rest
        backend.outage.rest = lambda reason, seconds=None: (rests.append(seconds), rest(reason, seconds))[1]  # type: ignore[method-assign]
        assert (await backend.generate(request())).text == "It is 21."
        assert (len(server.requests), rests) == (2, [0.0])


# --- the API's own client -----------------------------------------------------------------------------------------------


def test_the_api_s_own_client_reads_what_the_test_server_sends(made: Callable[..., AnthropicBackend]) -> None:
    """So the server of these tests speaks the protocol, and a request of the engine passes the client unchanged."""
    anthropic = pytest.importorskip("anthropic")
    backend = made(cache="5m")
    with ApiServer() as server:
        client = anthropic.Anthropic(api_key="secret", base_url=server.url.removesuffix("/v1"), max_retries=0)
        conversation = [Message(role="system", content="s"), user("What is 17 plus 4?")]
        sent = body(backend, conversation, tools=[TOOL])
        first = client.messages.create(**sent)
        assert server.requests == [sent]
        assert backend.headers("secret").items() <= server.headers[0].items()
        older = {"anthropic-version": "2023-06-01", "x-api-key": "secret"}
        assert made(version="2023-06-01").headers("secret") == older
        whole = anthropic.types.Message.model_validate(first.model_dump())
        assert [block.type for block in whole.content] == ["tool_use", "tool_use"]
        read = backend.read(whole.model_dump_json().encode())
        assert read.calls == [("add", {"a": 17, "b": 4}), ("add", {"a": 1, "b": 1})]
        assert read.usage is not None
        assert read.usage.prompt == whole.usage.input_tokens + whole.usage.cache_creation_input_tokens > 0
        conversation += [called("call_0_0", "call_0_1"), result("call_0_0"), result("call_0_1")]
        second = client.messages.create(**body(backend, conversation, tools=[TOOL]))
        assert (second.stop_reason, second.content[0].text) == ("end_turn", "It is 21.")
        assert second.usage.cache_read_input_tokens > 0
        assert server.refused == []
