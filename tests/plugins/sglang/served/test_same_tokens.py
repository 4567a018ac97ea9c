"""One request, several backends: greedy sampling gives the same tokens, and the chat endpoint the same text."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from generate_requests import generate_request

from engine.errors import BackendError
from engine.plugins.local.spec import LocalBackendSpec
from engine.plugins.servers import sessions
from engine.plugins.sglang.client import SGLangBackend
from engine.plugins.sglang.spec import SGLangBackendSpec
from engine.schemas.generation import FinishReason, GenerateRequest, SamplingParams
from engine.schemas.message import Message
from engine.schemas.model import ModelSpec
from engine.tokens.template import ChatTemplate

GREEDY = SamplingParams(temperature=0.0)
Running = Any


def request(ids: list[int], sampling: SamplingParams = GREEDY, **changes: Any) -> GenerateRequest:
    return generate_request(ids, sampling, max_new_tokens=48, **changes)


async def test_greedy_sampling_gives_the_same_tokens_here_and_there(
    sglang_server: Running, chat_format: ChatTemplate, tiny_model_dir: Path
) -> None:
    from engine.plugins.local.backend import LocalBackend

    loaded: Any = SimpleNamespace(
        spec=SimpleNamespace(sampling=GREEDY, model=ModelSpec(path=str(tiny_model_dir))),
        base=tiny_model_dir,
        path=tiny_model_dir,
    )
    local = LocalBackend.open(LocalBackendSpec(device="cpu", dtype="float32"), chat_format, loaded)
    remote = SGLangBackend(
        SGLangBackendSpec(urls=[sglang_server.url]), chat_format, sampling=GREEDY, model=str(tiny_model_dir)
    )
    await local.start()
    await remote.start()
    try:
        ids = chat_format.encode("<|im_start|>user\nWhat is 17 plus 25?<|im_end|>\n<|im_start|>assistant\n")
        for turn in range(3):
            here, there = await asyncio.gather(*(b.generate(request(ids, turn=turn)) for b in (local, remote)))
            assert here.output_ids.tolist() == there.output_ids.tolist()
            assert (here.finish.type, here.finish.matched) == (there.finish.type, there.finish.matched)
            np.testing.assert_allclose(here.logprobs, there.logprobs, atol=1e-4)
            ids = (
                ids + here.output_ids.tolist() + chat_format.encode("<|im_end|>\n<|im_start|>user\nAgain.<|im_end|>\n")
            )
    finally:
        await local.close()
        await remote.close()


async def test_the_chat_endpoint_answers_what_the_ids_say(
    sglang_server: Running, chat_format: ChatTemplate, tiny_model_dir: Path
) -> None:
    messages = [Message(role="system", content="Be brief."), Message(role="user", content="What is 17 plus 25?")]
    prompt = chat_format.render(messages, None)
    native = SGLangBackend(
        SGLangBackendSpec(urls=[sglang_server.url]), chat_format, sampling=GREEDY, model=str(tiny_model_dir)
    )
    from engine.plugins.chat_apis.openai import OpenAIBackend
    from engine.plugins.chat_apis.spec import OpenAIBackendSpec

    chat = OpenAIBackend(OpenAIBackendSpec(url=f"{sglang_server.url}/v1", model="tiny"), chat_format)
    await native.start()
    await chat.start()
    try:
        exact = await native.generate(request(prompt))
        said = await chat.generate(request([], messages=messages))
        stopped = await chat.generate(request([], SamplingParams(temperature=0.0, stop=["e"]), messages=messages))
    finally:
        await native.close()
        await chat.close()
    assert said.text == chat_format.decode([token for token in exact.output_ids.tolist() if token != 2])
    assert (len(said.output_ids), len(said.logprobs)) == (0, 0)
    assert said.prompt_tokens == len(prompt)
    assert said.finish == exact.finish
    assert stopped.finish == FinishReason(type="stop", matched="e") or "e" not in (said.text or "")
    assert stopped.text == (said.text or "").partition("e")[0]


async def test_too_long_a_conversation_is_a_limit_at_the_chat_endpoint(
    sglang_server: Running, chat_format: ChatTemplate
) -> None:
    from engine.plugins.chat_apis.openai import OpenAIBackend
    from engine.plugins.chat_apis.spec import OpenAIBackendSpec

    chat = OpenAIBackend(OpenAIBackendSpec(url=f"{sglang_server.url}/v1", model="tiny"), chat_format)
    await chat.start()
    try:
        with pytest.raises(BackendError) as caught:
            await chat.generate(request([], messages=[Message(role="user", content="x y z " * 4000)]))
    finally:
        await chat.close()
    assert (caught.value.kind, caught.value.retryable) == ("context_overflow", False)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.0, stop=["e"])])
async def test_a_session_gives_the_tokens_of_whole_prompts(
    sglang_server: Running,
    chat_format: ChatTemplate,
    tiny_model_dir: Path,
    sampling: SamplingParams,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "LEAST_TOKENS", 8)
    one, other = (
        SGLangBackend(
            SGLangBackendSpec(urls=[sglang_server.url], sessions=kept),
            chat_format,
            sampling=sampling,
            model=str(tiny_model_dir),
        )
        for kept in (True, False)
    )
    await asyncio.gather(one.start(), other.start())
    assert one.sessions is not None
    in_session = []
    covers = sessions.Session.covers
    monkeypatch.setattr(
        sessions.Session, "covers", lambda session, ids: in_session.append(covers(session, ids)) or in_session[-1]
    )
    try:
        ids = chat_format.encode("<|im_start|>user\nWhat is 17 plus 25?<|im_end|>\n<|im_start|>assistant\n")
        lengths = []
        for turn in range(6):
            await asyncio.gather(*one.sessions._tasks)
            here = await one.generate(request(ids, sampling, turn=turn))
            there = await other.generate(request(ids, sampling, turn=turn))
            assert here.output_ids.tolist() == there.output_ids.tolist()
            np.testing.assert_allclose(here.logprobs, there.logprobs, atol=1e-4)
            assert (here.prompt_tokens, here.prompt_unchecked) == (len(ids), False)
            lengths.append(len(ids) + len(here.output_ids))
            ids = (
                ids + here.output_ids.tolist() + chat_format.encode("<|im_end|>\n<|im_start|>user\nAgain.<|im_end|>\n")
            )
        assert in_session == [0, *lengths[1:5]]
        assert one.stats()["attempts"] == 6
    finally:
        await one.close()
        await other.close()
