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

sys.path.insert(0, str(Path(__file__).parent))

import subject
from floor import Workload
from rollout import Fake, load_tokenizer
from subject import SAMPLES, Engine

SUBJECTS: dict[str, dict[str, Any]] = {
    "text": {},
    "sessions": {"sessions": True},
    "routing": {"routed_experts": True},
    "both": {"sessions": True, "routed_experts": True},
}
EXPERTS = (8, 4, 128)
"""Layers, choices of a token in each, and experts in each."""
FIRST, LAST = 24, 88
FIGURES = ("CPU µs", "sent", "received", "written")


def _with_experts(model: Path, folder: Path) -> Path:
    """A folder with the files of a model, and the configuration of one with experts."""
    shutil.copytree(model, folder)
    layers, top_k, experts = EXPERTS
    config = {"num_hidden_layers": layers, "num_experts": experts, "num_experts_per_tok": top_k}
    path = folder / "config.json"
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **config}))
    return folder


class Marks:
    """Counts the calls of the tool, one a turn, and notes the figures after the first turns and before the last."""

    def __init__(self, fake: Fake) -> None:
        self._fake, self._tool, self._calls = fake, subject.calculate, 0
        self.begin = self.end = (0.0, 0, 0, 0)

    async def calculate(self, expression: str) -> str:
        self._calls += 1
        while self._calls < SAMPLES:  # no episode is at its first turn while another is counted  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        if self._calls == FIRST * SAMPLES:
            stats = self._fake.stats()
            self.begin = time.process_time(), written(), stats["bytes_in"], stats["bytes_out"]
        elif self._calls == LAST * SAMPLES:
            spent, bytes_written, stats = time.process_time(), written(), self._fake.stats()
            self.end = spent, bytes_written, stats["bytes_in"], stats["bytes_out"]
        return await self._tool(expression)

    calculate.__doc__ = subject.calculate.__doc__


def written() -> int:
    """Bytes that this process has written to files and pipes: the store, and what the guard is sent. Linux."""
    return int(Path("/proc/self/io").read_text().partition("wchar: ")[2].split()[0])


def measure(fake: Fake, model: str, context: int, backend: dict[str, Any]) -> list[float]:
    """CPU microseconds, and bytes sent, received and written, of a turn."""
    engine, tool, marks = (
        Engine(fake.url, model, LAST + 2, prompt=context, backend=backend),
        subject.calculate,
        Marks(fake),
    )
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
    with tempfile.TemporaryDirectory() as folder, Fake(workload, experts=EXPERTS) as fake:
        model = _with_experts(Path(options.model), Path(folder) / "model")
        for _ in range(options.rounds):
            for context in options.contexts:
                for name in options.subjects:
                    row = measure(fake, str(model), context, SUBJECTS[name])
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
