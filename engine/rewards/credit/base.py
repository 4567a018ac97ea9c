"""What the credit methods share: the members of a group, returns, and the comparison with the group.

Methods that compare have these keys:
- `baseline: mean` subtracts the group's mean; in a group of one episode every advantage is then 0. `leave_one_out`
  subtracts the mean of the other episodes (RLOO, arXiv 2402.14740, section 3.2), and nothing if there are no others.
- `scale: std` divides by the group's sample standard deviation (with n - 1, as other trainers compute it) plus
  `EPSILON`. Equal returns and a group of one are not scaled, because dividing by `EPSILON` alone would make them huge.
  `scale: none` is Dr. GRPO's choice (arXiv 2503.20783): dividing gives more weight to tasks that are nearly always or
  nearly never solved.
- An episode that has already ended counts with 0 in the baseline of later turns, because nothing more can be earned. A
  mean over only the episodes that are still running is biased, because the policy decides which episodes run on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from engine.errors import LedgerError
from engine.rewards.sealed import SealedLedger
from engine.schemas.base import Struct
from engine.schemas.credit import ComparedCredit

Values = npt.NDArray[np.float64]

EPSILON = 1e-6
"""Added to a standard deviation, so that rounding errors of equal rewards are not amplified."""

ROUNDING = 1e-12
"""Returns whose standard deviation is at most this part of the largest one are equal."""


class Member(Struct, frozen=True, kw_only=True, eq=False):
    """One episode of a group.

    Member(ledger=ledger)
    Member(ledger=ledger, state_keys=["hall", "kitchen", "hall"])
    Member(ledger=ledger, values=np.array([0.5, 0.25, 0.75]), ends=[2, 3])     # two turns, of two tokens and of one
    """

    ledger: SealedLedger
    state_keys: Sequence[str | None] | None = None
    """The state in which each turn began. An empty key is a state like no other; None was not stored."""
    values: Values | None = None
    """A critic's value before each sampled token of the episode, in the order of turns: float64 [sampled tokens]."""
    ends: Sequence[int] | None = None
    """For each turn, one past its last token in `values`. The ends are never inferred from rewards."""
    after: float = 0.0
    """The critic's value of the state after the last turn, if a limit cut the episode there; 0 if it ended."""
    penalties: Values | None = None
    """What is subtracted from the reward of each sampled token (`train.kl.in: reward`), in the order of `values`:
    float64 [sampled tokens]. The ledger does not hold them."""

    def turn_penalties(self) -> Values:
        """The sum of the penalties of each turn's tokens, float64 [turns].

        Raises:
            LedgerError: as in `slices`, or there is not one penalty for each sampled token.
        """
        if self.penalties is None:
            return np.zeros(self.ledger.turns)
        slices = self.slices()
        if len(self.penalties) != (slices[-1].stop if slices else 0):
            raise LedgerError(
                f"{len(self.penalties)} penalties for turns that end at {self.ends}; give one for each token"
            )
        return np.array([math.fsum(self.penalties[place]) for place in slices], np.float64)

    def rewards(self) -> Values:
        """The reward of each turn less its penalties, float64 [turns]."""
        return self.ledger.totals - self.turn_penalties()

    def total(self) -> float:
        """The reward of the episode less all penalties."""
        return self.ledger.total - math.fsum(self.turn_penalties())

    def slices(self) -> list[slice]:
        """The position of each turn in `values`.

        Raises:
            LedgerError: `ends` is missing, or does not fit this episode.
        """
        ends = self.ends
        if ends is None:
            raise LedgerError("`ends` is missing; give for each turn one past its last token")
        starts = [0, *ends][: len(ends)]
        if len(ends) != self.ledger.turns or any(end < start for start, end in zip(starts, ends, strict=True)):
            raise LedgerError(
                f"`ends` must be {self.ledger.turns} rising numbers, one for each turn; they are {list(ends)}"
            )
        return [slice(start, end) for start, end in zip(starts, ends, strict=True)]

    def valued(self, method: str) -> tuple[Values, list[slice]]:
        """The critic's values, float64 [sampled tokens], and the position of each turn in them.

        Args:
            method: The credit method, for the message.

        Raises:
            LedgerError: there are no values, or not one for each sampled token.
        """
        if self.values is None:
            raise LedgerError(f"`method: {method}` needs a critic's value for each sampled token, and there are none")
        slices = self.slices()
        tokens = slices[-1].stop if slices else 0
        if len(self.values) != tokens:
            raise LedgerError(f"{len(self.values)} values for {tokens} sampled tokens; give one for each")
        return np.asarray(self.values, np.float64), slices

    def broadcast(self, advantages: Values) -> list[Values]:
        """Repeat the value of each turn for its tokens.

        Args:
            advantages: float64 [turns].

        Returns:
            For each turn, float64 [sampled tokens of the turn].

        Raises:
            LedgerError: as in `slices`.
        """
        return [
            np.full(place.stop - place.start, value)
            for place, value in zip(self.slices(), advantages.tolist(), strict=True)
        ]


