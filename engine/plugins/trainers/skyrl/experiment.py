"""SkyRL's experiment and trainer on episodes of a spec. Users start from `EnginePPOExp`.

Invariant: no update is made with a batch whose sums are not those of the engine's rows.
Settings of SkyRL that would change the engine's advantages, or have no effect on its episodes, are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from engine.errors import TrainError
from engine.plugins.sglang.routing import layout_of
from engine.plugins.trainers.backend import unsupported
from engine.plugins.trainers.handover import BatchSums, HandedRow, SeveralRows, groups_of, one_row_each
from engine.plugins.trainers.library import OFF, Row, late_subclass, overrides, refuse
from engine.plugins.trainers.rollouts import TrainerRollouts
from engine.plugins.trainers.skyrl.backend import NAMES, SkyRLBackend
from engine.plugins.trainers.skyrl.rows import ESTIMATOR, filled, generator_output, register_estimator, sums_of_batch
from engine.spec.load import load_spec
from engine.validate.model_files import model_files

if TYPE_CHECKING:
    from engine.spec.load import LoadedSpec


log = structlog.get_logger(__name__)
_SETTINGS: list[Row] = [
    ("trainer.algorithm.advantage_estimator", (ESTIMATOR,), f"set it to {ESTIMATOR}"),
    ("trainer.algorithm.use_kl_in_reward", OFF, "it would be subtracted from the advantages"),
    ("trainer.algorithm.advantage_batch_normalize", OFF, "use `train.advantage_norm: batch`"),
    ("trainer.algorithm.zero_variance_filter", OFF, "SkyRL ignores it with rewards by token"),
    ("trainer.algorithm.dynamic_sampling.type", OFF, "it would compare sums of advantages"),
    ("trainer.critic.model.path", OFF, "the engine's advantages have no critic"),
    ("trainer.fully_async.enabled", OFF, "rows have no weight versions there"),
    ("generator.step_wise_trajectories", OFF, "all rows of an episode would get the advantage of the last one"),
    ("generator.apply_overlong_filtering", OFF, "use `train.overlong: mask`"),
    ("generator.zero_reward_on_non_stop", OFF, "use `train.overlong`"),
    ("generator.chat_template_kwargs", OFF, "use `model.template_kwargs`"),
    ("generator.sampling_params.repetition_penalty", (1.0,), "the spec's `sampling` is used"),
    ("generator.sampling_params.top_p", (1.0,), "the spec's `sampling` is used"),
    ("generator.sampling_params.min_p", OFF, "the spec's `sampling` is used"),
    ("generator.sampling_params.top_k", (-1,), "the spec's `sampling` is used"),
    ("generator.sampling_params.stop", OFF, "the spec's `sampling` is used"),
    ("generator.sampling_params.additional_kwargs", OFF, "the spec's `sampling` is used"),
]
_ENGINES = "generator.inference_engine."
_SETTINGS_WITH_IMAGES: list[Row] = [
    (
        _ENGINES + "enable_return_routed_experts",
        OFF,
        "its endpoint drops images, and the model would reply without seeing them",
    ),
    (
        "trainer.remove_microbatch_padding",
        OFF,
        "set it to false; SkyRL does not pack rows of a model that takes images",
    ),
    ("trainer.policy.sequence_parallel_size", (None, 1), "set it to 1 for a model that takes images"),
    ("trainer.ref.sequence_parallel_size", (None, 1), "set it to 1 for a model that takes images"),
    ("trainer.policy.language_model_only", OFF, "the model would have no vision tower"),
    ("trainer.ref.language_model_only", OFF, "the model would have no vision tower"),
    (_ENGINES + "language_model_only", OFF, "the model would have no vision tower"),
]
WITHOUT_EFFECT = (
    "generator.max_turns, max_input_length, sampling_params.max_generate_length: the spec's `limits` are used",
    "environment.env_class: the spec's environment is used",
    "trainer.algorithm.gamma, lambd, grpo_norm_by_std: the engine gives the advantages",
)
"""Settings whose values change nothing; they have defaults, so they cannot be refused."""


def refuse_settings(cfg: Any, loaded: LoadedSpec) -> None:
    """Refuse settings of SkyRL that would change the engine's advantages, or have no effect on its episodes.

    Raises:
        TrainError: kind `train_setup`; the message names all of them.
    """
    spec, trainer = loaded.spec, cfg.trainer
    temperature, samples, asks = spec.sampling.temperature, spec.rollout.samples_per_task, spec.backend.asks_experts
    files = model_files(loaded)
    table = [
        *_SETTINGS,
        ("generator.sampling_params.temperature", (temperature,), f"the spec samples with {temperature:g}"),
        ("trainer.algorithm.temperature", (None, temperature), f"the spec samples with {temperature:g}"),
        ("generator.n_samples_per_prompt", (samples,), f"`rollout.samples_per_task` is {samples}"),
        *(_SETTINGS_WITH_IMAGES if files is not None and files.sees else ()),
    ]
    if temperature != 1:
        why = (
            "set it to processed_logprobs; else the log-probs are those of temperature 1, and the spec samples with "
            f"{temperature:g}"
        )
        table.append((_ENGINES + "engine_init_kwargs.logprobs_mode", ("processed_logprobs",), why))
    if not asks:
        table.append((_ENGINES + "enable_return_routed_experts", OFF, "set `backend.routed_experts: true`"))
    foreign = ", ".join(f"`sampling.{name}`" for name in unsupported(spec.sampling, NAMES))
    replays = trainer.strategy == "megatron" and trainer.policy.megatron_config.moe_enable_routing_replay
    returns = cfg.generator.inference_engine.enable_return_routed_experts
    conditions = {
        f"trainer.eval_interval={trainer.eval_interval}: "
        "set it to -1 and evaluate with `engine eval`": trainer.eval_interval > 0,
        f"backend.kind: {spec.backend.kind}: its replies have no ids; "
        "use `backend: {kind: vllm}`": not spec.backend.exact_ids,
        f"SkyRL's inference engines do not take {foreign}": bool(foreign),
        f"`backend.routed_experts`: set {_ENGINES}enable_return_routed_experts, trainer.strategy: megatron and "
        "trainer.policy.megatron_config.moe_enable_routing_replay": asks and not (returns and replays),
    }
    refuse(loaded, "SkyRL", cfg, table, conditions)
    for text in WITHOUT_EFFECT:
        log.info("no effect", setting=text)
    log.info("no effect", setting=f"`backend: {{kind: {spec.backend.kind}}}`: SkyRL's inference engines sample")


CHANGES = "an overridden method of the trainer, or a setting that masks, cuts or drops responses"


@dataclass(eq=False)
class TaskPrompts:
    """The data set of a spec's tasks, with the methods of SkyRL's PromptDataset. A prompt holds the task's id, which
    the model does not see.

    Args:
        ids: The ids of the tasks.
    """

    ids: Sequence[str]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, place: int) -> tuple[list[dict[str, str]], None, dict[str, str], str]:
        task = self.ids[place]
        return [{"role": "user", "content": task}], None, {"task": task}, str(place)

    def collate_fn(self, items: Sequence[tuple[Any, ...]]) -> list[dict[str, Any]]:
        """The batch that SkyRL's `prepare_generator_input` reads."""
        return [dict(zip(("prompt", "env_class", "env_extras", "uid"), item, strict=True)) for item in items]


