"""Settings of SkyRL that are refused, because they would change the engine's advantages or have no effect on its
episodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from engine.plugins.trainers.backend import unsupported
from engine.plugins.trainers.settings import OFF, Row, refuse
from engine.plugins.trainers.skyrl.backend import NAMES
from engine.plugins.trainers.skyrl.rows import ESTIMATOR
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
