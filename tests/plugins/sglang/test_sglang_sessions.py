"""Sessions of SGLang: what is sent, and that the prompt is the same whatever becomes of a session."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bad_replies import drop
from fake_sglang import FakeSGLang
from generate_requests import generate_request
from pydantic import ValidationError
from sglang_cluster import OUTPUT, Cluster, changed, cluster
from test_expert_routing import LAYOUT, experts
from vision_code import FIRST, SECOND

from engine.errors import BackendError
from engine.plugins.servers import sessions
from engine.plugins.sglang.spec import SGLangBackendSpec
from engine.schemas.model import ModelSpec
from engine.tokens.images import digest_of
from engine.tokens.loading import load_format
from engine.tokens.tape import Tape
from engine.tokens.template import ChatTemplate

PROMPT = list(range(10, 30))
request = partial(generate_request, max_new_tokens=8)


@pytest.fixture(autouse=True)
def short_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "LEAST_TOKENS", 8)


@asynccontextmanager
async def opened(form: ChatTemplate, servers: int = 1, **spec: Any) -> AsyncIterator[Cluster]:
    async with cluster(form, servers, start=False, sessions=True, **spec) as it:
        await it.backend.start()
        for fake in it.fakes:
            fake.keep = True
            fake.calls.clear()
        yield it


async def settle(it: Cluster) -> None:
    """Wait until sessions are opened and ended."""
    assert it.backend.sessions is not None
    while tasks := list(it.backend.sessions._tasks):
        await asyncio.gather(*tasks)


async def play(it: Cluster, ids: list[int], turns: int, **changes: Any) -> list[int]:
    """Take turns, each with one new token after the reply; the next prompt."""
    for _ in range(turns):
        generation = await it.backend.generate(request(ids, **changes))
        assert generation.output_ids.tolist() == OUTPUT
        assert generation.prompt_tokens == len(ids)
        assert not generation.prompt_unchecked
        ids = [*ids, *OUTPUT, 40]
        await settle(it)
    return ids


def seen(fake: FakeSGLang) -> list[list[int]]:
    """The ids of the requests as they were sent."""
    return [json.loads(body)["input_ids"] for body in fake.calls]


def computed_on(fake: FakeSGLang) -> list[list[int]]:
    """The whole prompts of the answered requests of all sessions that are open."""
    chains = [chain for requests in fake.sessions.values() for chain, _ in requests.values()]
    return [json.loads(b"[%b]" % b",".join(chain[:-1])) for chain in chains]


async def test_a_turn_sends_what_is_new_and_the_server_has_the_whole_prompt(chat_format: ChatTemplate) -> None:
    async with opened(chat_format) as it:
        await play(it, PROMPT, 5)
        prompts = [PROMPT + [*OUTPUT, 40] * turn for turn in range(5)]
        assert seen(it.fake) == [prompts[0], prompts[1], [40], [40], [40]]
        assert computed_on(it.fake) == prompts[1:]
        counts = it.counts
    assert counts["certificate"] == {"turns_checked": 5, "turns_unchecked": 0, "prompt_mismatches": 0}
    assert (counts["attempts"], counts["retries"]) == (5, 0)


@pytest.mark.parametrize("routing", [False, True])
async def test_bytes_that_are_sent_and_received_depend_on_the_new_tokens_alone(
    chat_format: ChatTemplate, routing: bool
) -> None:
    sizes = []
    for context in (100, 2000):
        async with cluster(
            chat_format, start=False, sessions=True, layout=LAYOUT if routing else None, routed_experts=routing
        ) as it:
            it.fake.experts = experts if routing else None
            await it.backend.start()
            ids = [500] * context
            ids = await play(it, ids, 2, **({"experts_from": 0} if routing else {}))
            before = it.fake.bytes_in, it.fake.bytes_out
            await play(it, ids, 3, **({"experts_from": len(ids) - 2} if routing else {}))
            sizes.append((it.fake.bytes_in - before[0], it.fake.bytes_out - before[1]))
    (sent, received), (sent_long, received_long) = sizes
    digits = 6 * len(str(2000))  # numbers of tokens are written in the requests and in the replies
    assert abs(sent_long - sent) <= digits
    assert abs(received_long - received) <= digits


async def test_experts_are_those_of_the_tokens_in_the_session(chat_format: ChatTemplate) -> None:
    async with cluster(chat_format, start=False, sessions=True, layout=LAYOUT, routed_experts=True) as it:
        it.fake.experts = experts
        await it.backend.start()
        ids = await play(it, PROMPT, 2, experts_from=0)
        generation = await it.backend.generate(request(ids, experts_from=len(ids) - 2))
    assert generation.routed_experts is not None
    np.testing.assert_array_equal(generation.routed_experts, experts([*ids, *OUTPUT][-7:-1], len(ids) - 2))


async def test_a_session_that_is_gone_costs_neither_a_turn_nor_a_retry(chat_format: ChatTemplate) -> None:
    async with opened(chat_format) as it:
        ids = await play(it, PROMPT, 3)
        it.fake.sessions.clear()
        ids = await play(it, ids, 4)
        assert [len(sent) for sent in seen(it.fake)] == [20, 26, 1, 1, 38, 44, 1, 1]
        assert it.counts["retries"] == 0
        assert it.counts["attempts"] == 8
    assert ids == PROMPT + [*OUTPUT, 40] * 7


async def test_a_reply_that_counts_another_prompt_is_not_taken(chat_format: ChatTemplate) -> None:
    async with opened(chat_format) as it:
        ids = await play(it, PROMPT, 2)
        it.fake.faults.append(changed(prompt_tokens=len(ids) - 1))
        await play(it, ids, 1)
        assert [len(sent) for sent in seen(it.fake)] == [20, 26, 1, 32]
        assert (it.counts["bad_replies"], it.counts["retries"]) == (1, 1)


async def test_a_reply_without_the_new_ids_is_not_taken(chat_format: ChatTemplate) -> None:
    async with opened(chat_format) as it:
        ids = await play(it, PROMPT, 2)
        it.fake.faults.append(changed(prompt_token_ids=None))
        ids = await play(it, ids, 3)
        assert it.counts["bad_replies"] == 1
        it.fake.faults.append(changed(prompt_token_ids=[41]))
        with pytest.raises(BackendError, match=r"differ at token 0\. Sent \[40\]"):
            await play(it, ids, 1)


async def test_another_server_gets_the_whole_prompt(chat_format: ChatTemplate) -> None:
    async with opened(chat_format, 2) as it:
        ids = await play(it, PROMPT, 3)
        first = next(fake for fake in it.fakes if fake.calls)
        other = next(fake for fake in it.fakes if fake is not first)
        first.faults.extend([drop, drop])  # the first one may have been an idle connection
        ids = await play(it, ids, 3)
        assert [len(sent) for sent in seen(other)] == [38, 44, 1]
        assert computed_on(other)[-1] == PROMPT + [*OUTPUT, 40] * 5


async def test_a_prompt_that_does_not_go_on_is_sent_whole(chat_format: ChatTemplate) -> None:
    async with opened(chat_format) as it:
        await play(it, PROMPT, 3)
        await play(it, [*PROMPT, 5, 6, 9], 2)
        assert [len(sent) for sent in seen(it.fake)] == [20, 26, 1, 23, 1]


async def test_an_interrupted_reply_is_continued_with_a_whole_prompt(chat_format: ChatTemplate) -> None:
    half = {"finish_reason": {"type": "abort", "message": "Aborted"}, "output_ids": [5, 6], "completion_tokens": 2}
    half["output_token_logprobs"] = [[-0.25, 5, None], [-0.5, 6, None]]
    half["weight_versions"] = [{"version": "3", "start": 0, "end": 2}]
    async with opened(chat_format) as it:
        ids = await play(it, PROMPT, 2)
        it.fake.faults.append(changed(**half))
        generation = await it.backend.generate(request(ids))
        assert generation.output_ids.tolist() == [5, 6, *OUTPUT]
        await play(it, [*ids, 5, 6, *OUTPUT, 41], 1)
        assert seen(it.fake)[2:] == [[40], [*ids, 5, 6], [40, 5, 6, *OUTPUT, 41]]


async def test_servers_without_sessions_get_whole_prompts(chat_format: ChatTemplate) -> None:
    async with opened(chat_format) as it:
        it.fake.sessions = Refusing()
        await play(it, PROMPT, 12)
        twice = [size for turn in range(1, 9) for size in [20 + 6 * turn] * 2]
        assert [len(sent) for sent in seen(it.fake)] == [20, *twice, 74, 80, 86]
        assert it.counts["retries"] == 0


class Refusing(dict[str, Any]):
    """Keeps no session."""

    def __setitem__(self, name: str, requests: Any) -> None:
        pass


async def test_what_a_server_keeps_is_limited(chat_format: ChatTemplate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MOST_TOKENS", 150)
    async with opened(chat_format) as it:
        await play(it, PROMPT, 12)
        sizes = [len(sent) for sent in seen(it.fake)]
        assert sizes == [20, 26, 1, 1, 1, 1, 56, 1, 1, 74, 1, 86]
        assert sum(map(len, computed_on(it.fake))) <= 2 * 150


async def test_sessions_are_ended(chat_format: ChatTemplate) -> None:
    async with opened(chat_format) as it:
        await play(it, PROMPT, 2, episode="a")
        await play(it, PROMPT, 2, episode="b")
        assert len(it.fake.sessions) == 2
        it.backend.release("a")
        await settle(it)
        assert len(it.fake.sessions) == 1
        await it.backend.close()
        assert not it.fake.sessions


async def test_short_prompts_open_no_session(chat_format: ChatTemplate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "LEAST_TOKENS", 1000)
    async with opened(chat_format) as it:
        await play(it, PROMPT, 3)
        assert it.fake.control == []


async def test_an_image_is_sent_once_and_all_of_them_after_new_weights(vlm: Callable[[str], Path]) -> None:
    form = load_format(ModelSpec(path=str(vlm("qwen2_5_vl"))), Path())
    vision = form.vision
    assert vision is not None
    for data in (FIRST, SECOND):
        vision.bank.put(digest_of(data), data, "image/png")
    async with cluster(form, start=False, sessions=True) as it:
        it.fake.image, it.fake.keep = (vision.marker_id, 28), True
        await it.backend.start()
        it.fake.calls.clear()
        tape = Tape(placeholder=vision.placeholder_id)
        marked = form.encode("<|vision_start|><|image_pad|><|vision_end|>")
        turns: list[tuple[bytes, ...]] = [(), (FIRST,), (SECOND,), (), (FIRST, SECOND), (SECOND,), (), (FIRST,)]
        for turn, shown in enumerate(turns):
            text = [40] if turn else PROMPT
            ids, placed = vision.expand(text + marked * len(shown), [digest_of(data) for data in shown])
            tape.append("bridge" if turn else "prompt", ids, placed)
            images, spans = tape.placed_images()
            generation = await it.backend.generate(request(tape.ids, images=images, image_spans=spans, turn=turn))
            assert generation.prompt_tokens == len(tape)
            assert not generation.prompt_unchecked
            tape.append_reply(generation, turn)
            await settle(it)
            if turn == 4:
                await it.backend.control.update_weights_from_disk("weights", 1)
        bodies = [json.loads(body) for body in it.fake.calls]
        assert [len(body.get("image_data", [])) for body in bodies] == [0, 1, 1, 0, 2, 5, 5, 1]
        assert [len(body.get("mm_hashes", [])) for body in bodies] == [0, 1, 1, 0, 2, 5, 5, 1]
        assert bodies[4]["input_ids"] == [40, *marked * 2]


def test_a_router_has_no_sessions() -> None:
    with pytest.raises(ValidationError, match="remove `sessions`"):
        SGLangBackendSpec.model_validate({"urls": ["http://a"], "router": True, "sessions": True})


async def test_servers_of_several_parts_are_refused(chat_format: ChatTemplate, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = FakeSGLang._other

    def other(self: FakeSGLang, path: str, body: bytes) -> tuple[int, Any]:
        status, reply = usual(self, path, body)
        return status, {**reply, "dp_size": 2} if path == "/server_info" else reply

    monkeypatch.setattr(FakeSGLang, "_other", other)
    async with cluster(chat_format, start=False, sessions=True) as it:
        with pytest.raises(BackendError, match="--dp-size"):
            await it.backend.start()
