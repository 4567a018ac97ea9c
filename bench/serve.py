"""Groups a second through `engine serve`, relative to the same episodes in this process.

    python bench/serve.py --model FOLDER        # FOLDER contains a tokenizer

The episodes are those of turn.py: an instant scripted backend, one tool call in a turn, the journal on. `in process` is what the adapters of
trainers use: episodes and training rows with advantages. `serve` is the service of groups in this process, read by the client in another
process as an Arrow stream, sums compared. Both run alternately in this process; the ratio of a pair is what counts. The start of the client's
process is not part of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from turn import make_spec

TOKEN = "bench"
CLIENT = """
import json, sys, time
from engine.plugins.serve.client import GroupClient
with GroupClient(sys.argv[1], "bench") as client:
    client.health()
    began, rows = time.perf_counter(), 0
    for group in client.groups("all", count=int(sys.argv[2])):
        rows += group.batch.num_rows
    print(json.dumps([time.perf_counter() - began, rows]))
"""


async def in_process(loaded: Any, folder: Path, groups: int, samples: int) -> tuple[float, float]:
    """(Wall seconds, CPU seconds of this process) of all groups."""
    from engine.backends.registry import open_backend
    from engine.plugins.trainers.rollouts import TrainerRollouts

    rollouts = TrainerRollouts(loaded, folder, "trl", keep_going=True)
    await rollouts.start(open_backend(loaded, rollouts.format))
    try:
        began, spent = time.perf_counter(), time.process_time()
        batch = await rollouts.batch(rollouts.tasks[:groups], samples, 0)
        took = time.perf_counter() - began, time.process_time() - spent
    finally:
        await rollouts.close()
    assert len(batch.rows) == groups * samples, len(batch.rows)
    return took


async def through_serve(loaded: Any, folder: Path, groups: int, samples: int) -> tuple[float, float]:
    """(Wall seconds of the client, CPU seconds of this process) of all groups."""
    from engine.backends.registry import open_backend
    from engine.plugins.agents.server import server_of_loop
    from engine.plugins.serve.groups import GroupService
    from engine.runner.runner import Runner
    from engine.spec.tasks import load_tasks
    from engine.store import RunHeader, RunStore
    from engine.tokens.loading import load_format

    form, tasks = load_format(loaded.spec.model, loaded.base), load_tasks(loaded)
    backend = open_backend(loaded, form)
    await backend.start()
    store = RunStore.create(folder, RunHeader.of(loaded))
    try:
        runner = Runner(loaded, tasks, form, backend, store, keep_going=True, training=True)
        async with runner.serving():
            failed: list[BaseException] = []
            service = GroupService(loaded, tasks, form, backend, store, runner, TOKEN, failed.append)
            address = await server_of_loop().listen("127.0.0.1", 0, service.service)
            try:
                spent = time.process_time()
                words = [sys.executable, "-c", CLIENT, address, str(groups)]
                client = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
                said, _ = await client.communicate()
                spent = time.process_time() - spent
            finally:
                await service.close()
                await server_of_loop().stop_listening()
    finally:
        await backend.close()
        store.close()
    assert client.returncode == 0, failed
    took, rows = json.loads(said)
    assert rows == groups * samples, rows
    return took, spent


async def measure(arguments: argparse.Namespace) -> None:
    """Print one line for each pair, and the medians."""
    from engine.spec.load import load_spec

    pairs = []
    with tempfile.TemporaryDirectory(prefix="bench-serve-") as name:
        folder = Path(name)
        path = make_spec(folder, arguments.turns, arguments.groups, arguments.model)
        changes = [f"rollout.samples_per_task={arguments.samples}", "rollout.concurrency=64"]
        loaded = load_spec(path, changes)
        for number in range(arguments.rounds + 1):
            own = await in_process(loaded, folder / f"own-{number}", arguments.groups, arguments.samples)
            served = await through_serve(loaded, folder / f"served-{number}", arguments.groups, arguments.samples)
            if number == 0:
                continue  # it warms the caches
            pairs.append((own, served))
            print(
                f"in process {arguments.groups / own[0]:.1f} groups/s, serve {arguments.groups / served[0]:.1f}; "
                f"serve / in process {own[0] / served[0]:.2f}, CPU {served[1] / own[1]:.2f}",
                flush=True,
            )
    rates = [arguments.groups / own[0] for own, _ in pairs], [arguments.groups / served[0] for _, served in pairs]
    ratio = [own[0] / served[0] for own, served in pairs]
    cpu = [served[1] / own[1] for own, served in pairs]
    print(
        f"median of {len(pairs)} pairs: in process {statistics.median(rates[0]):.1f} groups/s, "
        f"serve {statistics.median(rates[1]):.1f}; ratio {statistics.median(ratio):.2f} "
        f"({min(ratio):.2f} to {max(ratio):.2f}), CPU of this process {statistics.median(cpu):.2f}"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder with a tokenizer")
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    arguments.model = str(Path(arguments.model).resolve())
    asyncio.run(measure(arguments))


if __name__ == "__main__":
    main()
