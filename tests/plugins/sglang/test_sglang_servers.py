"""The SGLang backend with several servers, and what it checks at the start."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from bad_replies import BROKEN, SERVER_ERRORS
from generate_requests import generate_request as request
from sglang_cluster import OUTPUT, Call, answers, cluster

from engine.errors import BackendError
from engine.plugins.sglang.client import SGLangBackend
from engine.plugins.sglang.spec import SGLangBackendSpec
from engine.schemas.generation import SamplingParams, VersionSpan
from engine.tokens.template import ChatTemplate


async def test_episodes_stay_where_they_are_and_new_ones_go_where_least_is_going_on(chat_format: ChatTemplate) -> None:
    async with cluster(chat_format, 2) as it:
        for fake in it.fakes:
            fake.latency = 0.05
        for _ in range(3):
            await asyncio.gather(*(it.backend.generate(request(episode=f"e{n}")) for n in range(8)))
        assert [fake.requests for fake in it.fakes] == [12, 12]
        assert [server["episodes"] for server in it.counts["servers"]] == [4, 4]
        assert it.counts["failovers"] == 0


@pytest.mark.parametrize("fault", [*BROKEN.values(), SERVER_ERRORS["500"]], ids=[*BROKEN, "500"])
async def test_what_one_server_fails_another_answers(chat_format: ChatTemplate, fault: Callable[[Call], Any]) -> None:
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


async def test_a_server_that_dies_loses_nothing_and_nothing_is_counted_twice(chat_format: ChatTemplate) -> None:
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
async def test_a_server_that_hangs_is_found_out_while_others_go_on(chat_format: ChatTemplate) -> None:
    async with cluster(chat_format, 2, health_timeout=0.3) as it:
        await it.backend.generate(request(episode="a"))
        await it.backend.generate(request(episode="b"))
        it.fakes[0].hung = True
        generations = await asyncio.gather(*(it.backend.generate(request(episode=name)) for name in "ab"))
        assert [g.output_ids.tolist() for g in generations] == [OUTPUT] * 2
        assert [server["healthy"] for server in it.counts["servers"]] == [False, True]
        assert it.counts["timeouts"] == 0


async def test_a_slow_server_is_not_taken_for_a_hanging_one(chat_format: ChatTemplate) -> None:
    async with cluster(chat_format, 2, health_timeout=0.1) as it:
        for fake in it.fakes:
            fake.latency = 0.6
        await it.backend.generate(request())
        assert [server["healthy"] for server in it.counts["servers"]] == [True, True]
        assert it.counts["attempts"] == 1


async def test_a_server_that_comes_back_is_used_again(chat_format: ChatTemplate) -> None:
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


async def test_a_server_that_comes_back_with_old_weights_is_given_the_new_ones(chat_format: ChatTemplate) -> None:
    async with cluster(chat_format, 2) as it:
        await it.backend.control.update_weights_from_disk("/w/7", 7)
        assert [fake.weight_version for fake in it.fakes] == ["7", "7"]
        it.fakes[0].weight_version = "default"  # as one that was started anew
        generations = await asyncio.gather(*(it.backend.generate(request(episode=f"e{n}")) for n in range(4)))
        assert [g.versions for g in generations] == [[VersionSpan(version=7, start=0, end=5)]] * 4
        await it.healed()
        assert it.fakes[0].weight_version == "7"


async def test_an_update_pauses_loads_and_goes_on_in_this_order(chat_format: ChatTemplate) -> None:
    async with cluster(chat_format, 2) as it:
        await it.backend.control.update_weights_from_disk("/w/1", 1)
        await it.backend.control.update_weights_from_disk("/w/2", 2, mode="in_place")
        goes_on = ("/continue_generation", {"torch_empty_cache": False})
        first = {"model_path": "/w/1", "weight_version": "1", "flush_cache": True}
        second = {"model_path": "/w/2", "weight_version": "2", "flush_cache": False}
        for fake in it.fakes:
            assert fake.control == [
                ("/pause_generation", {"mode": "retract"}),
                ("/update_weights_from_disk", first),
                goes_on,
                ("/pause_generation", {"mode": "in_place"}),
                ("/update_weights_from_disk", second),
                goes_on,
            ]


async def test_adapters_are_loaded_everywhere_and_named_in_requests(chat_format: ChatTemplate) -> None:
    async with cluster(chat_format, 2) as it:
        await it.backend.control.load_adapter("tutor", "/a/tutor")
        assert list(it.backend.control.adapters) == ["tutor"]
        load = ("/load_lora_adapter", {"lora_name": "tutor", "lora_path": "/a/tutor"})
        assert [fake.control for fake in it.fakes] == [[load]] * 2
        it.fake.keep = it.fakes[1].keep = True
        await it.backend.generate(request(adapter="tutor"))
        await it.backend.generate(request())
        sent = [json.loads(body) for fake in it.fakes for body in fake.calls]
        assert [body.get("lora_path") for body in sent] == ["tutor", None]
        await it.backend.control.unload_adapter("tutor")
        assert list(it.backend.control.adapters) == []


async def test_a_server_that_is_not_there_yet_is_left_out_and_joins_later(chat_format: ChatTemplate) -> None:
    async with cluster(chat_format, 2, start=False) as it:
        port = int(it.urls[0].rpartition(":")[2])
        await it.fakes[0].stop()
        await it.backend.start()
        assert [server["healthy"] for server in it.counts["servers"]] == [False, True]
        await it.backend.generate(request())
        await it.fakes[0].start(port=port)
        await it.healed()


async def test_no_server_at_all_is_an_error_that_names_them(chat_format: ChatTemplate) -> None:
    async with cluster(chat_format, 2, start=False) as it:
        for fake in it.fakes:
            await fake.stop()
        with pytest.raises(BackendError, match="no SGLang server can be reached") as caught:
            await it.backend.start()
        assert all(url in str(caught.value) for url in it.urls)


async def test_another_tokenizer_is_found_at_the_start(chat_format: ChatTemplate) -> None:
    async with cluster(chat_format, start=False) as it:
        it.fake.tokenize = lambda text: [1, 2, 3]
        with pytest.raises(BackendError, match="has another tokenizer than the spec's model") as caught:
            await it.backend.start()
        assert caught.value.kind == "wrong_server"


async def test_sampling_that_the_server_refuses_is_found_at_the_start(chat_format: ChatTemplate) -> None:
    async with cluster(chat_format, start=False) as it:
        it.fake.faults.append(answers(b'{"error":"unknown field `foo`"}', 400))
        with pytest.raises(BackendError, match=r"refuses this spec's sampling .400.: unknown field `foo`") as caught:
            await it.backend.start()
        assert caught.value.kind == "bad_sampling"


async def test_a_server_that_does_not_echo_prompts_is_refused_at_the_start(chat_format: ChatTemplate) -> None:
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


async def test_min_p_is_refused_where_it_would_end_the_server(chat_format: ChatTemplate) -> None:
    async with cluster(chat_format, start=False, sampling=SamplingParams(min_p=0.1)) as it:
        it.fake.seeded = True
        with pytest.raises(BackendError, match="enable-deterministic-inference"):
            await it.backend.start()


async def test_seeds_are_sent_where_they_count(chat_format: ChatTemplate) -> None:
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


async def test_something_else_that_listens_there_is_refused(chat_format: ChatTemplate) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        await writer.drain()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    backend = SGLangBackend(SGLangBackendSpec(urls=[url]), chat_format, sampling=SamplingParams(), model="fake")
    with pytest.raises(BackendError, match="is no SGLang server"):
        await backend.start()
    await backend.close()
    server.close()


async def test_features_of_images_do_not_outlive_the_weights_that_computed_them(chat_format: ChatTemplate) -> None:
    async with cluster(chat_format) as it:
        control = it.backend.control
        names = [control.features]
        for version, mode in ((1, "retract"), (1, "in_place"), (2, "abort")):
            await control.update_weights_from_disk(f"/w/{version}", version, mode=mode)
            names.append(control.features)
        assert len(set(names)) == 4
    async with cluster(chat_format, start=False) as it:  # a server that an earlier training gave weights
        it.fake.weight_version = "2"
        await it.backend.start()
        assert it.backend.control.features not in names
