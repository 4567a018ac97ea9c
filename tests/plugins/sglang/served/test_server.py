"""The SGLang backend against the real server: ids, log-probs, stops, seeds, aborts, weights, adapters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from generate_requests import generate_request
from server_load import aborted, until_samples, until_works_on

from engine.errors import BackendError, ContextOverflow
from engine.plugins.sglang.client import SGLangBackend
from engine.plugins.sglang.spec import SGLangBackendSpec
from engine.plugins.weights.colocation import ServerMemory
from engine.schemas.generation import FinishReason, Generation, SamplingParams
from engine.tokens.template import ChatTemplate

Running = Any
HOT = SamplingParams(temperature=1.0, ignore_eos=True)


@asynccontextmanager
async def opened(
    server: Running, format: ChatTemplate, model: Path, sampling: SamplingParams | None = None, **spec: Any
) -> AsyncIterator[SGLangBackend]:
    backend = SGLangBackend(
        SGLangBackendSpec.model_validate({"urls": [server.url], **spec}),
        format,
        sampling=sampling or SamplingParams(),
        model=str(model),
    )
    try:
        await backend.start()
        yield backend
    finally:
        await backend.close()


@pytest.fixture
async def backend(
    sglang_server: Running, chat_format: ChatTemplate, tiny_model_dir: Path
) -> AsyncIterator[SGLangBackend]:
    async with opened(sglang_server, chat_format, tiny_model_dir) as made:
        yield made


@pytest.fixture
async def at_first(backend: SGLangBackend, tiny_model_dir: Path) -> AsyncIterator[None]:
    """Puts the model's own weights back when the test is over."""
    yield
    await backend.control.update_weights_from_disk(str(tiny_model_dir), 0)


request = partial(generate_request, max_new_tokens=24, seed=7)


@cache
def _model(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def recomputed(
    model: Path | Any,
    prompt: Sequence[int],
    output: Sequence[int],
    temperature: float = 1.0,
    banned: Sequence[int] = (),
) -> np.ndarray:
    """log p of each output id under softmax(logits / temperature), by transformers in float32."""
    import torch

    net = _model(model) if isinstance(model, Path) else model
    with torch.no_grad():
        logits = net(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1].float()
    logits[:, list(banned)] = -torch.inf
    logprobs = torch.log_softmax(logits / temperature, -1)
    return logprobs[torch.arange(len(output)), torch.tensor(list(output))].numpy()


def prompt_of(format: ChatTemplate, text: str = "What is 17 plus 25?") -> list[int]:
    return list(format.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"))


async def test_a_server_says_what_it_takes(backend: SGLangBackend) -> None:
    assert (backend.vocab_size, backend.context) == (1000, 4090)
    assert backend.stats()["seeded"] is True
    assert backend.dropped == []


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.8}, {"top_k": 5}])
async def test_logprobs_are_those_of_the_model_before_any_filter(
    backend: SGLangBackend, chat_format: ChatTemplate, tiny_model_dir: Path, temperature: float, filters: dict[str, Any]
) -> None:
    prompt = prompt_of(chat_format)
    generation = await backend.generate(request(prompt, SamplingParams(temperature=temperature, **filters)))
    expected = recomputed(tiny_model_dir, prompt, generation.output_ids.tolist(), temperature)
    np.testing.assert_allclose(generation.logprobs, expected, atol=1e-4)
    assert generation.prompt_tokens == len(prompt)


