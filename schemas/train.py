"""TrainSpec: the `train:` section of a spec. Only `engine train` and `engine validate` read it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import IPv6Address
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from engine import plugin
from engine.schemas.base import Contract, Seconds, Struct
from engine.schemas.credit import ComparedCredit, CreditMethod
from engine.schemas.loss import DrGrpoLoss, LossSpec
from engine.schemas.sections import NameOf, OneOf, SectionOwner, SpecSection


class TrainKind(Struct, frozen=True, kw_only=True):
    """What holds for one value of `train.kind`."""

    use: str
    """Entry point of its `engine.train.step_source:StepSource`."""
    samples: bool = True
    """Whether the model is trained on episodes that it samples, and so needs a backend that takes new weights."""
    keys: frozenset[str] | None = None
    """The core's keys of `train` that it reads; None: all. `weight_sync` is read only where the backend gets
    weights."""
    settings: Mapping[str, Any] = {}
    """The values of keys that it does not read, where they are not the defaults."""


CORE_KINDS: dict[str, TrainKind] = {
    "rl": TrainKind(use="engine.train.episode_steps:EpisodeSteps"),
}
"""The kinds of the core, by the name in `train.kind`."""


class CriticBase(Contract):
    """Base class of the critics."""

    own_model: ClassVar[bool] = False
    """It computes its values with a model of its own, not from the policy's hidden states."""

    if TYPE_CHECKING:  # a literal of each class
        kind: str

    @property
    def bootstraps(self) -> frozenset[str]:
        """The limits that cut an episode without being its end, by their names in outcomes: the value of the last state
        counts as the rewards that would have come."""
        return frozenset()


CRITICS: OneOf[CriticBase] = OneOf("critics", base=CriticBase)
CriticSpec = Annotated[CriticBase, CRITICS]
"""The critic; `kind` selects it."""


Level = Literal["token", "turn", "sequence"]
"""Level at which a probability ratio is taken: one token, the tokens of a turn, or the tokens of a row."""


Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
"""Decay rate of a running mean."""


class KlSpec(Contract):
    """KL penalty against the reference model: the model at the start of training, or the base model if LoRA is
    trained."""

    coefficient: float = Field(default=0.0, ge=0.0)
    """Coefficient of the penalty. With 0 no reference model is loaded."""
    in_: Literal["loss", "reward"] = Field(default="loss", alias="in")
    """`loss`: `estimator`, added to the loss of each token. `reward`: `k1` of each trained token, subtracted from its
    reward (verl:
    `use_kl_in_reward`); the credit method then counts it as it counts rewards."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """With `in: loss`: Schulman's estimator of KL(policy || reference), computed from the sampled token."""

    @property
    def in_loss(self) -> bool:
        """Whether the loss has a KL penalty."""
        return self.coefficient > 0 and self.in_ == "loss"

    @property
    def in_reward(self) -> bool:
        """Whether the rewards have a KL penalty."""
        return self.coefficient > 0 and self.in_ == "reward"


class RolloutCorrectionSpec(Contract):
    """Importance weights between sampler and trainer: each token is weighted by trainer probability / sampler
    probability."""

    kind: Literal["none", "truncate", "mask"] = "truncate"
    """`truncate` (TIS) clips the weight to [low, high]; `mask` (MIS) sets weights outside of [low, high] to 0."""
    level: Level = "token"
    """Level of the ratio. `turn` and `sequence` use the geometric mean over the tokens of the turn or row."""
    low: float = Field(default=0.0, ge=0.0)
    """Lower bound of the ratio."""
    high: float = Field(default=2.0, gt=0.0)
    """Upper bound of the ratio."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.low < self.high:
            raise ValueError(f"`low` ({self.low}) must be less than `high` ({self.high})")
        return self


class BonusSpec(Contract):
    """A function whose values are added to the advantages of sampled tokens."""

    use: str = Field(min_length=1)
    """`package.module:function(row, **with)` -> float array of [tokens]; `row` is an exported training row."""
    with_: dict[str, Any] = Field(default_factory=dict, alias="with")
    """Keyword arguments of the function."""
    coefficient: float = 1.0
    """Factor of the function's values."""


