"""Sampling of episodes with images on the local backend: in batches, beside one at a time.

    python bench/vision_batch.py                                     a tiny Qwen2.5-VL, made on the spot
    python bench/vision_batch.py --model Qwen/Qwen2.5-VL-3B-Instruct --episodes 16 --size 448

Each episode has `--turns` turns with a new image each, replies of `--new-tokens` tokens and a question between them. Both sides run the
same requests with the same seeds in this process, in alternating rounds: `max_batch` episodes at once, and `max_batch: 1`. The
replies must be the same ids, and log-probs the same within 1e-4 in float32. The ratio of medians is what counts.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
from vision_turns import pictures

from engine.plugins.local.backend import LocalBackend
from engine.plugins.local.spec import LocalBackendSpec
from engine.schemas.generation import GenerateRequest, Generation, SamplingParams
from engine.schemas.message import ImagePart
from engine.schemas.model import ModelSpec
from engine.tokens.catalogue import resolve_model
from engine.tokens.images import digest_of
from engine.tokens.loading import load_format

QUESTION = "What is to be seen here, and how does it differ from what was shown before?"


def ask(form: Any, episode: str, turn: int, ids: list[int], digests: list[str], most: int) -> GenerateRequest:
    """A request for exactly `most` tokens; each marker in `ids` stands for one image."""
    expanded, placed = form.vision.expand(ids, digests)
    return GenerateRequest.read(
        {
            "episode_id": episode,
            "turn": turn,
            "input_ids": expanded,
            "sampling": SamplingParams(ignore_eos=True),
            "max_new_tokens": most,
            "stop_token_ids": [],
            "banned_token_ids": form.vision.banned,
            "seed": turn,
            "images": [ImagePart(image=digest) for digest in digests],
            "image_spans": [(start, start + len(picture.ids)) for picture, start in placed],
        }
    )


async def play(
    backend: LocalBackend, form: Any, shown: list[list[str]], most: int, name: str, at_once: int
) -> tuple[float, list[list[Generation]]]:
    """Episodes per second, and the replies of each episode."""
    free = asyncio.Semaphore(at_once)
    question = form.encode(QUESTION)

    async def episode(place: int) -> list[Generation]:
        ids: list[int] = []
        replies: list[Generation] = []
        async with free:
            for turn in range(len(shown[place])):
                ids = [*ids, form.vision.marker_id, *question]
                request = ask(form, f"{name}/{place}", turn, ids, shown[place][: turn + 1], most)
                replies.append(await backend.generate(request))
                ids = [*ids, *replies[-1].output_ids.tolist()]
            backend.release(f"{name}/{place}")
        return replies

    began = time.perf_counter()
    replies = await asyncio.gather(*(episode(place) for place in range(len(shown))))
    return len(shown) / (time.perf_counter() - began), list(replies)


async def measure(options: argparse.Namespace) -> None:
    """Measure both sides and print the ratio."""
    with tempfile.TemporaryDirectory() as temporary:
        form = load_format(ModelSpec(path=options.model), Path(temporary))
        folder = resolve_model(options.model)
    if form.vision is None:
        raise SystemExit(f"{options.model} takes no images")
    made = pictures(options.episodes * options.turns, options.size, 0)
    for data in made:
        form.vision.bank.put(digest_of(data), data, "image/png")
        form.vision.bank.picture(digest_of(data))  # both sides find it processed
    digests = [digest_of(data) for data in made]
    shown = [digests[place :: options.episodes] for place in range(options.episodes)]
    backends = []
    for rows in (options.max_batch, 1):
        spec = LocalBackendSpec(max_batch=rows, dtype=options.dtype)
        backends.append(LocalBackend(lambda: folder, form.decode, spec, vocab=form.vocab_size, vision=form.vision))
        await backends[-1].start()
    rates: list[list[float]] = [[], []]
    for number in range(options.rounds + 1):
        played = []
        for side, rows in enumerate((options.max_batch, 1)):
            rate, replies = await play(backends[side], form, shown, options.new_tokens, f"{number}", rows)
            rates[side].append(rate)
            played.append([reply for episode in replies for reply in episode])
        same = all(np.array_equal(a.output_ids, b.output_ids) for a, b in zip(*played, strict=True))
        apart = (
            max(float(np.abs(a.logprobs - b.logprobs).max()) for a, b in zip(*played, strict=True)) if same else None
        )
    batched, alone = (statistics.median(side[1:]) for side in rates)  # the first round is a warm-up
    stats = backends[0].stats()
    for backend in backends:
        await backend.close()
    print(
        f"{options.model} {stats['dtype']} on {stats['device']}, {options.episodes} episodes of {options.turns} turns, "
        f"images of {options.size} pixels, {options.new_tokens} tokens a reply, max_batch {options.max_batch}, "
        f"median of {options.rounds} rounds"
    )
    print("| batched, episodes/s | one at a time, episodes/s | ratio | same ids | largest difference of log-probs |")
    print("|---|---|---|---|---|")
    print(
        f"| {batched:.2f} | {alone:.2f} | {batched / alone:.1f} | {same} | {apart if apart is None else f'{apart:.1e}'} |"
    )


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="tiny-qwen2_5-vl")
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--size", type=int, default=112, help="side of an image, in pixels")
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
