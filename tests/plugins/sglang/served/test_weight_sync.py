"""Weights of a policy that learns reach the real server, and what it samples with them is theirs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generate_requests import generate_request
from server_load import until_samples
from transformers import AutoConfig, AutoModelForCausalLM

from engine.errors import BackendError, TrainError
from engine.plugins.sglang.client import SGLangBackend
from engine.plugins.sglang.spec import SGLangBackendSpec
from engine.plugins.weights.server_pushes import check_versions
from engine.plugins.weights.shared_tensors import SharedBlock, buffer_bytes
from engine.schemas.episode import EpisodeSpec
from engine.schemas.generation import GenerateRequest, Generation, SamplingParams
from engine.schemas.sections import read_stored
from engine.schemas.train import TrainSpec
from engine.tokens.template import ChatTemplate
from engine.train.policy import Policy
from engine.train.sync import open_sync

Running = Any
HOT = SamplingParams(temperature=1.0, ignore_eos=True)
LORA = {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


async def started(format: ChatTemplate, model: Path, *servers: Running, **more: Any) -> SGLangBackend:
    backend = SGLangBackend(
        SGLangBackendSpec.model_validate({"urls": [server.url for server in servers], **more}),
        format,
        sampling=SamplingParams(),
        model=str(model),
    )
    await backend.start()
    return backend


@pytest.fixture
async def backend(
    sglang_server: Running, chat_format: ChatTemplate, tiny_model_dir: Path
) -> AsyncIterator[SGLangBackend]:
    """It has the model's own weights before each test, and gets them back after it."""
    made = await started(chat_format, tiny_model_dir, sglang_server)
    yield made
    for name in list(made.control.adapters):
        await made.control.unload_adapter(name)
    await made.close()
    again = await started(chat_format, tiny_model_dir, sglang_server)
    await again.control.update_weights_from_disk(str(tiny_model_dir), 0)
    await again.close()


def spec_of(model: Path, **train: Any) -> EpisodeSpec:
    return read_stored(
        {
            "spec": "episode/v1",
            "name": "demo",
            "model": {"path": str(model)},
            "backend": {"kind": "sglang", "urls": ["http://127.0.0.1:1"]},
            "tasks": {"source": "inline", "rows": [{"id": "t0"}]},
            "train": train,
        },
        EpisodeSpec,
    )


def policy_of(model: Path, lora: dict[str, Any] | None = None) -> Policy:
    spec = read_stored({"device": "cpu", "lora": lora}, TrainSpec)
    return Policy.load(model, spec, temperature=1.0, vocab=None, vision=None)


