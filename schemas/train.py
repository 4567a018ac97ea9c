"""TrainSpec: the `train:` section of a spec, which `engine train` reads and everything else leaves alone."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from engine.schemas.base import Contract, Seconds

Level = Literal["token", "turn", "sequence"]
"""What a ratio is taken over: one token, a turn's tokens, or a whole row's."""

Clip = Annotated[float, Field(ge=0.0)]


class ClippedLoss(Contract):
    """What the losses with a clipped ratio share."""

    clip_low: float = Field(default=0.2, ge=0.0, le=1.0)
    """The ratio is held above 1 - clip_low."""
    clip_high: Clip = 0.2
    """The ratio is held below 1 + clip_high; DAPO's clip-higher takes 0.28."""
    delta: float | None = Field(default=None, gt=1.0)
    """Two-sided clipping: with a negative advantage the ratio counts at most this much (dual-clip PPO); left out, no bound."""


class GrpoLoss(ClippedLoss):
    """GRPO: clipped ratio, each episode's tokens averaged, then the episodes."""

    kind: Literal["grpo"] = "grpo"


class BnpoLoss(ClippedLoss):
    """BNPO: as GRPO, averaged over the tokens of each mini-batch."""

    kind: Literal["bnpo"] = "bnpo"


class DrGrpoLoss(ClippedLoss):
    """Dr. GRPO: as GRPO, divided by a constant length, so that long replies are not favoured."""

    kind: Literal["dr_grpo"] = "dr_grpo"
    length: int | None = Field(default=None, ge=1)
    """The constant, tokens an episode; `limits.episode_tokens` when left out."""


class DapoLoss(ClippedLoss):
    """DAPO: clip-higher, averaged over all tokens of the step."""

    kind: Literal["dapo"] = "dapo"
    clip_high: Clip = 0.28
    """The ratio is held below 1 + clip_high: more room to rise than to fall."""


class GspoLoss(ClippedLoss):
    """GSPO: one ratio a row, the geometric mean of its tokens'."""

    kind: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, ge=0.0, le=1.0)
    """The row's ratio is held above 1 - clip_low."""
    clip_high: Clip = 4e-4
    """The row's ratio is held below 1 + clip_high."""


class CispoLoss(Contract):
    """CISPO: the clipped ratio is a weight without gradient; no token's gradient is cut off."""

    kind: Literal["cispo"] = "cispo"
    clip_low: float | None = Field(default=None, ge=0.0, le=1.0)
    """The weight is held above 1 - clip_low; no lower bound when left out."""
    clip_high: Clip = 4.0
    """The weight is held below 1 + clip_high."""


class SapoLoss(Contract):
    """SAPO: a smooth gate around ratio 1 in place of the clip."""

    kind: Literal["sapo"] = "sapo"
    temperature_positive: float = Field(default=1.0, gt=0.0)
    """Of the gate where the advantage is positive."""
    temperature_negative: float = Field(default=1.05, gt=0.0)
    """Of the gate where it is not."""


class ReinforceLoss(Contract):
    """REINFORCE: advantage times log-prob. With the leave-one-out baseline it is RLOO, with a batch's one REINFORCE++."""

    kind: Literal["reinforce"] = "reinforce"


class PpoLoss(ClippedLoss):
    """PPO's clipped surrogate, averaged over all tokens of the step."""

    kind: Literal["ppo"] = "ppo"


LossSpec = Annotated[
    GrpoLoss | BnpoLoss | DrGrpoLoss | DapoLoss | GspoLoss | CispoLoss | SapoLoss | ReinforceLoss | PpoLoss,
    Field(discriminator="kind"),
]


class KlSpec(Contract):
    """A penalty for moving away from the reference: the model as it was at the start, or below its adapter."""

    coefficient: float = Field(default=0.0, ge=0.0)
    """0 takes no reference at all."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators of KL(policy || reference) from the sampled token."""


