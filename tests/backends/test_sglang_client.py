"""The SGLang backend against servers that misbehave, one way at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sglang_cluster import OUTPUT, Call, answers, changed, cluster, request

from engine.backends.sglang.client import SGLangBackend
from engine.errors import BackendError, ContextOverflow
from engine.schemas.backend import SGLangBackendSpec
from engine.schemas.generation import FinishReason, SamplingParams, VersionSpan
from engine.schemas.model import ModelSpec
from engine.tokens.format import ChatFormat
from engine.tokens.loading import load_format


@pytest.fixture(scope="module")
def chat_format(tiny_model_dir: Path) -> ChatFormat:
    return load_format(ModelSpec(path=str(tiny_model_dir)), tiny_model_dir)


# -- one server


async def test_a_reply_is_handed_on_whole(chat_format: ChatFormat) -> None:
    async with cluster(chat_format) as it:
        generation = await it.backend.generate(request())
        assert generation.output_ids.tolist() == OUTPUT
        assert generation.logprobs.tolist() == pytest.approx(it.fake.logprobs, abs=1e-6)
        assert generation.finish == FinishReason(type="stop", matched=2)
        assert generation.versions == [VersionSpan(version=0, start=0, end=5)]
        assert it.counts["certificate"] == {"turns_checked": 1, "turns_unchecked": 0, "prompt_mismatches": 0}
        assert (it.counts["attempts"], it.counts["turns"], it.counts["tokens"]) == (1, 1, 5)
        assert it.backend.context == 4090


async def drop(call: Call) -> None:
    call.drop()


async def drop_inside_the_body(call: Call) -> None:
    body = call.reply()
    call.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body[: len(body) // 2]))
    await asyncio.sleep(0.01)
    call.drop()


async def promise_more_than_is_sent(call: Call) -> None:
    body = call.reply()
    call.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body) + 10, body))
    await asyncio.sleep(0.01)
    call.drop()


async def promise_less_than_is_sent(call: Call) -> None:
    body = call.reply()
    call.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body) - 10, body))


async def speak_no_http(call: Call) -> None:
    call.send(b"I am not a web server\r\n\r\n")


TOO_MANY = [[-0.5, token, None] for token in [*OUTPUT, 2]]
BAD_REPLIES = {
    "no JSON": answers(b"<html>"),
    "cut JSON": answers(b'{"output_ids":[5,6'),
    "wrong shape": answers(b'{"output_ids":"abc","meta_info":{}}'),
    "empty": answers(b""),
    "too many log-probs": changed(output_token_logprobs=TOO_MANY),
    "no log-probs": changed(output_token_logprobs=[]),
    "null log-prob": changed(output_token_logprobs=[[None, token, None] for token in OUTPUT]),
    "wrong length": changed(completion_tokens=4),
    "wrong prompt length": changed(prompt_tokens=2),
    "another's reply": changed(id="another"),
    "too long a body": promise_less_than_is_sent,
}
BROKEN = {
    "dropped": drop,
    "dropped inside the body": drop_inside_the_body,
    "too short a body": promise_more_than_is_sent,
    "no HTTP": speak_no_http,
}
SERVER_ERRORS = {
    "500": answers(b"Internal Server Error", 500),
    "502": answers(b'{"error":{"message":"bad gateway"}}', 502),
    "429": answers(b'{"error":"slow down"}', 429),
}


@pytest.mark.parametrize("fault", [*BAD_REPLIES.values(), *SERVER_ERRORS.values()], ids=[*BAD_REPLIES, *SERVER_ERRORS])
@pytest.mark.usefixtures("short_pauses")
async def test_another_try_follows_a_reply_that_cannot_be_used(
    chat_format: ChatFormat, fault: Callable[[Call], Any]
) -> None:
    async with cluster(chat_format) as it:
        it.fake.faults.append(fault)
        generation = await it.backend.generate(request())
        assert generation.output_ids.tolist() == OUTPUT
        assert (it.counts["turns"], it.counts["attempts"], it.counts["retries"]) == (1, 2, 1)
        assert it.fake.requests == 2 + it.counts["servers"][0].get("rejoined", 0)  # one that comes back is tried out


@pytest.mark.parametrize("fault", list(BROKEN.values()), ids=list(BROKEN))
@pytest.mark.usefixtures("short_pauses")
async def test_another_try_follows_a_broken_connection(chat_format: ChatFormat, fault: Callable[[Call], Any]) -> None:
    async with cluster(chat_format) as it:
        it.fake.faults += [fault, fault]  # a connection that was used before is tried twice
        generation = await it.backend.generate(request())
        assert generation.output_ids.tolist() == OUTPUT
        assert (it.counts["turns"], it.counts["tokens"]) == (1, 5)
        assert it.counts["certificate"]["turns_checked"] == 1


@pytest.mark.usefixtures("short_pauses")
async def test_tries_have_a_cap(chat_format: ChatFormat) -> None:
    async with cluster(chat_format, retries=2) as it:
        it.fake.faults += [answers(b"no", 500)] * 3
        with pytest.raises(BackendError, match="answered 500: no") as caught:
            await it.backend.generate(request())
        assert (caught.value.kind, caught.value.retryable) == ("server_error", True)
        assert it.fake.requests == 3
        assert (await it.backend.generate(request())).output_ids.tolist() == OUTPUT


async def test_another_prompt_is_an_error_at_once(chat_format: ChatFormat) -> None:
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
    chat_format: ChatFormat, status: int, body: bytes, kind: str
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
async def test_too_long_a_prompt_is_a_limit(chat_format: ChatFormat, message: str) -> None:
    async with cluster(chat_format) as it:
        it.fake.faults.append(answers(json.dumps({"error": {"message": message}}).encode(), 400))
        with pytest.raises(ContextOverflow):
            await it.backend.generate(request())


async def test_a_prompt_that_no_server_takes_is_not_sent(chat_format: ChatFormat) -> None:
    async with cluster(chat_format) as it:
        with pytest.raises(ContextOverflow, match="4090 tokens; the servers take fewer than 4090"):
            await it.backend.generate(request([5] * 4090))
        assert it.fake.requests == 0


async def test_an_id_that_would_end_the_server_is_not_sent(chat_format: ChatFormat) -> None:
    async with cluster(chat_format) as it:
        with pytest.raises(BackendError, match=r"\[0, 1000\)"):
            await it.backend.generate(request([1, 1000]))
        assert it.fake.requests == 0


async def test_a_deadline_ends_a_request_and_its_work(chat_format: ChatFormat) -> None:
    async with cluster(chat_format, timeout=0.3) as it:
        it.fake.latency = 30
        with pytest.raises(BackendError, match=r"no reply within 0\.3 s") as caught:
            await it.backend.generate(request())
        assert caught.value.kind == "timeout"
        await asyncio.sleep(0.1)
        assert (len(it.fake.aborted), it.fake.running) == (1, {})


async def test_a_cancelled_request_is_stopped_on_the_server(chat_format: ChatFormat) -> None:
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
    chat_format: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.backends.servers.attempts.ABORT_SECONDS", 0.05)
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


async def test_closing_stops_everything_and_fails_what_waits(chat_format: ChatFormat) -> None:
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


async def test_no_name_of_a_request_begins_with_anothers(chat_format: ChatFormat) -> None:
    """SGLang aborts every request whose name begins with the one that it is given."""
    async with cluster(chat_format) as it:
        it.fake.keep = True
        for _ in range(20):
            await it.backend.generate(request())
        names = [json.loads(body)["rid"] for body in it.fake.calls]
        assert len(set(names)) == 20
        assert {len(name) for name in names} == {28}


async def test_an_interrupted_reply_goes_on_from_its_tokens(chat_format: ChatFormat) -> None:
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


async def test_an_interrupted_reply_with_a_grammar_begins_anew(chat_format: ChatFormat) -> None:
    half = {"finish_reason": {"type": "abort"}, "output_ids": [5], "completion_tokens": 1, "weight_versions": []}
    half["output_token_logprobs"] = [[-0.25, 5, None]]
    async with cluster(chat_format) as it:
        it.fake.keep = True
        it.fake.faults.append(changed(**half))
        generation = await it.backend.generate(request(sampling=SamplingParams(regex="a")))
        assert [json.loads(body)["input_ids"] for body in it.fake.calls] == [[1, 22, 333]] * 2
        assert generation.output_ids.tolist() == OUTPUT


async def test_an_interruption_is_reported_where_the_spec_says_so(chat_format: ChatFormat) -> None:
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


async def test_an_interruption_at_the_last_token_is_a_reply_of_full_length(chat_format: ChatFormat) -> None:
    half = {"finish_reason": {"type": "abort"}, "output_ids": [5, 6], "completion_tokens": 2, "weight_versions": []}
    half["output_token_logprobs"] = [[-0.25, 5, None], [-0.25, 6, None]]
    async with cluster(chat_format) as it:
        it.fake.faults.append(changed(**half))
        generation = await it.backend.generate(request(max_new_tokens=2))
        assert (generation.output_ids.tolist(), generation.finish) == ([5, 6], FinishReason(type="length"))
        assert it.fake.requests == 1


# -- several servers


async def test_episodes_stay_where_they_are_and_new_ones_go_where_least_is_going_on(chat_format: ChatFormat) -> None:
    async with cluster(chat_format, 2) as it:
        for fake in it.fakes:
            fake.latency = 0.05
        for _ in range(3):
            await asyncio.gather(*(it.backend.generate(request(episode=f"e{n}")) for n in range(8)))
        assert [fake.requests for fake in it.fakes] == [12, 12]
        assert [server["episodes"] for server in it.counts["servers"]] == [4, 4]
        assert it.counts["failovers"] == 0


@pytest.mark.parametrize("fault", [*BROKEN.values(), SERVER_ERRORS["500"]], ids=[*BROKEN, "500"])
async def test_what_one_server_fails_another_answers(chat_format: ChatFormat, fault: Callable[[Call], Any]) -> None:
    async with cluster(chat_format, 2) as it:
        it.fakes[0].keep = it.fakes[1].keep = True
        await it.backend.generate(request())
        own = next(fake for fake in it.fakes if fake.requests)
        other = next(fake for fake in it.fakes if not fake.requests)
        own.faults += [fault, fault]
        generation = await it.backend.generate(request([1, 22, 333, *OUTPUT, 9]))
        assert generation.output_ids.tolist() == OUTPUT
        assert json.loads(other.calls[0])["input_ids"] == [1, 22, 333, *OUTPUT, 9]
        assert (it.counts["turns"], it.counts["tokens"], it.counts["failovers"]) == (2, 10, 1)


async def test_a_server_that_dies_loses_nothing_and_nothing_is_counted_twice(chat_format: ChatFormat) -> None:
    async with cluster(chat_format, 2) as it:
        for fake in it.fakes:
            fake.latency = 0.2
        tasks = [asyncio.create_task(it.backend.generate(request(episode=f"e{n}"))) for n in range(20)]
        await asyncio.sleep(0.1)
        await it.fakes[0].stop()
        generations = await asyncio.gather(*tasks)
        assert [g.output_ids.tolist() for g in generations] == [OUTPUT] * 20
        assert (it.counts["turns"], it.counts["tokens"], it.counts["failovers"]) == (20, 100, 10)
        assert [server["healthy"] for server in it.counts["servers"]] == [False, True]
        assert [server["in_flight"] for server in it.counts["servers"]] == [0, 0]


@pytest.mark.slow
async def test_a_server_that_hangs_is_found_out_while_others_go_on(chat_format: ChatFormat) -> None:
    async with cluster(chat_format, 2, health_timeout=0.3) as it:
        await it.backend.generate(request(episode="a"))
        await it.backend.generate(request(episode="b"))
        it.fakes[0].hung = True
        generations = await asyncio.gather(*(it.backend.generate(request(episode=name)) for name in "ab"))
        assert [g.output_ids.tolist() for g in generations] == [OUTPUT] * 2
        assert [server["healthy"] for server in it.counts["servers"]] == [False, True]
        assert it.counts["timeouts"] == 0


async def test_a_slow_server_is_not_taken_for_a_hanging_one(chat_format: ChatFormat) -> None:
    async with cluster(chat_format, 2, health_timeout=0.1) as it:
        for fake in it.fakes:
            fake.latency = 0.6
        await it.backend.generate(request())
        assert [server["healthy"] for server in it.counts["servers"]] == [True, True]
        assert it.counts["attempts"] == 1


async def test_a_server_that_comes_back_is_used_again(chat_format: ChatFormat) -> None:
    async with cluster(chat_format, 2) as it:
        port = int(it.urls[0].rpartition(":")[2])
        await it.fakes[0].stop()
        await asyncio.gather(*(it.backend.generate(request(episode=f"e{n}")) for n in range(4)))
        assert it.counts["servers"][0]["healthy"] is False
        await it.fakes[0].start(port=port)
        await it.healed()
        it.fakes[0].requests = 0
        await asyncio.gather(*(it.backend.generate(request(episode=f"f{n}")) for n in range(4)))
        assert it.fakes[0].requests > 0
        assert it.counts["servers"][0]["rejoined"] == 1


async def test_a_server_that_comes_back_with_old_weights_is_given_the_new_ones(chat_format: ChatFormat) -> None:
    async with cluster(chat_format, 2) as it:
        await it.backend.control.update_weights_from_disk("/w/7", 7)
        assert [fake.weight_version for fake in it.fakes] == ["7", "7"]
        it.fakes[0].weight_version = "default"  # as one that was started anew
        generations = await asyncio.gather(*(it.backend.generate(request(episode=f"e{n}")) for n in range(4)))
        assert [g.versions for g in generations] == [[VersionSpan(version=7, start=0, end=5)]] * 4
        await it.healed()
        assert it.fakes[0].weight_version == "7"


async def test_an_update_pauses_loads_and_goes_on_in_this_order(chat_format: ChatFormat) -> None:
    async with cluster(chat_format, 2) as it:
        await it.backend.control.update_weights_from_disk("/w/1", 1)
        await it.backend.control.update_weights_from_disk("/w/2", 2, mode="in_place", load_format="safetensors")
        goes_on = ("/continue_generation", {"torch_empty_cache": False})
        first = {"model_path": "/w/1", "weight_version": "1", "flush_cache": True}
        second = {"model_path": "/w/2", "weight_version": "2", "flush_cache": False, "load_format": "safetensors"}
        for fake in it.fakes:
            assert fake.control == [
                ("/pause_generation", {"mode": "retract"}),
                ("/update_weights_from_disk", first),
                goes_on,
                ("/pause_generation", {"mode": "in_place"}),
                ("/update_weights_from_disk", second),
                goes_on,
            ]


async def test_adapters_are_loaded_everywhere_and_named_in_requests(chat_format: ChatFormat) -> None:
    async with cluster(chat_format, 2) as it:
        await it.backend.control.load_adapter("tutor", "/a/tutor")
        assert it.backend.control.adapters == ["tutor"]
        load = ("/load_lora_adapter", {"lora_name": "tutor", "lora_path": "/a/tutor", "pinned": False})
        assert [fake.control for fake in it.fakes] == [[load]] * 2
        it.fake.keep = it.fakes[1].keep = True
        await it.backend.generate(request(adapter="tutor"))
        await it.backend.generate(request())
        sent = [json.loads(body) for fake in it.fakes for body in fake.calls]
        assert [body.get("lora_path") for body in sent] == ["tutor", None]
        await it.backend.control.unload_adapter("tutor")
        assert it.backend.control.adapters == []


# -- the start


async def test_a_server_that_is_not_there_yet_is_left_out_and_joins_later(chat_format: ChatFormat) -> None:
    async with cluster(chat_format, 2, start=False) as it:
        port = int(it.urls[0].rpartition(":")[2])
        await it.fakes[0].stop()
        await it.backend.start()
        assert [server["healthy"] for server in it.counts["servers"]] == [False, True]
        await it.backend.generate(request())
        await it.fakes[0].start(port=port)
        await it.healed()


async def test_no_server_at_all_is_an_error_that_names_them(chat_format: ChatFormat) -> None:
    async with cluster(chat_format, 2, start=False) as it:
        for fake in it.fakes:
            await fake.stop()
        with pytest.raises(BackendError, match="no sglang server can be reached") as caught:
            await it.backend.start()
        assert all(url in str(caught.value) for url in it.urls)


async def test_another_tokenizer_is_found_at_the_start(chat_format: ChatFormat) -> None:
    async with cluster(chat_format, start=False) as it:
        it.fake.tokenize = lambda text: [1, 2, 3]
        with pytest.raises(BackendError, match="has another tokenizer than the spec's model") as caught:
            await it.backend.start()
        assert caught.value.kind == "wrong_server"


async def test_sampling_that_the_server_refuses_is_found_at_the_start(chat_format: ChatFormat) -> None:
    async with cluster(chat_format, start=False) as it:
        it.fake.faults.append(answers(b'{"error":"unknown field `foo`"}', 400))
        with pytest.raises(BackendError, match=r"refuses this spec's sampling .400.: unknown field `foo`") as caught:
            await it.backend.start()
        assert caught.value.kind == "bad_sampling"


async def test_a_server_that_does_not_echo_prompts_is_refused_at_the_start(chat_format: ChatFormat) -> None:
    async def without_echo(call: Call) -> None:
        data = json.loads(call.reply())
        del data["prompt_token_ids"]
        call.answer(json.dumps(data).encode())

    async with cluster(chat_format, start=False) as it:
        it.fake.faults.append(without_echo)
        with pytest.raises(
            BackendError, match=r"does not report the prompt that it computed on .*`backend.unchecked_prompts: allow`"
        ):
            await it.backend.start()


async def test_min_p_is_refused_where_it_would_end_the_server(chat_format: ChatFormat) -> None:
    async with cluster(chat_format, start=False, sampling=SamplingParams(min_p=0.1)) as it:
        it.fake.seeded = True
        with pytest.raises(BackendError, match="enable-deterministic-inference"):
            await it.backend.start()


async def test_seeds_are_sent_where_they_count(chat_format: ChatFormat) -> None:
    for seeded in (False, True):
        async with cluster(chat_format, start=False) as it:
            it.fake.seeded = seeded
            await it.backend.start()
            it.fake.keep = True
            await it.backend.generate(request(seed=2**63 - 1))
            assert json.loads(it.fake.calls[0])["sampling_params"].get("sampling_seed") == (
                2**63 - 1 if seeded else None
            )
            assert it.counts["seeded"] is seeded


async def test_something_else_that_listens_there_is_refused(chat_format: ChatFormat) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        await writer.drain()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    backend = SGLangBackend(SGLangBackendSpec(urls=[url]), chat_format, sampling=SamplingParams(), model="fake")
    with pytest.raises(BackendError, match="is no sglang server"):
        await backend.start()
    await backend.close()
    server.close()
