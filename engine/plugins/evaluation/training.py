"""Evaluations during a training: each is a run of its own under `evals/`, continued where an earlier launch was
stopped."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from engine.errors import StoreError, TrainError
from engine.plugins.evaluation.measures import evaluate
from engine.plugins.evaluation.spec import TrainEvalSpec
from engine.runner.processes import processes_of
from engine.runner.runner import Runner
from engine.runner.source import fitting_tasks
from engine.schemas.generation import SamplingParams
from engine.schemas.tasks import TasksSpec
from engine.spec.tasks import load_tasks
from engine.store import RunHeader, RunStore
from engine.train.step_source import Evaluator

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from engine.spec.load import LoadedSpec
    from engine.train.trainer import Trainer

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
    section = None if spec.train is None else TrainEvalSpec.section_of(spec.train)
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


class RunEvaluator(Evaluator):
    """Evaluates the policy when it is due, each time in a run of its own, and keeps the best value."""

    def __init__(self, trainer: Trainer, section: TrainEvalSpec) -> None:
        self._trainer = trainer
        self._sets = section.by_name()
        self._best_metric = section.best_metric

    def due(self, step: int) -> bool:
        """See `Evaluator`."""
        return bool(self._due(step))

    def _due(self, step: int) -> list[str]:
        """The names of the evaluations after a step."""
        last = self._trainer.train.steps
        return [name for name, one in self._sets.items() if step % one.every == 0 or step == last]

    def note(self, step: int, metrics: Mapping[str, float]) -> bool:
        """See `Evaluator`."""
        state, value = self._trainer.state, metrics.get(self._best_metric)
        if value is None or not (state.best is None or value > state.best):
            return False
        state.best, state.best_step = value, step
        return True

    async def evaluate(self, step: int) -> dict[str, float]:
        """Return `eval/<measure>` for each measure that has a value; with `sets`, `eval/<set>/<measure>` of each set
        that is due."""
        metrics: dict[str, float] = {}
        for name in self._due(step):
            metrics |= await self._evaluate(step, name)
        return metrics

    async def _evaluate(self, step: int, name: str) -> dict[str, float]:
        trainer = self._trainer
        loaded, template = evaluation_of(trainer.loaded, name), trainer.template
        store = _store_of(loaded, trainer.folder / "evals", f"step-{step:06d}{f'-{name}' if name else ''}")
        try:
            tasks = fitting_tasks(load_tasks(loaded), loaded, template)
            runner = Runner(
                loaded, tasks, template, trainer.backend, store, keep_going=trainer.keep_going, folder=trainer.folder
            )
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
        with suppress(StoreError):  # it has another writer, or is damaged
            store = RunStore.open(folder / name)
            if store.header.spec == header.spec:
                return store
            store.close()
        name += "-again"
    return RunStore.create(folder, header.model_copy(update={"run_id": name}))


def evaluator(trainer: Trainer) -> RunEvaluator | None:
    """The hook `evaluate_training`."""
    section = TrainEvalSpec.section_of(trainer.train)
    return None if section is None else RunEvaluator(trainer, section)
