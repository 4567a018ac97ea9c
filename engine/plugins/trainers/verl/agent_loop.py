"""An agent loop of verl that runs one episode of a spec. The YAML file of
`actor_rollout_ref.rollout.agent.agent_loop_config_path` names it:

    - name: engine
      _target_: engine.plugins.trainers.verl.agent_loop.EngineAgentLoop
      spec: /data/spec.yaml
      folder: /data/runs/with-verl

verl makes an object for each episode, forms the groups and computes the advantages from one reward for each episode. So
only specs are run whose credit is a formula of verl's: `settings.py` refuses others. `EngineManager` has no such limit.

Each worker of verl is a process with a run store of its own, `process-<number>/rollouts` in the folder.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import TrainError
from engine.plugins.trainers.handover import HandedRow
from engine.plugins.trainers.library import value_of
from engine.plugins.trainers.process import OncePerProcess
from engine.plugins.trainers.rollouts import TrainerRollouts
from engine.plugins.trainers.verl import fixes
from engine.plugins.trainers.verl.backend import VerlBackend
from engine.plugins.trainers.verl.rows import image_columns, versions_of_row
from engine.plugins.trainers.verl.settings import refuse_loop_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future

    from engine.plugins.trainers.pixels import Pixels
    from engine.schemas.environment import Task
    from engine.schemas.trajectory import Trajectory
    from engine.store.rows.row import TrainingRow

    _Ended = tuple[Trajectory, list[TrainingRow], dict[str, str]]

_OPEN: OncePerProcess[tuple[Path, Path], LoopEpisodes] = OncePerProcess()


class EngineAgentLoop:
    """The agent loop. verl gives the arguments after `folder`; the names of those that are not read are verl's too.

    Args:
        spec: The path of the spec.
        folder: The folder of the training.
        trainer_config: verl's whole configuration, in `config`.
        server_manager: verl's `LLMServerClient`.
    """

    def __init__(
        self,
        *,
        spec: str,
        folder: str,
        trainer_config: Any,
        server_manager: Any,
        name: str | None = None,
        tokenizer: Any = None,
        processor: Any = None,
        dataset_cls: Any = None,
        data_config: Any = None,
        hf_model_type: str | None = None,
        tools: Any = None,
    ) -> None:
        self._key = (Path(spec).resolve(), Path(folder).resolve())
        self._config, self._client = trainer_config.config, server_manager

    async def run(self, sampling_params: Mapping[str, Any], **columns: Any) -> Any:
        """Run one episode.

        Args:
            sampling_params: verl's parameters. The spec's are used, and must have the same temperature.
            columns: The row of verl's data set, with `extra_info.task`, and `uid`; verl's V1 trainer adds `session_id`.

        Returns:
            For verl's V1 trainer a list with one AgentLoopOutput for each row of the episode, else the one
            AgentLoopOutput.

        Raises:
            TrainError: kind `train_setup`: a setting, the spec or the row of the data set does not fit; kind
                `untrainable`: the episode cannot be trained on; kind `handover`: verl would not carry its rows. verl
                counts the prompt as failed.
            EngineError: as `TrainerRollouts.start` and `Runner.episode`.
        """
        episodes = await asyncio.to_thread(LoopEpisodes.of, *self._key, self._config, self._client)
        wanted, asked = episodes.spec.sampling.temperature, sampling_params.get("temperature")
        if asked is not None and asked != wanted:
            raise TrainError(
                f"verl asks for temperature {asked:g}, and {episodes.loaded.path} samples with {wanted:g}; evaluate "
                "with `engine eval`",
                kind="train_setup",
            )
        session = "session_id" in columns
        refuse = partial(self._refuse_rows, session=session)
        trajectory, rows, holders = await asyncio.wrap_future(episodes.submit(columns, refuse))
        outputs = [_output(row, trajectory, named=session) for row in rows]
        if episodes.pixels is not None:
            prefix = f"{columns['uid']}_{columns['session_id']}"
            await asyncio.to_thread(_add_images, outputs, rows, episodes.pixels, prefix, holders)
        return outputs if session else outputs[0]

    def _refuse_rows(self, rows: list[TrainingRow], episode: str, session: bool) -> None:
        if len(rows) > 1 and (not session or value_of(self._config, "algorithm.adv_estimator") != "grpo"):
            raise TrainError(
                f"{episode} has {len(rows)} rows, and verl takes several rows of an episode only in its V1 trainer, "
                "with adv_estimator=grpo. Use "
                "EngineManager, or a chat template that does not rewrite history",
                kind="handover",
            )
        if session:
            return
        handed = HandedRow.of(rows[0])
        for part, ids in (("prompt", handed.prompt_ids), ("response", handed.completion_ids)):
            setting = f"actor_rollout_ref.rollout.{part}_length"
            most = value_of(self._config, setting)
            if len(ids) > most:
                raise TrainError(
                    f"{episode} has a {part} of {len(ids)} tokens, and {setting}={most}; set it to the largest number "
                    "that `limits.episode_tokens` "
                    "allows",
                    kind="handover",
                )


@dataclass(slots=True, eq=False)
class _Prompt:
    """The episodes of one prompt, all of which one worker of verl runs."""

    task: Task
    running: int
    """Episodes that have not ended, those that have not begun included."""
    begun: int = 0
    usable: list[Trajectory] = field(default_factory=list)
    """Episodes that verl can train on."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    holders: dict[str, str] = field(default_factory=dict)  # see `QueuedImages`


