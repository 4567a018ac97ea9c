"""What several drivers give, and what they cost: turns a second, busy slots, the coordinator's CPU time, the cost of a lease.

    python bench/drivers.py --drivers 1 2 4                  # needs the extra `ray`
    python bench/drivers.py --measure leases simulate        # needs no Ray

What is measured:

    turns     `engine run` of scripted episodes of 16 turns, journal on, with 1, 2, … drivers: turns/s while all drivers run, CPU time per turn
              of the drivers, and CPU time of the coordinator per episode. N drivers have N of the machine's cores, for all of their
              processes and threads: without a bound, one driver's thread of the store and its guard use a second core
    slots     the same against a fake of SGLang's /generate with 256 slots and 50 ms a reply: the share of busy slots. The fake server takes a
              share of the cores; its CPU time per turn is printed
    leases    CPU and wall time of a call that leases one group and reports one as done, without Ray
    calls     the same through Ray: CPU time of the coordinator's process
    simulate  a run on many hosts, from the costs that are measured here: see `simulate`

A machine whose cores are busy with other work gives smaller rates: compare figures of one run alone.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import yaml

sys.path.insert(0, str(Path(__file__).parent))

TURNS, SAMPLES, SLOTS = 16, 8, 256


def spec_of(folder: Path, model: str, backend: dict[str, Any], groups: int, drivers: int) -> Path:
    """The spec of one measurement."""
    call = {"tool_calls": [{"name": "calculate", "arguments": {"expression": "17 * 25 - 3"}}]}
    if backend["kind"] == "scripted":
        backend = backend | {"replies": [call] * TURNS}
    spec = {
        "spec": "episode/v1",
        "name": "bench",
        "model": {"path": model, "tool_calls": "hermes", "tool_role": "user", "context": 1_000_000},
        "backend": backend,
        "tasks": {"source": "python", "use": "drivers_rows:rows", "with": {"count": groups}, "id": "id"},
        "prompt": [{"role": "user", "content": "How many apples are in shop {{id}}?"}],
        "tools": [{"use": "subject:calculate"}],
        "machine": "tools",
        "limits": {"assistant_turns": TURNS, "tool_calls": None, "turn_tokens": 512, "episode_tokens": None},
        "rollout": {"samples_per_task": SAMPLES, "concurrency": SLOTS, "live_episodes": 2 * SLOTS, "drivers": drivers},
    }
    (folder / "drivers_rows.py").write_text(
        "def rows(count: int) -> list[dict[str, str]]:\n    return [{'id': f't{at}'} for at in range(count)]\n"
    )
    path = folder / f"spec{drivers}.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


@dataclass
class Measured:
    """One run."""

    drivers: int
    turns: int
    seconds: float
    """From the first report of a finished episode to the end, without the start of Ray and of the drivers."""
    cpu_per_turn: float
    """CPU seconds of the drivers per turn, with their start."""
    coordinator: float
    """CPU seconds of the coordinator per episode, without its start."""
    rate: float
    """Turns a second, between the first and the last report at which all drivers ran."""


async def run_once(spec: Path, out: Path) -> Measured:
    """One run with Ray, also for one driver, so that all are measured alike."""
    from engine.plugins.drivers.rules import number_of_drivers
    from engine.plugins.drivers.run import Fleet, run_drivers
    from engine.runner.counters import RunCounters
    from engine.runner.summary import RunSummary
    from engine.spec.load import load_spec
    from engine.spec.tasks import load_tasks
    from engine.store import RunHeader, RunStore

    loaded = load_spec(spec)
    tasks = load_tasks(loaded)
    fleet = Fleet(RunCounters(total=len(tasks) * SAMPLES), RunSummary())
    store = RunStore.create(out, RunHeader.of(loaded))
    seen: list[tuple[float, int, int, float]] = []

    async def watch() -> None:
        while True:
            busy = sum(bool(report["states"]) for report in fleet.reports.values())
            point = (time.perf_counter(), fleet.counters.turns, busy, fleet.coordinator_cpu)
            if not seen or seen[-1][1] != point[1]:
                seen.append(point)
            await asyncio.sleep(0.1)

    watching = asyncio.create_task(watch())
    try:
        ended = await run_drivers(
            loaded, tasks, None, store, fleet, stop=asyncio.Event(), keep_going=True, ready=lambda: None
        )
    finally:
        watching.cancel()
        store.close()
    done = len(tasks) * SAMPLES
    outcomes = sum((driver.summary.outcomes for driver in ended), Counter())
    assert outcomes == {"limit: assistant_turns": done}, outcomes
    full = [point for point in seen if point[2] == number_of_drivers(loaded.spec) and point[1]]
    (first, turns_a, _, cpu_a), (last, turns_b, _, cpu_b) = full[0], full[-1]
    turns = turns_b - turns_a
    cpu = sum(report["cpu"] for report in fleet.reports.values())
    return Measured(
        drivers=number_of_drivers(loaded.spec),
        turns=turns,
        seconds=last - first,
        cpu_per_turn=cpu / (done * TURNS),
        coordinator=(cpu_b - cpu_a) / max(1, turns / TURNS),
        rate=turns / (last - first),
    )


def show(found: Measured, first: Measured | None, more: str = "") -> None:
    """Print one line."""
    ratio = f"  {found.rate / first.rate:4.2f} of one driver" if first else ""
    print(
        f"{found.drivers} drivers {found.rate:8.0f} turns/s  {found.cpu_per_turn * 1e6:6.0f} µs CPU a turn  "
        f"{found.coordinator * 1e3:6.3f} ms of the coordinator an episode{ratio}{more}",
        flush=True,
    )


def turns(model: str, counts: list[int], groups: int, rounds: int) -> list[Measured]:
    """Scripted episodes: of some rounds, in which the numbers of drivers take turns, the best of each."""
    best: dict[int, Measured] = {}
    with tempfile.TemporaryDirectory(prefix="bench-drivers-") as name:
        folder = Path(name)
        sys.path.insert(0, name)
        cores = sorted(os.sched_getaffinity(0))
        for _ in range(rounds):
            for count in counts:
                os.sched_setaffinity(0, cores[:count])
                found = asyncio.run(
                    run_once(spec_of(folder, model, {"kind": "scripted"}, groups, count), folder / "runs")
                )
                if count not in best or found.rate > best[count].rate:
                    best[count] = found
        os.sched_setaffinity(0, cores)
        sys.path.remove(name)
    for found in best.values():
        show(found, best[counts[0]] if found.drivers != counts[0] else None)
    return list(best.values())


def slots(model: str, counts: list[int], groups: int) -> dict[int, float]:
    """The share of the fake server's slots that are busy while the run goes on, at 50 ms a reply."""
    import rollout
    from floor import Workload

    shares: dict[int, float] = {}
    workload = Workload.of(rollout.load_tokenizer(model), model=model)
    cores = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory(prefix="bench-drivers-") as name:
        folder = Path(name)
        sys.path.insert(0, name)
        for count in counts:
            with rollout.Fake(workload, latency=0.05, slots=SLOTS) as fake:
                os.sched_setaffinity(0, cores)
                backend = {"kind": "sglang", "urls": [fake.url]}
                found = asyncio.run(run_once(spec_of(folder, model, backend, groups, count), folder / "runs"))
                stats = fake.stats()
            # a reply occupies its slot for busy_seconds / requests on average
            each = stats["busy_seconds"] / (groups * SAMPLES * TURNS)
            shares[count] = found.rate * each / SLOTS
            server = stats["cpu_seconds"] / (groups * SAMPLES * TURNS) * 1e6
            show(
                found,
                None,
                f"  {shares[count]:.1%} of {SLOTS} slots busy at 50 ms  {server:.0f} µs CPU a turn in the fake server",
            )
        sys.path.remove(name)
    return shares


