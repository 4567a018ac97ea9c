"""One driver: its store, its backend, and its runner, from joining the run to the last group."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from engine.errors import EngineError, StoreError
from engine.plugins.drivers.cluster import TOKEN
from engine.plugins.drivers.feed import Feed
from engine.plugins.drivers.leases import LeaseAnswer
from engine.plugins.drivers.rules import number_of_drivers
from engine.schemas.base import Contract, Struct
from engine.schemas.sections import SectionOwner

if TYPE_CHECKING:
    from engine.runner.counters import RunCounters
    from engine.runner.runner import Runner
    from engine.runner.summary import RunResult, RunSummary
    from engine.schemas.episode import EpisodeSpec
    from engine.spec.load import LoadedSpec
    from engine.store.header import RunHeader
    from engine.store.store import RunStore

log = structlog.get_logger(__name__)

STORES = "drivers"
"""Name of the folder, in that of the run, that has the stores of drivers."""

DIVIDED = frozenset({"requests_per_minute", "tokens_per_minute", "workers"})
"""Limits of backends and of `isolation` that hold for the whole run: each driver gets an equal part."""

Report = dict[str, Any]
"""What a driver says of itself with each call: see `report_of`."""


class Setup(Struct, frozen=True, kw_only=True):
    """What every driver of a run is given."""

    loaded: LoadedSpec
    header: RunHeader
    folder: str
    """The run's folder, absolute. The driver's store is in it, on the driver's own disk."""
    drivers: int
    kept: list[int] | None
    """Indices of the tasks that run, if some are left out."""
    shards: str | None
    """Where finished groups are published; None: only in the stores."""
    keep_going: bool
    path: list[str]
    """`sys.path` of the command."""
    cwd: str
    environ: dict[str, str]
    """Environment variables of the engine's own."""

    @classmethod
    def of(
        cls,
        loaded: LoadedSpec,
        header: RunHeader,
        folder: Path,
        *,
        kept: list[int] | None = None,
        shards: str | None = None,
        keep_going: bool = False,
    ) -> Setup:
        """Give the drivers of a run what they need, with the paths and variables of this process."""
        return cls(
            loaded=loaded,
            header=header,
            folder=str(folder.absolute()),
            drivers=number_of_drivers(loaded.spec),
            kept=kept,
            shards=shards,
            keep_going=keep_going,
            path=list(sys.path),
            cwd=str(Path.cwd()),
            environ={name: value for name, value in os.environ.items() if name.startswith("EPISODE_ENGINE_")},
        )

    @property
    def runtime_env(self) -> dict[str, Any]:
        """Ray's environment for the processes of the run."""
        return {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, self.path))}}


class Done(Struct, frozen=True, kw_only=True):
    """How a driver ended."""

    store: str
    summary: RunSummary
    faults: list[str]
    stopped: EngineError | None
    spent: float
    counts: dict[str, Any]
    """Counts of its backend."""


Ask = Callable[..., Awaitable[Any]]
"""Calls a method of `Coordinator` by its name; it returns when there is an answer."""


def machine_id() -> str:
    """What identifies the machine on whose disk a driver writes."""
    return f"{socket.gethostname()}-{uuid.getnode():012x}"


