"""The Messages API: what is sent has the form that the API's own client has, and each kind of reply becomes a generation."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from anthropic_kit import HIDDEN, PICTURE, body, called, is_valid, never_asked, result, text, use, user
from api_server import THOUGHT, ApiServer
from test_openai import TOOL

from engine.errors import BackendError
from engine.plugins.chat_apis.anthropic import NO_TEXT, AnthropicBackend
from engine.plugins.chat_apis.spec import AnthropicBackendSpec
from engine.schemas.generation import SamplingParams
from engine.schemas.message import ImagePart, Message, TextPart, ToolCall
from engine.tokens.template import ChatTemplate


@pytest.fixture
def made(chat_format: ChatTemplate) -> Callable[..., AnthropicBackend]:
    """A backend that is never asked."""
    return partial(never_asked, chat_format)


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


def test_parameters_that_the_protocol_lacks_are_refused_by_name(chat_format: ChatTemplate) -> None:
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