def nudge(policy: Policy, seed: int = 5) -> None:
    """As a step of training: every trained parameter is another one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in policy.named_parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


def request(ids: Sequence[int] = PROMPT, **changes: Any) -> GenerateRequest:
    fields = {"max_new_tokens": 24, "stop_token_ids": [], "seed": 7} | changes
    return generate_request(ids, HOT, **fields)


def spans(generation: Generation) -> list[tuple[int, int]]:
    """(version, tokens) of each span."""
    return [(span.version, span.end - span.start) for span in generation.versions]


def by_transformers(folder: Path, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits = net(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(output)), torch.tensor(list(output))].numpy()


@pytest.mark.parametrize(
    ("method", "lora", "pause"),
    [
        ("disk", None, True),
        ("disk", LORA, False),
        ("tensors", None, False),
        ("tensors", LORA, True),
        ("collective", None, True),
        ("adapter", LORA, True),
        ("auto", None, False),
        ("auto", LORA, True),
        pytest.param("disk", None, False, marks=pytest.mark.exhaustive),
        pytest.param("disk", LORA, True, marks=pytest.mark.exhaustive),
        pytest.param("tensors", None, True, marks=pytest.mark.exhaustive),
        pytest.param("tensors", LORA, False, marks=pytest.mark.exhaustive),
        pytest.param("collective", None, False, marks=pytest.mark.exhaustive),
        pytest.param("adapter", LORA, False, marks=pytest.mark.exhaustive),
        pytest.param("auto", None, True, marks=pytest.mark.exhaustive),
        pytest.param("auto", LORA, False, marks=pytest.mark.exhaustive),
    ],
)
async def test_what_is_sampled_after_a_push_is_of_the_pushed_weights(
    backend: SGLangBackend, tiny_model_dir: Path, tmp_path: Path, method: str, lora: dict[str, Any] | None, pause: bool
) -> None:
    policy = policy_of(tiny_model_dir, lora)
    spec = spec_of(tiny_model_dir, lora=lora, weight_sync={"method": method, "pause_generation": pause})
    sync = open_sync(spec, backend, tmp_path, lora=lora is not None)
    before = await backend.generate(request())
    replies = []
    for version in (7, 8):
        nudge(policy, version)
        await sync.push(policy, version)
        replies.append(await backend.generate(request()))
        policy.save(tmp_path / f"saved-{version}")
    assert [spans(reply) for reply in (before, *replies)] == [[(0, 24)], [(7, 24)], [(8, 24)]]
    for version, reply in zip((7, 8), replies, strict=True):
        wanted = by_transformers(tmp_path / f"saved-{version}", PROMPT, reply.output_ids.tolist())
        np.testing.assert_allclose(reply.logprobs, wanted, atol=1e-4)
    old = by_transformers(tiny_model_dir, PROMPT, replies[0].output_ids.tolist())
    assert np.abs(replies[0].logprobs - old).max() > 1e-2  # the push was needed
    kept = sorted(path.name for path in (tmp_path / "weights").glob("*")) if (tmp_path / "weights").exists() else []
    assert len(kept) == (0 if method in ("tensors", "collective") else 1)


@pytest.mark.parametrize("method", ["disk", "tensors", "collective"])
@pytest.mark.parametrize("pause", [True, False])
async def test_replies_that_are_being_sampled_go_on_with_two_versions(
    backend: SGLangBackend, tiny_model_dir: Path, tmp_path: Path, method: str, pause: bool
) -> None:
    policy = policy_of(tiny_model_dir)
    sync = open_sync(
        spec_of(tiny_model_dir, weight_sync={"method": method, "pause_generation": pause}),
        backend,
        tmp_path,
        lora=False,
    )
    await sync.push(policy, 1)
    tasks = [
        asyncio.create_task(backend.generate(request([*PROMPT, n], episode_id=f"e{n}", max_new_tokens=1000)))
        for n in range(20, 23)
    ]
    await until_samples(backend, len(PROMPT) + 30, requests=3)
    nudge(policy)
    await sync.push(policy, 2)
    replies = await asyncio.gather(*tasks)
    policy.save(tmp_path / "saved")
    for n, reply in zip(range(20, 23), replies, strict=True):
        (old, first), (new, rest) = spans(reply)
        assert (old, new, first + rest) == (1, 2, 1000)
        prompt, output = [*PROMPT, n], reply.output_ids.tolist()
        np.testing.assert_allclose(
            reply.logprobs[:first], by_transformers(tiny_model_dir, prompt, output[:first]), atol=1e-4
        )
        after = np.abs(
            reply.logprobs[first:] - by_transformers(tmp_path / "saved", prompt + output[:first], output[first:])
        )
        # Held, their prefixes are computed anew; in flight, the old weights' keys and values stay.
        assert after.max() < 1e-4 if pause else after.max() > 1e-2
    assert backend.stats()["retries"] == 0


async def test_a_reply_ends_with_the_adapter_that_it_began_with_which_is_unloaded_later(
    backend: SGLangBackend, tiny_model_dir: Path, tmp_path: Path
) -> None:
    policy = policy_of(tiny_model_dir, LORA)
    sync = open_sync(spec_of(tiny_model_dir, lora=LORA), backend, tmp_path, lora=True)
    nudge(policy, 1)
    await sync.push(policy, 1)
    (first,) = list(backend.control.adapters)
    policy.save(tmp_path / "first")
    task = asyncio.create_task(backend.generate(request(max_new_tokens=1000)))
    await until_samples(backend, len(PROMPT) + 8)
    nudge(policy, 2)
    await sync.push(policy, 2)
    second = list(backend.control.adapters)[-1]
    assert list(backend.control.adapters) == [first, second]
    reply = await task
    assert spans(reply) == [(1, 1000)]
    output = reply.output_ids.tolist()
    np.testing.assert_allclose(reply.logprobs, by_transformers(tmp_path / "first", PROMPT, output), atol=1e-4)
    await sync.push(policy, 3)
    third = list(backend.control.adapters)[-1]
    assert list(backend.control.adapters) == [third]
    assert [path.name for path in (tmp_path / "weights").iterdir()] == [third]
    assert spans(await backend.generate(request())) == [(3, 24)]


async def test_a_version_that_the_server_does_not_report_is_said(
    backend: SGLangBackend, tiny_model_dir: Path, tmp_path: Path
) -> None:
    await open_sync(spec_of(tiny_model_dir), backend, tmp_path, lora=False).push(policy_of(tiny_model_dir), 4)
    with pytest.raises(TrainError, match=r"was sent version 5, but reports '4' with its next reply") as caught:
        await check_versions(backend, 5)
    assert caught.value.kind == "weights_not_taken"


async def test_a_folder_that_the_server_cannot_load_is_told_with_what_it_samples_now(
    backend: SGLangBackend, tiny_model_dir: Path, tmp_path: Path
) -> None:
    class Broken:
        """A policy whose files are no model."""

        def save(self, folder: Path, *, serving: bool) -> None:
            folder.mkdir(parents=True)

    sync = open_sync(spec_of(tiny_model_dir, weight_sync={"method": "disk"}), backend, tmp_path, lora=False)
    await sync.push(policy_of(tiny_model_dir), 4)
    with pytest.raises(TrainError, match=r"version 5 did not reach every server: .* \(samples with 4\)") as caught:
        await sync.push(Broken(), 5)  # type: ignore[arg-type]
    assert caught.value.kind == "weights_not_taken"
    assert spans(await backend.generate(request())) == [(4, 24)]
    assert (tmp_path / "weights" / "version-4").is_dir()  # what it has


async def test_a_server_that_somebody_else_updated_is_out_until_the_next_push(
    backend: SGLangBackend, sglang_server: Running, chat_format: ChatTemplate, tiny_model_dir: Path, tmp_path: Path
) -> None:
    policy = policy_of(tiny_model_dir)
    sync = open_sync(spec_of(tiny_model_dir, weight_sync={"method": "tensors"}), backend, tmp_path, lora=False)
    await sync.push(policy, 5)
    somebody = await started(chat_format, tiny_model_dir, sglang_server)
    await somebody.control.update_weights_from_disk(str(tiny_model_dir), 9)
    await somebody.close()
    with pytest.raises(BackendError, match="samples with weights '9', not '5'") as caught:
        await backend.generate(request())
    assert caught.value.kind == "stale_weights"
    (server,) = backend.pool.workers
    assert not server.healthy
    await sync.push(policy, 6)
    while not server.healthy:  # noqa: ASYNC110  neither has the pool
        await asyncio.sleep(0.05)
    assert spans(await backend.generate(request())) == [(6, 24)]


async def test_a_push_after_one_that_was_broken_off_begins_anew(
    backend: SGLangBackend, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """A trainer that died in the middle of a push leaves the server's session open."""
    policy = policy_of(tiny_model_dir)
    (server,) = backend.pool.workers
    await server.json("POST", "/begin_weight_update", {})
    piece = list(policy.weights().items())[:3]
    buffer = SharedBlock(buffer_bytes(piece))
    buffer.write(piece)
    body = {"serialized_named_tensors": [buffer.serialize()], "flush_cache": False}
    assert (await server.json("POST", "/update_weights_from_tensor", body))["success"]
    nudge(policy)
    await open_sync(spec_of(tiny_model_dir, weight_sync={"method": "tensors"}), backend, tmp_path, lora=False).push(
        policy, 3
    )
    policy.save(tmp_path / "saved")
    reply = await backend.generate(request())
    wanted = by_transformers(tmp_path / "saved", PROMPT, reply.output_ids.tolist())
    np.testing.assert_allclose(reply.logprobs, wanted, atol=1e-4)


