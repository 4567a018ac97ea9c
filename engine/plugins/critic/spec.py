"""The critics of `train.critic`, and the credit methods that read their values: one config class each, with the facts
that checks, docs and the trainer read.

To add one: its config class here and in the face; `ValueHead` in `critic.py` makes its layers.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from engine.schemas.credit import CreditMethod
from engine.schemas.train import CriticBase

BootstrapLimit = Literal[
    "episode_seconds",
    "episode_tokens",
    "context",
    "turn_tokens",
    "images",
    "assistant_turns",
    "user_turns",
    "user.turns",
    "user.tokens",
    "tool_calls",
]
"""A limit that can end an episode, by its name in outcomes."""


class ValueCritic(CriticBase):
    """Base class of the critics that are heads on hidden states."""

    lr: float = Field(default=1e-3, gt=0.0)
    """Learning rate of the critic's own weights (AdamW, constant)."""
    max_grad_norm: float | None = Field(default=1.0, gt=0.0)
    """Gradients of the critic's own weights with a larger norm are scaled down to this norm. No clipping if null."""
    clip: float | None = Field(default=0.2, gt=0.0)
    """Clipped value loss: a value that moves further than this from the value before the batch's first update has no
    gradient towards its target. It matters only if a batch has several updates. No clipping if null."""
    level: Literal["auto", "token", "turn"] = "auto"
    """`token`: a value before each sampled token. `turn`: one value for each turn, before its first sampled token; all
    tokens of the turn have it. `auto`: what the credit method needs."""
    update_epochs: int | None = Field(default=None, ge=1)
    """Optimization passes of the critic over one batch (verl: critic.ppo_epochs), each with `train.minibatches`
    updates. Passes beyond `train.update_epochs` come after the policy's and train the critic's own weights only.
    Default:
    `train.update_epochs`."""
    lam: float | None = Field(default=None, ge=0.0, le=1.0)
    """Lambda of the targets of the values, if it differs from the credit method's (decoupled GAE: VC-PPO, arXiv
    2503.01491). 1: the target is the sum of the rewards that came, so values need no other values to learn from.
    Default: the credit method's."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps at the beginning in which only the critic is trained and the policy stays as it is."""
    bootstrap: list[BootstrapLimit] = Field(
        default_factory=lambda: ["episode_seconds", "episode_tokens", "context"]  # type: ignore[arg-type]
    )
    """Limits that cut an episode without being its end: if one of them ended the episode, the critic's value of the
    last state counts as the rewards that would have come. After any other end the value is 0. Name limits on turns or
    calls only if they are not a rule of the task (docs/credit.md)."""

    @property
    def bootstraps(self) -> frozenset[str]:
        return frozenset(self.bootstrap)


class ProbeCritic(ValueCritic):
    """A small network on the policy's hidden states, whose gradient does not reach the policy."""

    kind: Literal["probe"] = "probe"
    """A small network on the policy's hidden states, apart from the policy."""
    width: int = Field(default=256, ge=1)
    """Width of its hidden layer."""


class HeadCritic(ValueCritic):
    """A linear layer on the policy's last hidden states. Its gradient also trains the policy's weights; with LoRA, the
    adapter."""

    kind: Literal["head"] = "head"
    """A linear layer on the policy's hidden states, which also trains the policy's weights."""
    coefficient: float = Field(default=0.1, gt=0.0)
    """Factor of the value loss in the gradient that reaches the policy's weights and the head."""


class NetworkCritic(ValueCritic):
    """A model of its own with a linear layer. All of its weights are trained, also if the policy trains a LoRA
    adapter."""

    own_model: ClassVar[bool] = True

    kind: Literal["network"] = "network"
    """A model of its own."""
    lr: float = Field(default=1e-5, gt=0.0)
    """Learning rate of the critic's weights (AdamW, constant)."""
    path: str | None = None
    """The model at the start: a folder or a name as in `model.path`, with the same vocabulary. Default: the policy's
    model."""
    revision: str | None = None
    """Revision of a model of the Hugging Face Hub."""


class BilevelGaeCredit(CreditMethod):
    """VAGEN's bi-level GAE: over turns first, then over the tokens of each turn. Needs a critic's values."""

    formula: ClassVar[str] = "engine.plugins.critic.gae:bilevel_gae"
    token_formula: ClassVar[str | None] = "engine.plugins.critic.gae:bilevel_token_gae"
    turn_keys: ClassVar[tuple[str, ...]] = ("lam",)
    needs_values: ClassVar[bool] = True

    method: Literal["bilevel_gae"] = "bilevel_gae"
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount per turn."""
    lam: float = Field(default=1.0, ge=0.0, le=1.0)
    """Lambda of the GAE over turns."""
    token_gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount per token within a turn."""
    token_lam: float = Field(default=1.0, ge=0.0, le=1.0)
    """Lambda of the GAE over tokens."""


class TurnPpoCredit(CreditMethod):
    """Turn-PPO: GAE with one turn as one action. Needs a critic's values."""

    formula: ClassVar[str] = "engine.plugins.critic.gae:turn_ppo"
    turn_keys: ClassVar[tuple[str, ...]] = ("lam",)
    needs_values: ClassVar[bool] = True
    value_level: ClassVar[Literal["token", "turn"]] = "turn"

    method: Literal["turn_ppo"] = "turn_ppo"
    gamma: float = Field(default=0.99, ge=0.0, le=1.0)
    """Discount per turn."""
    lam: float = Field(default=0.9, ge=0.0, le=1.0)
    """Lambda of the GAE."""


class GaeCredit(CreditMethod):
    """PPO's GAE over all sampled tokens of an episode, with each turn's reward on its last token. Needs a critic's
    values."""

    formula: ClassVar[str] = "engine.plugins.critic.gae:first_token_gae"
    token_formula: ClassVar[str | None] = "engine.plugins.critic.gae:token_gae"
    needs_values: ClassVar[bool] = True

    method: Literal["gae"] = "gae"
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount per token."""
    lam: float = Field(default=1.0, ge=0.0, le=1.0)
    """Lambda of the GAE. Below 1 the variance is smaller, and errors of the critic bias the gradient."""
