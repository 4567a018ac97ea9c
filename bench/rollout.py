"""What a turn costs: CPU time of the rollout's own process, against a fake of SGLang's /generate in another one.

    python bench/rollout.py --model smollm2-135m-instruct                 # everything
    python bench/rollout.py --measure cost --turns 16 --subjects raw engine
    python bench/rollout.py --measure slots memory
    python bench/rollout.py --measure cost --peer skyrl verl              # peers.py says with which Python they run

Subjects run one after another against the same server, which has a core of its own where the machine has two:

    wire    the floor: requests only
    raw     the floor: and tokenising, and parsing of tool calls
    client  our SGLang backend alone: the same requests, checked prompts and replies; no tokenizer
    engine  a run of the engine, journal on (subject.py); its guard, the process that compares each ended branch with the
            chat template, is measured in the same run and has a column of its own
    peers   other libraries, each in a process of its own (peers.py)

What is measured:

    cost        CPU microseconds (user and system) a turn at 4, 16 and 64 turns, medians of rounds in which all subjects
                alternate; what they are over `raw` in the same round, and `growth`: what turns 17-64 cost over turns
                5-16; the server answers at once
    throughput  episodes a second at 4 turns with 256 at once, likewise
    slots       how much of the server's slots a run keeps busy, start and end included, and between the first and the last
                wave: while neither the first replies of all slots are missing nor the last requests are sent. Workloads
                are slots x seconds of a reply: 256 with 16 turns, 2,048 and 4,096 with 8. Beside it: CPU, rounds of the
                event loop (between two waits for events), garbage collections, and what the fake server costs itself
    memory      what 1,000 episodes of 16 turns that are alive at once add to the process

Compare figures of one run alone: absolute ones drift with the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import urlopen

import numpy as np
import structlog

sys.path.insert(0, str(Path(__file__).parent))

from floor import Workload, rollout
from peers import PEERS
from peers import Subject as Peer
from subject import SAMPLES, Engine

Subject = Callable[[str, Workload, int, int, int], Awaitable[tuple[int, float, float]]]
"""(url, workload, turns, episodes, concurrency) -> (turns taken, CPU seconds, wall seconds)."""

SLOTS = 256
GUARD = "guard"
"""The column of the engine's other process."""


async def _floor(kind: str, url: str, workload: Workload, turns: int, episodes: int, concurrency: int) -> int:
    return await rollout(url, workload, kind=kind, turns=turns, episodes=episodes, concurrency=concurrency)


def _timed(work: Callable[[str, Workload, int, int, int], Awaitable[int]]) -> Subject:
    async def subject(
        url: str, workload: Workload, turns: int, episodes: int, concurrency: int
    ) -> tuple[int, float, float]:
        began, wall = time.process_time(), time.perf_counter()
        count = await work(url, workload, turns, episodes, concurrency)
        return count, time.process_time() - began, time.perf_counter() - wall

    return subject


async def _engine(
    url: str, workload: Workload, turns: int, episodes: int, concurrency: int
) -> tuple[int, float, float]:
    engine = Engine(url, workload.model, turns)
    try:
        return await engine.run(episodes, concurrency)
    finally:
        engine.close()


def _guard_seconds() -> float:
    """CPU time of the guard's process so far; 0 where there is none. Linux."""
    from engine.tokens.bridge import guard

    child = None if guard._current is None else guard._current.child
    return 0.0 if child is None else int(Path(f"/proc/{child.process.pid}/schedstat").read_text().split()[0]) / 1e9


async def _client(url: str, workload: Workload, turns: int, episodes: int, concurrency: int) -> int:
    from engine.plugins.sglang.client import SGLangBackend
    from engine.plugins.sglang.spec import SGLangBackendSpec
    from engine.schemas.generation import GenerateRequest, SamplingParams

    sampling = SamplingParams(temperature=1.0)
    backend = SGLangBackend(SGLangBackendSpec(urls=[url]), _Format(workload), sampling=sampling, model="fake")  # type: ignore[arg-type]
    await backend.start()
    left = iter(range(episodes))
    observation = np.array(workload.observation, np.int32)

    async def worker() -> None:
        for number in left:
            ids = np.array(workload.prompt, np.int32)
            for turn in range(turns):
                request = GenerateRequest.read(
                    {
                        "episode_id": str(number),
                        "turn": turn,
                        "input_ids": ids,
                        "sampling": sampling,
                        "max_new_tokens": 512,
                        "stop_token_ids": [2],
                        "seed": 0,
                    }
                )
                generation = await backend.generate(request)
                ids = np.concatenate([ids, generation.output_ids, observation])
            backend.release(str(number))

    await asyncio.gather(*(worker() for _ in range(min(concurrency, episodes))))
    stats = backend.stats()
    assert stats["certificate"] == {"turns_checked": turns * episodes, "turns_unchecked": 0, "prompt_mismatches": 0}
    await backend.close()
    return turns * episodes


