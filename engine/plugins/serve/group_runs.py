"""Runs the groups of requests, each with the sampling of its request: `engine.plugins.serve.groups` answers the
requests.

Invariants:
- An episode that is finished is read from the store; nothing finished is run again.
- All runners share the store, the backend and the limit of live episodes.
- A group that began more than `max_staleness` versions before the trainer's present one is left out; if it still runs,
  it is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import orjson

from engine.plugins.serve.http import ServiceError
from engine.runner.batch import without_signal
from engine.runner.groups import GroupRequest, GroupRunner
from engine.runner.runner import Runner
from engine.schemas.base import Struct
from engine.schemas.generation import SamplingParams
from engine.schemas.train import TrainSpec
from engine.store.store import episode_id_of
from engine.train.batches import GroupBuilder

if TYPE_CHECKING:
    from engine.backends.backend import Backend
    from engine.plugins.serve.request_log import RequestLog, TakenRequest
    from engine.runner.batch import Group
    from engine.runner.processes import EpisodeRunner
    from engine.schemas.environment import Task
    from engine.schemas.trajectory import Trajectory
    from engine.spec.load import LoadedSpec
    from engine.store.reader import RunReader
    from engine.store.rows.row import TrainingRow
    from engine.store.store import RunStore
    from engine.tokens.template import ChatTemplate

MAX_OVERRIDES = 8
"""Maximum number of different sampling overrides in one launch."""


class ReadyGroup(Struct, frozen=True):
    """A group that can be sent."""

    note: Mapping[str, Any]
    """What is said about it (docs/rows.md)."""
    rows: Sequence[TrainingRow] = ()
    images: Mapping[str, tuple[str, bytes]] = msgspec.field(default_factory=dict)
    """Media type and bytes by digest."""

    def left_out(self, why: str) -> ReadyGroup:
        """The group without its rows."""
        sums = {"tokens": 0, "trained": 0, "advantages": 0.0}
        nothing = {"rows": 0, "sums": sums, "episodes": [], "signal": False}
        return ReadyGroup({**self.note, **nothing, "left_out": why})


class GroupRuns:
    """Runs groups over one run's store. Use it inside `runner.serving()`.

    Args:
        loaded: The spec.
        tasks: Its tasks.
        format: The chat format.
        backend: The started backend.
        store: The run's store.
        runner: Runs episodes with the spec's own sampling.
        log: The requests that were taken.
        reader: Reads the run's episodes: `store`, or all stores of its drivers.
    """

    def __init__(
        self,
        loaded: LoadedSpec,
        tasks: Sequence[Task],
        format: ChatTemplate,
        backend: Backend,
        store: RunStore,
        runner: EpisodeRunner,
        log: RequestLog,
        reader: RunReader,
    ) -> None:
        self._loaded, self._tasks, self._format = loaded, tasks, format
        self._backend, self._store, self._runner, self._log, self._reader = backend, store, runner, log, reader
        rollout, train = loaded.spec.rollout, loaded.spec.train or TrainSpec()
        self.capacity = rollout.live_episodes or 2 * rollout.concurrency
        """Maximum number of episodes that run at the same time."""
        self.max_staleness = train.asynchrony.max_staleness
        self.finished = reader.finished()
        """Ids of the finished episodes, those of this launch too."""
        self.places = {task.id: place for place, task in enumerate(tasks)}
        """The position of each task by id."""
        self._live = asyncio.Semaphore(self.capacity)
        self._rows = GroupBuilder(loaded.spec, train, loaded.base)
        self._runners = {b"{}": self._group_runner(runner)}
        self._services = AsyncExitStack()
        self._making = asyncio.Lock()
        self._groups: dict[tuple[str, int], asyncio.Task[Group]] = {}

    def _group_runner(self, runner: EpisodeRunner) -> GroupRunner:
        return GroupRunner(
            runner, self._group, self._live, self._stored, progress=lambda ended: self.finished.add(ended.episode_id)
        )

    def _stored(self, task_id: str, sample: int) -> Trajectory | None:
        """A finished episode; None if it is not finished."""
        episode_id = episode_id_of(task_id, sample)
        if episode_id not in self.finished:
            return None
        self._reader.refresh()
        return self._reader.trajectory(episode_id)

    def _group(self, request: GroupRequest, trajectories: Sequence[Trajectory]) -> Group:
        """A group whose rows have the id of the run: the store of a driver has an id of its own."""
        return self._rows.group(request, [replace(ended, run_id=self._store.run_id) for ended in trajectories])

    async def close(self) -> None:
        """Close the runners of other samplings."""
        await self._services.aclose()

    def running(self) -> int:
        """Number of episodes that run."""
        return sum(groups.running for groups in self._runners.values())

    def is_stale(self, request: str, number: int) -> bool:
        """Whether a group that has begun is too old for the trainer's present weights."""
        return self._log.began[request, number] < self._log.version - self.max_staleness

    def cancel_stale(self) -> None:
        """Cancel the running groups that are too old."""
        for key, work in list(self._groups.items()):
            if self.is_stale(*key):
                work.cancel()

    def has_runner(self, sampling: Mapping[str, Any]) -> bool:
        """Whether these overrides have been used since the start."""
        return _key(sampling) in self._runners

    async def runner_of(self, request: TakenRequest) -> GroupRunner:
        """The runner of groups with a request's sampling. All share the store, the backend and the limit of live
        episodes."""
        key = _key(request.sampling)
        async with self._making:
            if key not in self._runners:
                if not isinstance(self._runner, Runner):
                    message = (
                        "`sampling` is not supported with several drivers; change the spec, or set `rollout.drivers: 1`"
                    )
                    raise ServiceError(409, message, "several_drivers")
                if len(self._runners) > MAX_OVERRIDES:
                    message = (
                        f"`sampling`: {MAX_OVERRIDES} different overrides were used since the start; use one of these"
                    )
                    raise ServiceError(409, message, "too_many_overrides")
                loaded = overridden(self._loaded, request.sampling)
                runner = Runner(
                    loaded,
                    self._tasks,
                    self._format,
                    self._backend,
                    self._store,
                    keep_going=True,
                    training=True,
                )
                runner.counters, runner.summary = self._runner.counters, self._runner.summary
                runner.faults = self._runner.faults
                await self._services.enter_async_context(runner.serving())
                self._runners[key] = self._group_runner(runner)
            return self._runners[key]

    async def group(self, request: TakenRequest, number: int, groups: GroupRunner) -> ReadyGroup:
        """Run a group, or read it from the store."""
        key = request.id, number
        if key not in self._log.began:
            self._log.begin(*key, self._log.version)
        name, use = request.tasks[number]
        task = self._tasks[self.places[name]]
        if use:
            task = task.model_copy(update={"id": f"{name}~{use}"})
        version = self._log.began[key]
        note = {"request": request.id, "number": number, "task_id": task.id, "version": version}
        if self.is_stale(*key):
            return ReadyGroup(note).left_out("stale")
        wanted = GroupRequest(number=number, task=task, samples=request.samples, version=version)
        work = self._groups[key] = asyncio.create_task(groups.group(wanted), name=f"group {request.id} {number}")
        try:
            group = await work
        except asyncio.CancelledError:
            if self.is_stale(*key) and not (asyncio.current_task() or work).cancelling():
                return ReadyGroup(note).left_out("stale")
            raise
        finally:
            del self._groups[key]
        return self._ready(group, note)

    def _ready(self, group: Group, note: Mapping[str, Any]) -> ReadyGroup:
        """A finished group as it is sent, with the images of its rows."""
        rows = group.rows
        digests = {image.image for row in rows for image in row.branch.images}
        if digests:
            self._reader.refresh()
        stored = [self._reader.image(digest) for digest in sorted(digests)]
        about = {
            "rows": len(rows),
            "sums": {  # which a client compares with its own
                "tokens": sum(len(row.branch.input_ids) for row in rows),
                "trained": sum(len(row.places) for row in rows),
                "advantages": sum(float(abs(row.advantages.astype(float)).sum()) for row in rows),
            },
            "episodes": [
                {
                    "episode_id": trajectory.episode_id,
                    "reward": trajectory.outcome.reward,
                    "rewards": trajectory.outcome.rewards,
                    "trainable": trajectory.outcome.trainable,
                    "solved": trajectory.outcome.solved,
                    "failure": trajectory.outcome.failure.kind if trajectory.outcome.failure else None,
                }
                for trajectory in group.trajectories
            ],
            "signal": not without_signal(rows),
            "left_out": None if rows else "too_few_episodes" if group.small else "no_rows",
        }
        return ReadyGroup({**note, **about}, rows, {image.digest: (image.mime, image.data) for image in stored})


def _key(sampling: Mapping[str, Any]) -> bytes:
    return orjson.dumps(sampling, option=orjson.OPT_SORT_KEYS)


def overridden(loaded: LoadedSpec, sampling: Mapping[str, Any]) -> LoadedSpec:
    """The spec with other sampling parameters. Raises: ValidationError."""
    given = loaded.spec.sampling.model_dump(by_alias=True) | dict(sampling)
    made = SamplingParams.model_validate(given)
    return replace(loaded, spec=loaded.spec.model_copy(update={"sampling": made}))