def returns_to_go(rewards: Values, gamma: float) -> Values:
    """G_t = r_t + gamma * G_t+1 (Sutton & Barto, equation 3.9); float64 [turns], like the rewards."""
    returns = np.zeros(len(rewards))
    following = 0.0
    for turn in range(len(rewards) - 1, -1, -1):
        following = float(rewards[turn]) + gamma * following
        returns[turn] = following
    return returns


def compare(spec: ComparedCredit, returns: Values) -> Values:
    """Subtract the baseline and divide by the scale, for each column of float64 [episodes, columns]; same shape."""
    episodes = len(returns)
    advantages = returns - _baseline(spec, returns)
    if spec.scale == "std" and episodes > 1:
        spread = returns.std(axis=0, ddof=1)
        equal = spread <= ROUNDING * np.abs(returns).max(axis=0)
        advantages = advantages / np.where(equal, 1.0, spread + EPSILON)
    return advantages


def _baseline(spec: ComparedCredit, returns: Values) -> Values:
    episodes = len(returns)
    if spec.baseline == "none" or episodes == 0 or (spec.baseline == "leave_one_out" and episodes == 1):
        return np.zeros_like(returns)
    if spec.baseline == "mean":
        return np.broadcast_to(returns.mean(axis=0), returns.shape)
    others: Values = (returns.sum(axis=0) - returns) / (episodes - 1)
    return others


def compare_episodes(spec: ComparedCredit, scores: Sequence[float]) -> Values:
    """Compare one number per episode with the group; float64 [episodes]."""
    return compare(spec, np.array(scores, np.float64).reshape(len(scores), 1))[:, 0]


def compare_turns(spec: ComparedCredit, rows: Sequence[Values]) -> list[Values]:
    """Compare each turn's number with the group's at the same turn; an ended episode counts with 0. For each episode,
    float64 [turns]."""
    longest = max((len(row) for row in rows), default=0)
    padded = np.zeros((len(rows), longest))
    for into, row in zip(padded, rows, strict=True):
        into[: len(row)] = row
    return [row[: len(of)].copy() for row, of in zip(compare(spec, padded), rows, strict=True)]


def shaped(group: Sequence[Member], reward: str | None, shape: Callable[[Values, Member], Values]) -> list[Values]:
    """The turn rewards of each episode, float64 [turns], with one reward (or the sum, for None) replaced by `shape` of
    it.

    Penalties of tokens are not a part of a score: they are subtracted from what `shape` returns.
    """
    rows = []
    for member in group:
        ledger = member.ledger
        chosen = ledger.totals if reward is None else ledger.matrix.get(reward, np.zeros(ledger.turns))
        rows.append(ledger.totals - chosen + shape(chosen, member) - member.turn_penalties())
    return rows
