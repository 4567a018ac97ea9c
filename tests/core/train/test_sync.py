"""Weights into the model in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from generate_requests import generate_request
from installed_plugins import needs_plugin
from slow_cases import slow_after
from transformers import AutoConfig, AutoModelForCausalLM

from engine.errors import TrainError
from engine.plugins.local.backend import LocalBackend
from engine.plugins.local.spec import LocalBackendSpec
from engine.schemas.episode import EpisodeSpec
from engine.schemas.generation import Generation, SamplingParams
from engine.schemas.model import ModelSpec
from engine.schemas.sections import read_stored
from engine.schemas.train import TrainSpec
from engine.tokens.loading import load_format
from engine.train.policy import Policy
from engine.train.sync import open_sync

PROMPT = [5, 6, 7, 8, 9, 10, 11]


def spec_of(model: Path, train: dict[str, Any], backend: dict[str, Any] | None = None) -> EpisodeSpec:
    return read_stored(
        {
            "spec": "episode/v1",
            "name": "demo",
            "model": {"path": str(model)},
            "backend": backend or {"kind": "local"},
            "tasks": {"source": "inline", "rows": [{"id": "t0"}]},
            "train": train,
        },
        EpisodeSpec,
    )


def policy_of(model: Path, train: dict[str, Any]) -> Policy:
    return Policy.load(
        model, read_stored({"device": "cpu", **train}, TrainSpec), temperature=1.0, vocab=None, vision=None
    )


def nudge(policy: Policy, size: float = 0.05) -> None:
    """As a step of training: every trained parameter is another one, adapters not zero."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, parameter in policy.named_parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)


request = partial(
    generate_request,
    sampling=SamplingParams(temperature=1.0, ignore_eos=True),
    max_new_tokens=16,
    stop_token_ids=[],
    seed=7,
)


def by_transformers(folder: Path, prompt: list[int], generation: Generation) -> torch.Tensor:
    """Log-probs [tokens] of a reply under a folder's weights."""
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    output = generation.output_ids.tolist()
    with torch.inference_mode():
        logits = net(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(output)), torch.tensor(output)]


def spans(generation: Generation) -> list[tuple[int, int, int]]:
    return [(span.version, span.start, span.end) for span in generation.versions]


@pytest.fixture
async def open_backend(tiny_model_dir: Path) -> AsyncIterator[Callable[..., Any]]:
    """Starts a local backend of the tiny model."""
    made: list[LocalBackend] = []

    async def start(dtype: str = "float32") -> LocalBackend:
        spec = LocalBackendSpec.model_validate({"dtype": dtype, "threads": 1, "device": "cpu"})
        made.append(LocalBackend(lambda: tiny_model_dir, str, spec))
        await made[-1].start()
        return made[-1]

    yield start
    for backend in made:
        await backend.close()


