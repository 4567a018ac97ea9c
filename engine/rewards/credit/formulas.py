"""The formulas of the credit methods: pure functions of a group, which give an advantage for each turn; and what they
share: the members of a group, returns, and the comparison with the group.

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
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.errors import LedgerError
from engine.rewards.sealed import SealedLedger
from engine.schemas.base import Struct
from engine.schemas.credit import ComparedCredit, EntryCredit, GigpoCredit, OutcomeCredit, TurnReturnCredit
from engine.spec.code.entry import load_entry

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
    advantages = returns.copy()
    if spec.baseline == "mean" and episodes:
        advantages -= returns.mean(axis=0)
    elif spec.baseline == "leave_one_out" and episodes > 1:
        advantages -= (returns.sum(axis=0) - returns) / (episodes - 1)
    if spec.scale == "std" and episodes > 1:
        spread = returns.std(axis=0, ddof=1)
        equal = spread <= ROUNDING * np.abs(returns).max(axis=0)
        advantages = advantages / np.where(equal, 1.0, spread + EPSILON)
    return advantages


def compare_episodes(spec: ComparedCredit, scores: Sequence[float]) -> Values:
    """Compare one number per episode with the group; float64 [episodes]."""
    return compare(spec, np.array(scores, np.float64).reshape(len(scores), 1))[:, 0]


def compare_turns(spec: ComparedCredit, rows: Sequence[Values]) -> list[Values]:
    """Compare each turn's number with the group's at the same turn; an ended episode counts with 0. For each episode,
    float64 [turns]."""
    padded = np.zeros((len(rows), max(map(len, rows), default=0)))
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


def outcome(spec: OutcomeCredit, group: Sequence[Member]) -> list[Values]:
    """GRPO with outcome supervision (arXiv 2402.03300, section 4.1.2).

        A_i,t = (R_i - mean(R)) / std(R)    for every turn t of episode i

    R_i is the sum of episode i's rewards over turns and names, less the penalties of its tokens. The formula is that of
    `baseline: mean, scale: std`. The default, `leave_one_out` without scaling, is RLOO (arXiv 2402.14740, section 3.2):
    A_i = R_i - mean over j != i of R_j.

    The result holds one array, float64 [turns], for each episode of the group.
    """
    advantages = compare_episodes(spec, [member.total() for member in group])
    return [np.full(member.ledger.turns, value) for member, value in zip(group, advantages, strict=True)]


def turn_return(spec: TurnReturnCredit, group: Sequence[Member]) -> list[Values]:
    """The return from each turn on (Sutton & Barto, equation 3.8), compared with the group turn by turn.

        G_i,t = sum over k >= t of gamma^(k - t) * r_i,k
        A_i,t = (G_i,t - b_t) / std_t

    r_i,k is the reward of turn k less the penalties of its tokens. b_t and std_t are over all n episodes of the group;
    an episode that has ended before turn t counts with G_i,t = 0.

    With `baseline: mean` an episode's own return is part of b_t, which scales the expected policy gradient by (n - 1) /
    n, equally at every turn. A mean over only the m episodes that are still running would scale it by (m - 1) / m,
    which differs between turns; and because the policy decides which episodes run on, that gradient would point in
    another direction than that of the return. With `leave_one_out` the gradient is not scaled. With gamma 1 the first
    turn's advantage is that of `outcome`.

    The result holds one array, float64 [turns], for each episode of the group.
    """
    return compare_turns(spec, [returns_to_go(member.rewards(), spec.gamma) for member in group])


def gigpo(spec: GigpoCredit, group: Sequence[Member]) -> list[Values]:
    """GiGPO (arXiv 2505.10978, equations 3 and 6 to 8).

        A^E_i   = (R_i - mean(R)) / F(R)                                        R_i: the episode's reward
        G(s)    = {(turn t of episode i, G_i,t) : the turn began in state s}
        G_i,t   = sum over k >= t of gamma^(k-t) r_k
        A^S_i,t = (G_i,t - mean over G(s)) / F over G(s)
        A_i,t   = A^E_i + weight * A^S_i,t

    Both comparisons count the penalties of tokens, as parts of r_k and R_i: verl-agent's GiGPO counts them in A^E only.
    F is the standard deviation (`scale: std`) or 1 (`scale: none`, the paper's alternative). A turn whose state occurs
    only once in the group has A^S = 0. An episode that returns to a state is in that state's group once per visit, as
    in the paper; in A^E it counts once.

    The result holds one array, float64 [turns], for each episode of the group.

    Raises:
        LedgerError: the states were not stored when the episodes ran.
    """
    by_episode = compare_episodes(spec, [member.total() for member in group])
    returns = [returns_to_go(member.rewards(), spec.gamma) for member in group]
    visits: dict[str, list[tuple[int, int]]] = {}
    for number, keys in enumerate(keys_of(group, spec.method)):
        for turn, key in enumerate(keys):
            if key:
                visits.setdefault(key, []).append((number, turn))
    by_state = [np.zeros(len(row)) for row in returns]
    for places in visits.values():
        if len(places) == 1:
            continue
        compared = compare_episodes(spec, [float(returns[number][turn]) for number, turn in places])
        for (number, turn), value in zip(places, compared, strict=True):
            by_state[number][turn] = value
    return [of_episode + spec.weight * turns for of_episode, turns in zip(by_episode.tolist(), by_state, strict=True)]


def keys_of(group: Sequence[Member], method: str) -> list[Sequence[str]]:
    """The state in which each turn began, for each member; an empty text for a state that is not known.

    Raises:
        LedgerError: a member has no states, or not one for each turn.
    """
    keys_by_member: list[Sequence[str]] = []
    for member in group:
        turns = member.ledger.turns
        if member.state_keys is not None and len(member.state_keys) != turns:
            raise LedgerError(f"{len(member.state_keys)} states for {turns} turns; give one for each")
        keys = [key for key in member.state_keys or () if key is not None]
        if len(keys) != turns:
            raise LedgerError(
                f"`method: {method}` needs the state in which each turn began, and these episodes were run without "
                "states; `engine rescore` with a spec of this method adds them"
            )
        keys_by_member.append(keys)
    return keys_by_member


def entry(spec: EntryCredit, group: Sequence[Member], base: Path | None = None) -> list[Values]:
    """Call `package.module:function(group, **with)` and check that it returns float64 [turns] for each episode.

    Raises:
        EntryError: there is no such function.
        LedgerError: a member has penalties of tokens, or the function raised, or did not return one finite number for
            each turn.
    """
    if any(member.penalties is not None for member in group):
        raise LedgerError(
            f"`{spec.use}` gets no penalties of tokens; use `train.kl.in: loss`, or a method of the engine"
        )
    function = load_entry(spec.use, base)
    try:
        answer = function(list(group), **spec.with_)
        advantages = [np.asarray(values, np.float64) for values in answer]
    except Exception as error:  # the user's code
        raise LedgerError(f"`{spec.use}` failed: {type(error).__name__}: {error}") from error
    if len(advantages) != len(group):
        raise LedgerError(f"`{spec.use}` returned arrays for {len(advantages)} episodes; the group has {len(group)}")
    for number, (member, values) in enumerate(zip(group, advantages, strict=True)):
        if values.shape != (member.ledger.turns,) or not np.isfinite(values).all():
            raise LedgerError(
                f"`{spec.use}` must return {member.ledger.turns} finite numbers for episode {number} of the group, "
                f"one for each turn; it returned {values.tolist()}"
            )
    return advantages
