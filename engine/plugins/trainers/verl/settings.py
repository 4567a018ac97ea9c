"""Settings of verl that an EngineManager or an EngineAgentLoop refuses, and those that it says have no effect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from engine.plugins.trainers.backend import unsupported
from engine.plugins.trainers.library import OFF, Row, refuse, value_of
from engine.schemas.credit import OutcomeCredit

if TYPE_CHECKING:
    from engine.spec.load import LoadedSpec
    from engine.tokens.vision import Vision

log = structlog.get_logger(__name__)

SHARED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
)
"""The parameters of `sampling` that verl's SGLang and vLLM servers both take, under the same names."""
WITHOUT_EFFECT = (
    "algorithm.gamma, lam, norm_adv_by_std_in_grpo: the engine gives the advantages",
    "rollout.top_p, top_k: the spec's `sampling` is used",
    "rollout.agent.num_workers: one process runs the episodes",
)
"""Settings whose values change nothing; they have defaults, so they cannot be refused."""


_ROLLOUT = "actor_rollout_ref.rollout."
SETTINGS: list[Row] = [
    (_ROLLOUT + "calculate_log_probs", (True,), "the engine needs the sampler's log-probs"),
    (_ROLLOUT + "multi_turn.tool_config_path", OFF, "the spec's `tools` are used"),
    (_ROLLOUT + "multi_turn.function_tool_path", OFF, "the spec's `tools` are used"),
    (_ROLLOUT + "multi_turn.interaction_config_path", OFF, "the spec's `user` is used"),
    ("trainer.val_before_train", OFF, "evaluate with `engine eval`"),
    ("trainer.test_freq", (None, 0, -1), "evaluate with `engine eval`"),
    ("algorithm.use_kl_in_reward", OFF, "the advantages would not be those of the spec's credit"),
    ("reward.reward_model.enable", OFF, "the spec's rewards are used"),
    ("distillation.enabled", OFF, "rows have no teacher"),
]
"""What an EngineManager and an EngineAgentLoop refuse with every spec."""
MANAGER_SETTINGS: list[Row] = [
    ("trainer.use_v1", (None, True), "the manager writes the rows of verl's V1 trainer"),
    ("trainer.v1.trainer_mode", ("engine",), "must be `engine`, else verl computes its own advantages"),
    ("algorithm.adv_estimator", ("grpo",), "has no effect; use grpo"),
    ("algorithm.filter_groups.enable", OFF, "its metric does not know the engine's advantages"),
]


def refuse_settings(config: Any, loaded: LoadedSpec, vision: Vision | None) -> None:
    """Refuse settings of verl that would change the rows of an EngineManager, or that have no effect on them, and log
    the others.

    Raises:
        TrainError: kind `train_setup`; the message names all of them.
    """
    table, conditions = _shared(config, loaded, vision)
    refuse(loaded, "verl", config, [*table, *MANAGER_SETTINGS], conditions)
    for text in (*WITHOUT_EFFECT, f"`backend: {{kind: {loaded.spec.backend.kind}}}`: verl's servers sample"):
        log.warning("no effect", setting=text)


def refuse_loop_settings(config: Any, loaded: LoadedSpec, vision: Vision | None) -> None:
    """Refuse settings with which verl would compute other advantages from an EngineAgentLoop's rewards than the spec's
    credit.

    Raises:
        TrainError: kind `train_setup`; the message names all of them.
    """
    spec = loaded.spec
    credit = spec.rewards.credit
    formula = (credit.baseline, credit.scale) if isinstance(credit, OutcomeCredit) else None
    by_std = value_of(config, "algorithm.norm_adv_by_std_in_grpo", True)
    estimator = value_of(config, "algorithm.adv_estimator")
    theirs = {"grpo": ("mean", "std" if by_std else "none"), "rloo": ("leave_one_out", "none")}.get(estimator)
    fields = {"method": credit.method} | credit.model_dump(include={"baseline", "scale"})
    keys = ", ".join(f"{name}: {value}" for name, value in fields.items())
    alone = spec.rollout.samples_per_task == 1 and estimator == "grpo"
    table, conditions = _shared(config, loaded, vision)
    conditions |= {
        f"algorithm.adv_estimator={estimator} (norm_adv_by_std_in_grpo={bool(by_std)}): another formula than "
        f"`rewards.credit: {{{keys}}}`; grpo is `{{method: outcome, baseline: mean, scale: std}}`, without "
        "norm_adv_by_std_in_grpo `scale: none`; rloo is `baseline: leave_one_out, scale: none`": formula is None
        or formula != theirs,
        "`rollout.samples_per_task: 1`: verl subtracts no baseline in a group of one": alone,
        "trainer.v1.trainer_mode=engine: it reads advantages that an agent loop cannot give": value_of(
            config, "trainer.v1.trainer_mode"
        )
        == "engine",
        "`train.overlong`: needs the engine's advantages": spec.train is not None and spec.train.overlong != "keep",
    }
    if vision is not None:
        table.append(("trainer.use_v1", (None, True), "its trainer would process images again"))
    refuse(loaded, "verl", config, table, conditions)
    for text in (WITHOUT_EFFECT[1], f"`backend: {{kind: {spec.backend.kind}}}`: verl's servers sample"):
        log.warning("no effect", setting=text)


def _shared(config: Any, loaded: LoadedSpec, vision: Vision | None) -> tuple[list[Row], dict[str, bool]]:
    """What an EngineManager and an EngineAgentLoop refuse: settings, and conditions."""
    spec = loaded.spec
    samples, temperature, routed = spec.rollout.samples_per_task, spec.sampling.temperature, spec.backend.asks_experts
    table = [
        *SETTINGS,
        (_ROLLOUT + "n", (samples,), f"`rollout.samples_per_task` is {samples}"),
        (_ROLLOUT + "temperature", (temperature,), f"`sampling.temperature` is {temperature:g}"),
        (
            _ROLLOUT + "enable_rollout_routing_replay",
            (True,) if routed else OFF,
            f"`backend.routed_experts` is {str(routed).lower()}",
        ),
    ]
    server = value_of(config, _ROLLOUT + "name")
    if spec.sampling.stop and server == "sglang":
        table.append((_ROLLOUT + "skip_tokenizer_init", (False,), "`sampling.stop` needs the server's tokenizer"))
    if value_of(config, "trainer.use_v1", True):
        why = "a step would train fewer groups than `data.train_batch_size`"
        table.append(("trainer.v1.sampler.sync_refill_failed_groups", (True,), why))
    strategy = value_of(config, "actor_rollout_ref.actor.strategy")
    if vision is not None:
        table.append((_ROLLOUT + "name", ("vllm", "sglang"), "images are sent to vllm or sglang"))
    foreign = ", ".join(unsupported(spec.sampling, SHARED))
    batch_norm = spec.train is not None and spec.train.advantage_norm == "batch"
    return table, {
        f"`sampling` has parameters that verl's servers do not both take: {foreign}": bool(foreign),
        "`train.advantage_norm: batch`: groups are handed over one by one": batch_norm,
        "images: verl's trainer takes those of Qwen-VL models": vision is not None and not vision.family.served,
        f"actor_rollout_ref.actor.strategy={strategy}: only megatron and veomni with router_replay.mode=R3 read "
        "`routed_experts`": routed
        and value_of(config, f"actor_rollout_ref.actor.{strategy}.router_replay.mode") != "R3",
    }
