"""`deterministic: true`: the same bits alone, among neighbours, in a small batch, and by a process that knows nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from generate_requests import generate_request

from engine.errors import BackendError
from engine.plugins.local.backend import LocalBackend
from engine.plugins.local.kv import Tile
from engine.plugins.local.load import BatchedModel
from engine.plugins.local.spec import LocalBackendSpec
from engine.schemas.generation import GenerateRequest, Generation, SamplingParams

EPISODES = 9


def prompt(episode: int) -> np.ndarray:
    """Of lengths 5 to 69, the odd ones with a beginning in common."""
    rng = np.random.default_rng(episode)
    shared = np.random.default_rng(99).integers(5, 1000, 30 if episode % 2 else 0)
    return np.concatenate([shared, rng.integers(5, 1000, 5 + 4 * episode)]).astype(np.int32)


def ask(episode: int, turn: int, ids: np.ndarray) -> GenerateRequest:
    sampling = SamplingParams(temperature=1.0, top_p=0.9 if episode % 3 == 0 else 1.0)
    changes = {"turn": turn, "max_new_tokens": 11 + episode, "stop_token_ids": [], "seed": 1000 * episode + turn}
    return generate_request(ids, sampling, episode=str(episode), **changes)


async def play(
    folder: Path, *, max_batch: int, together: bool, restart: bool = False, deterministic: bool = True
) -> list[list[Generation]]:
    """Two turns of every episode, the second one after an observation."""
    spec = LocalBackendSpec(max_batch=max_batch, dtype="float32", device="cpu", deterministic=deterministic)

    async def turn(backend: LocalBackend, number: int, before: list[list[Generation]]) -> list[Generation]:
        def ids(episode: int) -> np.ndarray:
            said = [part for one in before for part in (one[episode].output_ids, np.array([3, 4, 5], np.int32))]
            return np.concatenate([prompt(episode), *said]).astype(np.int32)

        calls = [backend.generate(ask(episode, number, ids(episode))) for episode in range(EPISODES)]
        return list(await asyncio.gather(*calls)) if together else [await call for call in calls]

    def fresh() -> LocalBackend:
        return LocalBackend(lambda: folder, lambda ids: "", spec, stash_bytes=1 << 16, prefill_tokens=40)

    backend = fresh()
    await backend.start()
    first = await turn(backend, 0, [])
    if restart:
        await backend.close()
        backend = fresh()
        await backend.start()
    second = await turn(backend, 1, [first])
    assert backend.stats()["deterministic"] is deterministic
    await backend.close()
    return [first, second]


@pytest.mark.slow
async def test_replies_are_the_same_bits_whatever_runs_beside_them(tiny_model_dir: Path) -> None:
    alone = await play(tiny_model_dir, max_batch=1, together=False)
    for made in (
        await play(tiny_model_dir, max_batch=8, together=True),
        await play(tiny_model_dir, max_batch=3, together=True, restart=True),
    ):
        for turn, expected in zip(made, alone, strict=True):
            for one, other in zip(turn, expected, strict=True):
                assert one.output_ids.tolist() == other.output_ids.tolist()
                assert one.logprobs.tobytes() == other.logprobs.tobytes()


@pytest.mark.slow
async def test_without_it_they_are_the_same_up_to_rounding(tiny_model_dir: Path) -> None:
    alone = await play(tiny_model_dir, max_batch=1, together=False, deterministic=False)
    among = await play(tiny_model_dir, max_batch=8, together=True, deterministic=False)
    assert alone[0][0].output_ids.tolist() == among[0][0].output_ids.tolist()
    np.testing.assert_allclose(alone[0][0].logprobs, among[0][0].logprobs, atol=1e-4)


@pytest.mark.slow
async def test_its_logprobs_are_those_of_a_recomputation(tiny_model_dir: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    for episode, made in enumerate((await play(tiny_model_dir, max_batch=4, together=True))[0]):
        ids = np.concatenate([prompt(episode), made.output_ids])
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(ids.astype(np.int64))[None]).logits[0].log_softmax(-1)
        found = logits[len(prompt(episode)) - 1 : -1].gather(
            -1, torch.tensor(made.output_ids.astype(np.int64))[:, None]
        )
        np.testing.assert_allclose(found[:, 0].numpy(), made.logprobs, atol=1e-4)


def test_a_machine_whose_products_depend_on_the_place_is_refused(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    real = Tile.attend

    def uneven(self: Tile, *args: Any) -> torch.Tensor:
        found = real(self, *args)
        return found + 1e-7 * torch.arange(len(found)).view(-1, 1, 1, 1)

    monkeypatch.setattr(Tile, "attend", uneven)
    with pytest.raises(
        BackendError, match=r"`backend.deterministic: true`: on cpu a token's logits depend on its position"
    ):
        BatchedModel(tiny_model_dir, torch.device("cpu"), torch.float32, 4, repeatable=True)