def leases(groups: int = 5000) -> dict[str, float]:
    """Seconds of a call that leases one group and reports one as done: CPU and wall time, with the file's commit."""
    from engine.plugins.drivers.leases import Leases

    with tempfile.TemporaryDirectory(prefix="bench-drivers-") as folder:
        held = Leases(Path(folder) / "leases.db", groups)
        for slot in range(64):
            held.join(slot, f"host-{slot}", [])
        began, wall = time.process_time(), time.perf_counter()
        done: list[list[int]] = [[] for _ in range(64)]
        calls = 0
        while held.counts.free or held.counts.leased:
            slot = calls % 64
            answer = held.call(slot, calls // 64 + 1, 1, done[slot])
            done[slot] = [position for position, _ in answer.leases]
            calls += 1
        found = {
            "calls": calls,
            "cpu": (time.process_time() - began) / calls,
            "wall": (time.perf_counter() - wall) / calls,
        }
        held.close()
    print(
        f"a call that leases one group and reports one: {found['cpu'] * 1e6:.0f} µs CPU, {found['wall'] * 1e6:.0f} µs"
    )
    return found


async def ray_calls(calls: int = 2000) -> dict[str, float]:
    """CPU seconds of the coordinator's process per call through Ray, each of which leases one group and reports one; 16 calls at a time."""
    from engine.plugins.drivers.actors import Coordinator, ask
    from engine.plugins.drivers.cluster import cluster

    report = {
        "incarnation": "a",
        "states": {"GENERATING": 8},
        "failures": {},
        "limits": {},
        "store": "0",
        "whole": None,
    }
    with cluster(1) as ray, tempfile.TemporaryDirectory(prefix="bench-drivers-") as folder:
        actor = ray.remote(Coordinator).options(num_cpus=0).remote(folder, calls, 60.0, shared=True)
        remote = partial(ask, actor, 60.0)
        for slot in range(16):
            await remote("join", slot, "host", [])
        began, wall = (await remote("status"))["cpu"], time.perf_counter()

        async def driver(slot: int) -> None:
            done: list[int] = []
            for number in range(1, calls // 16 + 1):
                answer, _, _ = await remote("call", slot, number, 1, done, [], report)
                done = [position for position, _ in answer.leases]

        await asyncio.gather(*(driver(slot) for slot in range(16)))
        found = {
            "cpu": ((await remote("status"))["cpu"] - began) / calls,
            "wall": (time.perf_counter() - wall) / calls,
        }
    print(
        f"the same through Ray, in the coordinator's process: {found['cpu'] * 1e6:.0f} µs CPU; {found['wall'] * 1e6:.0f} µs "
        "between two answers, 16 drivers at once"
    )
    return found


def simulate(
    hosts: int, alive: int, *, call_cost: float, turn_cost: float, turn_wait: float, groups_per_host: int
) -> dict[str, float]:
    """A run with many hosts, by events: how busy the coordinator is, how long a call waits for it, and how many places wait for a lease.

    Assumptions: one driver a host, which has `alive` episodes in groups of `SAMPLES` whose episodes end together; an episode has `TURNS` turns,
    each of which waits `turn_wait` for a server and costs its driver `turn_cost` of one core; servers are never the bound. A driver keeps a
    quarter of its episodes ahead and calls when half of these are left, as `engine.plugins.drivers.feed` does, and twice a second. Calls cost the
    coordinator `call_cost` each, one after another, on a core of its own; the network adds 1 ms there and 1 ms back. Hosts do not fail.

    Args:
        hosts: Number of hosts.
        alive: Episodes of a host that run at once.
        call_cost: Seconds of the coordinator per call.
        turn_cost: CPU seconds of a driver per turn.
        turn_wait: Seconds of a reply.
        groups_per_host: Groups that each host runs.
    """
    episode = TURNS * max(turn_wait + turn_cost, alive * turn_cost)
    places, ahead = alive // SAMPLES, alive // 4 // SAMPLES
    left = hosts * groups_per_host
    ready, idle, open_call = [0] * hosts, [places] * hosts, [False] * hosts
    events: list[tuple[float, int, str, int, int]] = []
    sequence = calls = 0
    free = busy = waits = longest = end = 0.0

    def push(at: float, kind: str, host: int, count: int = 0) -> None:
        nonlocal sequence
        sequence += 1
        heapq.heappush(events, (at, sequence, kind, host, count))

    def call(at: float, host: int, wanted: int) -> None:
        nonlocal free, busy, waits, longest, calls, left
        free = max(at + 0.001, free) + call_cost
        wait = free + 0.001 - at
        busy, calls, waits, longest = busy + call_cost, calls + 1, waits + wait, max(longest, wait)
        given = min(wanted, left)
        left -= given
        open_call[host] = wanted > 0
        push(free + 0.001, "answer", host, given)

    for host in range(hosts):
        push(0.0, "beat", host)  # all begin at once
    while events:
        at, _, kind, host, count = heapq.heappop(events)
        if kind == "beat":
            if left or idle[host] < places:
                push(at + 0.5, "beat", host)
                call(at, host, 0)
        elif kind == "end":
            idle[host] += 1
            end = max(end, at)
        elif kind == "answer":
            if count:
                open_call[host] = False
            ready[host] += count
        begun = min(ready[host], idle[host])
        for number in range(begun):
            # the first ones begin one after another, over one episode's time, as in a run that goes on
            push(at + episode * (number / places if kind == "answer" and at < 1.0 else 1.0), "end", host)
        ready[host] -= begun
        idle[host] -= begun
        if left and not open_call[host] and ready[host] <= ahead // 2:
            call(at, host, idle[host] + ahead - ready[host])
    return {
        "hosts": hosts,
        "turns_per_second": hosts * groups_per_host * SAMPLES * TURNS / end,
        "coordinator_busy": busy / end,
        "calls_per_second": calls / end,
        "wait_mean": waits / calls,
        "wait_longest": longest,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="smollm2-135m-instruct", help="a folder with a tokenizer, or a catalogue name"
    )
    kinds = ["turns", "slots", "leases", "calls", "simulate"]
    parser.add_argument("--measure", nargs="+", default=kinds, choices=kinds)
    parser.add_argument("--drivers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--groups", type=int, default=1000, help=f"groups of {SAMPLES} episodes of {TURNS} turns")
    parser.add_argument("--rounds", type=int, default=2, help="of `turns`; the best counts")
    parser.add_argument("--turn-cost", type=float, default=350.0, help="for `simulate`: µs CPU of a turn in a driver")
    parser.add_argument("--call-cost", type=float, help="for `simulate`: µs of a call in the coordinator")
    parser.add_argument("--json", help="write the figures to this file too")
    arguments = parser.parse_args()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR), cache_logger_on_first_use=False
    )
    print(f"load of the machine before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    found: dict[str, Any] = {}
    model = str(Path(arguments.model).resolve()) if Path(arguments.model).exists() else arguments.model
    if "turns" in arguments.measure:
        found["turns"] = [vars(each) for each in turns(model, arguments.drivers, arguments.groups, arguments.rounds)]
    if "slots" in arguments.measure:
        found["slots"] = slots(model, arguments.drivers, arguments.groups)
    call_cost = arguments.call_cost
    if "leases" in arguments.measure or ("simulate" in arguments.measure and call_cost is None):
        found["leases"] = leases()
        call_cost = call_cost or found["leases"]["wall"] * 1e6
    if "calls" in arguments.measure:
        found["calls"] = asyncio.run(ray_calls())
        call_cost = arguments.call_cost or found["calls"]["cpu"] * 1e6
    if "simulate" in arguments.measure:
        found["simulate"] = []
        for hosts in (1, 4, 16, 64):
            each = simulate(
                hosts,
                1000,
                call_cost=call_cost * 1e-6,
                turn_cost=arguments.turn_cost * 1e-6,
                turn_wait=0.5,
                groups_per_host=500,
            )
            found["simulate"].append(each)
            print(
                f"{hosts:3d} hosts × 1,000 episodes {each['turns_per_second']:9.0f} turns/s  coordinator {each['coordinator_busy']:6.2%} busy, "
                f"{each['calls_per_second']:6.0f} calls/s, a call waits {each['wait_mean'] * 1e3:.2f} ms, at most {each['wait_longest'] * 1e3:.1f} ms"
            )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
