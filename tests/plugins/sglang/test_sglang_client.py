"""The SGLang backend against servers that misbehave, one way at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from bad_replies import BAD_REPLIES, BROKEN, SERVER_ERRORS
from generate_requests import generate_request as request
from sglang_cluster import OUTPUT, Call, answers, changed, cluster

from engine.backends.backend import SlotSampler
from engine.backends.slots import Slots
from engine.errors import BackendError, ContextOverflow
from engine.schemas.generation import FinishReason, SamplingParams, VersionSpan
from engine.tokens.template import ChatTemplate


async def test_a_reply_is_handed_on_whole(chat_format: ChatTemplate) -> None:
    async with cluster(chat_format) as it:
        generation = await it.backend.generate(request())
        assert generation.output_ids.tolist() == OUTPUT
        assert generation.logprobs.tolist() == pytest.approx(it.fake.logprobs, abs=1e-6)
        assert generation.finish == FinishReason(type="stop", matched=2)
        assert generation.versions == [VersionSpan(version=0, start=0, end=5)]
        assert it.counts["certificate"] == {"turns_checked": 1, "turns_unchecked": 0, "prompt_mismatches": 0}
        assert (it.counts["attempts"], it.counts["turns"], it.counts["tokens"]) == (1, 1, 5)
        assert it.backend.context == 4090


@pytest.mark.parametrize("fault", [*BAD_REPLIES.values(), *SERVER_ERRORS.values()], ids=[*BAD_REPLIES, *SERVER_ERRORS])
@pytest.mark.usefixtures("short_pauses")
async def test_another_try_follows_a_reply_that_cannot_be_used(
    chat_format: ChatTemplate, fault: Callable[[Call], Any]
) -> None:
    async with cluster(chat_format) as it:
        it.fake.faults.append(fault)
        generation = await it.backend.generate(request())
        assert generation.output_ids.tolist() == OUTPUT
        assert (it.counts["turns"], it.counts["attempts"], it.counts["retries"]) == (1, 2, 1)
        assert it.fake.requests == 2 + it.counts["servers"][0].get("rejoined", 0)  # one that comes back is tried out


@pytest.mark.parametrize("fault", list(BROKEN.values()), ids=list(BROKEN))
@pytest.mark.usefixtures("short_pauses")
async def test_another_try_follows_a_broken_connection(chat_format: ChatTemplate, fault: Callable[[Call], Any]) -> None:
    async with cluster(chat_format) as it:
        it.fake.faults += [fault, fault]  # a connection that was used before is tried twice
        generation = await it.backend.generate(request())
        assert generation.output_ids.tolist() == OUTPUT
        assert (it.counts["turns"], it.counts["tokens"]) == (1, 5)
        assert it.counts["certificate"]["turns_checked"] == 1


@pytest.mark.usefixtures("short_pauses")
async def test_tries_have_a_cap(chat_format: ChatTemplate) -> None:
    async with cluster(chat_format, retries=2) as it:
        it.fake.faults += [answers(b"no", 500)] * 3
        with pytest.raises(BackendError, match="answered 500: no") as caught:
            await it.backend.generate(request())
        assert (caught.value.kind, caught.value.retryable) == ("server_error", True)
        assert it.fake.requests == 3
        assert (await it.backend.generate(request())).output_ids.tolist() == OUTPUT


async def test_another_prompt_is_an_error_at_once(chat_format: ChatTemplate) -> None:
    async with cluster(chat_format) as it:
        it.fake.faults.append(changed(prompt_token_ids=[1, 22, 334]))
        with pytest.raises(BackendError, match=r"differ at token 2\. Sent \[1, 22, 333\]") as caught:
            await it.backend.generate(request())
        assert (caught.value.kind, caught.value.retryable) == ("prompt_mismatch", False)
        assert it.fake.requests == 1
        assert it.counts["certificate"] == {"turns_checked": 0, "turns_unchecked": 0, "prompt_mismatches": 1}


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, b'{"error":"unknown field `foo`"}', "bad_request"),
        (400, b'{"object":"error","message":"schema"}', "bad_request"),
        (401, b'{"error":"Unauthorized"}', "unauthorized"),
        (404, b'{"detail":"Not Found"}', "not_found"),
        (422, b"{}", "bad_request"),
    ],
)
async def test_what_the_client_did_wrong_is_not_tried_again(
    chat_format: ChatTemplate, status: int, body: bytes, kind: str
) -> None:
    async with cluster(chat_format) as it:
        it.fake.faults.append(answers(body, status))
        with pytest.raises(BackendError) as caught:
            await it.backend.generate(request())
        assert (caught.value.kind, caught.value.retryable, it.fake.requests) == (kind, False, 1)


@pytest.mark.parametrize(
    "message",
    [
        "The input (4450 tokens) is longer than the model's context length (4096 tokens).",
        "Requested token count exceeds the model's maximum context length of 4096 tokens.",
        "Input length (4090 tokens) exceeds the maximum allowed length (4090 tokens).",
    ],
)
async def test_too_long_a_prompt_is_a_limit(chat_format: ChatTemplate, message: str) -> None:
    async with cluster(chat_format) as it:
        it.fake.faults.append(answers(json.dumps({"error": {"message": message}}).encode(), 400))
        with pytest.raises(ContextOverflow):
            await it.backend.generate(request())


async def test_a_prompt_that_no_server_takes_is_not_sent(chat_format: ChatTemplate) -> None:
    async with cluster(chat_format) as it:
        with pytest.raises(ContextOverflow, match="4090 tokens; the servers take fewer than 4090"):
            await it.backend.generate(request([5] * 4090))
        assert it.fake.requests == 0


async def test_an_id_that_would_end_the_server_is_not_sent(chat_format: ChatTemplate) -> None:
    async with cluster(chat_format) as it:
        with pytest.raises(BackendError, match=r"\[0, 1000\)"):
            await it.backend.generate(request([1, 1000]))
        assert it.fake.requests == 0


async def test_a_deadline_ends_a_request_and_its_work(chat_format: ChatTemplate) -> None:
    async with cluster(chat_format, timeout=0.3) as it:
        it.fake.latency = 30
        with pytest.raises(BackendError, match=r"no reply within 0\.3 s") as caught:
            await it.backend.generate(request())
        assert caught.value.kind == "timeout"
        await asyncio.sleep(0.1)
        assert (len(it.fake.aborted), it.fake.running) == (1, {})


async def test_a_cancelled_request_is_stopped_on_the_server(chat_format: ChatTemplate) -> None:
    async with cluster(chat_format) as it:
        it.fake.latency = 30
        tasks = [asyncio.create_task(it.backend.generate(request(episode=str(n)))) for n in range(3)]
        await asyncio.sleep(0.1)
        running = list(it.fake.running)
        tasks[1].cancel()
        await asyncio.wait([tasks[1]])
        await asyncio.sleep(0.1)
        assert tasks[1].cancelled()
        assert (it.fake.aborted, list(it.fake.running)) == ([running[1]], [running[0], running[2]])
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_closing_leaves_no_abort_behind_that_nobody_answers(
    chat_format: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.plugins.servers.backend.ABORT_SECONDS", 0.05)
    async with cluster(chat_format) as it:
        it.fake.latency = 30
        task = asyncio.create_task(it.backend.generate(request()))
        await asyncio.sleep(0.1)
        it.fake.hung = True
        await it.backend.close()
        await asyncio.wait([task])
        assert isinstance(task.exception(), BackendError)
        names = {task.get_coro().__qualname__ for task in asyncio.all_tasks()}  # type: ignore[union-attr]
        assert not {name for name in names if name.startswith(("SGLangBackend.", "Pool."))}


async def test_closing_stops_everything_and_fails_what_waits(chat_format: ChatTemplate) -> None:
    async with cluster(chat_format) as it:
        it.fake.latency = 30
        tasks = [asyncio.create_task(it.backend.generate(request(episode=str(n)))) for n in range(3)]
        await asyncio.sleep(0.1)
        await it.backend.close()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, BackendError)
        assert (len(set(it.fake.aborted)), it.fake.running) == (3, {})
        with pytest.raises(BackendError, match="closed"):
            await it.backend.generate(request())


async def test_no_name_of_a_request_begins_with_anothers(chat_format: ChatTemplate) -> None:
    """SGLang aborts every request whose name begins with the one that it is given."""
    async with cluster(chat_format) as it:
        it.fake.keep = True
        for _ in range(20):
            await it.backend.generate(request())
        names = [json.loads(body)["rid"] for body in it.fake.calls]
        assert len(set(names)) == 20
        assert {len(name) for name in names} == {28}


async def test_an_interrupted_reply_goes_on_from_its_tokens(chat_format: ChatTemplate) -> None:
    half = {"finish_reason": {"type": "abort", "message": "Aborted"}, "output_ids": [5, 6], "completion_tokens": 2}
    half["output_token_logprobs"] = [[-0.25, 5, None], [-0.5, 6, None]]
    half["weight_versions"] = [{"version": "3", "start": 0, "end": 2}]
    async with cluster(chat_format) as it:
        it.fake.keep = True
        it.fake.weight_version = "4"
        it.fake.faults.append(changed(**half))
        generation = await it.backend.generate(request())
        first, second = (json.loads(body) for body in it.fake.calls)
        assert first["input_ids"] == [1, 22, 333]
        assert second["input_ids"] == [1, 22, 333, 5, 6]
        assert (first["sampling_params"]["max_new_tokens"], second["sampling_params"]["max_new_tokens"]) == (8, 6)
        assert generation.output_ids.tolist() == [5, 6, *OUTPUT]
        assert generation.logprobs[:2].tolist() == [-0.25, -0.5]
        assert generation.versions == [VersionSpan(version=3, start=0, end=2), VersionSpan(version=4, start=2, end=7)]
        assert generation.finish == FinishReason(type="stop", matched=2)
        assert (generation.prompt_tokens, it.counts["interruptions"], it.counts["turns"], it.counts["tokens"]) == (
            3,
            1,
            1,
            7,
        )


async def test_an_interrupted_reply_with_a_grammar_begins_anew(chat_format: ChatTemplate) -> None:
    half = {"finish_reason": {"type": "abort"}, "output_ids": [5], "completion_tokens": 1, "weight_versions": []}
    half["output_token_logprobs"] = [[-0.25, 5, None]]
    async with cluster(chat_format) as it:
        it.fake.keep = True
        it.fake.faults.append(changed(**half))
        generation = await it.backend.generate(request(sampling=SamplingParams(regex="a")))
        assert [json.loads(body)["input_ids"] for body in it.fake.calls] == [[1, 22, 333]] * 2
        assert generation.output_ids.tolist() == OUTPUT


async def test_an_interruption_is_reported_where_the_spec_says_so(chat_format: ChatTemplate) -> None:
    half = {
        "finish_reason": {"type": "abort", "message": "Aborted"},
        "output_ids": [5],
        "completion_tokens": 1,
        "weight_versions": [],
    }
    half["output_token_logprobs"] = [[-0.25, 5, None]]
    async with cluster(chat_format, interrupted="report") as it:
        it.fake.faults.append(changed(**half))
        generation = await it.backend.generate(request())
        assert generation.finish == FinishReason(type="abort", message="Aborted")
        assert generation.output_ids.tolist() == [5]


async def test_an_interruption_at_the_last_token_is_a_reply_of_full_length(chat_format: ChatTemplate) -> None:
    half = {"finish_reason": {"type": "abort"}, "output_ids": [5, 6], "completion_tokens": 2, "weight_versions": []}
    half["output_token_logprobs"] = [[-0.25, 5, None], [-0.25, 6, None]]
    async with cluster(chat_format) as it:
        it.fake.faults.append(changed(**half))
        generation = await it.backend.generate(request(max_new_tokens=2))
        assert (generation.output_ids.tolist(), generation.finish) == ([5, 6], FinishReason(type="length"))
        assert it.fake.requests == 1


@pytest.mark.parametrize(("more", "checked"), [(0, True), (1, False)])
async def test_replies_are_checked_again_where_the_server_has_more_ids_than_the_model(
    chat_format: ChatTemplate, more: int, checked: bool
) -> None:
    async with cluster(chat_format, start=False) as it:
        it.fake.vocab_size = chat_format.vocab_size + more
        assert it.backend.checks_replies is False
        await it.backend.start()
        assert it.backend.checks_replies is checked
        assert SlotSampler(it.backend, Slots(1)).checks_replies is checked
