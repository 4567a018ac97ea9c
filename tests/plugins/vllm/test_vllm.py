"""The vLLM backend: ids in, ids out, exact log-probs, and what it refuses. The server is a stand-in made from vLLM's source."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from generate_requests import generate_request
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_server import EOS, VOCAB, Fault, VLLMServer, log_softmax, reply

from engine.errors import BackendError, ContextOverflow, OutageError
from engine.plugins.launch.commands import vllm_servers
from engine.plugins.servers.wire import EncodedRequest, RequestEncoder
from engine.plugins.vllm.client import VLLM, VLLMBackend
from engine.plugins.vllm.spec import VLLMBackendSpec
from engine.schemas.backend import LaunchSpec
from engine.schemas.generation import FinishReason, GenerateRequest, ImagePart, SamplingParams
from engine.tokens.template import ChatTemplate

asked = partial(generate_request, stop_token_ids=[EOS], seed=41)


@asynccontextmanager
async def serving(
    format: ChatTemplate,
    *,
    servers: int = 1,
    sampling: SamplingParams | None = None,
    key: str | None = None,
    spec: dict[str, Any] | None = None,
    **server: Any,
) -> AsyncIterator[tuple[VLLMBackend, list[VLLMServer]]]:
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(VLLMServer(**server)) for _ in range(servers)]
        for fake in fakes:
            fake.tokenize = lambda text: list(format.encode(text))
        declared = VLLMBackendSpec.model_validate({"urls": [fake.url for fake in fakes], "timeout": 20, **(spec or {})})
        backend = VLLMBackend(declared, format, sampling=sampling or SamplingParams(), model="fake", api_key=key)
        stack.push_async_callback(backend.close)
        await backend.start()
        for fake in fakes:
            fake.requests.clear()
        yield backend, fakes


# -- exactness


async def test_a_reply_has_the_sampled_ids_and_their_log_probs(chat_format: ChatTemplate) -> None:
    async with serving(chat_format) as (backend, (fake,)):
        generation = await backend.generate(asked())
        ids = generation.output_ids.tolist()
        assert 0 < len(ids) <= 8
        expected = [log_softmax(fake.logits([1, 22, 333, *ids[:at]]))[token] for at, token in enumerate(ids)]
        assert generation.logprobs.tolist() == pytest.approx(expected, abs=1e-6)
        assert (generation.prompt_unchecked, generation.versions, generation.cached_tokens) == (False, [], 1)
        assert backend.stats()["certificate"] == {"turns_checked": 1, "turns_unchecked": 0, "prompt_mismatches": 0}
        assert backend.context == 512


async def test_the_seed_of_a_request_decides_its_reply(chat_format: ChatTemplate) -> None:
    async with serving(chat_format) as (backend, _):
        first, again, other = [(await backend.generate(asked(seed=seed))).output_ids.tolist() for seed in (7, 7, 8)]
        assert first == again != other


async def test_the_model_s_generation_config_changes_nothing(chat_format: ChatTemplate) -> None:
    """The stand-in, as vLLM, takes temperature 0.7, top-p 0.8 and top-k 20 where a request has none."""
    async with serving(chat_format, mode="processed_logprobs") as (backend, (fake,)):
        generation = await backend.generate(asked())
        ids = generation.output_ids.tolist()
        expected = [log_softmax(fake.logits([1, 22, 333, *ids[:at]]))[token] for at, token in enumerate(ids)]
        assert generation.logprobs.tolist() == pytest.approx(expected, abs=1e-6)


CHANGED: dict[str, Any] = {
    "temperature": 0.5,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.2,
    "logit_bias": {"5": 2.0},
    "min_new_tokens": 3,
}
CUT: dict[str, Any] = {"top_p": 0.9, "top_k": 50, "min_p": 0.1}


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("name", ["none", "greedy", *CHANGED, *CUT])
async def test_a_server_is_taken_exactly_if_it_reports_the_log_probs_of_rows(
    chat_format: ChatTemplate, name: str, mode: str
) -> None:
    set_here = {} if name == "none" else {"temperature": 0.0} if name == "greedy" else {name: (CHANGED | CUT)[name]}
    sampling = SamplingParams(**set_here)
    wrong = (name in CHANGED and mode == "raw_logprobs") or (name in CUT and mode == "processed_logprobs")
    if not wrong:
        async with serving(chat_format, sampling=sampling, mode=mode) as (backend, _):
            await backend.generate(asked(sampling=sampling))
        return
    advice = "start it with(out)? --logprobs-mode processed_logprobs, or leave `" + name
    with pytest.raises(BackendError, match=advice) as caught:
        async with serving(chat_format, sampling=sampling, mode=mode):
            pass
    assert caught.value.kind == "bad_sampling"


@pytest.mark.parametrize("changed", CHANGED)
@pytest.mark.parametrize("cut", CUT)
def test_what_no_mode_reports_is_a_conflict(changed: str, cut: str) -> None:
    spec = VLLMBackendSpec(urls=["http://x"])
    both = SamplingParams(**{changed: CHANGED[changed], cut: CUT[cut]})
    assert f"`{changed}` with `{cut}`" in str(spec.conflict(both))
    assert spec.conflict(SamplingParams(**{changed: CHANGED[changed]})) is None
    assert spec.conflict(SamplingParams(**{cut: CUT[cut]})) is None
    assert spec.conflict(SamplingParams(**{cut: CUT[cut], "temperature": 0.0})) is None


async def test_temperature_is_in_the_log_probs(chat_format: ChatTemplate) -> None:
    sampling = SamplingParams(temperature=0.5)
    async with serving(chat_format, sampling=sampling, mode="processed_logprobs") as (backend, (fake,)):
        generation = await backend.generate(asked(sampling=sampling))
        ids = generation.output_ids.tolist()
        expected = [log_softmax(fake.logits([1, 22, 333, *ids[:at]]) / 0.5)[token] for at, token in enumerate(ids)]
        assert generation.logprobs.tolist() == pytest.approx(expected, abs=1e-6)


# -- ends of replies


@pytest.mark.parametrize(
    ("change", "finish"),
    [
        ({"finish_reason": "stop", "stop_reason": 17}, FinishReason(type="stop", matched=17)),
        ({"finish_reason": "stop", "stop_reason": "</a>"}, FinishReason(type="stop", matched="</a>")),
        ({"finish_reason": "length"}, FinishReason(type="length")),
    ],
)
async def test_why_a_reply_ended_is_reported(chat_format: ChatTemplate, change: Any, finish: FinishReason) -> None:
    async with serving(chat_format) as (backend, (fake,)):
        fake.faults.append(reply(**change))
        assert (await backend.generate(asked())).finish == finish


async def test_the_stop_id_stays_in_the_reply(chat_format: ChatTemplate) -> None:
    async with serving(chat_format) as (backend, _):
        generation = await backend.generate(asked(sampling=SamplingParams(logit_bias={str(EOS): 100.0})))
        assert (generation.output_ids.tolist(), generation.finish) == ([EOS], FinishReason(type="stop", matched=EOS))


async def test_the_rest_of_an_aborted_reply_is_sampled_after_its_beginning(chat_format: ChatTemplate) -> None:
    async with serving(chat_format) as (backend, (fake,)):
        whole = (await backend.generate(asked())).output_ids.tolist()
        fake.requests.clear()

        def cut_short(request: dict[str, Any]) -> tuple[int, bytes]:
            return 200, json.dumps(VLLMServer().reply(request | {"max_tokens": 3}, finish_reason="abort")).encode()

        fake.faults.append(cut_short)
        generation = await backend.generate(asked())
        assert generation.output_ids.tolist() == whole
        assert [len(request["prompt"]) for request in fake.requests] == [3, 6]
        assert fake.requests[1]["max_tokens"] == 5
        assert backend.stats()["interruptions"] == 1


# -- what goes wrong


BAD: dict[str, Fault] = {
    "no JSON": lambda request: (200, b"<html>"),
    "no choice": lambda request: (200, b'{"choices":[],"usage":{}}'),
    "no log-probs": lambda request: (
        200,
        json.dumps(VLLMServer().reply(request, logprobs={"token_logprobs": []})).encode(),
    ),
    "null log-prob": lambda request: (
        200,
        json.dumps(VLLMServer().reply(request | {"max_tokens": 1}, logprobs={"token_logprobs": [None]})).encode(),
    ),
    "log-prob above 0": lambda request: (
        200,
        json.dumps(VLLMServer().reply(request | {"max_tokens": 1}, logprobs={"token_logprobs": [0.5]})).encode(),
    ),
    "probability 0": lambda request: (
        200,
        json.dumps(VLLMServer().reply(request | {"max_tokens": 1}, logprobs={"token_logprobs": [-9999.0]})).encode(),
    ),
    "other ids": reply(token_ids=[5, 6, 7]),
    "too many": lambda request: (200, json.dumps(VLLMServer().reply(request | {"max_tokens": 50})).encode()),
    "wrong prompt length": reply(usage={"prompt_tokens": 2, "completion_tokens": None}),
    "unknown end": reply(finish_reason="repetition"),
    "500": lambda request: (500, b'{"error":{"message":"EngineDeadError","type":"InternalServerError","code":500}}'),
    "503": lambda request: (503, b"{}"),
    "429": lambda request: (429, b"{}"),
    "dropped": lambda request: None,
}


@pytest.mark.parametrize("fault", list(BAD.values()), ids=list(BAD))
@pytest.mark.usefixtures("short_pauses")
async def test_another_try_follows_a_reply_that_cannot_be_used(chat_format: ChatTemplate, fault: Fault) -> None:
    async with serving(chat_format) as (backend, (fake,)):
        good = (await backend.generate(asked())).output_ids.tolist()
        fake.faults.append(fault)
        assert (await backend.generate(asked())).output_ids.tolist() == good
        assert backend.stats()["turns"] == 2


async def test_another_prompt_is_an_error_at_once(chat_format: ChatTemplate) -> None:
    async with serving(chat_format) as (backend, (fake,)):
        fake.faults.append(reply(prompt_token_ids=[1, 22, 334]))
        with pytest.raises(BackendError, match=r"differ at token 2\. Sent \[1, 22, 333\]") as caught:
            await backend.generate(asked())
        assert (caught.value.kind, len(fake.requests)) == ("prompt_mismatch", 1)
        assert backend.stats()["certificate"]["prompt_mismatches"] == 1


@pytest.mark.parametrize(("tokens", "most"), [(511, 8), (510, 3)])
async def test_the_server_s_refusal_of_a_long_prompt_is_a_limit(
    chat_format: ChatTemplate, tokens: int, most: int
) -> None:
    async with serving(chat_format) as (backend, (fake,)):
        with pytest.raises(ContextOverflow):
            await backend.generate(asked([5] * tokens, max_new_tokens=most))
        assert len(fake.requests) == 1
        with pytest.raises(ContextOverflow):
            await backend.generate(asked([5] * 512))
        assert len(fake.requests) == 1  # not sent


@pytest.mark.parametrize("end", ["cancelled", "closed", "too late"])
async def test_a_request_that_nobody_waits_for_ends_on_the_server(chat_format: ChatTemplate, end: str) -> None:
    spec = {"timeout": 0.2} if end == "too late" else {}
    async with serving(chat_format, spec=spec) as (backend, (fake,)):
        fake.latency = 30
        task = asyncio.create_task(backend.generate(asked()))
        async with asyncio.timeout(10):
            while not fake.requests:  # noqa: ASYNC110  (the stand-in sets no event)
                await asyncio.sleep(0.01)
            if end == "cancelled":
                task.cancel()
            elif end == "closed":
                await backend.close()
            await asyncio.wait([task])
            while not fake.aborted:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert fake.aborted == [fake.requests[0]["request_id"]]
        if end != "cancelled":
            assert getattr(task.exception(), "kind", None) == ("closed" if end == "closed" else "timeout")


async def test_images_are_refused_by_name(chat_format: ChatTemplate) -> None:
    async with serving(chat_format) as (backend, (fake,)):
        image = ImagePart(image="sha256:" + "0" * 64)
        with pytest.raises(BackendError, match="vLLM takes no images") as caught:
            await backend.generate(asked(images=[image], image_spans=[(1, 2)]))
        assert (caught.value.kind, fake.requests) == ("unsupported", [])


async def test_an_episode_goes_on_at_another_server(chat_format: ChatTemplate) -> None:
    async with serving(chat_format, servers=2) as (backend, fakes):
        first = (await backend.generate(asked())).output_ids.tolist()
        used = next(fake for fake in fakes if fake.requests)
        used.faults += [lambda request: (503, b"{}")] * 5
        assert (await backend.generate(asked())).output_ids.tolist() == first
        assert all(fake.requests for fake in fakes)


# -- the start


async def test_an_older_server_is_refused_or_counted(chat_format: ChatTemplate) -> None:
    with pytest.raises(
        BackendError, match=r"install vllm 0\.10\.2 or later, or set `backend\.unchecked_prompts: allow`"
    ):
        async with serving(chat_format, echo=False):
            pass
    async with serving(chat_format, echo=False, spec={"unchecked_prompts": "allow"}) as (backend, _):
        generation = await backend.generate(asked())
        assert generation.prompt_unchecked
        assert len(generation.output_ids) == len(generation.logprobs) > 0
        assert backend.stats()["certificate"]["turns_unchecked"] == 1


async def test_another_tokenizer_is_refused(chat_format: ChatTemplate) -> None:
    async with VLLMServer() as fake:
        fake.tokenize = lambda text: [1, 2, 3]
        backend = VLLMBackend(VLLMBackendSpec(urls=[fake.url]), chat_format, sampling=SamplingParams(), model="fake")
        with pytest.raises(BackendError, match="has another tokenizer"):
            await backend.start()
        await backend.close()


async def test_a_missing_adapter_is_refused_and_a_loaded_one_is_named_in_requests(chat_format: ChatTemplate) -> None:
    async with VLLMServer() as fake:
        spec = VLLMBackendSpec(urls=[fake.url], adapter="tutor")
        backend = VLLMBackend(spec, chat_format, sampling=SamplingParams(), model="fake")
        with pytest.raises(BackendError, match="has no adapter 'tutor'; it has fake"):
            await backend.start()
        fake.models.insert(0, {"id": "tutor", "root": "/adapters/tutor", "parent": "fake", "max_model_len": None})
        await backend.start()
        assert backend.context == 512
        await backend.generate(asked(adapter="tutor"))
        assert fake.requests[-1]["model"] == "tutor"
        await backend.close()


async def test_no_server_at_all_is_an_outage(chat_format: ChatTemplate) -> None:
    spec = VLLMBackendSpec(urls=["http://127.0.0.1:9"])
    backend = VLLMBackend(spec, chat_format, sampling=SamplingParams(), model="fake")
    with pytest.raises(OutageError, match="no vLLM server can be reached"):
        await backend.start()
    await backend.close()


async def test_the_key_is_sent_and_never_shown(chat_format: ChatTemplate) -> None:
    async with serving(chat_format, key="secret-key") as (backend, (fake,)):
        assert all(b"Bearer secret-key" in head for head in fake.headers)
        assert "secret-key" not in repr(backend.stats())


# -- requests and commands


def sent(request: GenerateRequest, **sizes: int) -> dict[str, Any]:
    body: EncodedRequest = RequestEncoder(VLLM, vocab_size=VOCAB).encode(
        request, "rid", request.input_ids, request.max_new_tokens, **sizes
    )
    return dict(json.loads(b"".join(body.pieces)))


def test_ignore_eos_sends_no_stop_ids() -> None:
    body = sent(asked(sampling=SamplingParams(ignore_eos=True)))
    assert (body["ignore_eos"], body["stop_token_ids"]) == (True, [])


def test_constraints_bans_and_stops_have_vllm_s_names() -> None:
    sampling = SamplingParams(regex="a+", logit_bias={"7": 1.0}, stop=["</a>"], min_new_tokens=4)
    body = sent(asked(sampling=sampling, banned_token_ids=[9]), sampled=3)
    assert body["structured_outputs"] == {"regex": "a+"}
    assert body["logit_bias"] == {"7": 1.0, "9": -100.0}
    assert (body["stop"], body["min_tokens"], body["skip_special_tokens"]) == (["</a>"], 1, False)


PARAMETERS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        "top_p": st.floats(0.01, 1.0),
        "top_k": st.integers(-1, 100),
        "min_p": st.floats(0, 1),
        "frequency_penalty": st.floats(-2, 2),
        "presence_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.1, 2),
        "min_new_tokens": st.integers(0, 5),
        "stop": st.lists(st.text(min_size=1), max_size=3),
        "ignore_eos": st.booleans(),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1).map(str), st.floats(-50, 50), max_size=3),
        "json_schema": st.just('{"type": "object"}'),
    },
)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(PARAMETERS, st.integers(0, 2**63 - 1))
def test_vllm_s_own_models_read_every_request_as_it_is_meant(parameters: dict[str, Any], seed: int) -> None:
    """Runs where vLLM can be imported."""
    protocol = pytest.importorskip("vllm.entrypoints.openai.completion.protocol")
    sampling = SamplingParams(**parameters)
    body = sent(asked(sampling=sampling, seed=seed))
    read = protocol.CompletionRequest.model_validate(body)
    assert not read.model_extra
    used = read.to_sampling_params(8, {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05})
    greedy = sampling.temperature == 0
    assert used.temperature == pytest.approx(sampling.temperature)
    assert used.top_p == (1.0 if greedy or sampling.top_p is None else sampling.top_p)
    assert used.top_k == (0 if greedy or sampling.top_k is None else max(0, sampling.top_k))
    assert used.min_p == (0.0 if greedy else sampling.min_p or 0.0)
    assert used.repetition_penalty == (sampling.repetition_penalty or 1.0)
    assert (used.logprobs, used.seed, used.max_tokens) == (0, seed, 8)
    assert used.stop == sampling.stop
    assert used.stop_token_ids == ([] if sampling.ignore_eos else [EOS])
    assert (used.logit_bias or {}) == {int(token): bias for token, bias in (sampling.logit_bias or {}).items()}


def command(sampling: SamplingParams, **launch: Any) -> list[str]:
    servers = vllm_servers(LaunchSpec.model_validate(launch), Path("/models/m"), sampling)
    return list(servers._servers[0].argv(30000))


def test_launched_servers_report_the_log_probs_of_the_spec() -> None:
    plain = command(SamplingParams(), gpus=4, tp=2, python="py", args=["--max-model-len", "4096"])
    assert plain == [
        *("py", "-m", "vllm.entrypoints.cli.main", "serve", "/models/m", "--host", "127.0.0.1", "--port", "30000"),
        *("--tensor-parallel-size", "2", "--max-model-len", "4096"),
    ]
    cooled = command(SamplingParams(temperature=0.7), gpus=1, python="py")
    assert cooled[-2:] == ["--logprobs-mode", "processed_logprobs"]


def test_the_stand_in_follows_vllm_s_order_of_processing() -> None:
    """Temperature before top-k, log-probs of `raw_logprobs` before both."""
    server = VLLMServer(mode="raw_logprobs")
    request = {"temperature": 0.5, "top_p": 1.0, "top_k": 1, "repetition_penalty": 1.0, "seed": 1}
    token, logprob = server._sample([1, 2], [], request)
    logits = server.logits([1, 2])
    assert (token, logprob) == (int(np.argmax(logits)), log_softmax(logits).max())