def share_of(limit: int, drivers: int, slot: int) -> int:
    """The part of a number that one of several drivers gets, at least 1; the parts of all drivers differ by at most
    1."""
    return max(1, limit // drivers + (slot < limit % drivers))


def of_driver(loaded: LoadedSpec, drivers: int, slot: int) -> LoadedSpec:
    """The spec of one driver: limits of the whole run (`rollout.concurrency`, `rollout.live_episodes`, `DIVIDED`) in
    equal parts."""
    rollout = loaded.spec.rollout
    live = rollout.live_episodes or 2 * rollout.concurrency
    spec: EpisodeSpec = _divided(loaded.spec, lambda limit: share_of(limit, drivers, slot))
    of_one = spec.rollout.model_copy(
        update={
            "concurrency": share_of(rollout.concurrency, drivers, slot),
            "live_episodes": share_of(live, drivers, slot),
        }
    ).with_value("drivers", 1)
    return replace(loaded, spec=spec.model_copy(update={"rollout": of_one}))


def _divided(part: Any, share: Callable[[int], int]) -> Any:
    """A copy of a part of a spec, with the limits in it and in its sections divided."""
    if isinstance(part, dict):
        return {name: _divided(value, share) for name, value in part.items()}
    if isinstance(part, list):
        return [_divided(value, share) for value in part]
    if not isinstance(part, Contract):
        return part
    changed = {}
    for name in type(part).model_fields:
        value = getattr(part, name)
        new = share(value) if name in DIVIDED and value is not None else _divided(value, share)
        if new is not value and new != value:
            changed[name] = new
    divided = part.model_copy(update=changed) if changed else part
    if not isinstance(divided, SectionOwner):
        return divided
    sections = {model: _divided(section, share) for model, section in divided.sections.items()}
    return divided.with_sections(sections) if sections != divided.sections else divided


def prepare_process(setup: Setup) -> None:
    """Give this process the command's folder, import paths and variables, where it does not have them.

    Ray has read its token; programs that this process starts do not get it.
    """
    os.environ.pop(TOKEN, None)
    if Path(setup.cwd).is_dir():
        os.chdir(setup.cwd)
    sys.path += [folder for folder in setup.path if folder not in sys.path]
    for name, value in setup.environ.items():
        os.environ.setdefault(name, value)


async def run_driver(setup: Setup, slot: int, ask: Ask) -> Done:
    """Run the groups that the coordinator leases to driver `slot`, until none is left or the run is to stop.

    A driver whose leases were taken, because it was silent for too long, begins again with other ones.

    Raises:
        EngineError: the backend cannot be used, or a store cannot be written.
    """
    while True:
        done = await _session(setup, slot, ask)
        if done is not None:
            return done
        log.warning(
            "the leases of this driver were taken, because it was silent for too long; it joins again", slot=slot
        )


async def _session(setup: Setup, slot: int, ask: Ask) -> Done | None:
    import numpy as np

    from engine.backends.registry import open_backend
    from engine.runner.runner import Runner
    from engine.spec.tasks import load_tasks
    from engine.tokens.loading import load_format

    loaded = of_driver(setup.loaded, setup.drivers, slot)
    tasks = load_tasks(loaded)
    if setup.kept is not None:
        tasks = tasks.chosen(np.asarray(setup.kept))
    rollout = loaded.spec.rollout
    stores = Path(setup.folder) / STORES
    existing = [store.name for store in stores.iterdir() if (store / "run.db").is_file()] if stores.is_dir() else []
    name, leases = await ask("join", slot, machine_id(), existing)
    store = open_driver_store(stores, name, setup.header, existing=name in existing)
    stop = asyncio.Event()
    try:
        chat_format = load_format(loaded.spec.model, loaded.base)
        backend = open_backend(loaded, chat_format)
        backend.logs = store.folder / "servers"
        backend.spread(slot)
        runner = Runner(loaded, tasks, chat_format, backend, store, keep_going=setup.keep_going)
        incarnation = uuid.uuid4().hex[:8]

        async def call(number: int, wanted: int, done: Sequence[int], faulty: Sequence[int]) -> LeaseAnswer:
            report = report_of(runner, name, incarnation)
            answer, stopping, whole = await ask("call", slot, number, wanted, list(done), list(faulty), report)
            if whole is not None and runner.guard is not None:
                runner.guard.render_whole(whole)
            if stopping or answer.word == "rejoin":
                stop.set()
            given: LeaseAnswer = answer
            return given

        publish = None
        if setup.shards is not None:
            from engine.plugins.drivers.publisher import Publisher

            publish = Publisher(store.folder, setup.shards, driver=name).publish
        room = rollout.live_episodes or 1
        feed = Feed(call, tasks, rollout.samples_per_task, room=room, finished=store.finished(), publish=publish)
        feed.add(leases)
        try:
            await backend.start()
            result = await _run_leased(runner, feed, stop)
            if feed.word == "rejoin":
                return None
            await feed.flush()
        finally:
            await backend.close()
        counts = backend.stats() | ({"played": runner.service_stats} if runner.service_stats else {})
        (store.folder / "backend.json").write_text(json.dumps(counts, indent=2, default=str) + "\n")
        spent = runner.cost.spent if runner.cost is not None else 0.0
        result.summary.causes.place = None  # it does not travel
        return Done(
            store=name, summary=result.summary, faults=result.faults, stopped=result.stopped, spent=spent, counts=counts
        )
    finally:
        store.close()


async def _run_leased(runner: Runner, feed: Feed, stop: asyncio.Event) -> RunResult:
    """Run what the coordinator leases; an error of the leases stops the runner."""
    serving = asyncio.create_task(feed.serve(), name="leases")
    running = asyncio.create_task(runner.run(feed, stop), name="episodes")
    try:
        await asyncio.wait({running, serving}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done() and not serving.cancelled() and (error := serving.exception()) is not None:
            raise error
        return await running
    finally:
        for work in (running, serving):
            work.cancel()
        await asyncio.gather(running, serving, return_exceptions=True)


def open_driver_store(stores: Path, name: str, header: RunHeader, *, existing: bool) -> RunStore:
    """Open the store of a driver for writing, and make it if it does not exist.

    Raises:
        StoreError: it cannot be made or opened.
    """
    from engine.store.store import RunStore

    if existing:
        return RunStore.open(stores / name, part=True)
    try:
        stores.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot create {stores}: {error}; a driver needs the run's folder on its own disk") from error
    return RunStore.create(stores, header, name=name)


def report_of(runner: Runner, store: str, incarnation: str) -> Report:
    """What a driver says of itself: its counts since it began, and the sums of its store."""
    live: RunCounters = runner.counters
    summary = runner.summary
    return {
        "store": store,
        "incarnation": incarnation,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "states": {state: count for state, count in live.states.items() if count},
        "tokens": live.tokens,
        "turns": live.turns,
        "finished": live.finished,
        "finished_turns": live.finished_turns,
        "failures": dict(live.failures),
        "limits": dict(live.limits),
        "seconds": live.seconds,
        "waits": live.waits,
        "episodes": summary.episodes,
        "reward": summary.reward,
        "unchecked": summary.unchecked_prompts,
        "cpu": sum(os.times()[:2]),
        "whole": None if runner.guard is None else runner.guard.reason,
    }