class RolloutCorrectionSpec(Contract):
    """Off-policy correction: weighs tokens by trainer over sampler probability, or masks where it strays too far."""

    kind: Literal["none", "truncate", "mask"] = "truncate"
    """`truncate` holds the weight between `low` and `high`; `mask` drops what is outside."""
    level: Level = "token"
    """`turn` and `sequence` take the geometric mean of the ratios of that turn's or row's tokens."""
    low: float = Field(default=0.0, ge=0.0)
    """The least ratio that is let through as it is."""
    high: float = Field(default=2.0, gt=0.0)
    """The greatest one."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.low < self.high:
            raise ValueError(f"`low` ({self.low}) must be less than `high` ({self.high})")
        return self


class BonusSpec(Contract):
    """Something added to each sampled token's advantage."""

    use: str = Field(min_length=1)
    """`package.module:function(row, **with)` -> float array of [tokens]; `row` is an exported training row."""
    with_: dict[str, Any] = Field(default_factory=dict, alias="with")
    """Its keyword arguments."""
    coefficient: float = 1.0
    """What it is multiplied by."""


class OptimizerSpec(Contract):
    """AdamW and its learning rate."""

    lr: float = Field(default=1e-6, gt=0.0)
    """The learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Of the running means of gradients and of their squares."""
    eps: float = Field(default=1e-8, gt=0.0)
    """Added to what gradients are divided by."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Of the weights, apart from their gradients."""
    max_grad_norm: float | None = Field(default=1.0, gt=0.0)
    """Longer gradients are scaled to this norm."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the learning rate rises from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: as it is, or falling to 0 at the last step."""


class LoraSpec(Contract):
    """LoRA: the base model is frozen, low-rank matrices beside it are trained (package `peft`)."""

    rank: int = Field(default=16, ge=1)
    """Rows of the low-rank matrices."""
    alpha: float = Field(default=32.0, gt=0.0)
    """Their product is multiplied by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of a layer's inputs that the adapter does not see, while training."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Names of the layers that are adapted."""


class MemorySpec(Contract):
    """What the update may take at once."""

    max_tokens_per_microbatch: int = Field(default=8192, ge=1)
    """Tokens in one forward pass, padding-free; a longer row goes alone."""
    logits_chunk_elements: int = Field(default=16_777_216, ge=1)
    """Cells of [tokens, vocabulary] that exist at once where log-probs are computed."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    share_prefixes: bool = True
    """Compute once what rows of one task begin with: the prompt, and what branches share."""


class AsynchronySpec(Contract):
    """How far rollouts may run ahead of the trainer."""

    max_staleness: int = Field(default=0, ge=0)
    """Versions that an episode's first token may be behind when it trains; 0 takes turns: sample, then train."""
    oversample: float = Field(default=1.0, ge=1.0)
    """Groups begun for each that is wanted; the stragglers are cancelled."""


class WeightSyncSpec(Contract):
    """How new weights reach the backend."""

    method: Literal["auto", "disk", "tensors", "adapter"] = "auto"
    """`disk`: a folder that the server reads. `tensors`: shared memory on one host. `adapter`: only the LoRA adapter,
    by name. `auto`: `tensors` in this process, `adapter` with LoRA, else `disk`."""
    pause_generation: bool = True
    """SGLang: replies wait while weights change, and go on after their prefix is computed anew; else they go on with
    what the old weights computed. A reply may have tokens of two versions either way. An adapter pauses nothing."""
    folder: str | None = None
    """For `disk` and `adapter`: where weights are put, a path that the server sees too; the run's own when left out."""


class CheckpointsSpec(Contract):
    """What is kept for later."""

    every: int = Field(default=10, ge=1)
    """Steps between checkpoints; the last step always has one."""
    keep: int = Field(default=2, ge=1)
    """Newest ones that stay; the best one stays as well."""


class TrainEvalSpec(Contract):
    """Evaluation while training, with the same worlds and other tasks where there are some."""

    every: int = Field(default=10, ge=1)
    """Steps between evaluations; there is one before the first step and one after the last."""
    tasks: dict[str, Any] | None = None
    """As the spec's `tasks`; the training tasks when left out."""
    limit: int | None = Field(default=None, ge=1)
    """The first so many tasks."""
    samples: int = Field(default=1, ge=1)
    """Episodes of each task."""
    sampling: dict[str, Any] = Field(default_factory=dict)
    """What is different from the spec's `sampling`, such as `temperature: 0`."""
    metric: str = "reward"
    """What makes a checkpoint the best: a measure of `engine eval`, such as `success`, `reward`, `pass@4`."""


