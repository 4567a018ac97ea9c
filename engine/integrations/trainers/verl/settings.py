"""Settings of verl that an EngineManager and the trainer `engine` refuse, and those that it says have no effect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from engine.errors import TrainError
from engine.integrations.trainers.verl.sampler import unsupported

if TYPE_CHECKING:
    from engine.spec.load import LoadedSpec

log = structlog.get_logger(__name__)

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


def refuse_settings(config: Any, loaded: LoadedSpec, *, images: bool) -> None:
    """Refuse settings of verl that would change the engine's rows, or that have no effect on them, and log the others.

    Args:
        config: verl's whole configuration.
        loaded: The spec.
        images: Whether the spec's model takes images.

    Raises:
        TrainError: kind `train_setup`; the message names all of them.
    """
    spec = loaded.spec
    rollout = "actor_rollout_ref.rollout."
    samples, temperature = of(config, rollout + "n"), of(config, rollout + "temperature")
    wanted, heat = spec.rollout.samples_per_task, spec.sampling.temperature
    rolled, tools = of(config, rollout + "name"), rollout + "multi_turn."
    strings = (
        bool(spec.sampling.stop) and rolled == "sglang" and bool(of(config, rollout + "skip_tokenizer_init", True))
    )
    named = ", ".join(unsupported(spec.sampling))
    batch = spec.train is not None and spec.train.advantage_norm == "batch"
    problems = {
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
        "trainer.v1.trainer_mode: must be `engine`, else verl computes its own advantages": of(
            config, "trainer.v1.trainer_mode"
        )
        != "engine",
        "trainer.val_before_train=true: evaluate with `engine eval`": bool(of(config, "trainer.val_before_train")),
        "trainer.test_freq>0: evaluate with `engine eval`": of(config, "trainer.test_freq", -1) > 0,
        "trainer.v1.sampler.sync_refill_failed_groups=false: a step would train fewer groups than `data.train_batch_size`": not of(
            config, "trainer.v1.sampler.sync_refill_failed_groups"
        ),
        f"algorithm.adv_estimator={of(config, 'algorithm.adv_estimator')}: has no effect; use grpo": of(
            config, "algorithm.adv_estimator"
        )
        != "grpo",
        "algorithm.use_kl_in_reward=true: the engine's advantages would not hold it": bool(
            of(config, "algorithm.use_kl_in_reward")
        ),
        "algorithm.filter_groups.enable=true: its metric does not know the engine's advantages": bool(
            of(config, "algorithm.filter_groups.enable")
        ),
        "reward.reward_model.enable=true: the spec's rewards are used": bool(of(config, "reward.reward_model.enable")),
        "distillation.enabled=true: rows have no teacher": bool(of(config, "distillation.enabled")),
        f"`sampling` has parameters that verl's servers do not both take: {named}": bool(named),
        "`train.advantage_norm: batch`: groups are handed over one by one": batch,
        "images: this adapter does not write `multi_modal_inputs`": images,
        "`backend.routed_experts`: this adapter does not write `routed_experts`": spec.backend.asks_experts,
    }
    found = [text for text, refused in problems.items() if refused]
    if found:
        raise TrainError(
            f"{loaded.path}: these settings do not go together with verl's: " + "; ".join(found), kind="train_setup"
        )
    for text in WITHOUT_EFFECT:
        log.warning("no effect", setting=text)
    log.warning("no effect", setting=f"`backend: {{kind: {spec.backend.kind}}}`: verl's servers sample")