async def test_greedy_takes_the_most_likely_id_at_temperature_one(
    backend: SGLangBackend, chat_format: ChatTemplate, tiny_model_dir: Path
) -> None:
    import torch

    prompt = prompt_of(chat_format)
    generation = await backend.generate(request(prompt, SamplingParams(temperature=0.0, ignore_eos=True)))
    output = generation.output_ids.tolist()
    with torch.no_grad():
        logits = _model(tiny_model_dir)(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == output
    np.testing.assert_allclose(generation.logprobs, recomputed(tiny_model_dir, prompt, output), atol=1e-4)


async def test_a_conversation_is_exact_turn_after_turn_and_its_prefix_is_cached(
    backend: SGLangBackend, chat_format: ChatTemplate, tiny_model_dir: Path
) -> None:
    ids, known = prompt_of(chat_format), 0
    for turn in range(5):
        generation = await backend.generate(request(ids, seed=turn, turn=turn, episode_id="long"))
        output = generation.output_ids.tolist()
        np.testing.assert_allclose(generation.logprobs, recomputed(tiny_model_dir, ids, output), atol=1e-4)
        assert generation.cached_tokens >= known
        known = len(ids) + len(output) - 1
        ids = ids + output + prompt_of(chat_format, f"And {turn}?")
    assert backend.stats()["certificate"] == {"turns_checked": 5, "turns_unchecked": 0, "prompt_mismatches": 0}


async def test_latency_and_queue_are_told(backend: SGLangBackend, chat_format: ChatTemplate) -> None:
    generation = await backend.generate(request(prompt_of(chat_format)))
    assert 0 < generation.queue_seconds < generation.seconds


async def test_a_stop_id_stays_in_the_reply(backend: SGLangBackend, chat_format: ChatTemplate) -> None:
    prompt = prompt_of(chat_format)
    free = (await backend.generate(request(prompt, SamplingParams()))).output_ids.tolist()
    generation = await backend.generate(request(prompt, SamplingParams(), stop_token_ids=[2, free[5]]))
    end = free.index(free[5]) + 1
    assert generation.output_ids.tolist() == free[:end]
    assert generation.finish == FinishReason(type="stop", matched=free[5])
    assert len(generation.logprobs) == end


@pytest.mark.parametrize("trim", [None, True])
async def test_a_stop_string_keeps_every_id_that_was_sampled(
    backend: SGLangBackend, chat_format: ChatTemplate, tiny_model_dir: Path, trim: bool | None
) -> None:
    prompt = prompt_of(chat_format)
    hot = SamplingParams(temperature=1.0, ignore_eos=True, stop=["e", "a", "t"], no_stop_trim=trim)
    generation = await backend.generate(request(prompt, hot, max_new_tokens=200))
    output = generation.output_ids.tolist()
    free = (await backend.generate(request(prompt, HOT, max_new_tokens=200))).output_ids.tolist()
    assert output == free[: len(output)]
    assert generation.finish.type == "stop"
    assert generation.finish.matched in ("e", "a", "t")
    text, before = chat_format.decode(output), chat_format.decode(output[:-1])
    assert any(stop in text for stop in "eat")
    assert not any(stop in before for stop in "eat")
    np.testing.assert_allclose(generation.logprobs, recomputed(tiny_model_dir, prompt, output), atol=1e-4)


async def test_a_seed_decides_what_is_sampled(backend: SGLangBackend, chat_format: ChatTemplate) -> None:
    prompt = prompt_of(chat_format)
    replies = await asyncio.gather(
        *(backend.generate(request(prompt, HOT, seed=seed)) for seed in (5, 6, 5, 2**63 - 1))
    )
    outputs = [reply.output_ids.tolist() for reply in replies]
    assert outputs[0] == outputs[2]
    assert len({tuple(output) for output in outputs}) == 3


async def test_banned_ids_are_not_sampled_and_logprobs_are_without_them(
    backend: SGLangBackend, chat_format: ChatTemplate, tiny_model_dir: Path
) -> None:
    prompt = prompt_of(chat_format)
    banned = list(range(500))
    generation = await backend.generate(request(prompt, HOT, banned_token_ids=banned))
    output = generation.output_ids.tolist()
    assert min(output) >= 500
    np.testing.assert_allclose(
        generation.logprobs, recomputed(tiny_model_dir, prompt, output, banned=banned), atol=1e-4
    )


async def test_a_cancelled_request_stops_on_the_server(
    backend: SGLangBackend, sglang_server: Running, chat_format: ChatTemplate
) -> None:
    before = aborted(sglang_server.url)
    task = asyncio.create_task(backend.generate(request(prompt_of(chat_format), HOT, max_new_tokens=3500)))
    await until_works_on(backend, 1)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    await until_works_on(backend, 0)
    assert aborted(sglang_server.url) == before + 1


async def test_closing_leaves_the_server_idle(
    backend: SGLangBackend, sglang_server: Running, chat_format: ChatTemplate, tiny_model_dir: Path
) -> None:
    before = aborted(sglang_server.url)
    async with opened(sglang_server, chat_format, tiny_model_dir) as other:
        asks = [request(prompt_of(chat_format), HOT, max_new_tokens=3500, episode_id=str(n)) for n in range(4)]
        tasks = [asyncio.create_task(other.generate(ask)) for ask in asks]
        await until_works_on(backend, 4)
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [BackendError] * 4
    await until_works_on(backend, 0)
    assert aborted(sglang_server.url) == before + 4


async def test_too_long_a_prompt_is_a_limit_and_not_a_fault(backend: SGLangBackend) -> None:
    backend.context = None  # let the server say it
    with pytest.raises(ContextOverflow, match="4090"):
        await backend.generate(request([5] * 4090, max_new_tokens=1))
    with pytest.raises(ContextOverflow, match="4096"):
        await backend.generate(request([5] * 100, max_new_tokens=4000))


async def test_the_longest_prompt_that_is_promised_is_taken(backend: SGLangBackend) -> None:
    assert backend.context == 4090
    generation = await backend.generate(request([5] * 4089, HOT, max_new_tokens=1))
    assert len(generation.output_ids) == 1


EVERYTHING = SamplingParams(
    temperature=0.9, top_p=0.95, top_k=50, frequency_penalty=0.1, presence_penalty=0.1, repetition_penalty=1.1,
    min_new_tokens=1, stop=["</answer>"], stop_token_ids=[2], stop_regex=["[0-9]{7}"], ignore_eos=False,
    skip_special_tokens=False, spaces_between_special_tokens=False, no_stop_trim=True, logit_bias={"5": -1.0},
    custom_params={"a": 1},
)  # fmt: skip


@pytest.mark.parametrize(
    "sampling",
    [
        EVERYTHING,
        SamplingParams(json_schema='{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'),
        SamplingParams(regex="(yes|no)"),
        SamplingParams(ebnf='root ::= "yes" | "no"'),
    ],
    ids=["everything", "json_schema", "regex", "ebnf"],
)
async def test_every_parameter_of_ours_is_known_to_the_server(
    sglang_server: Running, chat_format: ChatTemplate, tiny_model_dir: Path, sampling: SamplingParams
) -> None:
    async with opened(sglang_server, chat_format, tiny_model_dir, sampling) as made:
        generation = await made.generate(request(prompt_of(chat_format), sampling, max_new_tokens=40))
    text = chat_format.decode([t for t in generation.output_ids.tolist() if t != 2])
    if sampling.regex or sampling.ebnf:
        assert text in ("yes", "no")


@pytest.mark.parametrize(
    ("sampling", "problem"),
    [
        (SamplingParams(stop=[f"s{n}" for n in range(40)]), "at most 32 stop strings"),
        (SamplingParams(logit_bias={"1000": 1.0}), "logit_bias"),
        (SamplingParams(regex="a", ebnf='root ::= "a"'), "Only one of"),
        (SamplingParams(min_p=0.1), "enable-deterministic-inference"),
    ],
)
async def test_sampling_that_the_server_refuses_is_found_before_the_run(
    sglang_server: Running, chat_format: ChatTemplate, tiny_model_dir: Path, sampling: SamplingParams, problem: str
) -> None:
    with pytest.raises(BackendError, match=problem) as caught:
        async with opened(sglang_server, chat_format, tiny_model_dir, sampling):
            pass
    assert caught.value.kind == "bad_sampling"


# -- weights


def split(generation: Generation) -> list[tuple[int, int]]:
    """(version, tokens) of each span."""
    return [(span.version, span.end - span.start) for span in generation.versions]


@pytest.mark.parametrize("mode", ["retract", "abort"])
async def test_an_update_in_the_middle_gives_each_token_its_own_version(
    backend: SGLangBackend,
    chat_format: ChatTemplate,
    tiny_model_dir: Path,
    other_model_dir: Path,
    at_first: None,
    mode: Any,
) -> None:
    """The tokens before it are the old model's; those after it are what the new one samples after that prefix."""
    await backend.control.update_weights_from_disk(str(tiny_model_dir), 4)
    prompt = prompt_of(chat_format)
    task = asyncio.create_task(backend.generate(request(prompt, HOT, max_new_tokens=1000)))
    await until_samples(backend, len(prompt) + 8)
    await backend.control.update_weights_from_disk(str(other_model_dir), 5, mode=mode)
    generation = await task
    (old, first), (new, rest) = split(generation)
    assert (old, new, first + rest) == (4, 5, 1000)
    assert min(first, rest) > 0
    output = generation.output_ids.tolist()
    before = recomputed(tiny_model_dir, prompt, output[:first])
    after = recomputed(other_model_dir, prompt + output[:first], output[first:])
    np.testing.assert_allclose(generation.logprobs, [*before, *after], atol=1e-4)
    assert backend.stats()["interruptions"] == (1 if mode == "abort" else 0)
    assert backend.stats()["certificate"]["prompt_mismatches"] == 0


async def test_in_place_goes_on_with_what_the_old_weights_computed(
    backend: SGLangBackend, chat_format: ChatTemplate, tiny_model_dir: Path, other_model_dir: Path, at_first: None
) -> None:
    await backend.control.update_weights_from_disk(str(tiny_model_dir), 4)
    prompt = prompt_of(chat_format)
    task = asyncio.create_task(backend.generate(request(prompt, HOT, max_new_tokens=1000)))
    await until_samples(backend, len(prompt) + 8)
    await backend.control.update_weights_from_disk(str(other_model_dir), 5, mode="in_place")
    generation = await task
    (old, first), (new, rest) = split(generation)
    assert (old, new, first + rest) == (4, 5, 1000)
    output = generation.output_ids.tolist()
    np.testing.assert_allclose(
        generation.logprobs[:first], recomputed(tiny_model_dir, prompt, output[:first]), atol=1e-4
    )
    mixed = recomputed(other_model_dir, prompt + output[:first], output[first:])
    assert np.abs(generation.logprobs[first:] - mixed).max() > 1e-2  # their prefix was not computed by the new weights


async def test_what_is_sent_after_an_update_is_sampled_with_the_new_weights_alone(
    backend: SGLangBackend, chat_format: ChatTemplate, tiny_model_dir: Path, other_model_dir: Path, at_first: None
) -> None:
    prompt = prompt_of(chat_format)
    for version, folder in ((11, other_model_dir), (12, tiny_model_dir)):
        await backend.control.update_weights_from_disk(str(folder), version)
        generation = await backend.generate(request(prompt))
        output = generation.output_ids.tolist()
        assert split(generation) == [(version, len(output))]
        np.testing.assert_allclose(generation.logprobs, recomputed(folder, prompt, output), atol=1e-4)
        assert [(await server.json("GET", "/model_info"))["weight_version"] for server in backend.pool.workers] == [
            str(version)
        ]


async def test_weights_that_cannot_be_loaded_leave_the_old_ones_and_sampling_goes_on(
    backend: SGLangBackend, chat_format: ChatTemplate, tiny_model_dir: Path, tmp_path: Path, at_first: None
) -> None:
    await backend.control.update_weights_from_disk(str(tiny_model_dir), 3)
    with pytest.raises(BackendError, match="were not loaded everywhere") as caught:
        await backend.control.update_weights_from_disk(str(tmp_path / "nothing"), 4)
    assert caught.value.kind == "update_failed"
    generation = await backend.generate(request(prompt_of(chat_format)))
    assert split(generation) == [(3, len(generation.output_ids))]


async def test_a_pause_holds_replies_back_and_they_are_whole_afterwards(
    backend: SGLangBackend, chat_format: ChatTemplate
) -> None:
    prompt = prompt_of(chat_format)
    free = await backend.generate(request(prompt, HOT, max_new_tokens=60))
    async with backend.control.paused("retract"):
        task = asyncio.create_task(backend.generate(request(prompt, HOT, max_new_tokens=60)))
        done, _ = await asyncio.wait([task], timeout=0.6)
        assert not done
    assert (await task).output_ids.tolist() == free.output_ids.tolist()


# -- adapters


async def test_an_adapter_is_used_by_name_and_the_base_model_stays_what_it_is(
    backend: SGLangBackend, chat_format: ChatTemplate, tiny_model_dir: Path, adapter_dir: Path
) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(
        tiny_model_dir, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tensors = load_file(adapter_dir / "adapter_model.safetensors")
    for name in [name for name in tensors if name.endswith("lora_A.weight")]:
        target = merged.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
        target.weight.data += 8 / 4 * tensors[name.replace("lora_A", "lora_B")] @ tensors[name]

    prompt = prompt_of(chat_format)
    await backend.control.load_adapter("tutor", str(adapter_dir))
    try:
        with_it, without = await asyncio.gather(
            backend.generate(request(prompt, HOT, adapter="tutor", episode_id="a")),
            backend.generate(request(prompt, HOT, adapter=None, episode_id="b")),
        )
    finally:
        await backend.control.unload_adapter("tutor")
    np.testing.assert_allclose(with_it.logprobs, recomputed(merged, prompt, with_it.output_ids.tolist()), atol=1e-4)
    np.testing.assert_allclose(
        without.logprobs, recomputed(tiny_model_dir, prompt, without.output_ids.tolist()), atol=1e-4
    )
    assert with_it.output_ids.tolist() != without.output_ids.tolist()
    with pytest.raises(BackendError, match="'tutor' was unloaded"):
        await backend.generate(request(prompt, adapter="tutor"))
    with pytest.raises(BackendError, match="never been loaded: nobody") as caught:
        await backend.generate(request(prompt, adapter="nobody"))
    assert caught.value.kind == "bad_request"


async def test_an_adapter_that_cannot_be_loaded_is_loaded_nowhere(backend: SGLangBackend, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="/load_lora_adapter failed"):
        await backend.control.load_adapter("ghost", str(tmp_path))
    assert list(backend.control.adapters) == []


async def test_an_adapter_that_the_spec_names_and_nobody_loaded_is_found_before_the_run(
    sglang_server: Running, chat_format: ChatTemplate, tiny_model_dir: Path
) -> None:
    with pytest.raises(BackendError, match="ghost"):
        async with opened(sglang_server, chat_format, tiny_model_dir, adapter="ghost"):
            pass


async def test_memory_is_released_and_taken_back_around_new_weights(
    backend: SGLangBackend, chat_format: ChatTemplate, tiny_model_dir: Path, other_model_dir: Path, at_first: None
) -> None:
    """The order of calls is that of the real server; without a GPU there is no memory that it could release."""
    prompt = prompt_of(chat_format)
    control = backend.control
    control.memory = memory = ServerMemory(backend.pool)
    await memory.release()
    await control.update_weights_from_disk(str(other_model_dir), 5)
    generation = await backend.generate(request(prompt, HOT))
    np.testing.assert_allclose(
        generation.logprobs, recomputed(other_model_dir, prompt, generation.output_ids.tolist()), atol=1e-4
    )
    assert {span.version for span in generation.versions} == {5}
    await memory.release()
    await memory.resume()
    await memory.resume()  # nothing is released: the real server would end
    await control.update_weights_from_disk(str(tiny_model_dir), 6)
    assert (await backend.generate(request(prompt, HOT))).versions[0].version == 6
    with pytest.raises(BackendError, match="--enable-memory-saver"):
        await memory.prepare(None)