@needs_plugin("lora")
@pytest.mark.parametrize("lora", slow_after(1, [{"rank": 4, "target_modules": ["q_proj", "down_proj"]}, None]))
async def test_the_next_reply_is_sampled_with_what_was_pushed(
    open_backend: Callable[..., Any], tiny_model_dir: Path, tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    train = {"lora": lora}
    backend, policy = await open_backend(), policy_of(tiny_model_dir, train)
    before = await backend.generate(request(PROMPT))
    nudge(policy)
    pushed = await open_sync(spec_of(tiny_model_dir, train), backend, tmp_path, lora=lora is not None).push(policy, 3)
    assert pushed.bytes == 4 * sum(
        parameter.numel() for _, parameter in policy_of(tiny_model_dir, {}).named_parameters()
    )
    after = await backend.generate(request(PROMPT))
    policy.save(tmp_path / "model")
    assert (spans(before), spans(after)) == ([(0, 0, 16)], [(3, 0, 16)])
    assert before.output_ids.tolist() != after.output_ids.tolist()
    apart = torch.tensor(after.logprobs) - by_transformers(tmp_path / "model", PROMPT, after)
    assert float(apart.abs().max()) < 1e-4


async def test_weights_are_cast_to_the_samplers_precision(
    open_backend: Callable[..., Any], tiny_model_dir: Path, tmp_path: Path
) -> None:
    backend, policy = await open_backend("bfloat16"), policy_of(tiny_model_dir, {})
    nudge(policy)
    await open_sync(spec_of(tiny_model_dir, {}), backend, tmp_path, lora=False).push(policy, 1)
    own = backend._worker.packed.model.state_dict()
    wanted = policy.weights("model")
    assert own.keys() >= wanted.keys()
    for name, tensor in wanted.items():
        assert own[name].dtype == torch.bfloat16
        assert torch.equal(own[name], tensor.to(torch.bfloat16))
        assert own[name].data_ptr() != tensor.data_ptr()


@pytest.mark.slow
async def test_a_push_in_the_middle_of_a_reply_gives_it_two_versions(
    open_backend: Callable[..., Any], tiny_model_dir: Path, tmp_path: Path
) -> None:
    backend, policy = await open_backend(), policy_of(tiny_model_dir, {})
    sync = open_sync(spec_of(tiny_model_dir, {}), backend, tmp_path, lora=False)
    reply = asyncio.create_task(backend.generate(request(PROMPT, max_new_tokens=600)))
    while backend.stats()["tokens"] < 5:  # noqa: ASYNC110  it has no event for that
        await asyncio.sleep(0.01)
    await sync.push(policy, 1)
    (old, *_), (new, *_) = spans(await reply)
    assert (old, new) == (0, 1)


async def test_weights_of_another_model_are_refused_and_the_old_ones_stay(
    open_backend: Callable[..., Any], tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = AutoConfig.from_pretrained(tiny_model_dir)
    config.intermediate_size = 96
    other = tmp_path / "other"
    AutoModelForCausalLM.from_config(config).save_pretrained(other)
    backend = await open_backend()
    with pytest.raises(
        TrainError, match=r"did not take version 1: the new weights do not fit the model: .* of another shape"
    ) as caught:
        await open_sync(spec_of(other, {}), backend, tmp_path, lora=False).push(policy_of(other, {}), 1)
    assert caught.value.kind == "weights_not_taken"
    assert spans(await backend.generate(request(PROMPT))) == [(0, 0, 16)]


async def test_a_model_that_sees_takes_weights_too(tmp_path: Path) -> None:
    from engine.plugins.local.tiny_vlm import build

    folder = build(tmp_path / "vlm")
    chat = load_format(ModelSpec(path=str(folder)), folder)
    assert chat.vision is not None
    policy = Policy.load(folder, TrainSpec(device="cpu"), temperature=1.0, vocab=chat.vocab_size, vision=chat.vision)
    nudge(policy, 0.01)
    backend = LocalBackend(
        lambda: folder,
        chat.decode,
        LocalBackendSpec(device="cpu", dtype="float32"),
        vocab=chat.vocab_size,
        vision=chat.vision,
    )
    await backend.start()
    try:
        await open_sync(spec_of(folder, {}), backend, tmp_path, lora=False).push(policy, 2)
        assert spans(await backend.generate(request(PROMPT))) == [(2, 0, 16)]
        own = backend._worker.packed.model.state_dict()  # type: ignore[union-attr]
        assert all(torch.equal(own[name], tensor) for name, tensor in policy.weights("model").items())
    finally:
        await backend.close()


@pytest.mark.parametrize("method", ["disk", "adapter"])
async def test_a_way_for_servers_is_not_for_the_local_backend(
    open_backend: Callable[..., Any], tiny_model_dir: Path, tmp_path: Path, method: str
) -> None:
    spec = spec_of(tiny_model_dir, {"weight_sync": {"method": method}})
    with pytest.raises(
        TrainError, match=f"`train.weight_sync.method: {method}`: the `local` backend takes only `auto` or `tensors`"
    ) as caught:
        open_sync(spec, await open_backend(), tmp_path, lora=True)
    assert caught.value.kind == "train_setup"
