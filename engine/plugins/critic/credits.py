"""The credit methods that read a critic's values: one config class each, with the facts that checks, docs and the engine read."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from engine.schemas.credit import CreditMethod


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
    """PPO's GAE over all sampled tokens of an episode, with each turn's reward on its last token. Needs a critic's values."""

    formula: ClassVar[str] = "engine.plugins.critic.gae:first_token_gae"
    token_formula: ClassVar[str | None] = "engine.plugins.critic.gae:token_gae"
    needs_values: ClassVar[bool] = True

    method: Literal["gae"] = "gae"
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount per token."""
    lam: float = Field(default=1.0, ge=0.0, le=1.0)
    """Lambda of the GAE. Below 1 the variance is smaller, and errors of the critic bias the gradient."""
