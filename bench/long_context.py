"""What a turn costs where the context is long: CPU time, and bytes sent, received and journaled, at several contexts.

    python bench/long_context.py --model FOLDER                       # a folder with a tokenizer
    python bench/long_context.py --contexts 4000 128000 --subjects text sessions

An episode has a prompt of so many tokens and takes turns of 128 sampled tokens with one tool call, as in rollout.py. The
figures are those of its turns 25 to 88, so that what an episode costs once (its prompt, its last rows) is not in them.
The fake server has a core of its own; its time is not counted.

    text       each request holds the whole prompt, and the reply repeats it
    sessions   `backend.sessions`: a request holds what is new
    routing    as `text`, with the experts of each token: 4 of 128 in each of 8 layers
    both       sessions and routing
    images     as `text`, half of the prompt is images of 256 tokens, and each turn's tool shows one more
    screens    images, with sessions
    all        images, with sessions and routing
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import structlog
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))

import subject
from floor import Workload
from rollout import Fake, load_tokenizer
from subject import SAMPLES, Engine

from engine.schemas.environment import ToolReply
from engine.schemas.message import TextPart, image_part

SUBJECTS: dict[str, dict[str, Any]] = {
    "text": {},
    "sessions": {"sessions": True},
    "routing": {"routed_experts": True},
    "both": {"sessions": True, "routed_experts": True},
    "images": {},
    "screens": {"sessions": True},
    "all": {"sessions": True, "routed_experts": True},
}
WITH_IMAGES = ("images", "screens", "all")
SIDE, IMAGE_TOKENS = 448, 258
"""Pixels of an image's side, and its tokens with the two around it."""
SHOWN = 8
"""Files of images, which are shown one after the other."""
EXPERTS = (8, 4, 128)
"""Layers, choices of a token in each, and experts in each."""
_LAYERS = dict(zip(("num_hidden_layers", "num_experts_per_tok", "num_experts"), EXPERTS, strict=True))
FIRST, LAST = 24, 88
FIGURES = ("CPU µs", "sent", "received", "written")


def _with_images(model: Path, folder: Path, vocabulary: int) -> Path:
    """A folder with the files of a model's tokenizer, and the configuration of one with a vision tower and experts."""
    from engine.tokens.catalogue import resolve_model

    shutil.copytree(model, folder)
    tiny = resolve_model("tiny-qwen2_5-vl")
    for name in ("preprocessor_config.json", "chat_template.jinja"):
        shutil.copy(tiny / name, folder / name)
    config = json.loads((tiny / "config.json").read_text())
    config["vocab_size"] = config["text_config"]["vocab_size"] = vocabulary
    config["text_config"] |= _LAYERS
    config["text_config"].pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    for number in range(SHOWN):
        noise = Image.effect_noise((14, 14), 40 + number).resize((SIDE, SIDE), Image.Resampling.NEAREST)
        noise.convert("RGB").save(folder / f"{number}.png")
    return folder


def _with_experts(model: Path, folder: Path) -> Path:
    """A folder with the files of a model, and the configuration of one with experts."""
    shutil.copytree(model, folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **_LAYERS}))
    return folder


class Marks:
    """Counts the calls of the tool, one a turn, and notes the figures after the first turns and before the last."""

    def __init__(self, fake: Fake, images: list[str]) -> None:
        self._fake, self._tool, self._calls, self._images = fake, subject.calculate, 0, images
        self.begin = self.end = (0.0, 0, 0, 0)

    async def calculate(self, expression: str) -> str | ToolReply:
        self._calls += 1
        while self._calls < SAMPLES:  # no episode is at its first turn while another is counted  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        if self._calls == FIRST * SAMPLES:
            stats = self._fake.stats()
            self.begin = time.process_time(), written(), stats["bytes_in"], stats["bytes_out"]
        elif self._calls == LAST * SAMPLES:
            spent, bytes_written, stats = time.process_time(), written(), self._fake.stats()
            self.end = spent, bytes_written, stats["bytes_in"], stats["bytes_out"]
        said = await self._tool(expression)
        if not self._images:
            return said
        shown = self._images[self._calls % len(self._images)]
        return ToolReply(content=[image_part(shown), TextPart(text=said)])

    calculate.__doc__ = subject.calculate.__doc__


def written() -> int:
    """Bytes that this process has written to files and pipes: the store, and what the guard is sent. Linux."""
    return int(Path("/proc/self/io").read_text().partition("wchar: ")[2].split()[0])


def measure(fake: Fake, model: Path, context: int, backend: dict[str, Any]) -> list[float]:
    """CPU microseconds, and bytes sent, received and written, of a turn."""
    files = sorted(map(str, model.glob("*.png")))
    images = [files[number % len(files)] for number in range(context // 2 // IMAGE_TOKENS)] if files else []
    text = context - IMAGE_TOKENS * len(images)
    engine = Engine(fake.url, str(model), LAST + 2, prompt=text, images=images, backend=backend)
    tool, marks = subject.calculate, Marks(fake, files)
    subject.calculate = marks.calculate
    try:
        asyncio.run(engine.run(SAMPLES, SAMPLES))
    finally:
        subject.calculate = tool
        engine.close()
    spent, stored, sent, received = (after - before for after, before in zip(marks.end, marks.begin, strict=True))
    return [figure / (LAST - FIRST) / SAMPLES for figure in (spent * 1e6, sent, received, stored)]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder with a tokenizer and template")
    parser.add_argument("--contexts", type=int, nargs="+", default=[4_000, 32_000, 128_000])
    parser.add_argument("--subjects", nargs="+", default=list(SUBJECTS), choices=list(SUBJECTS))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    workload = Workload.of(load_tokenizer(options.model), model=options.model)
    figures: dict[tuple[str, int], list[list[float]]] = {}
    marker = workload.tokenizer.token_to_id("<|image_pad|>")
    image = (marker, 28) if marker is not None else ()
    with tempfile.TemporaryDirectory() as folder, Fake(workload, experts=EXPERTS, image=image) as fake:
        model, seeing = _with_experts(Path(options.model), Path(folder) / "model"), Path(folder) / "seeing"
        if set(options.subjects) & set(WITH_IMAGES):
            _with_images(Path(options.model), seeing, workload.tokenizer.get_vocab_size())
        for _ in range(options.rounds):
            for context in options.contexts:
                for name in options.subjects:
                    row = measure(fake, seeing if name in WITH_IMAGES else model, context, SUBJECTS[name])
                    figures.setdefault((name, context), []).append(row)
    print("| | context | " + " | ".join(f"{figure} a turn" for figure in FIGURES) + " | / the first |")
    print("|---|---|" + "---|" * (len(FIGURES) + 1))
    for (name, context), rows in figures.items():
        values = [median(column) for column in zip(*rows, strict=True)]
        first = median(row[0] for row in figures[name, options.contexts[0]])
        print(
            f"| {name} | {context:,} | "
            + " | ".join(f"{value:,.0f}" for value in values)
            + f" | {values[0] / first:.2f} |"
        )


if __name__ == "__main__":
    main()
