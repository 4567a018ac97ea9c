"""The cost of one call of a spec's code: a plain function in a thread, an `async` one on the code loop.

    python bench/hop.py            # 64 episodes at once, µs a call
    python bench/hop.py --at-once 1

CPU is the process's, all threads together; wall is the time from the first call to the last result, over the number of
calls. `main loop` is an `async` function of the engine's own (`@on_main_loop`): what a call costs without another thread.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import Any

from engine.actions.calling import workers as calls


def plain() -> int:
    return 1


async def waits_for_nothing() -> int:
    return 1


async def waits_once() -> int:
    await asyncio.sleep(0)
    return 1


async def ours() -> int:
    await asyncio.sleep(0)
    return 1


async def measure(function: Any, at_once: int, count: int) -> tuple[float, float]:
    """(CPU, wall) in µs a call."""
    workers = calls.Workers()

    async def episode() -> None:
        for _ in range(count // at_once):
            await calls.call_spec_code(workers, function, seconds=60.0, blame="tool", what="tool")

    await asyncio.gather(*(episode() for _ in range(at_once)))  # warms up
    began, spent = time.perf_counter(), time.process_time()
    await asyncio.gather(*(episode() for _ in range(at_once)))
    cpu, wall = time.process_time() - spent, time.perf_counter() - began
    workers.close()
    return cpu / count * 1e6, wall / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at-once", type=int, default=64, help="episodes that call at the same time")
    parser.add_argument("--count", type=int, default=6400, help="calls of each kind")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    kinds: dict[str, Any] = {"plain": plain, "async, nothing to wait for": waits_for_nothing, "async": waits_once}
    mark = getattr(calls, "on_main_loop", None)
    if mark is not None:
        kinds["main loop"] = mark(ours)
    print("| call | CPU, µs | wall, µs |\n|---|---|---|")
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for _ in range(options.rounds):
        for name, function in kinds.items():
            found[name].append(asyncio.run(measure(function, options.at_once, options.count)))
    for name, pairs in found.items():
        cpu, wall = (statistics.median(values) for values in zip(*pairs, strict=True))
        print(f"| {name} | {cpu:.0f} | {wall:.0f} |")


if __name__ == "__main__":
    main()