class _Format:
    """What the backend asks of a chat format."""

    def __init__(self, workload: Workload) -> None:
        self.vocab_size = workload.tokenizer.get_vocab_size()
        self.context = None
        self.vision = None
        self.stop_token_ids = [workload.reply[-1]]
        self.encode = lambda text: workload.tokenizer.encode(text, add_special_tokens=False).ids
        self.decode = lambda ids: workload.tokenizer.decode(ids, skip_special_tokens=False)


SUBJECTS: dict[str, Subject] = {
    "wire": _timed(partial(_floor, "wire")),
    "raw": _timed(partial(_floor, "raw")),
    "client": _timed(_client),
    "engine": _engine,
}


class Fake:
    """The fake server in a process of its own."""

    def __init__(
        self,
        workload: Workload,
        *,
        latency: float = 0.0,
        slots: int = 0,
        experts: Sequence[int] = (),
        image: Sequence[int] = (),
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name) / "reply.json"
        text = workload.tokenizer.decode(workload.reply, skip_special_tokens=False)
        path.write_text(json.dumps({"ids": workload.reply, "text": text}))
        script = Path(__file__).parent / "fake_sglang.py"
        command = [sys.executable, str(script), "--reply", str(path), "--latency", str(latency), "--slots", str(slots)]
        command += ["--vocab", str(workload.tokenizer.get_vocab_size())]
        command += ["--experts", *map(str, experts)] if experts else []
        command += ["--image", *map(str, image)] if image else []
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) > 1:
            os.sched_setaffinity(self._process.pid, cores[1:])
            os.sched_setaffinity(0, cores[:1])
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stats(self) -> dict[str, Any]:
        """What went through it."""
        return self.ask("/fake/stats")

    def ask(self, path: str) -> dict[str, Any]:
        """A JSON object of it."""
        with urlopen(f"{self.url}{path}") as reply:
            return dict(json.load(reply))

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()
        self._folder.cleanup()


def growth(costs: dict[int, float]) -> float | None:
    """What a turn of 17-64 costs over one of 5-16, from averages over 4, 16 and 64 turns."""
    if not {4, 16, 64} <= costs.keys():
        return None
    total = {turns: turns * cost for turns, cost in costs.items()}
    return ((total[64] - total[16]) / 48) / ((total[16] - total[4]) / 12)


def tokenizer_folder(model: str) -> Path:
    """A folder with a tokenizer: the given one, or that of a model of the catalogue."""
    folder = Path(model)
    if not folder.exists():
        from engine.tokens.catalogue import resolve_model

        folder = resolve_model(model)
    return folder