OVERLONG_PENALTY = "overlong_penalty"
"""Name of the reward that holds the penalties of long replies."""


class OverlongPenalty(Contract):
    """DAPO's soft overlong punishment: a reply's reward falls linearly over the last tokens before
    `limits.turn_tokens`."""

    margin: int = Field(ge=1)
    """Number of tokens before the limit from which the reward falls, from 0 down to -coefficient at the limit."""
    coefficient: float = Field(default=1.0, gt=0.0)
    """What a reply that reaches the limit costs."""


class OptimizerSpec(Contract):
    """AdamW and its learning rate schedule."""

    kind: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw`: AdamW of torch. `adamw_8bit`: AdamW whose moments have 8 bits, of the package `torchao`."""
    lr: float = Field(default=1e-6, gt=0.0)
    """The learning rate."""
    betas: list[Decay] = Field(default_factory=lambda: [0.9, 0.999], min_length=2, max_length=2)
    """Decay rates of the running means of the gradient and of its square."""
    eps: float = Field(default=1e-8, gt=0.0)
    """Added to the denominator of the update."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Decoupled weight decay."""
    max_grad_norm: float | None = Field(default=1.0, gt=0.0)
    """Gradients with a larger norm are scaled down to this norm. No clipping if null."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or decay to 0 at the last step."""


class AdapterSection(SpecSection):
    """Base of the sections that train an adapter beside frozen weights; each adds the keys of its adapter."""

    NULLABLE: ClassVar[bool] = True
    adapter: ClassVar[str]
    """`module:class` of what runs it, an `engine.train.policy.Adapter` made of (model, section, seed)."""

    if TYPE_CHECKING:  # keys of each
        rank: int = 0
        dropout: float = 0.0
        target_modules: list[str] | Literal["all-linear"] = "all-linear"


class MemorySpec(Contract):
    """Memory limits of an update."""

    max_tokens_per_microbatch: int = Field(default=8192, ge=1)
    """Maximum number of tokens in one forward pass, without padding. A row that is longer is a micro-batch of its
    own."""
    logits_chunk_elements: int = Field(default=16_777_216, ge=1)
    """Maximum size of one block of logits, tokens × vocabulary. The full logits are never in memory."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them."""
    share_prefixes: bool = True
    """Compute a prefix that several rows share (the prompt, or the common part of branches) once."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """What stays on the CPU. `optimizer`: AdamW's moments, between updates. `all`: this process's part of the weights
    (those of the reference too), their gradients and AdamW's moments; a block is copied to the device while it
    computes."""


class AsynchronySpec(Contract):
    """Asynchronous rollouts: how many weight versions the sampler may be behind the trainer."""

    max_staleness: int = Field(default=0, ge=0)
    """Maximum age, in weight versions, of an episode's first token when it is trained on. 0: sampling and training
    alternate."""
    oversample: float = Field(default=1.0, ge=1.0)
    """Groups started for each group of a batch. Groups that are not finished when the batch is full are cancelled."""


_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
"""A host name or an IPv4 address."""


class WeightSyncSpec(Contract):
    """How new weights are sent to the backend."""

    method: Literal["auto", "disk", "tensors", "collective", "adapter"] = "auto"
    """`disk`: a folder that the server reads. `tensors`: memory of one host. `collective`: broadcasts in a process
    group (NCCL on GPUs, gloo else), over several hosts. `adapter`: the LoRA adapter only.
    `auto`: `tensors` for the local backend, else `adapter` with LoRA and `disk` without."""
    pause_generation: bool = True
    """SGLang: pause generation during the update and recompute the KV cache of running requests with the new weights.
    If false, running requests continue with the KV cache of the old weights. Either way a reply can have tokens of two
    versions. Sending an adapter pauses nothing."""
    folder: str | None = None
    """Folder for `disk` and `adapter`; the servers must see it under the same path. Default: a folder of the
    training."""
    address: str | None = None
    """`collective`: host name or IP address of process 0 of the training, as the servers reach it. Default: the address
    of this host on its route to the first server."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """`collective`: the port at which the servers find process 0. Default: a free one. Open it in firewalls."""

    @field_validator("address")
    @classmethod
    def _is_host(cls, address: str | None) -> str | None:
        if address is None or _HOST_NAME.fullmatch(address):
            return address
        try:
            return str(IPv6Address(address))
        except ValueError:
            raise ValueError(
                f"{address!r} is not a host name or an IP address: write no scheme, port, path or brackets"
            ) from None


class CheckpointsSpec(Contract):
    """When checkpoints are written and which ones are kept."""

    every: int = Field(default=10, ge=1)
    """Steps between checkpoints. The last step always has one."""
    keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep. The best checkpoint is kept as well."""
    grace: Seconds = 20.0
    """After SIGTERM the process exits after this time at the latest. Within it, a running update is finished and a
    checkpoint is written. Set it below the time after which your scheduler sends SIGKILL. What is not saved in time is
    repeated by `--resume` without sampling."""


Precision = Literal["float32", "mixed", "bfloat16"]


class TrainSpec(SectionOwner):
    """How the model is trained on its episodes."""

    OWNER: ClassVar[str] = "train"
    PLUGIN_NAMES: ClassVar[Mapping[str, str]] = {"kind": "train_kinds"}

    kind: Annotated[str, NameOf(point="train_kinds", core=tuple(CORE_KINDS))] = "rl"
    """`rl`: the model samples episodes and is trained on their rewards. `sft`: it is trained on the sampled tokens of
    the episodes in `data`, with the cross-entropy; nothing is sampled, except by `eval`."""
    steps: int = Field(default=100, ge=1)
    """Number of training steps. Each step collects one batch of episodes and trains on it."""
    epochs: float | None = Field(default=None, gt=0.0)
    """Instead of `steps`: epochs × tasks / `tasks_per_step` steps, rounded up (verl: total_epochs). Groups that dynamic
    sampling drops use further tasks, so that a training then goes through the tasks more often. With `kind: sft`:
    epochs × episodes of `data`; the last step takes what is left."""
    tasks_per_step: int = Field(default=8, ge=1)
    """Groups per batch. A group is `rollout.samples_per_task` episodes of one task."""
    shuffle: bool = True
    """Use the tasks in a new random order in each epoch, derived from `seed`."""
    update_epochs: int = Field(default=1, ge=1)
    """Optimization passes over one batch (verl: ppo_epochs)."""
    minibatches: int = Field(default=1, ge=1)
    """Mini-batches per epoch: optimizer steps in one pass over a batch."""
    seed: int = Field(default=0, ge=0)
    """Seed of the order of tasks and of the split into mini-batches."""
    loss: LossSpec = Field(default_factory=DrGrpoLoss)
    """The loss; `kind` selects it."""
    proximal_logprobs: Literal["auto", "sampler", "recompute"] = "auto"
    """Denominator of the clipped ratio: the sampler's log-probs, or log-probs that the trainer recomputes before the
    first update of a batch (decoupled PPO). `auto`: recompute if a batch has more than one update. With one update the
    current log-probs are already those before the update."""
    rollout_correction: RolloutCorrectionSpec = Field(default_factory=RolloutCorrectionSpec)
    """Importance weights for the difference between sampler and trainer."""
    kl: KlSpec = Field(default_factory=KlSpec)
    """KL penalty against the reference model."""
    entropy_coefficient: float = 0.0
    """Coefficient of the entropy bonus."""
    advantage_bonuses: list[BonusSpec] = Field(default_factory=list)
    """Functions whose values are added to the advantages of sampled tokens."""
    advantage_norm: Literal["none", "batch"] = "none"
    """`batch`: whiten the advantages of a batch to mean 0 and standard deviation 1 over its tokens (REINFORCE++)."""
    critic: CriticSpec | None = None
    """A critic, for credit methods that need values; `kind` selects it."""
    overlong: Literal["keep", "mask"] | OverlongPenalty = "keep"
    """Replies that were cut. `keep`: trained on like others. `mask`: the tokens of a reply that `limits.turn_tokens`,
    `sampling.max_new_tokens`, `limits.episode_tokens` or the model's context cut are not trained (DAPO's overlong
    filtering); episodes that another limit ended are. `{margin: N}`: a growing penalty near the limit, added to the
    turn's rewards."""
    dynamic_sampling: bool = True
    """Drop groups without signal (every advantage is 0) and sample other groups instead (DAPO). With a credit method
    that needs a critic no group is dropped."""
    min_group: int | None = Field(default=None, ge=1)
    """Groups with fewer trainable episodes than this, because others failed, are left out: the advantage of an episode
    without others would be its raw return. Default: 2 if the credit method subtracts a baseline of the group and a task
    has several samples, else 1."""
    max_sampling_rounds: int = Field(default=4, ge=1)
    """Limit of dynamic sampling: at most this many times `tasks_per_step` groups are sampled for one batch. Then the
    batch is trained on with fewer groups."""
    optimizer: OptimizerSpec = Field(default_factory=OptimizerSpec)
    """Optimizer (AdamW)."""
    precision: Literal["auto", "float32", "mixed", "bfloat16"] = "auto"
    """`auto`: `mixed` on a CUDA device, else `float32`; a training keeps that with which it began. `mixed`: float32
    weights with bfloat16 autocast. `bfloat16`: weights in bfloat16 as well; the optimizer updates float32 copies of
    them."""
    device: str = "auto"
    """Device of the trainer: `auto`, `cpu`, `cuda`, `cuda:1`."""
    freeze: list[str] = Field(default_factory=list)
    """Regular expressions. A parameter is not trained if one of them matches a part of its name."""
    memory: MemorySpec = Field(default_factory=MemorySpec)
    """How much memory one update may take."""
    asynchrony: AsynchronySpec = Field(default_factory=AsynchronySpec)
    """Asynchronous rollouts."""
    weight_sync: WeightSyncSpec = Field(default_factory=WeightSyncSpec)
    """How the backend gets the new weights after an update."""
    colocate: bool = False
    """Trainer and servers use the same GPUs in turn: the servers release the memory of weights and KV cache while an
    update runs. Needs `asynchrony.max_staleness: 0`, and servers with `--enable-memory-saver`, which `backend.launch`
    adds."""
    checkpoints: CheckpointsSpec = Field(default_factory=CheckpointsSpec)
    """Checkpoints."""

    @property
    def facts(self) -> TrainKind:
        """What holds for this kind of training. Raises: ValueError: its plugin cannot be used."""
        facts = CORE_KINDS.get(self.kind) or plugin.loaded("train_kinds", CORE_KINDS, of=TrainKind).get(self.kind)
        if facts is None:
            raise ValueError(f"`train.kind: {self.kind}` cannot be used; {plugin.missing('train_kinds', self.kind)}")
        return facts

    @property
    def samples_episodes(self) -> bool:
        """Whether the model is trained on episodes that it samples, and so needs a backend that takes new weights."""
        return self.facts.samples

    def precision_on(self, device: str) -> Precision:
        """The precision on a device of the type `cuda`, `cpu` and so on."""
        if self.precision == "auto":
            return "mixed" if device == "cuda" else "float32"
        return self.precision

    def smallest_group(self, credit: CreditMethod, samples: int) -> int:
        """The number of trainable episodes that a group needs.

        Args:
            credit: The credit method.
            samples: Episodes that the group was to have.
        """
        if self.min_group is not None:
            return self.min_group
        return 2 if samples > 1 and isinstance(credit, ComparedCredit) and credit.baseline != "none" else 1

    @property
    def adapter(self) -> AdapterSection | None:
        """The section of the adapter that is trained; None: all weights are trained."""
        return next((section for section in self.sections.values() if isinstance(section, AdapterSection)), None)

    def effective(self) -> TrainSpec:
        """The settings of the updates: keys that the kind does not read have the values of its `TrainKind`, or
        defaults."""
        read = self.facts.keys
        if read is None:
            return self
        fields = type(self).model_fields
        unread = {
            name: field.get_default(call_default_factory=True) for name, field in fields.items() if name not in read
        }
        return self.model_copy(update=unread | dict(self.facts.settings))
