"""Runs the episodes of AReaL's rollouts: its `RolloutWorkflow`. One call is one group.

AReaL makes a workflow for each submission, so the episodes of a folder are opened once in a process. Each process has a
folder of its own, because a run store has one writer.

Settings of AReaL that would change the engine's advantages, or have no effect on its episodes, are refused.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import structlog

from engine.errors import EngineError, TrainError
from engine.plugins.trainers.areal.backend import ArealBackend, names_of
from engine.plugins.trainers.areal.rows import check_batches, trajectory
from engine.plugins.trainers.backend import unsupported
from engine.plugins.trainers.library import OFF, Row, overrides, refuse
from engine.plugins.trainers.process import OncePerProcess
from engine.plugins.trainers.rollouts import TrainerRollouts
from engine.spec.load import load_spec
from engine.validate.model_files import model_files

if TYPE_CHECKING:
    from engine.spec.load import LoadedSpec
    from engine.store.rows.row import TrainingRow


_SETTINGS: list[Row] = [
    ("actor.discount", (0,), "set it to 0"),
    ("actor.kl_ctl", (0,), "set it to 0"),
    ("actor.reward_norm", OFF, "set it to null; the engine's credit has the baseline"),
    ("actor.adv_norm", OFF, "set it to null"),
    ("actor.overlong_reward_penalty", OFF, "use `train.overlong`"),
    ("actor.mask_no_eos_with_zero", OFF, "it would take the reward from the last token of the longest rows"),
    ("critic", OFF, "it would overwrite the column `values`"),
    ("dynamic_bs", OFF, "groups without signal are handed over too"),
    ("rollout.return_routed_experts", OFF, "no trainer of AReaL reads them"),
]
_SETTINGS_WITH_IMAGES: list[Row] = [
    ("rollout.check_trajectory_format", OFF, "rows without an image have no pixel_values"),
    ("actor.enable_tree_training", OFF, "its positions do not know images"),
]


def refuse_settings(config: Any, loaded: LoadedSpec) -> None:
    """Refuse settings of AReaL that would change the engine's advantages, or have no effect on its episodes.

    Raises:
        TrainError: kind `train_setup`; the message names all of them.
    """
    spec, server = loaded.spec, str(config.rollout.backend).partition(":")[0]
    temperature, samples = spec.sampling.temperature, spec.rollout.samples_per_task
    foreign = ", ".join(f"`sampling.{name}`" for name in unsupported(spec.sampling, names_of(server)))
    files = model_files(loaded)
    sees = files is not None and bool(files.sees)
    table = [
        *_SETTINGS,
        ("gconfig.n_samples", (1,), f"set it to 1, the engine runs the {samples} episodes of a group"),
        ("actor.temperature", (temperature,), f"the spec samples with {temperature:g}"),
        *(_SETTINGS_WITH_IMAGES if sees else ()),
    ]
    batch_norm = spec.train is not None and spec.train.advantage_norm == "batch"
    conditions = {
        f"AReaL does not send {foreign} to {server or 'its servers'}": bool(foreign),
        f"rollout.backend: {server} gives the log-probs of temperature 1, and the spec samples with {temperature:g}; "
        "use sglang": server == "vllm" and temperature != 1,
        f"backend.kind: {spec.backend.kind}: its replies have no ids; "
        "use `backend: {kind: sglang}`": not spec.backend.exact_ids,
        "`train.advantage_norm: batch`: groups are handed over one by one": batch_norm,
        "rollout.backend: vllm takes images with messages only, which it tokenises again; use sglang": sees
        and server == "vllm",
    }
    refuse(loaded, "AReaL", config, table, conditions)


log = structlog.get_logger(__name__)
_OPEN: OncePerProcess[tuple[Path, Path], ArealEpisodes] = OncePerProcess()


class ArealEpisodes:
    """The episodes of a spec in this process, on the loop of AReaL's workflow executor.

    Args:
        spec: The path of the spec.
        folder: The folder of the training. The run store is `process-<n>/rollouts` in it.
    """

    def __init__(self, spec: Path, folder: Path) -> None:
        self.rollouts = TrainerRollouts(spec, folder, "areal", shared=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started: asyncio.Task[None] | None = None

    async def start(self, engine: Any) -> None:
        """Start with the first call; the others wait for it.

        Raises:
            TrainError: kind `train_setup`: the calls are made on two loops, as by a second inference engine for
                evaluations.
            EngineError: as `TrainerRollouts.start`.
        """
        loop = asyncio.get_running_loop()
        if self._started is None:
            backend = ArealBackend(engine, self.rollouts)
            self._loop, self._started = loop, loop.create_task(self.rollouts.start(backend))
        if self._loop is not loop:
            raise TrainError(
                "this workflow already runs under another inference engine of AReaL in this process; evaluate with "
                "`engine eval`",
                kind="train_setup",
            )
        await asyncio.shield(self._started)

    async def close(self) -> None:
        """Close the run store and the services of the episodes, on the loop of the calls."""
        _OPEN.forget(self)
        await self.rollouts.close()


class EngineGroups:
    """The methods of `EngineWorkflow`, which is AReaL's RolloutWorkflow too; `workflow_arguments` makes the arguments.

    Args:
        spec: The path of the spec.
        folder: The folder of the training.
        reward: `reward_bias`, `reward_scaling` and `reward_clip` of AReaL's `actor`.
        ranks: Number of AReaL's training processes that take different rows.

    Raises:
        SpecError: the spec is invalid.
        TrainError: kind `train_setup`: the spec uses something that does not reach AReaL's loss.
    """

    def __init__(self, spec: str, folder: str, reward: Mapping[str, float], ranks: int = 1) -> None:
        key = (Path(spec).resolve(), Path(folder).resolve())
        self.episodes = _OPEN.opened(key, lambda: ArealEpisodes(*key))
        self._actor = SimpleNamespace(**reward)
        self._ranks = ranks

    @overrides("engine, data")
    async def arun_episode(self, engine: Any, data: Mapping[str, Any]) -> dict[str, Any] | None:
        """Run one group and return its rows. Returns None, which AReaL counts as rejected, if it has none (see
        `train.min_group`).

        Args:
            engine: AReaL's inference engine.
            data: A row of the data set; `task` is the task's id.

        Raises:
            TrainError: kind `train_setup`: the row has no task of the spec; kind `handover`: as `refuse_blind`.
            EngineError: as `TrainerRollouts.group`.
        """
        from areal import workflow_context
        from areal.utils import stats_tracker

        rollouts = self.episodes.rollouts
        try:
            if "task" not in data:
                raise TrainError(
                    "a row of AReaL's data set has no column `task`; make it with `task_dataset`", kind="train_setup"
                )
            await self.episodes.start(engine)
            group = await rollouts.group(
                str(data["task"]), rollouts.spec.rollout.samples_per_task, engine.get_version()
            )
        except EngineError as error:
            log.error("the group failed; AReaL goes on without it", task=data.get("task"), error=str(error))
            raise
        scope = stats_tracker.get(workflow_context.stat_scope())
        for ended in group.trajectories:
            scope.scalar(
                reward=ended.outcome.reward or 0.0, num_turns=len(ended.turns), trainable=float(ended.outcome.trainable)
            )
        if not group.rows:
            log.warning(group.why_no_rows, task=group.task_id, faults=rollouts.faults[-3:])
            return None
        if rollouts.pixels is not None and self._ranks > 1:
            refuse_blind(group.rows, self._ranks)
        rewards = {ended.episode_id: ended.outcome.reward or 0.0 for ended in group.trajectories}
        return trajectory(
            group.rows,
            [rewards[row.episode.episode_id] for row in group.rows],
            actor=self._actor,
            pixels=rollouts.pixels,
        )


def refuse_blind(rows: Sequence[TrainingRow], ranks: int) -> None:
    """Refuse rows without images where several processes train, whose parts of the vision tower wait for each other.

    Raises:
        TrainError: kind `handover`.
    """
    blind = next((row.episode.episode_id for row in rows if not row.branch.images), None)
    if blind is not None:
        raise TrainError(
            f"{blind} has a row without an image, and AReaL's {ranks} training processes would wait for each other for "
            "ever where only some of them have images; show an image in each episode, or train in one process "
            "(`fsdp:d1`)",
            kind="handover",
        )


def workflow_arguments(config: Any, spec: LoadedSpec | Path | str, folder: Path | str) -> dict[str, Any]:
    """The `workflow_kwargs` of `EngineWorkflow`, after the settings of AReaL were checked.

    Args:
        config: AReaL's `GRPOConfig` or `PPOConfig`.
        spec: The spec, or the path of its file.
        folder: The folder of the training.

    Raises:
        SpecError: the spec is invalid.
        TrainError: kind `train_setup`: a setting would be lost; the message names all of them.
    """
    loaded = load_spec(spec) if isinstance(spec, str | Path) else spec
    refuse_settings(config, loaded)
    changes = ("reward_bias", "reward_scaling", "reward_clip")  # what changes the reward that AReaL places
    ranks = re.search(r":.*?d(\d+)", str(config.actor.backend)) or (0, 1)
    return {
        "spec": str(Path(loaded.path).resolve()),
        "folder": str(Path(folder).resolve()),
        "reward": {name: float(getattr(config.actor, name)) for name in changes},
        "ranks": int(ranks[1]),
    }


def watch(actor: Any) -> None:
    """Compare the sums of each batch right after AReaL's actor has computed advantages. Later calls for one actor do
    nothing.

    AReaL gives each of the returned groups the images of all groups; before the comparison each gets its own again.

    A batch whose sums differ raises TrainError (kind `handover`) out of `compute_advantages`, so no update is made with
    it.

    Args:
        actor: AReaL's actor, an engine or a controller: `trainer.actor`. What a controller holds on other machines is
            fetched.
    """
    compute: Callable[..., Any] = actor.compute_advantages
    if getattr(compute, "watched", False):
        return

    @wraps(compute)
    def watched(data: Any, *args: Any, **kwargs: Any) -> Any:
        batches = compute(data, *args, **kwargs)
        for batch, group in zip(batches, data, strict=True):
            if "multi_modal_input" in group:
                batch["multi_modal_input"] = group["multi_modal_input"]
        check_batches(batches)
        return batches

    watched.watched = True  # type: ignore[attr-defined]
    actor.compute_advantages = watched


def task_dataset(spec: LoadedSpec | Path | str) -> Any:
    """The data set of a spec's tasks for AReaL: a `datasets.Dataset` with the column `task`.

    Raises:
        SpecError: the spec is invalid, or its tasks cannot be read.
    """
    from datasets import Dataset

    from engine.spec.tasks import load_tasks

    loaded = load_spec(spec) if isinstance(spec, str | Path) else spec
    return Dataset.from_list([{"task": task.id} for task in load_tasks(loaded)])