@pytest.mark.parametrize(
    ("train", "lora", "said"),
    [
        ({"weight_sync": {"method": "adapter"}}, False, "`train.weight_sync.method: adapter` needs `train.lora`"),
        ({"weight_sync": {"method": "adapter"}}, True, None),
    ],
)
async def test_ways_that_do_not_fit_are_refused(
    backend: SGLangBackend, tiny_model_dir: Path, tmp_path: Path, train: dict[str, Any], lora: bool, said: str | None
) -> None:
    spec = spec_of(tiny_model_dir, **train)
    if said is None:
        open_sync(spec, backend, tmp_path, lora=lora)
        return
    with pytest.raises(TrainError, match=said) as caught:
        open_sync(spec, backend, tmp_path, lora=lora)
    assert caught.value.kind == "train_setup"


@pytest.mark.slow
@pytest.mark.parametrize("method", [pytest.param("disk", marks=pytest.mark.exhaustive), "tensors"])
async def test_of_two_servers_one_that_died_is_out_and_the_push_goes_on_with_the_other(
    sglang_server: Running,
    second_server: Running,
    chat_format: ChatTemplate,
    tiny_model_dir: Path,
    tmp_path: Path,
    method: str,
) -> None:
    backend = await started(chat_format, tiny_model_dir, sglang_server, second_server)
    try:
        policy = policy_of(tiny_model_dir)
        sync = open_sync(spec_of(tiny_model_dir, weight_sync={"method": method}), backend, tmp_path, lora=False)
        await sync.push(policy, 1)
        assert {server.version for server in backend.pool.workers} == {"1"}
        second_server.kill()
        await sync.push(policy, 2)
        assert [server.healthy for server in backend.pool.workers] == [True, False]
        nudge(policy)
        await sync.push(policy, 3)
        assert spans(await backend.generate(request())) == [(3, 24)]
    finally:
        await backend.close()
        again = await started(chat_format, tiny_model_dir, sglang_server)
        await again.control.update_weights_from_disk(str(tiny_model_dir), 0)
        await again.close()


async def test_weights_of_another_shape_are_refused_before_they_are_sent(
    backend: SGLangBackend, tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = AutoConfig.from_pretrained(tiny_model_dir)
    config.intermediate_size = 96
    other = tmp_path / "other"
    AutoModelForCausalLM.from_config(config).save_pretrained(other)
    sync = open_sync(spec_of(other), backend, tmp_path, lora=False)
    with pytest.raises(TrainError, match=r"another model than the one that is trained: .*down_proj.* has shape"):
        await sync.push(policy_of(other), 1)
    assert spans(await backend.generate(request())) == [(0, 24)]