class NotifySpec(Contract):
    """Who is told when training fails, stalls, diverges or ends."""

    webhook_env: str | None = None
    """Name of the environment variable with a URL; events are POSTed there as JSON (`text` and the event's fields)."""
    command: list[str] | None = None
    """A command; the event is its standard input, as JSON."""
    use: str | None = None
    """`package.module:function(event: dict)`."""
    on: list[Literal["failed", "stalled", "diverged", "finished"]] = Field(
        default_factory=lambda: ["failed", "stalled", "diverged", "finished"]  # type: ignore[arg-type]
    )
    """What is told."""
    stall_timeout: Seconds = 1800.0
    """No episode and no step for so long is a stall."""


class TrainSpec(Contract):
    """How the model learns from its episodes."""

    steps: int = Field(default=100, ge=1)
    """Batches that are collected and trained on."""
    tasks_per_step: int = Field(default=8, ge=1)
    """Groups in a batch, each of `rollout.samples_per_task` episodes."""
    shuffle: bool = True
    """Go through the tasks in a new random order each time round, by `seed`."""
    update_epochs: int = Field(default=1, ge=1)
    """Times that a batch is gone over."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps in one pass over a batch."""
    seed: int = Field(default=0, ge=0)
    """Of the order of tasks and of mini-batches."""
    loss: LossSpec = Field(default_factory=GrpoLoss)
    """What is made smaller; `kind` says which."""
    proximal_logprobs: Literal["auto", "sampler", "recompute"] = "auto"
    """What the clipped ratio is against: the sampler's log-probs, or the trainer's own before the batch's first update
    (decoupled PPO). `auto`: recomputed where a batch takes more than one update; with one, the current ones are
    those before it, however stale the batch."""
    rollout_correction: RolloutCorrectionSpec = Field(default_factory=RolloutCorrectionSpec)
    """For what sampler and trainer see differently."""
    kl: KlSpec = Field(default_factory=KlSpec)
    """Penalty for moving away from where it began."""
    entropy_coefficient: float = 0.0
    """Coefficient of the entropy bonus."""
    advantage_bonuses: list[BonusSpec] = Field(default_factory=list)
    """Added to the advantages of sampled tokens."""
    advantage_norm: Literal["none", "batch"] = "none"
    """`batch`: advantages of the whole batch to mean 0 and standard deviation 1 over tokens (REINFORCE++)."""
    dynamic_sampling: bool = True
    """Leave out groups in which no turn has an advantage (all episodes did equally well), and collect others for them."""
    max_sampling_rounds: int = Field(default=4, ge=1)
    """Times `tasks_per_step` groups are begun for one batch at most, where groups are left out; then it trains on fewer."""
    optimizer: OptimizerSpec = Field(default_factory=OptimizerSpec)
    """AdamW."""
    precision: Literal["float32", "mixed", "bfloat16"] = "float32"
    """`mixed`: float32 weights, bfloat16 autocast. `bfloat16`: weights as well."""
    device: str = "auto"
    """The trainer's: `auto`, `cpu`, `cuda`, `cuda:1`."""
    freeze: list[str] = Field(default_factory=list)
    """Regular expressions; parameters whose name one of them finds are not trained."""
    lora: LoraSpec | None = None
    """Train low-rank matrices beside the layers; left out, the weights themselves."""
    memory: MemorySpec = Field(default_factory=MemorySpec)
    """What an update may take at once."""
    asynchrony: AsynchronySpec = Field(default_factory=AsynchronySpec)
    """How far rollouts may run ahead."""
    weight_sync: WeightSyncSpec = Field(default_factory=WeightSyncSpec)
    """The way of new weights to the backend."""
    checkpoints: CheckpointsSpec = Field(default_factory=CheckpointsSpec)
    """How often everything is written down, and how much of it stays."""
    eval: TrainEvalSpec | None = None
    """Evaluation while training; none when left out."""
    notify: NotifySpec = Field(default_factory=NotifySpec)
    """Who is told when it fails, stalls, diverges or ends."""
    report_to: list[Literal["tensorboard", "trackio", "wandb", "mlflow"]] = Field(default_factory=list)
    """Where metrics go beside the run's own `metrics.jsonl`."""
