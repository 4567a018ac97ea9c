"""TRL's arguments that make the updates of a spec's `train:` section, and the arguments that an EngineGRPOTrainer
refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.backends.device import pick_device
from engine.errors import TrainError
from engine.plugins.trainers.library import OFF, Row, refuse
from engine.schemas.loss import CispoLoss, ClippedLoss, DrGrpoLoss, LossSpec, SapoLoss
from engine.schemas.sections import dump
from engine.schemas.train import TrainSpec

if TYPE_CHECKING:
    from engine.spec.load import LoadedSpec

_LOSS_TYPES = {
    "grpo": "grpo",
    "dr_grpo": "dr_grpo",
    "dapo": "dapo",
    "ppo": "dapo",
    "gspo": "grpo",
    "cispo": "cispo",
    "sapo": "sapo",
}
"""TRL's `loss_type` by `train.loss.kind`, where formula and denominator are the same."""


def grpo_arguments(loaded: LoadedSpec) -> dict[str, Any]:
    """The keyword arguments of TRL's `GRPOConfig` for the updates that `engine train` would make. Any of them may be
    changed.

    One microbatch is one group; set `per_device_train_batch_size` and `gradient_accumulation_steps` for another size.

    Raises:
        TrainError: kind `train_setup`: the spec's loss, penalty or parameters have no counterpart in TRL; the message
            names all of them.
    """
    spec = loaded.spec
    train = spec.train or TrainSpec()
    _refuse_untranslated(loaded, train)
    samples, groups = spec.rollout.samples_per_task, train.tasks_per_step
    optimizer = train.optimizer
    arguments: dict[str, Any] = {
        "max_steps": train.steps * train.minibatches * train.update_epochs,
        "num_generations": samples,
        "per_device_train_batch_size": samples,
        "gradient_accumulation_steps": groups // train.minibatches,
        "steps_per_generation": groups,
        "num_iterations": train.update_epochs,
        "temperature": spec.sampling.temperature,
        "shuffle_dataset": train.shuffle,
        "seed": train.seed,
        "learning_rate": optimizer.lr,
        "lr_scheduler_type": optimizer.schedule,
        "warmup_steps": optimizer.warmup_steps,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_grad_norm or 0.0,
        "beta": train.kl.coefficient,
        "entropy_coef": train.entropy_coefficient,
        "bf16": train.precision_on(pick_device(train.device, "train.device").type) == "mixed",
        "model_init_kwargs": {"dtype": "float32"},
        "gradient_checkpointing": train.memory.gradient_checkpointing,
        "use_cpu": train.device == "cpu",
        "logging_steps": 1,
        "save_steps": train.checkpoints.every,
        "save_total_limit": train.checkpoints.keep,
        "report_to": dump(train).get("report_to") or "none",
    }
    # TRL reads it in `dr_grpo` alone; None: `EngineGRPOTrainer` measures it in the first batch, as `engine train` does
    length = train.loss.length if isinstance(train.loss, DrGrpoLoss) else spec.limits.tokens_per_episode
    return arguments | {"max_completion_length": length} | _loss_arguments(train.loss)


def _loss_arguments(loss: LossSpec) -> dict[str, Any]:
    arguments: dict[str, Any] = {"loss_type": _LOSS_TYPES[loss.kind]}
    if loss.ratio_level == "sequence":
        arguments["importance_sampling_level"] = "sequence"
    if isinstance(loss, ClippedLoss):
        arguments |= {"epsilon": loss.clip_low, "epsilon_high": loss.clip_high, "delta": loss.delta}
    if isinstance(loss, CispoLoss):
        arguments["epsilon_high"] = 1.0 + loss.clip_high
    if isinstance(loss, SapoLoss):
        arguments |= {
            "sapo_temperature_pos": loss.temperature_positive,
            "sapo_temperature_neg": loss.temperature_negative,
        }
    return arguments


def _refuse_untranslated(loaded: LoadedSpec, train: TrainSpec) -> None:
    loss, kl = train.loss, train.kl
    problems = {
        "train.kind: sft": not train.samples_episodes,
        "train.epochs": train.epochs is not None,
        f"train.loss.kind: {loss.kind}": loss.kind not in _LOSS_TYPES,
        "train.loss.clip_low with cispo": isinstance(loss, CispoLoss) and loss.clip_low is not None,
        "train.kl.in: reward": kl.in_reward,
        f"train.kl.estimator: {kl.estimator}": kl.in_loss and kl.estimator != "k3",
        "train.precision: bfloat16, whose master weights are float32 (write mixed)": train.precision == "bfloat16",
        "train.lora": train.adapter is not None,
        "train.freeze": bool(train.freeze),
        "train.optimizer.kind: adamw_8bit": train.optimizer.kind != "adamw",
        f"train.minibatches: {train.minibatches} with train.tasks_per_step: {train.tasks_per_step}": bool(
            train.tasks_per_step % train.minibatches
        ),
    }
    named = ", ".join(f"`{name}`" for name, refused in problems.items() if refused)
    if named:
        raise TrainError(
            f"{loaded.path}: no argument of TRL's GRPOConfig does the same as {named}; change the spec, or write the "
            "GRPOConfig yourself",
            kind="train_setup",
        )


_ARGUMENTS: list[Row] = [
    ("use_vllm", OFF, "the engine samples with the trainer's model"),
    ("mask_truncated_completions", OFF, "use `train.overlong: mask`"),
    ("eval_strategy", ("no",), "evaluate with `engine eval`"),
    ("off_policy_mask_threshold", (None,), "it takes one advantage for each row"),
    (
        "world_size",
        (1,),
        "the engine's hand-over was run in one process only; use `engine train` for several",
    ),
]
_OPTIONS: list[Row] = [
    ("peft_config", OFF, "sampling with an adapter was not run"),
    *(
        (name, OFF, "the spec gives it")
        for name in (
            "reward_funcs", "rollout_func", "tools", "environment_factory", "train_dataset", "eval_dataset",
        )
    ),
]  # fmt: skip


def refuse_arguments(args: Any, options: dict[str, Any], loaded: LoadedSpec, *, vision: bool) -> None:
    """Refuse `args`, a `GRPOConfig`, and keyword arguments of a trainer that would change the rows or have no effect.

    Raises:
        TrainError: kind `train_setup`; the message names all of them.
    """
    temperature = loaded.spec.sampling.temperature
    table = [*_ARGUMENTS, ("temperature", (temperature,), f"the spec samples with {temperature:g}")]
    conditions = {
        "loss_type=vespo: it takes one advantage for each row": args.loss_type == "vespo",
        "beta with a model that takes images: TRL computes the reference's log-probs without them": vision
        and args.beta != 0,
    }
    refuse(loaded, "TRL", args, table, conditions)
    refuse(loaded, "TRL", options, _OPTIONS)
