"""Settings of SkyRL that are refused, because they would change the engine's advantages or have no effect on its episodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from engine.plugins.trainers.check import refuse
from engine.plugins.trainers.sampler import unsupported
from engine.plugins.trainers.skyrl.handover import ESTIMATOR
from engine.plugins.trainers.skyrl.sampler import NAMES
from engine.validate.model_files import model_files

if TYPE_CHECKING:
    from engine.spec.load import LoadedSpec

log = structlog.get_logger(__name__)
_OWN_SAMPLING = {
    "repetition_penalty": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "top_k": -1,
    "stop": None,
    "additional_kwargs": None,
}
"""SkyRL's parameters of sampling that the spec replaces, with their defaults."""
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
    trainer, generator = cfg.trainer, cfg.generator
    algorithm = trainer.algorithm
    temperature = loaded.spec.sampling.temperature
    problems = {
        f"trainer.algorithm.advantage_estimator: {algorithm.advantage_estimator}; set it to {ESTIMATOR}": algorithm.advantage_estimator
        != ESTIMATOR,
        "trainer.algorithm.use_kl_in_reward: it would be subtracted from the advantages": algorithm.use_kl_in_reward,
        "trainer.algorithm.advantage_batch_normalize: use `train.advantage_norm: batch`": algorithm.advantage_batch_normalize,
        "trainer.algorithm.zero_variance_filter: SkyRL ignores it with rewards by token": algorithm.zero_variance_filter,
        "trainer.algorithm.dynamic_sampling.type: it would compare sums of advantages": algorithm.dynamic_sampling.type
        is not None,
        "trainer.critic.model.path: the engine's advantages have no critic": trainer.critic.model.path is not None,
        "trainer.fully_async.enabled: rows have no weight versions there": trainer.fully_async.enabled,
        "generator.step_wise_trajectories: all rows of an episode would get the advantage of the last one": generator.step_wise_trajectories,
        "generator.apply_overlong_filtering: use `train.overlong: mask`": generator.apply_overlong_filtering,
        f"generator.sampling_params.temperature: {generator.sampling_params.temperature:g}; the spec samples with {temperature:g}": generator.sampling_params.temperature
        != temperature,
        f"trainer.algorithm.temperature: {algorithm.temperature}; the spec samples with {temperature:g}": algorithm.temperature
        not in (None, temperature),
    }
    samples, wanted = generator.n_samples_per_prompt, loaded.spec.rollout.samples_per_task
    problems |= {
        f"generator.n_samples_per_prompt: {samples}; `rollout.samples_per_task` is {wanted}": samples != wanted,
        f"trainer.eval_interval: {trainer.eval_interval}; set it to -1 and evaluate with `engine eval`": trainer.eval_interval
        > 0,
        "generator.zero_reward_on_non_stop: use `train.overlong`": generator.zero_reward_on_non_stop,
        "generator.chat_template_kwargs: use `model.template_kwargs`": bool(generator.chat_template_kwargs),
    }
    own = generator.sampling_params
    for name, default in _OWN_SAMPLING.items():
        value = getattr(own, name)
        problems[f"generator.sampling_params.{name}: {value}; the spec's `sampling` is used"] = value != default
    kind = loaded.spec.backend.kind
    problems[
        f"backend.kind: {kind}: its replies have no ids; use `backend: {{kind: vllm}}`"
    ] = not loaded.spec.backend.exact_ids
    sampling = loaded.spec.sampling
    foreign = ", ".join(f"`sampling.{name}`" for name in unsupported(sampling, NAMES))
    problems[f"SkyRL's inference engines do not take {foreign}"] = bool(foreign)
    raw = generator.inference_engine.engine_init_kwargs.get("logprobs_mode", "raw_logprobs") != "processed_logprobs"
    problems[
        f"generator.inference_engine.engine_init_kwargs.logprobs_mode: set it to processed_logprobs; else the log-probs are those of temperature 1, and the spec samples with {temperature:g}"
    ] = raw and temperature != 1
    engines, policy, reference = generator.inference_engine, trainer.policy, trainer.ref
    asks, returns = loaded.spec.backend.asks_experts, engines.enable_return_routed_experts
    replays = trainer.strategy == "megatron" and policy.megatron_config.moe_enable_routing_replay
    problems |= {
        "`backend.routed_experts`: set generator.inference_engine.enable_return_routed_experts, trainer.strategy: megatron and trainer.policy.megatron_config.moe_enable_routing_replay": asks
        and not (returns and replays),
        "generator.inference_engine.enable_return_routed_experts: set `backend.routed_experts: true`": returns
        and not asks,
    }
    files = model_files(loaded)
    if files is not None and files.sees:
        parallel = max(policy.sequence_parallel_size, reference.sequence_parallel_size)
        blind = any(part.language_model_only for part in (policy, reference, engines))
        problems |= {
            "generator.inference_engine.enable_return_routed_experts: its endpoint drops images, and the model would reply without seeing them": returns,
            "trainer.remove_microbatch_padding: set it to false; SkyRL does not pack rows of a model that takes images": trainer.remove_microbatch_padding,
            "trainer.policy.sequence_parallel_size, trainer.ref.sequence_parallel_size: set them to 1 for a model that takes images": parallel
            > 1,
            "language_model_only: the model would have no vision tower": blind,
        }
    refuse(loaded, "SkyRL", problems)
    for text in WITHOUT_EFFECT:
        log.info("no effect", setting=text)
    log.info("no effect", setting=f"`backend: {{kind: {kind}}}`: SkyRL's inference engines sample")
