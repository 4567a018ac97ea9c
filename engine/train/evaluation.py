"""Evaluations during a training: each is a run of its own under `evals/`, continued where an earlier launch was stopped."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from engine.errors import StoreError, TrainError
from engine.runner.evaluate import evaluate
from engine.runner.overlong import fitting_tasks
from engine.runner.processes import processes_of
from engine.runner.runner import Runner
from engine.schemas.generation import SamplingParams
from engine.schemas.tasks import TasksSpec
from engine.spec.tasks import load_tasks
from engine.store import RunHeader, RunStore

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from engine.actions.services import Cost
    from engine.backends.backend import Backend
    from engine.schemas.train import TrainSpec
    from engine.spec.load import LoadedSpec
    from engine.tokens.template import ChatTemplate
    from engine.train.checkpoint import State

log = structlog.get_logger(__name__)


def evaluation_of(loaded: LoadedSpec, name: str = "") -> LoadedSpec:
    """The spec of an evaluation of the training, with the tasks, samples and sampling of `train.eval`.

    Args:
        loaded: The spec of the training.
        name: One of `train.eval.sets`; empty without them.

    Raises:
        TrainError: kind `train_setup`: `train.eval.tasks` or `train.eval.sampling` is invalid.
    """
    # evaluations run in the process of the trainer, also those of a training whose episodes run in several
    if (processes := processes_of(loaded)) is not None:
        loaded = processes.alone
    spec = loaded.spec
    section = spec.train.eval if spec.train is not None else None
    if section is None:
        return loaded
    wanted, at = section.by_name()[name], ("train", "eval", *(("sets", name) if name else ()))
    try:
        if wanted.tasks is not None:
            loaded = loaded.with_tasks_of(TasksSpec.model_validate(wanted.tasks), (*at, "tasks"))
        sampling = SamplingParams.model_validate(spec.sampling.model_dump() | wanted.sampling)
    except ValueError as error:
        raise TrainError(f"{loaded.path}: {'.'.join(at)}: {error}", kind="train_setup") from error
    tasks = loaded.spec.tasks
    if wanted.limit is not None:
        tasks = tasks.model_copy(update={"limit": wanted.limit})
    rollout = spec.rollout.model_copy(update={"samples_per_task": wanted.samples})
    changed = loaded.spec.model_copy(update={"tasks": tasks, "sampling": sampling, "rollout": rollout})
    return replace(loaded, spec=changed)


class Evaluator:
    """Evaluates the policy when it is due, and keeps the best value.

    Args:
        loaded: The spec of the training.
        folder: The folder of the training.
        train: Its `train:` section.
        keep_going: See `Runner`.
    """

    def __init__(self, loaded: LoadedSpec, folder: Path, train: TrainSpec, *, keep_going: bool) -> None:
        self._loaded = loaded
        self._folder = folder
        self._train = train
        self._keep_going = keep_going
        self.cost: Cost | None = None
        """What the training has cost; None before the first evaluation, and where no costs are counted."""

    def due(self, step: int) -> bool:
        """Whether the weights after a step are evaluated."""
        return bool(self._due(step))

    def _due(self, step: int) -> list[str]:
        """The names of the evaluations after a step."""
        sets = self._train.eval.by_name() if self._train.eval is not None else {}
        return [name for name, one in sets.items() if step % one.every == 0 or step == self._train.steps]

    def note(self, state: State, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether the evaluation in a step's metrics, if there is one, is the best so far. Then `state` has it."""
        value = metrics.get(self._train.eval.best_metric) if self._train.eval is not None else None
        if value is None or not (state.best is None or value > state.best):
            return False
        state.best, state.best_step = value, step
        return True

    async def evaluate(self, step: int, format: ChatTemplate, backend: Backend) -> dict[str, float]:
        """Evaluate the weights that the backend has, which are those after `step`.

        Returns:
            `eval/<measure>` for each measure that has a value; with `sets`, `eval/<set>/<measure>` of each set that is due.

        Raises:
            EngineError: the evaluation failed.
        """
        metrics: dict[str, float] = {}
        for name in self._due(step):
            metrics |= await self._evaluate(step, name, format, backend)
        return metrics

    async def _evaluate(self, step: int, name: str, format: ChatTemplate, backend: Backend) -> dict[str, float]:
        loaded = evaluation_of(self._loaded, name)
        store = _store_of(loaded, self._folder / "evals", f"step-{step:06d}{f'-{name}' if name else ''}")
        try:
            tasks = fitting_tasks(load_tasks(loaded), loaded, format)
            runner = Runner(loaded, tasks, format, backend, store, keep_going=self._keep_going, folder=self._folder)
            try:
                result = await runner.run()
            finally:
                self.cost = runner.cost
            if result.stopped is not None:
                raise result.stopped
            if runner.summary.all_failed:
                log.warning(
                    "an evaluation measures nothing", reason=runner.summary.causes.words(runner.summary.episodes)
                )
            evaluation = evaluate(store.trajectories())
        finally:
            store.close()
        before = f"eval/{name}/" if name else "eval/"
        return {
            f"{before}{key}": value.value for key, value in evaluation.estimates.items() if value.value == value.value
        }


def _store_of(loaded: LoadedSpec, folder: Path, name: str) -> RunStore:
    """The run of an evaluation: the one that an earlier launch began with the same spec, else a new one."""
    header = RunHeader.of(loaded, run_id=name, evaluation=True)
    while (folder / name).exists():
        try:
            store = RunStore.open(folder / name)
        except StoreError:  # it has another writer, or is damaged
            name += "-again"
            continue
        if store.header.spec == header.spec:
            return store
        store.close()
        name += "-again"
    return RunStore.create(folder, header.model_copy(update={"run_id": name}))
