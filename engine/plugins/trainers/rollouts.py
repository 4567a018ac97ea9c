"""Runs groups of episodes of a spec for the trainer of another library. Each adapter adds a backend over its trainer's
sampler.

The episodes are in a run store (`engine show`, `engine view`, `engine replay`). They have the ids that `engine train`
gives: the second use of task `t` is `t~1`, and a later launch in the same folder continues these numbers. Where several
processes share a folder, see `number_uses_of`.

Invariant: a group is whole. All of its episodes have ended before its rows are made, because they are each other's
baseline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from engine.errors import TrainError, first_of
from engine.plugins.trainers.capabilities import TRAINERS
from engine.plugins.trainers.handover import final_rows
from engine.plugins.trainers.pixels import Pixels
from engine.plugins.trainers.process import LoopThread, lock_process_number
from engine.runner.batch import Batch, Group
from engine.runner.groups import GroupRequest, GroupRunner
from engine.runner.processes import refuse_many
from engine.runner.runner import Runner
from engine.runner.source import fitting_tasks
from engine.schemas.train import TrainSpec
from engine.spec.load import LoadedSpec, load_spec
from engine.spec.tasks import load_tasks
from engine.store.training import open_rollouts
from engine.tokens.catalogue import resolve_model
from engine.tokens.loading import load_format
from engine.train.batches import GroupBuilder
from engine.validate import refuse_first_tasks

if TYPE_CHECKING:
    from engine.backends.backend import Backend
    from engine.schemas.environment import Task
    from engine.schemas.trajectory import Trajectory
    from engine.store.rows.row import TrainingRow

log = structlog.get_logger(__name__)

PROCESSES = 1000
"""Processes that may share a folder, at most."""


class TrainerRollouts:
    """The episodes of a spec, for one trainer. All coroutines run on the loop on which `start` ran.

    >>> rollouts = TrainerRollouts("spec.yaml", "runs/with-verl", "verl")
    >>> await rollouts.start(backend)
    >>> group = await rollouts.group("task-1", samples=8, version=0)

    Args:
        spec: The spec, or the path of its file.
        folder: The folder of the training; the run store is `rollouts` in it.
        trainer: The trainer's name in `TRAINERS`.
        keep_going: Do not stop if the first episodes all fail with one cause.
        shared: Other processes run episodes in the folder, too: the run store is `process-<number>/rollouts` in it.

    Raises:
        SpecError: the spec is invalid.
        TrainError: kind `train_setup`: the spec uses something that does not reach the trainer's loss.
    """

    def __init__(
        self,
        spec: LoadedSpec | Path | str,
        folder: Path | str,
        trainer: str,
        *,
        keep_going: bool = False,
        shared: bool = False,
    ) -> None:
        self.loaded = spec if isinstance(spec, LoadedSpec) else load_spec(spec)
        self.spec = self.loaded.spec
        self.train = self.spec.train or TrainSpec()
        self.folder = Path(folder)
        refuse_many(self.loaded, f"the adapter for {trainer}")
        refuse_lost(self.loaded, trainer)
        model = self.spec.model
        self.model_folder = resolve_model(model.path, model.revision, self.loaded.base)
        self.format = load_format(model, self.loaded.base)
        self.pixels = None if self.format.vision is None else Pixels(self.format.vision, self.model_folder)
        """What makes the images of rows; None for a model without images."""
        every = load_tasks(self.loaded)
        refuse_first_tasks(self.loaded, every)
        self._tasks = {task.id: task for task in fitting_tasks(every, self.loaded, self.format)}
        self.tasks = list(self._tasks)
        """The ids of the tasks, in order."""
        self.context = min((value for value in (self.format.context, model.context) if value), default=None)
        """The longest sequence that spec and model allow, in tokens; None: unlimited."""
        self.rows = GroupBuilder(self.spec, self.train, self.loaded.base)
        """Builds the rows of a group, with the credit of the spec."""
        self._keep_going, self._shared = keep_going, shared
        self._uses: dict[str, int] = {}
        self._first_use, self._use_step = 0, 1
        self._services = AsyncExitStack()
        self.loop = LoopThread()
        """The loop of the episodes, for a trainer that has none."""
        self._runner: Runner
        self._group_runner: GroupRunner
        self.faults: list[str] = []
        """Episodes that the engine itself could not finish, newest last."""

    def number_uses_of(self, process: int) -> None:
        """Give uses of a task numbers that no other process of the folder gives: `process`, `process` + 1000, …

        Processes share no counter, and equal ids would have equal seeds.

        Raises:
            TrainError: kind `train_setup`: there are too many processes.
        """
        if process >= PROCESSES:
            raise TrainError(f"more than {PROCESSES} processes run episodes in one folder", kind="train_setup")
        self._first_use, self._use_step = process, PROCESSES

    async def start(self, backend: Backend) -> None:
        """Start the backend and open the run store.

        Raises:
            BackendError: the backend cannot serve this spec.
            StoreError: the run store cannot be opened.
            TrainError: kind `train_setup`: more than 1000 processes share the folder.
        """
        async with AsyncExitStack() as services:
            if self._shared:
                process, lock = lock_process_number(self.folder)
                services.callback(lock.release)
                self.folder /= f"process-{process}"
                self.number_uses_of(process)
            await backend.start()
            services.push_async_callback(backend.close)
            self.folder.mkdir(parents=True, exist_ok=True)
            store = open_rollouts(self.folder, self.loaded)
            services.callback(store.close)
            for task_id in {episode_id.rpartition("/")[0] for episode_id in store.statuses()}:
                name, _, use = task_id.rpartition("~")
                task_name, number = (name, int(use)) if name in self._tasks and use.isdecimal() else (task_id, 0)
                self._uses[task_name] = max(self._uses.get(task_name, 0), number + self._use_step)
            runner = Runner(self.loaded, [], self.format, backend, store, keep_going=self._keep_going, training=True)
            runner.faults = self.faults
            rollout = self.spec.rollout
            live = asyncio.Semaphore(rollout.live_episodes or 2 * rollout.concurrency)
            self._runner, self._group_runner = runner, GroupRunner(runner, self.rows.group, live)
            await services.enter_async_context(runner.serving())
            self._services = services.pop_all()

    async def close(self) -> None:
        """Close the run store, the backend and the services of the episodes. Later calls do nothing."""
        await self._services.aclose()

    def stop(self) -> None:
        """Close what `close` does, on `loop`, and end the loop. Later calls do nothing."""
        if self.loop.running:
            try:
                self.loop.call(self.close())
            finally:
                self.loop.close()

    async def group(self, task_id: str, samples: int, version: int) -> Group:
        """Run the episodes of one group and build its training rows, which may be none.

        `version`: of the weights that the backend samples with now.

        Raises:
            TrainError: kind `train_setup`: there is no such task, or a bonus function returned an invalid value.
            LedgerError: the credit method cannot be computed.
            EngineError: as `Runner.episode`.
        """
        return await self._group(self._used(task_id), samples, version, 0)

    async def batch(self, task_ids: Sequence[str], samples: int, version: int) -> Batch:
        """Run one group for each task. Groups without rows are in `left_out`: nothing of them is handed over.

        Raises:
            TrainError: as `group`; kind `no_data`: no episode can be trained on.
            EngineError: as `group`.
        """
        tasks = [self._used(task_id) for task_id in task_ids]
        self.faults.clear()
        try:
            async with asyncio.TaskGroup() as running:
                works = [
                    running.create_task(self._group(task, samples, version, number))
                    for number, task in enumerate(tasks)
                ]
        except BaseExceptionGroup as several:
            raise first_of(several) from None
        batch = Batch(version)
        for work in works:
            made = work.result()
            (batch.used if made.rows else batch.left_out).append(made)
        if not batch.used:
            raise batch.no_data(self.faults)
        return batch

    def final_rows(self, batch: Batch) -> list[tuple[int, TrainingRow]]:
        """The rows of a batch with the advantages that `engine train` gives to its loss, each with the number of its
        group."""
        numbers = [group.number for group in batch.used for _ in group.rows]
        return list(zip(numbers, final_rows(batch.rows, self.train), strict=True))

    def _used(self, task_id: str) -> Task:
        """The task of a group, with an id that no episode of this folder has."""
        if task_id not in self._tasks:
            raise TrainError(
                f"{task_id!r} is not a task of {self.loaded.path}; the trainer's data set must hold the ids of the "
                "spec's tasks",
                kind="train_setup",
            )
        use = self._uses.get(task_id, self._first_use)
        self._uses[task_id] = use + self._use_step
        task = self._tasks[task_id]
        return task.model_copy(update={"id": f"{task_id}~{use}"}) if use else task

    async def _group(self, task: Task, samples: int, version: int, number: int) -> Group:
        self._runner.counters.total += samples
        return await self._group_runner.group(GroupRequest(number=number, task=task, samples=samples, version=version))

    async def _episode(self, task: Task, sample: int) -> Trajectory | None:
        """Run an episode. Returns None if the engine itself failed."""
        self._runner.counters.total += 1
        return await self._group_runner.episode(task, sample)


def refuse_lost(loaded: LoadedSpec, trainer: str) -> None:
    """Refuse what does not reach the loss of a trainer of `TRAINERS`, and log what reaches it in part.

    Raises:
        TrainError: kind `train_setup`; the message names all of it.
    """
    findings = TRAINERS[trainer].findings(loaded)
    lost = [finding for finding in findings if finding.severity == "error"]
    if lost:
        listed = "\n".join(f"{finding.message}; {finding.fix}" for finding in lost)
        raise TrainError(f"{loaded.path}: {listed}", kind="train_setup")
    credit = loaded.spec.rewards.credit
    if credit.needs_values:
        raise TrainError(
            f"{loaded.path}: `{credit.method}` needs a critic, and {TRAINERS[trainer].title} gives the engine no "
            "values; use `rewards.credit: {method: turn_return}`, or `engine train`",
            kind="train_setup",
        )
    for finding in findings:
        log.warning("carried in part", reason=finding.message, fix=finding.fix)