class LoopEpisodes(TrainerRollouts):
    """The episodes of a spec in one worker of verl, on a loop of their own. `LoopEpisodes.of` gives those of this
    process.

    Raises:
        SpecError: the spec is invalid.
        TrainError: kind `train_setup`: the spec or a setting does not fit.
    """

    def __init__(self, spec: Path, folder: Path, config: Any, client: Any) -> None:
        super().__init__(spec, folder, "verl_agent_loop", keep_going=True, shared=True)  # verl counts failures itself
        refuse_loop_settings(config, self.loaded, self.format.vision)
        if self.pixels is not None:
            fixes.check_applied()
        self.client = client
        self.backend = VerlBackend.of(config, client, self)
        """What samples; its `stats` count replies whose versions collapsed."""
        self._groups: dict[str, _Prompt] = {}
        self.loop.call(self.start(self.backend))

    @classmethod
    def of(cls, spec: Path, folder: Path, config: Any, client: Any) -> LoopEpisodes:
        """The episodes of this process; the first call opens them.

        Raises:
            TrainError: kind `train_setup`: they sample with another client of verl.
            EngineError: as `LoopEpisodes` and `TrainerRollouts.start`.
        """
        episodes = _OPEN.opened((spec, folder), lambda: cls(spec, folder, config, client))
        if episodes.client is not client:
            raise TrainError(
                f"the episodes of {folder} sample with another client of verl in this process; give each worker a "
                "process",
                kind="train_setup",
            )
        return episodes

    def submit(self, columns: Mapping[str, Any], refuse: Callable[[list[TrainingRow], str], None]) -> Future[_Ended]:
        """Start an episode of the task that a row of verl's data set names; its result is the episode and its rows.

        In verl's V1 trainer it comes when all episodes of the prompt have ended: verl trains on what a failed prompt
        has, and would give the raw reward to an episode without others. `refuse` raises if verl does not carry these
        rows of an episode.
        """
        return self.loop.submit(self._rows_of(columns, refuse))

    async def _rows_of(self, columns: Mapping[str, Any], refuse: Callable[[list[TrainingRow], str], None]) -> _Ended:
        task, number, prompt = self._place(columns)
        usable = None
        try:
            trajectory = await self._episode(task, number)
            rows = [] if trajectory is None else self.rows.rows([trajectory])
            if trajectory is None or not rows:
                failure = None if trajectory is None else trajectory.outcome.failure
                cause = f"{failure.kind}: {failure.message}" if failure is not None else "; ".join(self.faults[-1:])
                raise TrainError(
                    f"{task.id}/{number} cannot be trained on ({cause or 'it has no sampled token'})",
                    kind="untrainable",
                )
            refuse(rows, trajectory.episode_id)
            usable = trajectory
        finally:
            prompt.running -= 1
            if usable is not None:
                prompt.usable.append(usable)
            if not prompt.running:
                prompt.ended.set()
        if "session_id" in columns:
            await prompt.ended.wait()
            if self.rows.is_small(prompt.usable, self.spec.rollout.samples_per_task):
                raise TrainError(
                    f"{task.id}/{number} is not trained on: its group has fewer trainable episodes than "
                    "`train.min_group`",
                    kind="untrainable",
                )
        return usable, rows, prompt.holders

    def _place(self, columns: Mapping[str, Any]) -> tuple[Task, int, _Prompt]:
        """The task of a prompt, the number of this episode in the prompt's group, and what is known of the group."""
        uid, name = columns.get("uid"), (columns.get("extra_info") or {}).get("task")
        if uid is None or name is None:
            raise TrainError(
                "a row of verl's data set has no `uid` or no `extra_info.task`; make the data file with `write_tasks`",
                kind="train_setup",
            )
        samples = self.spec.rollout.samples_per_task
        prompt = self._groups.pop(str(uid), None) or _Prompt(self._used(str(name)), running=samples)
        number, prompt.begun = prompt.begun, prompt.begun + 1
        if prompt.begun < samples:
            self._groups[str(uid)] = prompt
        return prompt.task, int(columns.get("session_id", number)), prompt

    def stop(self) -> None:
        """Close the run store and the services, and leave the folder to another process."""
        _OPEN.forget(self)
        super().stop()


