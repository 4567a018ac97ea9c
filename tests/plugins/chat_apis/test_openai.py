"""The chat backend: what it sends, and what it makes of replies. The real endpoint is in tests/plugins/sglang/served."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from generate_requests import generate_request

from engine.errors import BackendError, ContextOverflow
from engine.plugins.chat_apis.budget import Budget, BudgetError
from engine.plugins.chat_apis.openai import OpenAIBackend
from engine.plugins.chat_apis.spec import OpenAIBackendSpec
from engine.schemas.generation import FinishReason, GenerateRequest, SamplingParams
from engine.schemas.message import ImagePart, MalformedCall, Message, TextPart, ToolCall
from engine.tokens.template import ChatTemplate

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


class Endpoint:
    def __init__(self) -> None:
        self.replies: list[tuple[int, bytes]] = []
        self.requests: list[dict[str, Any]] = []
        self.heads: list[bytes] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
                body = await reader.readexactly(length)
                self.heads.append(head)
                status, reply = 200, b'{"data":[]}'
                if body:
                    self.requests.append(json.loads(body))
                    status, reply = self.replies.pop(0)
                if status == 0:
                    writer.close()
                    return
                writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(reply), reply))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


@asynccontextmanager
async def endpoint(
    format: ChatTemplate, key: str | None = None, **spec: Any
) -> AsyncIterator[tuple[Endpoint, OpenAIBackend]]:
    made = Endpoint()
    server = await asyncio.start_server(made.handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    backend = OpenAIBackend(
        OpenAIBackendSpec.model_validate({"url": url, "model": "m", "timeout": 10, **spec}), format, api_key=key
    )
    try:
        yield made, backend
    finally:
        await backend.close()
        server.close()


def request(
    messages: list[Message] | None = None, sampling: SamplingParams | None = None, **changes: Any
) -> GenerateRequest:
    asked = [Message(role="user", content="hi")] if messages is None else messages
    fields = {"max_new_tokens": 9, "seed": 2**40 + 5, "messages": asked} | changes
    return generate_request([], sampling, **fields)


def completion(message: dict[str, Any] | None = None, finish: str = "stop", **more: Any) -> tuple[int, bytes]:
    choice = {"message": message or {"role": "assistant", "content": "hello"}, "finish_reason": finish, **more}
    usage = {"prompt_tokens": 12, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}
    return 200, json.dumps({"choices": [choice], "usage": usage}).encode()


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "x", "type": "function", "function": {"name": name, "arguments": arguments}}


async def test_a_conversation_is_sent_in_the_protocols_words(chat_format: ChatTemplate) -> None:
    messages = [
        Message(role="system", content="s"),
        Message(role="user", content=[TextPart(text="look"), ImagePart(image="data:image/png;base64,AA==")]),
        Message(
            role="assistant", content="", reasoning="hm", tool_calls=[ToolCall(id="c", name="add", arguments={"a": 1})]
        ),
        Message(role="tool", content="1", tool_call_id="c", name="add"),
    ]
    sampling = SamplingParams(temperature=0.5, top_p=0.9, stop=["x"], presence_penalty=0.5, logit_bias={"3": 1.0})
    async with endpoint(chat_format, key="secret") as (server, backend):
        server.replies.append(completion())
        generation = await backend.generate(request(messages, sampling, tools=[TOOL]))
    assert server.requests == [
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "s"},
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "look"},
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
                    ],
                },
                {"role": "assistant", "content": "", "tool_calls": [{**call("add", '{"a":1}'), "id": "c"}]},
                {"role": "tool", "content": "1", "tool_call_id": "c"},
            ],
            "max_tokens": 9,
            "seed": 5,
            "temperature": 0.5,
            "top_p": 0.9,
            "presence_penalty": 0.5,
            "logit_bias": {"3": 1.0},
            "stop": ["x"],
            "tools": [TOOL],
        }
    ]
    assert b"\r\nAuthorization: Bearer secret\r\n" in server.heads[0]
    assert (generation.text, generation.output_ids.tolist(), generation.logprobs.tolist()) == ("hello", [], [])
    assert (generation.prompt_tokens, generation.cached_tokens) == (12, 8)
    assert (backend.declared.exact_ids, backend.declared.takes_messages) == (False, True)


@pytest.mark.parametrize(
    ("finish", "more", "expected"),
    [
        ("stop", {}, FinishReason(type="stop")),
        ("stop", {"matched_stop": "x"}, FinishReason(type="stop", matched="x")),
        ("length", {}, FinishReason(type="length")),
        ("tool_calls", {}, FinishReason(type="stop")),
        ("content_filter", {}, FinishReason(type="abort", message="content_filter")),
    ],
)
async def test_why_a_reply_ended_is_told(
    chat_format: ChatTemplate, finish: str, more: dict[str, Any], expected: FinishReason
) -> None:
    async with endpoint(chat_format) as (server, backend):
        server.replies.append(completion(finish=finish, **more))
        assert (await backend.generate(request())).finish == expected


async def test_tool_calls_come_back_with_the_engine_s_ids(chat_format: ChatTemplate) -> None:
    made = {
        "role": "assistant", "content": "So:", "reasoning_content": "hm",
        "tool_calls": [call("add", '{"a": 1}'), call("add", "")],
    }  # fmt: skip
    async with endpoint(chat_format) as (server, backend):
        server.replies.append(completion(made, "tool_calls"))
        generation = await backend.generate(request(tools=[TOOL], turn=3))
    assert (generation.text, generation.reasoning, generation.sampled_tokens) == ("So:", "hm", 3)
    assert generation.calls == [
        ToolCall(id="call_3_0", name="add", arguments={"a": 1}),
        ToolCall(id="call_3_1", name="add", arguments={}),
    ]


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", "null", "3", '{"a": 1} x', '{"a": 1e999}'])
async def test_arguments_that_are_no_object_are_malformed_calls_beside_the_others(
    chat_format: ChatTemplate, arguments: str
) -> None:
    made = {"role": "assistant", "content": None, "tool_calls": [call("add", '{"a": 1}'), call("add", arguments)]}
    async with endpoint(chat_format) as (server, backend):
        server.replies.append(completion(made, "tool_calls"))
        generation = await backend.generate(request(tools=[TOOL]))
    good, bad = generation.calls
    assert good == ToolCall(id="call_0_0", name="add", arguments={"a": 1})
    assert isinstance(bad, MalformedCall)
    assert bad.raw == f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
    reply, written = chat_format.replies.given("So:", None, generation.calls)
    assert (reply.attempts, reply.content, reply.as_calls) == (generation.calls, f"So:\n{bad.raw}", False)
    assert written.startswith("So:\n")
    assert written.endswith(bad.raw)


async def test_text_that_only_looks_like_a_call_beside_a_real_one_is_no_call(chat_format: ChatTemplate) -> None:
    text = 'I write <tool_call>{"name": "add", "arguments": {}}</tool_call>'
    made = {"role": "assistant", "content": text, "tool_calls": [call("add", '{"a": 1}')]}
    async with endpoint(chat_format) as (server, backend):
        server.replies.append(completion(made, "tool_calls"))
        generation = await backend.generate(request(tools=[TOOL]))
    reply, _ = chat_format.replies.given(text, None, generation.calls)
    assert (reply.content, len(reply.attempts)) == (text, 1)


async def test_a_reply_is_charged_by_the_tokens_that_its_usage_counts(
    chat_format: ChatTemplate, tmp_path: Path
) -> None:
    prices = {"input": 2, "cached": 0.5, "output": 8}
    async with endpoint(chat_format, prices=prices) as (server, backend):
        server.replies += [completion(), completion(), (200, b'{"choices":[{"message":{"content":"a"}}]}')]
        cost = (4 * 2 + 8 * 0.5 + 3 * 8) / 1e6
        with closing(Budget(tmp_path / "costs.jsonl", 1.5 * cost)) as budget:
            backend.budget = budget
            assert [(await backend.generate(request())).cost for _ in range(2)] == [cost, cost]
            with pytest.raises(BudgetError):
                await backend.generate(request())
            budget.most = None
            with pytest.raises(BackendError, match="without `usage`") as caught:
                await backend.generate(request())
        assert (caught.value.kind, backend.stats()["cost"], len(server.requests)) == ("no_usage", 2 * cost, 3)


@pytest.mark.parametrize(
    "fault",
    [
        (500, b"no"),
        (503, b""),
        (529, b""),
        (429, b"{}"),
        (0, b""),
        (200, b"<html>"),
        (200, b'{"choices":[]}'),
        (200, b"{}"),
    ],
)
@pytest.mark.usefixtures("short_pauses")
async def test_another_try_follows_a_reply_that_cannot_be_used(
    chat_format: ChatTemplate, fault: tuple[int, bytes]
) -> None:
    async with endpoint(chat_format) as (server, backend):
        server.replies += [fault, completion()]
        assert (await backend.generate(request())).text == "hello"
        assert (backend.stats()["attempts"], backend.stats()["turns"]) == (2, 1)


@pytest.mark.parametrize(("status", "kind"), [(400, "bad_request"), (401, "unauthorized"), (404, "not_found")])
async def test_what_the_client_did_wrong_is_not_tried_again(chat_format: ChatTemplate, status: int, kind: str) -> None:
    async with endpoint(chat_format) as (server, backend):
        server.replies.append((status, b'{"error":{"message":"no such model"}}'))
        with pytest.raises(BackendError, match="no such model") as caught:
            await backend.generate(request())
        assert (caught.value.kind, backend.stats()["attempts"]) == (kind, 1)


async def test_too_long_a_conversation_is_a_limit(chat_format: ChatTemplate) -> None:
    async with endpoint(chat_format) as (server, backend):
        server.replies.append((400, b'{"error":{"message":"This model\'s maximum context length is 8 tokens."}}'))
        with pytest.raises(ContextOverflow):
            await backend.generate(request())


async def test_the_newer_name_of_the_length_is_used_where_the_older_is_refused(chat_format: ChatTemplate) -> None:
    async with endpoint(chat_format) as (server, backend):
        server.replies += [(400, b"Use 'max_completion_tokens' instead of 'max_tokens'."), completion(), completion()]
        await backend.generate(request())
        await backend.generate(request())
        assert [sorted(key for key in sent if key.startswith("max")) for sent in server.requests] == [
            ["max_tokens"], ["max_completion_tokens"], ["max_completion_tokens"],
        ]  # fmt: skip


async def test_a_deadline_ends_a_request(chat_format: ChatTemplate) -> None:
    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    server = await asyncio.start_server(never, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    backend = OpenAIBackend(OpenAIBackendSpec(url=url, model="m", timeout=0.2), chat_format)
    with pytest.raises(BackendError, match=r"no reply within 0\.2 s") as caught:
        await backend.generate(request())
    assert caught.value.kind == "timeout"
    await backend.close()
    server.close()


async def test_nobody_listening_is_found_at_the_start(chat_format: ChatTemplate) -> None:
    backend = OpenAIBackend(OpenAIBackendSpec(url="http://127.0.0.1:9/v1", model="m"), chat_format)
    with pytest.raises(BackendError, match="cannot be reached"):
        await backend.start()


def test_parameters_that_the_protocol_lacks_are_refused_by_name(chat_format: ChatTemplate) -> None:
    loaded: Any = SimpleNamespace(spec=SimpleNamespace(sampling=SamplingParams(top_k=5, regex="a")))
    with pytest.raises(BackendError, match=r"`sampling\.regex`, `sampling\.top_k`"):
        OpenAIBackend.open(OpenAIBackendSpec(url="http://h/v1", model="m"), chat_format, loaded)


def test_a_key_that_is_not_set_is_named(chat_format: ChatTemplate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    loaded: Any = SimpleNamespace(spec=SimpleNamespace(sampling=SamplingParams()))
    with pytest.raises(BackendError, match="NO_SUCH_KEY"):
        OpenAIBackend.open(
            OpenAIBackendSpec(url="http://h/v1", model="m", api_key_env="NO_SUCH_KEY"), chat_format, loaded
        )
