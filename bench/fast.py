"""What each file of `engine/fast/` saves: CPU time of a turn, and of the start of a process, with the file switched off.

    python bench/fast.py --model FOLDER                     # FOLDER contains a tokenizer in Qwen3's format
    python bench/fast.py --model FOLDER --only ascii --rounds 200

Turns: runs of 64 episodes of 16 turns against the fake server of `bench/rollout.py`, journal on, all in one process. A run with a
file switched off and a run with everything on are a pair (`bench/pairs.py`); `nothing` compares a run with itself.

Start: a process that loads the chat format and renders one prompt; the median of several processes, in turn with and without.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import structlog

sys.path.insert(0, str(Path(__file__).parent))

from floor import Workload
from pairs import Pairs
from rollout import Fake, load_tokenizer
from subject import Engine

TURNS, EPISODES = 16, 64

Off = Callable[[Any], contextlib.AbstractContextManager[Any]]
"""Switches a file off for a chat format."""


@contextlib.contextmanager
def _without_wrapper(form: Any) -> Iterator[None]:
    with patch.object(form.bridges, "extension", form.extension):
        yield


def _library_reader(form: Any) -> contextlib.AbstractContextManager[Any]:
    if form.reader is None or form.reader._qwen is None:
        raise SystemExit("qwen_replies: this model's replies are not read by it; name a model in Qwen3's format")
    return patch.object(form.reader, "_qwen", None)


OFF: dict[str, Off] = {
    "nothing": lambda form: contextlib.nullcontext(),
    "ascii": lambda form: patch.object(form.fast, "_ascii", None),
    "byte_level": lambda form: patch.object(form.fast, "_bytes", None),
    "qwen_replies": _library_reader,
    "wrapper": _without_wrapper,
}
"""By file: how it is switched off. `nothing` shows the noise."""

START = """
import resource, sys
from pathlib import Path
import engine.fast.jinja, engine.tokens.loading as loading
from engine.schemas.model import ModelSpec
if "plain_tokenizer" in sys.argv[2:]:
    loading.read_plain = lambda folder: None
if "jinja" in sys.argv[2:]:
    from transformers.utils.chat_template_utils import _compile_jinja_template
    engine.fast.jinja.compile_template = _compile_jinja_template
form = loading.load_format(ModelSpec(path=sys.argv[1]), Path())
form.render([{"role": "user", "content": "Hello."}])
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)
"""
"""A process that prints its CPU seconds and its largest size in MB: MODEL, and the files that are switched off."""


def turns(model: str, names: list[str], rounds: int) -> dict[str, Pairs]:
    """By file: CPU µs per turn with everything on (base) and with the file off (other), in pairs."""
    workload = Workload.of(load_tokenizer(model), model=model)
    found = {name: Pairs() for name in names}
    with Fake(workload.reply) as fake:
        engine = Engine(fake.url, model, TURNS)

        def once() -> float:
            done, spent, _ = asyncio.run(engine.run(EPISODES, EPISODES))
            return spent / done * 1e6

        def without(name: str) -> float:
            with OFF[name](engine._format):
                return once()

        try:
            once()
            for _ in range(rounds):
                for name, pairs in found.items():
                    pairs.run(once, lambda name=name: without(name))
        finally:
            engine.close()
    return found


def start(model: str, rounds: int) -> dict[str, tuple[float, float]]:
    """By what is switched off: median CPU seconds and MB of a process that loads the chat format."""
    cases = {"nothing": [], "jinja": ["jinja"], "plain_tokenizer": ["plain_tokenizer"]}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, off in cases.items():
            ran = subprocess.run([sys.executable, "-c", START, model, *off], capture_output=True, text=True, check=True)
            seconds, size = map(float, ran.stdout.split()[-2:])
            found[name].append((seconds, size))
    return {
        name: (statistics.median(s for s, _ in runs), statistics.median(m for _, m in runs))
        for name, runs in found.items()
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder with a tokenizer in Qwen3's format")
    parser.add_argument("--only", nargs="+", choices=[*OFF, "start"], default=[*OFF, "start"])
    parser.add_argument("--rounds", type=int, default=100, help="pairs of each file; about 0.8 CPU s each")
    options = parser.parse_args()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR), cache_logger_on_first_use=False
    )
    names = [name for name in options.only if name in OFF]
    if names:
        print(f"{'off':<16} off / on, median (95 %)    saved per turn", flush=True)
        for name, pairs in turns(options.model, names, options.rounds).items():
            print(f"{name:<16} {pairs}", flush=True)
    if "start" in options.only:
        for name, (seconds, size) in start(options.model, min(9, max(3, options.rounds // 2))).items():
            print(f"start, {name:<16} off: {seconds:.2f} s CPU, {size:.0f} MB", flush=True)


if __name__ == "__main__":
    main()
