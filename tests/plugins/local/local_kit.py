"""Requests to the local backend on the tiny model, and what transformers makes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from generate_requests import generate_request

from engine.plugins.local.backend import LocalBackend
from engine.schemas.generation import GenerateRequest, Generation, SamplingParams

VOCAB = 1000
END = 2
"""The fixture's `<|im_end|>`."""


Opener = Callable[..., LocalBackend]


def ask(
    ids: Any,
    episode: str = "a",
    *,
    turn: int = 0,
    most: int = 12,
    seed: int = 0,
    stop_ids: tuple[int, ...] = (),
    **more: Any,
) -> GenerateRequest:
    changes = {name: more.pop(name) for name in ("banned_token_ids", "images", "adapter") if name in more}
    changes |= {"turn": turn, "max_new_tokens": most, "stop_token_ids": list(stop_ids), "seed": seed}
    return generate_request(ids, SamplingParams(**more), episode=episode, **changes)


def prompts(count: int, seed: int = 0, shortest: int = 3, longest: int = 70) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, int(rng.integers(shortest, longest))).astype(np.int32) for _ in range(count)]


def recomputed(model: Any, prompt: np.ndarray, reply: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Log-probs of a reply from one plain forward pass."""
    ids = torch.from_numpy(np.concatenate([prompt, reply]).astype(np.int64))
    with torch.inference_mode():
        logits = model(ids[None]).logits[0, len(prompt) - 1 : -1] / temperature
    found: np.ndarray = logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0].numpy()
    return found


def greedy(model: Any, prompt: np.ndarray, most: int) -> list[int]:
    """What transformers' own `generate` says."""
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, do_sample=False, eos_token_id=None
    )
    said: list[int] = out[0, len(prompt) :].tolist()
    return said


async def sampling(backend: LocalBackend) -> None:
    """Wait until a reply is under way."""
    for _ in range(4000):
        if backend.stats()["tokens"]:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("nothing was sampled within 20 seconds")


async def sampled(backend: LocalBackend, **more: Any) -> Generation:
    return await backend.generate(ask(np.arange(10, 40, dtype=np.int32), most=30, **more))
