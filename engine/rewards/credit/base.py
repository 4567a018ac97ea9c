"""What the methods share: a member of a group, returns, and the comparison with the group.

What all methods that compare share:
- `baseline: mean` takes off the group's mean; in a group of one, nothing is left. `leave_one_out` takes off the mean
  of the other episodes (RLOO, arXiv 2402.14740, section 3.2); where there are no others, nothing is taken off.
- `scale: std` divides by the group's sample standard deviation (n - 1 below the root, as the trainers in use compute
  it) plus `EPSILON`. Equal returns and a group of one are not scaled: with `baseline: none` an advantage would be the return
  divided by `EPSILON`. `scale: none` is Dr. GRPO's (arXiv 2503.20783), which shows that dividing favours tasks that are nearly
  solved or nearly hopeless.
- An episode that is over counts with 0 in the baseline of later turns: there is nothing more to come. A mean over only
  the episodes that are still going is biased when the policy decides who goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.errors import LedgerError
from engine.rewards.ledger import SealedLedger
from engine.schemas.credit import ComparedCredit

Values = npt.NDArray[np.float64]

EPSILON = 1e-6
"""Added to a standard deviation, so that rounding noise in equal rewards is not blown up."""

ROUNDING = 1e-12
"""Returns whose standard deviation is at most this part of the largest one are equal."""


@dataclass(frozen=True, eq=False, slots=True)
class Member:
    """One episode of a group.

    Member(ledger)
    Member(ledger, state_keys=["hall", "kitchen", "hall"])
    Member(ledger, values=np.array([0.5, 0.25, 0.75]), ends=[2, 3])     # two turns, of two tokens and of one
    """

    ledger: SealedLedger
    state_keys: Sequence[str | None] | None = None
    """The state that each turn began in, by turn; empty is a state like no other, None one that was not written down."""
    values: Values | None = None
    """A critic's value before each sampled token of the episode, turn after turn: shape [sampled tokens]."""
    ends: Sequence[int] | None = None
    """One past each turn's last token in `values`, by turn: where a turn ends is said, never read off the rewards."""

    def slices(self) -> list[slice]:
        """Each turn's place in `values`.

        Raises:
            LedgerError: `ends` are missing, or not those of this episode.
        """
        ends = self.ends
        if ends is None:
            raise LedgerError("where the turns end is not said; give `ends`, one past each turn's last token")
        starts = [0, *ends][: len(ends)]
        if len(ends) != self.ledger.turns or any(end < start for start, end in zip(starts, ends, strict=True)):
            raise LedgerError(
                f"`ends` must be {self.ledger.turns} rising numbers, one for each turn; they are {list(ends)}"
            )
        return [slice(start, end) for start, end in zip(starts, ends, strict=True)]

    def valued(self, method: str) -> tuple[Values, list[slice]]:
        """The critic's values and each turn's place in them.

        Raises:
            LedgerError: there are none, or not as many as tokens.
        """
        if self.values is None:
            raise LedgerError(f"`method: {method}` needs a critic's value for each sampled token, and there are none")
        slices = self.slices()
        tokens = slices[-1].stop if slices else 0
        if len(self.values) != tokens:
            raise LedgerError(f"{len(self.values)} values for {tokens} sampled tokens; give one for each")
        return np.asarray(self.values, np.float64), slices

    def broadcast(self, advantages: Values) -> list[Values]:
        """Each turn's value for each of its tokens."""
        return [
            np.full(place.stop - place.start, value)
            for place, value in zip(self.slices(), advantages.tolist(), strict=True)
        ]


def returns_to_go(rewards: Values, gamma: float) -> Values:
    """G_t = r_t + gamma * G_t+1 (Sutton & Barto, equation 3.9), of shape [turns] as the rewards."""
    returns = np.zeros(len(rewards))
    coming = 0.0
    for turn in range(len(rewards) - 1, -1, -1):
        coming = float(rewards[turn]) + gamma * coming
        returns[turn] = coming
    return returns


def compare(spec: ComparedCredit, returns: Values) -> Values:
    """Baseline and scale, column by column, over the episodes of [episodes, columns]."""
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
    """One number an episode, against the group: [episodes]."""
    return compare(spec, np.array(scores, np.float64).reshape(len(scores), 1))[:, 0]


def compare_turns(spec: ComparedCredit, rows: Sequence[Values]) -> list[Values]:
    """Each turn's number against the group's at the same turn; 0 for an episode that is over by then."""
    longest = max((len(row) for row in rows), default=0)
    padded = np.zeros((len(rows), longest))
    for into, row in zip(padded, rows, strict=True):
        into[: len(row)] = row
    return [row[: len(of)].copy() for row, of in zip(compare(spec, padded), rows, strict=True)]


def shaped(group: Sequence[Member], reward: str | None, shape: Callable[[Values, Member], Values]) -> list[Values]:
    """Each episode's turn rewards with one of them (or their sum) put in another shape, the others as they are."""
    rows = []
    for member in group:
        ledger = member.ledger
        chosen = ledger.totals if reward is None else ledger.matrix.get(reward, np.zeros(ledger.turns))
        rows.append(ledger.totals - chosen + shape(chosen, member))
    return rows
