"""The local backend reports the experts of each token, however tokens are batched and prefixes are reused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_moe
import torch
from generate_requests import generate_request
from nets_for_tests import build
from transformers import AutoModelForCausalLM

from engine.errors import BackendError
from engine.plugins.local.backend import LocalBackend
from engine.plugins.local.spec import LocalBackendSpec
from engine.schemas.generation import GenerateRequest, Generation
from engine.train.routing import routers_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_moe.build(tmp_path_factory.mktemp("moe") / "qwen2", "Qwen2Moe")


def backend_of(folder: Path, **spec: Any) -> LocalBackend:
    settings = {"device": "cpu", "dtype": "float32", "routed_experts": True} | spec
    return LocalBackend(lambda: folder, lambda ids: "", LocalBackendSpec.model_validate(settings), stash_bytes=1 << 20)


def request(episode: str, ids: list[int], start: int | None) -> GenerateRequest:
    changes = {"max_new_tokens": 9, "stop_token_ids": [], "seed": len(ids), "experts_from": start}
    return generate_request(ids, episode=episode, **changes)


def own_choices(folder: Path, ids: list[int]) -> np.ndarray:
    """The routers' choices in one pass of transformers; zeros in layers without a router."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = np.zeros((len(ids), 3, 3), np.int64)
    for layer, router in routers_of(model).items():
        router.register_forward_hook(
            lambda module, inputs, output, layer=layer: found.__setitem__((slice(None), layer), output[2].numpy())
        )
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]), use_cache=False)
    return found


@pytest.mark.parametrize(
    "spec", [{"max_batch": 4}, pytest.param({"max_batch": 1}, marks=pytest.mark.slow)], ids=["batched", "stashed"]
)
async def test_experts_are_those_of_the_routers(folder: Path, spec: dict[str, Any]) -> None:
    """Three episodes with a common prefix and two turns each; with one row, each turn finds its prefix in a stash."""
    backend = backend_of(folder, **spec)
    await backend.start()
    try:
        prompts = [[*range(20, 45), 50 + number, 60] for number in range(3)]
        first = await asyncio.gather(*(backend.generate(request(str(n), ids, 0)) for n, ids in enumerate(prompts)))
        longer = [ids + found.output_ids.tolist() + [70, 71] for ids, found in zip(prompts, first, strict=True)]
        known = [len(found.routed_experts) for found in first]
        second: list[Generation] = await asyncio.gather(
            *(backend.generate(request(str(n), ids, known[n])) for n, ids in enumerate(longer))
        )
        bare = await backend.generate(request("0", longer[0], None))
    finally:
        await backend.close()
    assert bare.routed_experts is None
    assert any(found.cached_tokens for found in second)
    for ids, one, other in zip(longer, first, second, strict=True):
        assert one.routed_experts.dtype == np.uint8
        found = np.concatenate([one.routed_experts, other.routed_experts])
        np.testing.assert_array_equal(found, own_choices(folder, ids + other.output_ids[:-1].tolist()))


async def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    backend = backend_of(build("Qwen2", tmp_path))
    with pytest.raises(BackendError, match="has no experts") as caught:
        await backend.start()
    assert caught.value.kind == "no_experts"
