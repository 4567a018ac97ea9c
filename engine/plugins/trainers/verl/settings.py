"""Settings of verl that an EngineManager or an EngineAgentLoop refuses, and those that it says have no effect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from engine.plugins.trainers.check import refuse
from engine.plugins.trainers.sampler import unsupported
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


def of(config: Any, path: str, default: Any = None) -> Any:
    """A value of verl's configuration, by its dotted path; the default if there is no such key."""
    for name in path.split("."):
        config = None if config is None else config.get(name)
    return default if config is None else config


def refuse_settings(config: Any, loaded: LoadedSpec, vision: Vision | None) -> None:
    """Refuse settings of verl that would change the rows of an EngineManager, or that have no effect on them, and log the others.

    Raises:
        TrainError: kind `train_setup`; the message names all of them.
    """
    estimator = of(config, "algorithm.adv_estimator")
    refuse(
        loaded,
        "verl",
        _shared(config, loaded, vision)
        | {
            "trainer.use_v1=false: the manager writes the rows of verl's V1 trainer": not of(
                config, "trainer.use_v1", True
            ),
            "trainer.v1.trainer_mode: must be `engine`, else verl computes its own advantages": of(
                config, "trainer.v1.trainer_mode"
            )
            != "engine",
            f"algorithm.adv_estimator={estimator}: has no effect; use grpo": estimator != "grpo",
            "algorithm.filter_groups.enable=true: its metric does not know the engine's advantages": bool(
                of(config, "algorithm.filter_groups.enable")
            ),
        },
    )
    for text in WITHOUT_EFFECT:
        log.warning("no effect", setting=text)
    log.warning("no effect", setting=f"`backend: {{kind: {loaded.spec.backend.kind}}}`: verl's servers sample")


def refuse_loop_settings(config: Any, loaded: LoadedSpec, vision: Vision | None) -> None:
    """Refuse settings with which verl would compute other advantages from an EngineAgentLoop's rewards than the spec's credit.

    Raises:
        TrainError: kind `train_setup`; the message names all of them.
    """
    spec = loaded.spec
    credit, samples = spec.rewards.credit, spec.rollout.samples_per_task
    own = (credit.baseline, credit.scale) if isinstance(credit, OutcomeCredit) else None
    scale = "std" if of(config, "algorithm.norm_adv_by_std_in_grpo", True) else "none"
    estimator = of(config, "algorithm.adv_estimator")
    theirs = {"grpo": ("mean", scale), "rloo": ("leave_one_out", "none")}.get(estimator)
    named = {"method": credit.method} | credit.model_dump(include={"baseline", "scale"})
    keys = ", ".join(f"{name}: {value}" for name, value in named.items())
    refuse(
        loaded,
        "verl",
        _shared(config, loaded, vision)
        | {
            f"algorithm.adv_estimator={estimator} (norm_adv_by_std_in_grpo={scale == 'std'}): another formula than `rewards.credit: {{{keys}}}`; "
            "grpo is `{method: outcome, baseline: mean, scale: std}`, without norm_adv_by_std_in_grpo `scale: none`; rloo is `baseline: "
            "leave_one_out, scale: none`": own is None or own != theirs,
            "`rollout.samples_per_task: 1`: verl subtracts no baseline in a group of one": samples == 1
            and estimator == "grpo",
            "trainer.v1.trainer_mode=engine: it reads advantages that an agent loop cannot give": of(
                config, "trainer.v1.trainer_mode"
            )
            == "engine",
            "`train.overlong`: needs the engine's advantages": spec.train is not None and spec.train.overlong != "keep",
            "trainer.use_v1=false: its trainer would process images again": vision is not None
            and not of(config, "trainer.use_v1", True),
        },
    )
    for text in (*WITHOUT_EFFECT[1:2], f"`backend: {{kind: {spec.backend.kind}}}`: verl's servers sample"):
        log.warning("no effect", setting=text)


def _shared(config: Any, loaded: LoadedSpec, vision: Vision | None) -> dict[str, bool]:
    """What an EngineManager and an EngineAgentLoop refuse: message -> whether it is so."""
    spec = loaded.spec
    rollout = "actor_rollout_ref.rollout."
    samples, temperature = of(config, rollout + "n"), of(config, rollout + "temperature")
    wanted, heat = spec.rollout.samples_per_task, spec.sampling.temperature
    rolled, tools = of(config, rollout + "name"), rollout + "multi_turn."
    strings = (
        bool(spec.sampling.stop) and rolled == "sglang" and bool(of(config, rollout + "skip_tokenizer_init", True))
    )
    named = ", ".join(unsupported(spec.sampling, SHARED))
    replays = of(config, rollout + "enable_rollout_routing_replay", False)
    strategy, routed = of(config, "actor_rollout_ref.actor.strategy"), spec.backend.asks_experts
    return {
        f"{rollout}n={samples}: `rollout.samples_per_task` is {wanted}": samples != wanted,
        f"{rollout}temperature={temperature}: `sampling.temperature` is {heat:g}": temperature != heat,
        f"{rollout}calculate_log_probs=false: the engine needs the sampler's log-probs": not of(
            config, rollout + "calculate_log_probs"
        ),
        f"{rollout}skip_tokenizer_init=true: `sampling.stop` needs the server's tokenizer": strings,
        f"{tools}tool_config_path: the spec's `tools` are used": of(config, tools + "tool_config_path") is not None,
        f"{tools}function_tool_path: the spec's `tools` are used": of(config, tools + "function_tool_path") is not None,
        f"{tools}interaction_config_path: the spec's `user` is used": of(config, tools + "interaction_config_path")
        is not None,
        "trainer.val_before_train=true: evaluate with `engine eval`": bool(of(config, "trainer.val_before_train")),
        "trainer.test_freq>0: evaluate with `engine eval`": of(config, "trainer.test_freq", -1) > 0,
        "trainer.v1.sampler.sync_refill_failed_groups=false: a step would train fewer groups than `data.train_batch_size`": bool(
            of(config, "trainer.use_v1", True)
        )
        and not of(config, "trainer.v1.sampler.sync_refill_failed_groups"),
        "algorithm.use_kl_in_reward=true: the advantages would not be those of the spec's credit": bool(
            of(config, "algorithm.use_kl_in_reward")
        ),
        "reward.reward_model.enable=true: the spec's rewards are used": bool(of(config, "reward.reward_model.enable")),
        "distillation.enabled=true: rows have no teacher": bool(of(config, "distillation.enabled")),
        f"`sampling` has parameters that verl's servers do not both take: {named}": bool(named),
        "`train.advantage_norm: batch`: groups are handed over one by one": spec.train is not None
        and spec.train.advantage_norm == "batch",
        f"{rollout}name={rolled}: images are sent to vllm or sglang": vision is not None
        and rolled not in ("vllm", "sglang"),
        "images: verl's trainer takes those of Qwen-VL models": vision is not None and not vision.family.served,
        f"{rollout}enable_rollout_routing_replay={replays}: `backend.routed_experts` is {routed}": replays != routed,
        f"actor_rollout_ref.actor.strategy={strategy}: only megatron and veomni with router_replay.mode=R3 read "
        "`routed_experts`": routed and of(config, f"actor_rollout_ref.actor.{strategy}.router_replay.mode") != "R3",
    }
