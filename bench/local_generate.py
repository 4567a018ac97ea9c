"""The local backend beside transformers' own `generate`, in one process and one run.

    python bench/local_generate.py [--model smollm2-135m-instruct] [--episodes 32] [--new-tokens 64] [--rounds 3]

Single turn: `--episodes` prompts of equal length (so that plain `generate` pads nothing), every reply
`--new-tokens` long. Multi-turn: the same number of episodes over `--turns` turns, replies of different lengths,
an observation after each; plain `generate` gets the whole left-padded conversation each turn and waits for the
longest reply, which is what a loop around it does. Rounds alternate between the two; medians are compared. Only
the ratio means anything on a machine that others use too.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.plugins.local.backend import LocalBackend
from engine.plugins.local.spec import LocalBackendSpec
from engine.schemas.generation import GenerateRequest, SamplingParams
from engine.tokens.catalogue import resolve_model

SHARED_PROMPT = 160
"""Tokens that every episode's prompt begins with: instructions and examples."""
OWN_PROMPT = 40
OBSERVATION = 24


def prompts(count: int, vocab: int, rng: np.random.Generator) -> list[np.ndarray]:
    """`count` prompts that share their beginning, int32 each."""
    shared = rng.integers(10, vocab, SHARED_PROMPT)
    return [np.concatenate([shared, rng.integers(10, vocab, OWN_PROMPT)]).astype(np.int32) for _ in range(count)]


def plain(model: Any, rows: list[np.ndarray], most: int, pad: int) -> np.ndarray:
    """One `generate` over left-padded rows, sampled, never stopping early: int64 [rows, most]."""
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros((len(rows), width), dtype=torch.long)
    for place, row in enumerate(rows):
        ids[place, width - len(row) :] = torch.from_numpy(row.astype(np.int64))
        mask[place, width - len(row) :] = 1
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=most,
            min_new_tokens=most,
            do_sample=True,
            top_k=0,
            top_p=1.0,
            pad_token_id=pad,
        )
    sampled: np.ndarray = out[:, width:].numpy()
    return sampled


def request(episode: str, turn: int, ids: np.ndarray, most: int) -> GenerateRequest:
    """One reply of exactly `most` tokens."""
    return GenerateRequest.read(
        {
            "episode_id": episode,
            "turn": turn,
            "input_ids": ids,
            "sampling": SamplingParams(ignore_eos=True),
            "max_new_tokens": most,
            "stop_token_ids": [],
            "seed": turn,
        }
    )


async def ours_single(backend: LocalBackend, rows: list[np.ndarray], most: int, name: str) -> float:
    """Tokens a second."""
    began = time.perf_counter()
    await asyncio.gather(*(backend.generate(request(f"{name}/{i}", 0, row, most)) for i, row in enumerate(rows)))
    return len(rows) * most / (time.perf_counter() - began)


def plain_single(model: Any, rows: list[np.ndarray], most: int, pad: int) -> float:
    """Tokens a second."""
    began = time.perf_counter()
    plain(model, rows, most, pad)
    return len(rows) * most / (time.perf_counter() - began)


async def ours_turns(
    backend: LocalBackend, rows: list[np.ndarray], lengths: np.ndarray, seen: list[np.ndarray], name: str
) -> float:
    """Useful tokens a second. Each episode goes on as soon as its own reply is there."""

    async def episode(place: int) -> None:
        context = rows[place]
        for turn, most in enumerate(lengths[place].tolist()):
            reply = await backend.generate(request(f"{name}/{place}", turn, context, most))
            context = np.concatenate([context, reply.output_ids, seen[turn]])
        backend.release(f"{name}/{place}")

    began = time.perf_counter()
    await asyncio.gather(*(episode(place) for place in range(len(rows))))
    return int(lengths.sum()) / (time.perf_counter() - began)


def plain_turns(model: Any, rows: list[np.ndarray], lengths: np.ndarray, seen: list[np.ndarray], pad: int) -> float:
    """Useful tokens a second: every turn is one batch, as long as its longest reply."""
    began = time.perf_counter()
    contexts = list(rows)
    for turn in range(lengths.shape[1]):
        replies = plain(model, contexts, int(lengths[:, turn].max()), pad)
        contexts = [
            np.concatenate([context, reply[:most], seen[turn]])
            for context, reply, most in zip(contexts, replies, lengths[:, turn].tolist(), strict=True)
        ]
    return int(lengths.sum()) / (time.perf_counter() - began)


def show(name: str, ours: list[float], other: list[float]) -> None:
    """One line: medians and their ratio."""
    a, b = statistics.median(ours), statistics.median(other)
    print(f"{name:<34} {a:9.1f} {b:9.1f} {a / b:7.2f}x")


async def main() -> None:
    """Load the model twice (the backend's and the plain one), then measure in turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    given = parser.parse_args()
    folder = resolve_model(given.model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    backend = LocalBackend(
        lambda: folder, tokenizer.decode, LocalBackendSpec(dtype=given.dtype, max_batch=given.episodes)
    )
    await backend.start()
    stats = backend.stats()
    model = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, stats["dtype"])).to(stats["device"]).eval()
    )
    rng = np.random.default_rng(0)
    pad, vocab = int(model.config.pad_token_id or 0), len(tokenizer)
    lengths = rng.integers(given.new_tokens // 4, given.new_tokens + 1, (given.episodes, given.turns))
    seen = [rng.integers(10, vocab, OBSERVATION).astype(np.int32) for _ in range(given.turns)]
    ours: dict[str, list[float]] = {"single": [], "turns": []}
    other: dict[str, list[float]] = {"single": [], "turns": []}
    for number in range(given.rounds):
        rows = prompts(given.episodes, vocab, rng)
        ours["single"].append(await ours_single(backend, rows, given.new_tokens, f"single{number}"))
        other["single"].append(plain_single(model, rows, given.new_tokens, pad))
        rows = prompts(given.episodes, vocab, rng)
        ours["turns"].append(await ours_turns(backend, rows, lengths, seen, f"turns{number}"))
        other["turns"].append(plain_turns(model, rows, lengths, seen, pad))
    print(
        f"{given.model} {stats['dtype']} on {stats['device']}, {torch.get_num_threads()} threads, {given.episodes} episodes"
    )
    print(f"{'tokens/s':<34} {'ours':>9} {'generate':>9} {'ratio':>8}")
    show(f"one turn of {given.new_tokens}", ours["single"], other["single"])
    show(f"{given.turns} turns of {given.new_tokens // 4} to {given.new_tokens}", ours["turns"], other["turns"])
    print({name: value for name, value in backend.stats().items() if name not in ("device", "dtype")})
    await backend.close()


if __name__ == "__main__":
    asyncio.run(main())