def load_tokenizer(model: str) -> Any:
    """A `tokenizers.Tokenizer` from a folder, or a model of the catalogue."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(tokenizer_folder(model) / "tokenizer.json"))


def cost(
    names: list[str], workload: Workload, counts: list[int], total: int, concurrency: int, rounds: int
) -> dict[str, Any]:
    """CPU microseconds a turn of each subject, by turns: one figure a round."""
    figures: dict[str, dict[int, list[float]]] = {}
    with Fake(workload) as fake:
        for turns in counts:
            episodes = max(concurrency, total // turns) // SAMPLES * SAMPLES
            for _ in range(rounds):
                for name in names:
                    guard = _guard_seconds() if name == "engine" else 0.0
                    done, spent, _ = asyncio.run(SUBJECTS[name](fake.url, workload, turns, episodes, concurrency))
                    figures.setdefault(name, {}).setdefault(turns, []).append(spent / done * 1e6)
                    print(f"{name}, {turns} turns: {spent / done * 1e6:.0f} µs", file=sys.stderr)
                    if name == "engine":
                        guarded = (_guard_seconds() - guard) / done * 1e6
                        figures.setdefault(GUARD, {}).setdefault(turns, []).append(guarded)
    for line in table(figures):
        print(line, flush=True)
    return {name: {str(turns): values for turns, values in costs.items()} for name, costs in figures.items()}


def table(figures: dict[str, dict[int, list[float]]]) -> list[str]:
    """Markdown: medians for each subject, their ratios to `raw` in the same round, and growth."""
    counts = list(next(iter(figures.values())))
    over = [f"/ `raw` at {turns}" for turns in counts]
    head = [
        "",
        *(f"µs, {turns} turns" for turns in counts),
        *over,
        "growth",
        "/ `raw`'s",
        *(f"guard {one}" for one in over),
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    raw = figures.get("raw")
    raw_growth = growth({turns: median(values) for turns, values in raw.items()}) if raw else None
    for name, costs in figures.items():
        if name == GUARD:
            continue
        medians = {turns: median(values) for turns, values in costs.items()}
        grown = growth(medians)
        cells = [f"{value:.0f}" for value in medians.values()]
        cells += ratios(costs, raw)
        cells += [f"{grown:.2f}" if grown else "", f"{grown / raw_growth:.2f}" if grown and raw_growth else ""]
        cells += ratios(figures[GUARD], raw) if name == "engine" else [""] * len(counts)
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return lines


def ratios(costs: dict[int, list[float]], raw: dict[int, list[float]] | None) -> list[str]:
    """The medians of the rounds' ratios to `raw`, by turns."""
    if raw is None:
        return [""] * len(costs)
    pairs = {turns: zip(values, raw[turns], strict=True) for turns, values in costs.items()}
    return [f"{median(value / floor for value, floor in pair):.2f}" for pair in pairs.values()]


def throughput(names: list[str], workload: Workload) -> dict[str, float]:
    """Episodes a second at 4 turns, 256 at once."""
    found: dict[str, float] = {}
    with Fake(workload) as fake:
        for _ in range(3):
            for name in names:
                done, _, took = asyncio.run(SUBJECTS[name](fake.url, workload, 4, 2048, SLOTS))
                found[name] = max(found.get(name, 0.0), done / 4 / took)
    for name, rate in found.items():
        print(f"{name:<10}{rate:8.0f} episodes/s at 4 turns x {SLOTS}", flush=True)
    return found


class Rounds:
    """Rounds of the running event loop, each from one wait for events to the next, and garbage collections meanwhile."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.collections = 0
        self.collecting = 0.0
        self._began = 0.0

    def __enter__(self) -> Rounds:
        selector: Any = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
        wait, clock, seconds = selector.select, time.perf_counter, self.seconds
        last = clock()

        def select(timeout: float | None = None) -> Any:
            nonlocal last
            seconds.append(clock() - last)
            events = wait(timeout)
            last = clock()
            return events

        selector.select = select
        gc.callbacks.append(self._collected)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._collected)

    def _collected(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.collections += 1
            self.collecting += time.perf_counter() - self._began


SLOT_WORKLOADS = {
    "2048x1": (2048, 1.0, 8, 6144, 2048),
    "4096x2": (4096, 2.0, 8, 8192, 4096),
    "256x0.2": (256, 0.2, 16, 1024, 512),
    "256x0.05": (256, 0.05, 16, 1024, 512),
}
"""Slots, seconds of a reply, turns of an episode, episodes, episodes that are alive at once."""


def between_waves(stats: dict[str, Any], slots: int) -> float:
    """The share of the slots that is busy from the end of the first reply of each to the beginning of the last requests."""
    began, ended = np.sort(stats["began"]), np.sort(stats["ended"])
    first, last = ended[slots - 1], began[-slots]
    busy = np.clip(ended, first, last).sum() - np.clip(began, first, last).sum()
    return float(busy / (slots * (last - first)))


def slots(workload: Workload, names: list[str]) -> dict[str, dict[str, float]]:
    """How much of the server's slots a run keeps busy."""
    figures: dict[str, dict[str, float]] = {}
    cores = os.sched_getaffinity(0)
    for name in names:
        count, latency, turns, episodes, live = SLOT_WORKLOADS[name]
        with Fake(workload, latency=latency, slots=count) as fake:
            os.sched_setaffinity(0, cores)  # the fake has one of them for itself only while nobody else wants it
            engine, rounds = Engine(fake.url, workload.model, turns), Rounds()
            asyncio.run(engine.run(SAMPLES, SAMPLES))  # loads what is loaded once
            fake.ask("/fake/reset")
            guard, server = _guard_seconds(), fake.stats()["cpu_seconds"]
            done, spent, took = asyncio.run(engine.run(episodes, count, live=live, watch=rounds))
            engine.close()
            guarded = _guard_seconds() - guard
            stats = fake.stats() | fake.ask("/fake/times")
        took_each = np.sort(stats["ended"]).sum() - np.sort(stats["began"]).sum()
        seconds = np.array(rounds.seconds)
        figures[name] = figure = {
            "busy": done * latency / (count * took),
            "between": between_waves(stats, count),
            "cpu_us": spent / done * 1e6,
            "core": spent / took,
            "round_longest": float(seconds.max()),
            "round_99": float(np.quantile(seconds, 0.99)),
            "turns_a_round": done / len(seconds),
            "collections": rounds.collections,
            "collecting": rounds.collecting / spent,
            "guard_us": guarded / done * 1e6,
            "fake_us": (stats["cpu_seconds"] - server) / done * 1e6,
            "fake_late_ms": (took_each / done - latency) * 1e3,
        }
        print(
            "{name:<9} busy {busy:6.1%}, between the waves {between:6.1%}; {cpu_us:4.0f} µs CPU a turn, {core:.0%} of a core "
            "(guard {guard_us:.0f}, fake {fake_us:.0f} µs and {fake_late_ms:.1f} ms late); round: longest {longest:.0f} ms, "
            "99 % {most:.1f} ms, {turns_a_round:.2f} turns; {collections} collections, {collecting:.1%}".format(
                name=name, longest=figure["round_longest"] * 1e3, most=figure["round_99"] * 1e3, **figure
            ),
            flush=True,
        )
    return figures


