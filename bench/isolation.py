"""What a call in a worker process costs, against the same call in a thread, and what a worker costs.

    python bench/isolation.py [--calls 2000]

Prints microseconds a call (one after the other), their ratio, and for workers: milliseconds to start one, MB of memory that
belong to it alone (private pages), and its resident memory.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from engine.actions.calling.code_call import call_spec_code
from engine.actions.calling.host import CodeOrigin
from engine.actions.calling.workers import Workers
from engine.environments.tools.calculator import calculate
from engine.plugins.isolation.host import Isolation
from engine.plugins.isolation.workers import CodeWorker
from engine.schemas.entry import IsolationSpec

USE = "engine.environments.tools.calculator:calculate"
ARGUMENTS = {"expression": "3 * (4 + 5)"}
PROCESS = IsolationSpec(mode="process")


async def timed(call: Callable[[], Awaitable[object]], calls: int) -> float:
    """Microseconds a call, the best of three."""
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(calls):
            await call()
        best = min(best, (time.perf_counter() - began) / calls * 1e6)
    return best


def private_mb(pid: int) -> tuple[float, float]:
    """(private, resident) memory of a process, in MB."""
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    size = {key: int(rows[key].split()[0]) / 1000 for key in ("Private_Clean", "Private_Dirty", "Rss")}
    return size["Private_Clean"] + size["Private_Dirty"], size["Rss"]


async def main(isolation: Isolation, calls: int) -> None:
    """Measure and print."""
    workers = Workers()
    plain = partial(calculate, **ARGUMENTS)
    thread = await timed(lambda: call_spec_code(workers, plain, seconds=30, blame="tool", what="calculate"), calls)
    tool, _ = isolation.load(CodeOrigin(use=USE, base=Path(), role="tool"), PROCESS).tool()
    process = await timed(lambda: tool.call(ARGUMENTS, None, seconds=30, what="calculate"), calls)
    print(f"a call in a thread    {thread:8.0f} µs")
    print(f"a call in a worker    {process:8.0f} µs   {process / thread:.1f} times")
    started = []
    for _ in range(20):
        worker = CodeWorker(isolation._zygote, isolation.limits_of(PROCESS))
        began = time.perf_counter()
        await worker.start()
        await worker.request("describe", USE, ".", None, seconds=30)
        started.append((time.perf_counter() - began, worker))
    best = min(seconds for seconds, _ in started) * 1e3
    private, resident = private_mb(started[0][1].pid)
    print(f"starting a worker     {best:8.1f} ms")
    print(f"memory of a worker    {private:8.1f} MB of its own, {resident:.0f} MB resident (shared with the zygote)")
    workers.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=2000)
    own = Isolation()
    began = time.perf_counter()
    own.load(CodeOrigin(use=USE, base=Path(), role="tool"), PROCESS)
    print(f"starting the zygote   {(time.perf_counter() - began) * 1e3:8.0f} ms, once a run")
    try:
        asyncio.run(main(own, parser.parse_args().calls))
    finally:
        own.close()
