"""What code written by hand for speed saves, by file of `engine/tokens/`: CPU time of a turn, and of the start of a process, with the file switched off.

    python bench/fast.py --model FOLDER                     # FOLDER contains a tokenizer in Qwen3's format
    python bench/fast.py --model FOLDER --only ascii --rounds 200
    python bench/fast.py --model FOLDER --rounds 5 --pool pairs.json       # many short calls add up

Turns: runs of 64 episodes of 16 turns against the fake server of `bench/rollout.py`, journal on, all in one process. A run with a
file switched off and a run with everything on are a pair (`bench/pairs.py`). Two figures of each pair:

    turn    CPU time of the whole process per turn, off / on; `nothing` compares a run with itself and shows the noise
    calls   CPU time of the thread inside the calls that the file serves, measured where they happen in these turns: what they
            cost more with the file off, as a part of a turn with everything on. The rest of the turn adds no noise to it.

Start: a process that loads the chat format and renders one prompt; the median of several processes, in turn with and without.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import structlog

sys.path.insert(0, str(Path(__file__).parent))

from floor import Workload
from pairs import Pairs, save, saved
from rollout import Fake, load_tokenizer
from subject import Engine

TURNS, EPISODES = 16, 64

Timed = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Wraps a function so that its CPU time is counted."""
Variant = Callable[[Any, Timed, bool], contextlib.AbstractContextManager[Any]]
"""Patches a chat format: its calls that a file serves are timed, with the file on or off."""


class _With:
    """An object with one method, such as `encode`."""

    def __init__(self, **methods: Callable[..., Any]) -> None:
        self.__dict__.update(methods)


def _nothing(form: Any, timed: Timed, on: bool) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


def _ascii(form: Any, timed: Timed, on: bool) -> contextlib.AbstractContextManager[Any]:
    library = form.fast._backend.encode
    call = form.fast._ascii.encode if on else lambda text: library(text, add_special_tokens=False).ids
    return patch.object(form.fast, "_ascii", _With(encode=timed(call)))


def _byte_level(form: Any, timed: Timed, on: bool) -> contextlib.AbstractContextManager[Any]:
    library = form.fast._backend.decode
    call = form.fast._bytes.decode if on else lambda ids: library(list(ids), skip_special_tokens=False)
    return patch.object(form.fast, "_bytes", _With(decode=timed(call)))


def _qwen_replies(form: Any, timed: Timed, on: bool) -> contextlib.AbstractContextManager[Any]:
    if form.reader is None or form.reader._qwen is None:
        raise SystemExit("qwen_replies: this model's replies are not read by it; name a model in Qwen3's format")
    stack = contextlib.ExitStack()
    stack.enter_context(patch.object(form.reader, "read", timed(form.reader.read)))
    if not on:
        stack.enter_context(patch.object(form.reader, "_qwen", None))
    return stack


def _wrapper(form: Any, timed: Timed, on: bool) -> contextlib.AbstractContextManager[Any]:
    return patch.object(
        form.bridges, "cached_bridge", timed(form.bridges.cached_bridge if on else form.unchecked_bridge)
    )


def _reply_text(form: Any, timed: Timed, on: bool) -> contextlib.AbstractContextManager[Any]:
    stack = contextlib.ExitStack()
    stack.enter_context(patch.object(form.bridges, "_shown_reply", timed(form.bridges._shown_reply)))
    if not on:
        stack.enter_context(patch("engine.tokens.bridge.bridge.shape_of", lambda reply, inspected: None))
    return stack


VARIANTS: dict[str, Variant] = {
    "nothing": _nothing,
    "ascii": _ascii,
    "byte_level": _byte_level,
    "qwen_replies": _qwen_replies,
    "wrapper": _wrapper,
    "reply_text": _reply_text,
}
"""By file: how its calls are timed, and how it is switched off."""

START = """
import resource, sys
from pathlib import Path
import engine.tokens.jinja, engine.tokens.loading as loading
from engine.schemas.model import ModelSpec
if "plain_tokenizer" in sys.argv[2:]:
    loading.read_plain = lambda folder: None
if "jinja" in sys.argv[2:]:
    from transformers.utils.chat_template_utils import _compile_jinja_template
    engine.tokens.jinja.compile_template = _compile_jinja_template
form = loading.load_format(ModelSpec(path=sys.argv[1]), Path())
form.render([{"role": "user", "content": "Hello."}])
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)
"""
"""A process that prints its CPU seconds and its largest size in MB: MODEL, and the files that are switched off."""


def turns(model: str, names: list[str], rounds: int, file: Path | None = None) -> dict[str, Pairs]:
    """Measure the files, and pool the pairs with those in `file`.

    Returns:
        By file, whole turns: CPU µs per turn with everything on (base) and with the file off (other). Under `FILE calls`, the
        turn with everything on (base), and that plus what the calls of the file cost more with the file off (other).
    """
    workload = Workload.of(load_tokenizer(model), model=model)
    found = saved(file)
    with Fake(workload) as fake:
        engine = Engine(fake.url, model, TURNS)

        def once(name: str, on: bool) -> tuple[float, float]:
            spent = 0

            def timed(call: Callable[..., Any]) -> Callable[..., Any]:
                def counted(*args: Any) -> Any:
                    nonlocal spent
                    began = time.thread_time_ns()
                    result = call(*args)
                    spent += time.thread_time_ns() - began
                    return result

                return counted

            gc.collect()
            with VARIANTS[name](engine._format, timed, on):
                done, seconds, _ = asyncio.run(engine.run(EPISODES, EPISODES))
            return seconds / done * 1e6, spent / done / 1e3

        try:
            asyncio.run(engine.run(EPISODES, EPISODES))
            for number in range(rounds):
                for name in names:
                    first = number % 2 == 0
                    both = {on: once(name, on) for on in (first, not first)}
                    (on, calls_on), (off, calls_off) = both[True], both[False]
                    found.setdefault(name, Pairs()).add(on, off)
                    found.setdefault(f"{name} calls", Pairs()).add(on, on + calls_off - calls_on)
        finally:
            engine.close()
    save(file, found)
    return {each: found[each] for name in names for each in (name, f"{name} calls")}


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
    parser.add_argument("--only", nargs="+", choices=[*VARIANTS, "start"], default=[*VARIANTS, "start"])
    parser.add_argument("--rounds", type=int, default=100, help="pairs of each file; about 0.8 CPU s each")
    parser.add_argument("--pool", type=Path, metavar="FILE", help="add the pairs to those of earlier calls in FILE")
    options = parser.parse_args()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR), cache_logger_on_first_use=False
    )
    names = [name for name in options.only if name in VARIANTS]
    if names:
        print(f"{'off':<19} off / on, median (95 %)    saved per turn", flush=True)
        for name, pairs in turns(options.model, names, options.rounds, options.pool).items():
            print(f"{name:<19} {pairs}", flush=True)
    if "start" in options.only:
        for name, (seconds, size) in start(options.model, min(9, max(3, options.rounds // 2))).items():
            print(f"start, {name:<16} off: {seconds:.2f} s CPU, {size:.0f} MB", flush=True)


if __name__ == "__main__":
    main()
