"""Runs the episodes of TRL's batches: the `rollout_func` of a GRPOTrainer.

Each call gets the task ids of one generation batch and runs `num_generations` episodes of each task, with the trainer's present weights.
The episodes are in a run store (`engine show`, `engine view`, `engine replay`). They have the ids that `engine train` gives: the second use of task
`t` is `t~1`, and a later launch in the same folder continues these numbers.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import structlog

from engine.checks import refuse_first_tasks
from engine.errors import TrainError
from engine.integrations.trainers.check import check_trainer
from engine.integrations.trainers.trl.handover import HandedRow, Sums
from engine.runner.overlong import fitting_tasks
from engine.runner.run import Runner
from engine.schemas.backend import LocalBackendSpec
from engine.schemas.train import TrainSpec
from engine.spec.load import LoadedSpec, load_spec
from engine.spec.tasks import load_tasks
from engine.tokens.catalogue import resolve_model
from engine.tokens.loading import load_format
from engine.train.batches import Batch, Group, RowBuilder, whitened_advantages
from engine.train.folder import open_rollouts

if TYPE_CHECKING:
    from engine.integrations.trainers.trl.sampler import SharedBackend
    from engine.schemas.environment import Task
    from engine.schemas.trajectory import Trajectory

log = structlog.get_logger(__name__)
_Result = TypeVar("_Result")


class EngineRollouts:
    """The episodes of a spec for a trainer in this process. Close it after the training, or use it as a context manager.

    >>> with EngineRollouts("spec.yaml", "runs/with-trl") as rollouts:
    ...     EngineGRPOTrainer(rollouts, args).train()

    Args:
        spec: The spec, or the path of its file. Its backend must be `local`: the sampler uses the trainer's own model.
        folder: The folder of the training; the run store is `rollouts` in it.
        keep_going: Do not stop if the first episodes all fail with one cause.
        several_rows: What happens to an episode with several rows, since TRL takes one for each prompt. `refuse`: the training stops.
            `leave_out`: its tokens are not trained; `trl/left_out_tokens` counts them. Its rewards stay in the baseline of its group.

    Raises:
        SpecError: the spec is invalid.
        TrainError: kind `train_setup`: the spec uses something that does not reach TRL's loss.
    """

    def __init__(
        self,
        spec: LoadedSpec | Path | str,
        folder: Path | str,
        *,
        keep_going: bool = False,
        several_rows: Literal["refuse", "leave_out"] = "refuse",
    ) -> None:
        self.loaded = spec if isinstance(spec, LoadedSpec) else load_spec(spec)
        self.spec = self.loaded.spec
        self.train = self.spec.train or TrainSpec()
        self.folder = Path(folder)
        self._keep_going = keep_going
        self._several_rows = several_rows
        _refuse_lost(self.loaded)
        backend, model = self.spec.backend, self.spec.model
        if not isinstance(backend, LocalBackendSpec):
            raise TrainError(
                f"{self.loaded.path}: a `{backend.kind}` backend does not sample with TRL's model; use `backend: {{kind: local}}`",
                kind="train_setup",
            )
        if self.spec.rewards.credit.needs_values:
            raise TrainError(
                f"{self.loaded.path}: `{self.spec.rewards.credit.method}` needs a critic, which TRL's GRPOTrainer does not have; "
                "use `rewards.credit: {method: turn_return}`, or `engine train`",
                kind="train_setup",
            )
        self._backend_spec = backend
        self.model_folder = resolve_model(model.path, model.revision, self.loaded.base)
        self.format = load_format(model, self.loaded.base)
        every = load_tasks(self.loaded)
        refuse_first_tasks(self.loaded, every)
        self._tasks = {task.id: task for task in fitting_tasks(every, self.loaded, self.format)}
        self._rows = RowBuilder(self.spec, self.train, self.loaded.base)
        self._uses: dict[str, int] = {}
        self._thread: threading.Thread | None = None
        self._loop = asyncio.new_event_loop()
        self._services = AsyncExitStack()
        self._backend: SharedBackend | None = None
        self._model: Any = None
        self._runner: Runner
        self._faults: list[str] = []
        self.handed: list[HandedRow] = []
        """The rows of the newest call, one for each prompt."""
        self.sums = Sums(0, 0, 0.0)
        """Their sums."""
        self.version = -1
        """The weight version of the newest call: the number of TRL's updates before it."""
        self.metrics: dict[str, float] = {}
        """Metrics of the newest call, under the names of `engine train`."""

    @property
    def tasks(self) -> list[str]:
        """The ids of the tasks, in order."""
        return list(self._tasks)

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        """Run the episodes of a generation batch. TRL calls this as `rollout_func`.

        Args:
            prompts: Task ids, each repeated `num_generations` times in a row.
            trainer: The trainer; its model samples.

        Raises:
            TrainError: kind `train_setup`: the prompts are not groups of this spec's tasks, or the model was exchanged; kind
                `handover`: an episode has several rows; kind `no_data`: no episode can be trained on.
            EngineError: as `Runner.episode`.
        """
        samples: int = trainer.num_generations
        model = trainer.accelerator.unwrap_model(trainer.model)
        backend = self._backend or self._make_backend(model)
        if model is not self._model:
            raise TrainError("the trainer has another model than at its first batch", kind="train_setup")
        self.version = trainer.state.global_step
        with backend.lent():
            if self._backend is None:
                self._call(self._start(backend))
            groups = self._groups(prompts, samples)
            batch = self._call(self._collect(backend, groups, samples))
        self.metrics = batch.metrics(tuple(self.spec.tasks.mix or ()))
        ended = {
            (group.number, each.sample_index): each
            for group in (*batch.used, *batch.left_out)
            for each in group.trajectories
        }
        self.handed = self._handed(batch, len(groups), samples)
        self.sums = Sums.of_rows(self.handed)
        slots = [ended.get((number, sample)) for number in range(len(groups)) for sample in range(samples)]
        return {
            "prompt_ids": [row.prompt_ids for row in self.handed],
            "completion_ids": [row.completion_ids for row in self.handed],
            "logprobs": [row.logprobs for row in self.handed],
            "env_mask": [row.mask for row in self.handed],
            "engine_reward": [None if each is None else each.outcome.reward for each in slots],
        }

    # --- episodes -------------------------------------------------------------------------------------------

    def _groups(self, prompts: Sequence[str], samples: int) -> list[Task]:
        """The task of each group, with an id that no episode of this folder has."""
        starts = range(0, len(prompts), samples)
        ids = [prompts[start] for start in starts]
        whole = len(prompts) % samples == 0
        if not whole or any(prompts[at] != prompts[at - at % samples] for at in range(len(prompts))):
            raise TrainError(
                f"the batch of {len(prompts)} prompts is not made of groups of {samples}: the advantages of a group need all of its "
                "episodes; make `generation_batch_size` a multiple of `num_generations`",
                kind="train_setup",
            )
        unknown = next((each for each in ids if each not in self._tasks), None)
        if unknown is not None:
            raise TrainError(
                f"{unknown!r} is not a task of {self.loaded.path}; let EngineGRPOTrainer make its data set",
                kind="train_setup",
            )
        return [self._used(each) for each in ids]

    def _used(self, task_id: str) -> Task:
        use = self._uses.get(task_id, 0)
        self._uses[task_id] = use + 1
        task = self._tasks[task_id]
        return task.model_copy(update={"id": f"{task_id}~{use}"}) if use else task

    async def _collect(self, backend: SharedBackend, tasks: Sequence[Task], samples: int) -> Batch:
        await backend.weights_changed(self.version)
        rollout = self.spec.rollout
        alive = asyncio.Semaphore(rollout.live_episodes or 2 * rollout.concurrency)
        self._faults.clear()
        self._runner.live.total += len(tasks) * samples
        try:
            async with asyncio.TaskGroup() as running:
                works = [
                    [running.create_task(self._episode(task, sample, alive)) for sample in range(samples)]
                    for task in tasks
                ]
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
        batch = Batch(self.version)
        for number, (task, group) in enumerate(zip(tasks, works, strict=True)):
            ended = [each for work in group if (each := work.result()) is not None]
            made = Group(number, task.id, self.version, ended, self._rows.rows(ended))
            (batch.used if made.rows else batch.left_out).append(made)
        if not batch.used:
            raise batch.no_data(self._faults)
        return batch

    async def _episode(self, task: Task, sample: int, alive: asyncio.Semaphore) -> Trajectory | None:
        """Run an episode. Returns None if the engine itself failed; the other episodes continue."""
        async with alive:
            trajectory = await self._runner.episode_or_none(task, sample, self._faults)
        if trajectory is not None:
            self._runner.count(trajectory)
        return trajectory

    def _handed(self, batch: Batch, groups: int, samples: int) -> list[HandedRow]:
        """One row for each prompt, in TRL's order."""
        rows = batch.rows
        advantages = (
            whitened_advantages(rows) if self.train.advantage_norm == "batch" else [row["advantages"] for row in rows]
        )
        numbers = [group.number for group in batch.used for _ in group.rows]
        places = [(number, row["sample_index"]) for number, row in zip(numbers, rows, strict=True)]
        counts = Counter(places)
        placed: dict[tuple[int, int], HandedRow] = {}
        left_out = 0
        for place, row, values in zip(places, rows, advantages, strict=True):
            if counts[place] == 1:
                placed[place] = HandedRow.of(row, values)
            elif self._several_rows == "leave_out":
                left_out += int(row["loss_mask"].sum())
            else:
                raise TrainError(
                    f"{row['episode_id']} has {counts[place]} rows, and TRL takes one for each prompt. Use a chat template that does not "
                    'rewrite history, leave such episodes out with `EngineRollouts(…, several_rows="leave_out")`, or train with '
                    "`engine train`, which takes all rows",
                    kind="handover",
                )
        self.metrics["trl/left_out_tokens"] = float(left_out)
        self.metrics["trl/empty_rows"] = float(groups * samples - len(placed))
        empty = HandedRow.empty(int(rows[0]["input_ids"][0]))
        return [placed.get((number, sample), empty) for number in range(groups) for sample in range(samples)]

    # --- services -------------------------------------------------------------------------------------------

    def _make_backend(self, model: Any) -> SharedBackend:
        from engine.integrations.trainers.trl.sampler import SharedBackend

        contexts = [value for value in (self.format.context, self.spec.model.context) if value]
        self._model = model
        return SharedBackend(
            model,
            self.model_folder,
            self.format.decode,
            self._backend_spec,
            vocab=self.format.vocab_size,
            context=min(contexts, default=None),
            vision=self.format.vision,
        )

    async def _start(self, backend: SharedBackend) -> None:
        await backend.start()
        self._services.push_async_callback(backend.close)
        self.folder.mkdir(parents=True, exist_ok=True)
        store = open_rollouts(self.folder, self.loaded)
        self._services.callback(store.close)
        for task_id in {episode_id.rpartition("/")[0] for episode_id in store.statuses()}:
            name, _, use = task_id.rpartition("~")
            known, number = (name, int(use)) if name in self._tasks and use.isdecimal() else (task_id, 0)
            self._uses[known] = max(self._uses.get(known, 0), number + 1)
        self._runner = Runner(self.loaded, [], self.format, backend, store, keep_going=self._keep_going, training=True)
        await self._services.enter_async_context(self._runner.serving())
        self._backend = backend

    def _call(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine on the loop of the episodes, which has a thread of its own. Ctrl-C cancels it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop.run_forever, name="engine-episodes", daemon=True)
            self._thread.start()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Close the run store and the services of the episodes. Later calls do nothing."""
        if self._thread is None:
            return
        try:
            self._call(self._services.aclose())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._thread = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _refuse_lost(loaded: LoadedSpec) -> None:
    """Refuse what does not reach TRL's loss, and log what reaches it in part."""
    found = check_trainer(loaded, "trl")
    lost = [each for each in found if each.severity == "error"]
    if lost:
        listed = "\n".join(f"{each.message}; {each.fix}" for each in lost)
        raise TrainError(f"{loaded.path}: {listed}", kind="train_setup")
    for each in found:
        log.warning("carried in part", reason=each.message, fix=each.fix)