class EngineEpisodes:
    """The methods of the generator. `generator_class` adds SkyRL's GeneratorInterface.

    Args:
        episodes: The episodes of the spec.
        client: SkyRL's inference engine client.
        model: The name by which SkyRL's servers know the policy; None: the client's own.
        several_rows: What happens to an episode with several rows, since SkyRL takes one for each prompt.
    """

    def __init__(
        self,
        episodes: TrainerRollouts,
        client: Any,
        *,
        model: str | None = None,
        several_rows: SeveralRows = "refuse",
    ) -> None:
        self._episodes = episodes
        self._several = several_rows
        self._started = False
        declared = episodes.spec.backend
        self.backend = SkyRLBackend(client, type(declared), context=episodes.context, model=model)
        """What samples."""
        self.backend.pixels = episodes.pixels
        self.backend.layout = layout_of(episodes.model_folder) if declared.asks_experts else None
        self.handed: list[HandedRow] = []
        """The rows of the newest batch, one for each prompt."""
        self.metrics: dict[str, float] = {}
        """Metrics of the newest batch, under the names of `engine train`, and `skyrl/left_out_tokens` and
        `skyrl/empty_rows`."""

    @overrides("input_batch")
    async def generate(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
        """Run the episodes of a batch. SkyRL calls this; all calls are made on one loop.

        Args:
            input_batch: SkyRL's `GeneratorInput`. `env_extras` has the task's id under `task`; each prompt is repeated
                `rollout.samples_per_task` times.

        Raises:
            TrainError: kind `train_setup`: the batch is an evaluation's, or its prompts are not groups of the spec's
                tasks; kind `handover`: an episode has several rows, or as `filled`; kind `no_data`: no episode can be
                trained on.
            EngineError: as `TrainerRollouts.batch`.
        """
        metadata = input_batch.get("batch_metadata")
        if metadata is None or metadata.training_phase != "train":
            raise TrainError("this generator runs no evaluation; evaluate with `engine eval`", kind="train_setup")
        extras = input_batch.get("env_extras") or [{}] * len(input_batch["prompts"])
        tasks = [(extra or {}).get("task") for extra in extras]
        if None in tasks:
            raise TrainError(
                "a prompt has no task: rows of the data set need the column `task` with the id of a task (EnginePPOExp "
                "makes such a data set)",
                kind="train_setup",
            )
        samples = self._episodes.spec.rollout.samples_per_task
        groups = groups_of(
            [str(extra) for extra in tasks], samples, f"set `generator.n_samples_per_prompt` to {samples}"
        )
        self.backend.version = max(0, metadata.global_step - 1)  # SkyRL's first step is 1
        if not self._started:
            await self._episodes.start(self.backend)
            self._started = True
        batch = await self._episodes.batch(groups, samples, self.backend.version)
        rows, empty, left_out = one_row_each(
            self._episodes.final_rows(batch),
            len(groups),
            samples,
            trainer="SkyRL",
            several=self._several,
            leave_out='EnginePPOExp(…, several_rows="leave_out")',
        )
        self.handed = filled(rows)
        self.metrics = batch.metrics(tuple(self._episodes.spec.tasks.mix or ())) | {
            "skyrl/left_out_tokens": float(left_out),
            "skyrl/empty_rows": float(empty),
        }
        told_metrics = {f"engine/{name}": value for name, value in self.metrics.items()}
        return generator_output(self.handed, told_metrics, self._episodes.pixels)

    def check(self, batch: Any) -> None:
        """Compare the sums of SkyRL's training batch, with advantages, with those of the newest rows.

        Raises:
            TrainError: kind `handover`: they differ.
        """
        BatchSums.of_rows(self.handed, self._episodes.pixels).check(sums_of_batch(batch), "SkyRL", CHANGES)

    async def close(self) -> None:
        """Close the run store and the services of the episodes. Later calls do nothing."""
        await self._episodes.close()


class EngineTrainer:
    """The methods of the trainer. `trainer_class` adds SkyRL's RayPPOTrainer."""

    generator: Any
    all_metrics: dict[str, Any]

    @overrides("")
    async def train(self) -> None:
        """Train, and close the run store at the end."""
        try:
            await super().train()  # type: ignore[misc]
        finally:
            await self.generator.close()

    @overrides("generator_output, uids, metrics_generator_output, metrics_uids")
    def postprocess_generator_output(self, generator_output: Any, uids: list[str], *rest: Any, **more: Any) -> Any:
        """SkyRL's own, and then its metrics of rewards, which it computes from advantages, are replaced or removed."""
        processed = super().postprocess_generator_output(generator_output, uids, *rest, **more)  # type: ignore[misc]
        for name in [name for name in self.all_metrics if name.startswith("reward/")]:
            del self.all_metrics[name]
        self.all_metrics["reward/avg_raw_reward"] = self.generator.metrics["reward/mean"]
        return processed

    @overrides("data")
    def compute_advantages_and_returns(self, data: Any) -> Any:
        """SkyRL's own, and then the sums of both sides of the hand-over are compared.

        Raises:
            TrainError: kind `handover`: they differ. No update is made with the batch.
        """
        data = super().compute_advantages_and_returns(data)  # type: ignore[misc]
        self.generator.check(data)
        return data


class EngineExperiment:
    """The methods of the experiment. `experiment_class` adds SkyRL's BasePPOExp.

    >>> EnginePPOExp(cfg, "spec.yaml", "runs/with-skyrl").run()

    Args:
        cfg: SkyRL's `SkyRLTrainConfig`, with `trainer.algorithm.advantage_estimator` set to `engine`.
        spec: The spec, or the path of its file.
        folder: The folder of the training; the run store is `rollouts` in it.
        several_rows: What happens to an episode with several rows, since SkyRL takes one for each prompt.

    Raises:
        SpecError: the spec is invalid.
        TrainError: kind `train_setup`: a setting of SkyRL or something of the spec would be lost; the message names all
            of them.
    """

    @overrides("cfg")
    def __init__(
        self, cfg: Any, spec: LoadedSpec | Path | str, folder: Path | str, *, several_rows: SeveralRows = "refuse"
    ) -> None:
        loaded = load_spec(spec) if isinstance(spec, str | Path) else spec
        register_estimator()
        refuse_settings(cfg, loaded)
        self.episodes = TrainerRollouts(loaded, folder, "skyrl")
        self._several = several_rows
        wanted = cfg.trainer.train_batch_size
        if len(self.episodes.tasks) < wanted:
            raise TrainError(
                f"trainer.train_batch_size is {wanted}, and {loaded.path} has {len(self.episodes.tasks)} tasks; make "
                "it smaller",
                kind="train_setup",
            )
        super().__init__(cfg)  # type: ignore[call-arg]

    @overrides("")
    def get_train_dataset(self) -> TaskPrompts:
        """The tasks of the spec; `data.train_data` is not read."""
        return TaskPrompts(self.episodes.tasks)

    @overrides("")
    def get_eval_dataset(self) -> None:
        """None: evaluate with `engine eval`."""

    @overrides("cfg, tokenizer, inference_engine_client")
    def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> Any:
        """The generator that runs the episodes."""
        from skyrl.backends.skyrl_train.inference_servers.utils import resolve_policy_model_name

        name = resolve_policy_model_name(cfg)
        return generator_class()(self.episodes, inference_engine_client, model=name, several_rows=self._several)

    @overrides("cfg, tracker, tokenizer, train_dataset, eval_dataset, inference_engine_client, generator, colocate_pg")
    def get_trainer(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer that compares the sums."""
        return trainer_class()(*args, **kwargs)


generator_class = partial(
    late_subclass, "EngineGenerator", EngineEpisodes, "skyrl.train.generators.base:GeneratorInterface"
)
trainer_class = partial(late_subclass, "EngineSkyRLTrainer", EngineTrainer, "skyrl.train.trainer:RayPPOTrainer")
experiment_class = partial(
    late_subclass, "EnginePPOExp", EngineExperiment, "skyrl.train.entrypoints.main_base:BasePPOExp"
)