def _output(row: TrainingRow, trajectory: Trajectory, *, named: bool) -> Any:
    """verl's AgentLoopOutput of a row. `named`: with rewards by name; verl's older trainer needs the same in all."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    handed = HandedRow.of(row)
    oldest, newest = versions_of_row(row)
    experts = row.branch.routed_experts
    return AgentLoopOutput(
        **({} if experts is None else {"routed_experts": experts.astype(np.int16)}),
        prompt_ids=handed.prompt_ids,
        response_ids=handed.completion_ids,
        response_mask=handed.mask,
        response_logprobs=handed.logprobs,
        reward_score=trajectory.outcome.reward,
        num_turns=2 * len(trajectory.turns),
        # verl drops fields that were not set, so all are given.
        metrics=AgentLoopMetrics(
            generate_sequences=sum(turn.seconds for turn in trajectory.turns),
            tool_calls=0.0,
            compute_score=0.0,
            num_preempted=-1,
        ),
        extra_fields={
            "episode_id": trajectory.episode_id,
            "min_global_steps": oldest,
            "max_global_steps": newest,
            "turn_scores": row.episode.turn_rewards.tolist(),
            "tool_rewards": [],
            "reward_extra_info": dict(trajectory.outcome.rewards) if named else {},
        },
    )


def _add_images(
    outputs: list[Any], rows: list[TrainingRow], pixels: Pixels, prefix: str, holders: dict[str, str]
) -> None:
    """Give verl's AgentLoopOutput of each row its images and positions; its worker, repaired by `fixes`, takes them
    as they are, and writes the rows under keys that begin with `prefix`."""
    for index, (output, row) in enumerate(zip(outputs, rows, strict=True)):
        columns = image_columns(row, pixels, f"{prefix}_{index}", holders)
        columns["multi_modal_inputs"].positions = columns["position_ids"]
        output.multi_modal_data = {fixes.IMAGES: columns["multi_modal_inputs"]}