def memory(workload: Workload, *, turns: int = 16, episodes: int = 1000) -> float:
    """MB that so many concurrent episodes add to a process of their own, at most."""
    with Fake(workload, latency=0.2) as fake:
        script = Path(__file__).parent / "subject.py"
        command = [sys.executable, script, fake.url, workload.model, str(turns), str(episodes)]
        added = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])
    print(f"engine    {added:6.1f} MB for {episodes} concurrent episodes of {turns} turns", flush=True)
    return added


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="smollm2-135m-instruct", help="a folder with a tokenizer, or a catalogue name"
    )
    kinds = ["cost", "throughput", "slots", "memory"]
    parser.add_argument("--measure", nargs="+", default=kinds, choices=kinds)
    parser.add_argument("--turns", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--subjects", nargs="+", default=list(SUBJECTS), choices=list(SUBJECTS))
    parser.add_argument("--peer", nargs="+", default=[], choices=PEERS, help="other libraries beside them, for `cost`")
    parser.add_argument("--rounds", type=int, default=5, help="for `cost`")
    parser.add_argument("--concurrency", type=int, default=64, help="episodes at once, for `cost`")
    parser.add_argument(
        "--total", type=int, default=8192, help="turns of each measurement of `cost`, or more where all are at once"
    )
    parser.add_argument(
        "--workloads", nargs="+", default=list(SLOT_WORKLOADS), choices=list(SLOT_WORKLOADS), help="of `slots`"
    )
    parser.add_argument("--json", help="write the figures to this file too")
    arguments = parser.parse_args()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR), cache_logger_on_first_use=False
    )
    workload = Workload.of(load_tokenizer(arguments.model), model=arguments.model)
    peers = {name: Peer(name, tokenizer_folder(arguments.model)) for name in arguments.peer}
    found: dict[str, Any] = {}
    if "cost" in arguments.measure:
        SUBJECTS.update(peers)
        names = [*arguments.subjects, *peers]
        found["cost"] = cost(names, workload, arguments.turns, arguments.total, arguments.concurrency, arguments.rounds)
        for peer in peers.values():
            peer.close()
    if "throughput" in arguments.measure:
        found["throughput"] = throughput([name for name in arguments.subjects if name != "client"], workload)
    if "slots" in arguments.measure:
        found["slots"] = slots(workload, arguments.workloads)
    if "memory" in arguments.measure:
        found["memory"] = memory(workload)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
