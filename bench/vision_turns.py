"""What images cost a turn: preprocessing for 2, 8 and 32 turns with one new image each.

    python bench/vision_turns.py                          # a tiny Qwen2.5-VL's processor, made on the spot
    python bench/vision_turns.py --model Qwen/Qwen2.5-VL-3B-Instruct --size 896

Ours: read and check the image, put it away by digest, process it, bridge to the next prompt. The baseline is what
several trainers do: the processor over the whole conversation and all of its images, at each turn. Both run in this
process, turn about, several rounds; the ratio is what counts. `last` is the cost of the last turns beside the
first: 1 is flat. No model runs.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

QUESTION = "What is to be seen here, and how does it differ from what was shown before?"
ANSWER = "A pattern of coloured noise, and no part of it was shown before."


def pictures(count: int, size: int, seed: int) -> list[bytes]:
    """PNG files of noise, each another one."""
    from PIL import Image

    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        small = random.integers(0, 256, (size // 8, size // 8, 3), np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(small).resize((size, size)).save(buffer, "PNG")
        found.append(buffer.getvalue())
    return found


def engine_turns(form: Any, shown: list[bytes], filter_record: Callable[[Any, Any], Any]) -> list[float]:
    """Seconds of each turn through the engine: from the user's message to the next prompt."""
    from engine.schemas.environment import UserTurn
    from engine.schemas.generation import FinishReason, Generation
    from engine.schemas.journal import UserRecord
    from engine.schemas.message import Message, TextPart, image_part
    from engine.tokens.conversation import Conversation

    conversation = Conversation(form, [])
    episode = SimpleNamespace(conversation=conversation)
    said = np.array([*form.encode(ANSWER), form.stop_token_ids[0]], np.int32)
    seconds = []
    loop = asyncio.new_event_loop()
    try:
        for turn, data in enumerate(shown):
            part = image_part(data)
            began = time.perf_counter()
            record = UserRecord(turn=UserTurn(content=[part, TextPart(text=QUESTION)]))
            record = loop.run_until_complete(filter_record(episode, record))
            message = Message(role="user", content=record.turn.content)
            if turn:
                conversation.add([message])
            else:
                conversation.open([message])
            conversation.prompt()
            conversation.tapes[-1].placed_images()
            seconds.append(time.perf_counter() - began)
            conversation.reply(
                Generation.read(
                    {
                        "output_ids": said,
                        "logprobs": np.zeros(len(said), np.float32),
                        "finish": FinishReason(type="stop"),
                    }
                ),
                turn,
            )
    finally:
        loop.close()
    assert len(conversation.branches()) == 1
    return seconds


def rerender_turns(form: Any, shown: list[bytes]) -> list[float]:
    """Seconds of each turn where the processor renders all of the conversation."""
    from PIL import Image
    from transformers.processing_utils import ProcessorMixin

    processor = form.vision.processing.processor
    messages: list[dict[str, Any]] = []
    images: list[Any] = []
    seconds = []
    for data in shown:
        began = time.perf_counter()
        images.append(Image.open(io.BytesIO(data)))
        messages.append({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]})
        text = form.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ProcessorMixin.__call__(processor, images=[images], text=[text], return_tensors="np")
        seconds.append(time.perf_counter() - began)
        messages.append({"role": "assistant", "content": [{"type": "text", "text": ANSWER}]})
    return seconds


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="tiny-qwen2_5-vl")
    parser.add_argument("--size", type=int, default=336, help="side of an image, in pixels")
    parser.add_argument("--turns", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    from engine.actions.record_filters import ImageStorer, MemoryImages
    from engine.schemas.model import ModelSpec
    from engine.tokens.loading import load_format

    with tempfile.TemporaryDirectory() as folder:
        form = load_format(ModelSpec(path=options.model), Path(folder))
    if form.vision is None:
        raise SystemExit(f"{options.model} sees nothing")
    images = MemoryImages()
    spec: Any = SimpleNamespace(condense=None, limits=SimpleNamespace(on_overflow="end"))
    filter_record = ImageStorer(form, images, images.sources.get, spec).filter
    seed = 0
    engine_turns(form, pictures(3, options.size, 10**6), filter_record)
    rerender_turns(form, pictures(3, options.size, 10**6))
    print(f"images of {options.size} x {options.size} pixels, median of {options.rounds} rounds")
    print(
        "| turns | engine, ms a turn | re-render, ms a turn | ratio | engine, last / first | re-render, last / first |"
    )
    print("|---|---|---|---|---|---|")
    for turns in options.turns:
        ours, theirs = [], []
        for _ in range(options.rounds):
            seed += 1
            shown = pictures(turns, options.size, seed)
            ours.append(engine_turns(form, shown, filter_record))
            theirs.append(rerender_turns(form, shown))
        ratio = statistics.median(sum(b) / sum(a) for a, b in zip(ours, theirs, strict=True))
        cells = [1000 * statistics.median(sum(row) / turns for row in rows) for rows in (ours, theirs)]
        quarter = max(1, turns // 4)
        growth = [
            statistics.median(sum(row[-quarter:]) / sum(row[:quarter]) for row in rows) for rows in (ours, theirs)
        ]
        print(f"| {turns} | {cells[0]:.1f} | {cells[1]:.1f} | {ratio:.1f} | {growth[0]:.2f} | {growth[1]:.2f} |")


if __name__ == "__main__":
    main()
