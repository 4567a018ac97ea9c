"""What a step can learn from: which rewards change the advantage of a trained token, and why a step has no learning
signal.

A reward reaches a token if the advantages of the group's sampled tokens change when the reward is taken away. One
reward of each kind is tested, up to `TESTS`: same name, of the last or an earlier turn, of a whole turn or of a part,
with or without tokens. If none of them changes an advantage, no reward of that kind reaches a token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import structlog

from engine.rewards.credit import Member, credit, credit_tokens
from engine.rewards.sealed import PartReward, SealedLedger, TurnPart
from engine.runner.batch import ZERO_ADVANTAGE
from engine.runner.observers import TrainingObserver
from engine.runner.summary import RunSummary
from engine.store.rows.build import member_of
from engine.train.loss_columns import whitened_advantages

if TYPE_CHECKING:
    from pathlib import Path

    from engine.runner.batch import Batch, Group
    from engine.schemas.credit import CreditSpec
    from engine.schemas.train import TrainSpec
    from engine.schemas.trajectory import Trajectory
    from engine.spec.load import LoadedSpec

log = structlog.get_logger(__name__)
TESTS = 3
"""Rewards of one kind that are tested before all of the kind count as unplaced."""
SMALLEST = 1e-12
"""A change of an advantage below this is a rounding error."""

_Kind = tuple[str, bool, bool, bool]


@dataclass(slots=True)
class _Rewards:
    """The rewards of one kind."""

    count: int = 0
    amount: float = 0.0
    tests: int = 0
    reaches: bool = False


@dataclass(slots=True)
class CreditReach:
    """Sums over the groups of a step."""

    before: float = 0.0
    after: float = 0.0
    cancelled: float = 0.0
    kinds: dict[_Kind, _Rewards] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """The sums by the names of metrics."""
        lost = [kind for kind in self.kinds.values() if not kind.reaches]
        return {
            "credit/turn_advantage": self.before,
            "credit/token_advantage": self.after,
            "credit/cancelled_rewards": self.cancelled,
            "credit/unplaced_rewards": float(sum(kind.count for kind in lost)),
            "credit/unplaced_sum": sum(kind.amount for kind in lost),
        }

    def unplaced(self) -> str:
        """The rewards that reach no token, for a warning; empty if all do."""
        named = [
            f"{kind.count} of `{name}` in {'the last turn' if last else 'earlier turns'}"
            for (name, last, _, _), kind in self.kinds.items()
            if not kind.reaches
        ]
        return ", ".join(dict.fromkeys(named))


def reach_of(spec: CreditSpec, groups: Iterable[Group], base: Path | None) -> CreditReach:
    """Compare the rewards and advantages of groups with what is on their trained tokens, before bonuses and whitening.

    Empty for a method that needs a critic: its values are not known here.

    Raises:
        LedgerError: the credit method cannot be computed.
    """
    reach = CreditReach()
    if spec.needs_values:
        return reach
    for group in groups:
        members = [
            member_of(trajectory)
            for trajectory in group.trajectories
            if trajectory.outcome.trainable
            and trajectory.turns
            and any(row.episode.episode_id == trajectory.episode_id for row in group.rows)
        ]
        if members:
            _add(reach, spec, members, base)
    return reach


def _add(found: CreditReach, spec: CreditSpec, members: Sequence[Member], base: Path | None) -> None:
    tokens = credit_tokens(spec, members, base=base)
    found.before += sum(float(np.abs(turns).sum()) for turns in credit(spec, members, base=base))
    found.after += sum(float(np.abs(turn).mean()) for turns in tokens for turn in turns if len(turn))
    for number, member in enumerate(members):
        for reward in _rewards(member.ledger):
            part = reward.part if reward.part.end else None
            sampled = len(tokens[number][reward.turn]) > 0
            kind = (reward.name, reward.turn == member.ledger.turns - 1, part is not None, sampled)
            sums = found.kinds.setdefault(kind, _Rewards())
            sums.count += 1
            sums.amount += abs(reward.value)
            if not sums.reaches and sums.tests < TESTS:
                sums.tests += 1
                less = replace(member, ledger=_without(member.ledger, reward))
                others = [*members[:number], less, *members[number + 1 :]]
                sums.reaches = any(
                    len(one) > 0 and float(np.abs(one - other).max()) > SMALLEST
                    for turns, changed in zip(tokens, credit_tokens(spec, others, base=base), strict=True)
                    for one, other in zip(turns, changed, strict=True)
                )
        of_turns = [reward for reward in _rewards(member.ledger) if not reward.part.end]
        for turn in range(member.ledger.turns):
            values = [reward.value for reward in of_turns if reward.turn == turn]
            found.cancelled += 2 * min(sum(v for v in values if v > 0), -sum(v for v in values if v < 0))


def _rewards(ledger: SealedLedger) -> list[PartReward]:
    """All rewards that are not 0: of turns as a whole (with an empty part) and of parts."""
    rewards = [part for part in ledger.parts if part.value]
    for name, row in ledger.matrix.items():
        for turn, value in enumerate(row.tolist()):
            rest = value - sum(part.value for part in ledger.parts if (part.turn, part.name) == (turn, name))
            if abs(rest) > SMALLEST:
                rewards.append(PartReward(turn=turn, part=TurnPart(start=0, end=0), name=name, value=rest))
    return rewards


def _without(ledger: SealedLedger, reward: PartReward) -> SealedLedger:
    """The ledger without one reward."""
    row = ledger.matrix[reward.name].copy()
    row[reward.turn] -= reward.value
    totals = ledger.totals.copy()
    totals[reward.turn] -= reward.value
    parts = tuple(part for part in ledger.parts if part != reward)
    return replace(ledger, matrix={**ledger.matrix, reward.name: row}, totals=totals, parts=parts)


STEPS = 3
"""Number of such steps in a row after which a training warns."""
_MOST = 0.9
"""Share of the replies, or of the episodes, from which one reason explains the step."""


def observe(loaded: LoadedSpec, folder: Path) -> LearningSignal:
    """The hook `observe_training`."""
    assert loaded.spec.train is not None
    return LearningSignal(loaded.spec.train, loaded.spec.rewards.credit, loaded.base)


@dataclass(eq=False)
class LearningSignal(TrainingObserver):
    """Counts the steps of this launch in which no trained token has an advantage.

    A critic's advantages are not known before the update. With one, a step has no signal if all
    episodes earned the same in each turn.
    """

    train: TrainSpec
    credit: CreditSpec
    base: Path | None
    steps: int = 0
    missing: int = 0
    in_a_row: int = 0
    reason: str = ""

    def sampled(self, step: int, batch: Batch) -> tuple[Mapping[str, float], str | None]:
        """See `TrainingObserver`."""
        reach = reach_of(self.credit, [*batch.used, *batch.left_out], self.base)
        if unplaced := reach.unplaced():
            log.warning("rewards reach no token", step=step, rewards=unplaced)
        return reach.metrics(), self.add(batch)

    def add(self, batch: Batch) -> str | None:
        """Count a step. Returns a warning at the third one in a row without a signal, and None at all others."""
        self.steps += 1
        if self._has_signal(batch):
            self.in_a_row = 0
            return None
        self.missing += 1
        self.in_a_row += 1
        self.reason = _reason(batch)
        if self.in_a_row != STEPS:
            return None
        return f"{STEPS} steps in a row had no learning signal: {self.reason}"

    def close(self) -> str | None:
        """The steps without a signal and the reason of the last one; None if there were fewer than `STEPS`."""
        if self.missing < min(STEPS, self.steps or 1):
            return None
        return f"{self.missing} of {self.steps} steps had no learning signal: {self.reason}"

    def _has_signal(self, batch: Batch) -> bool:
        if self.train.critic is not None:
            return (
                len({tuple(sum(turn.rewards.values()) for turn in trajectory.turns) for trajectory in _episodes(batch)})
                > 1
            )
        if all(group.without_signal for group in batch.used):
            return False
        if self.train.advantage_norm != "batch":
            return True
        whitened = whitened_advantages([row.advantages for row in batch.rows])
        return any(np.abs(column).max(initial=0.0) > ZERO_ADVANTAGE for column in whitened)


def _episodes(batch: Batch) -> list[Trajectory]:
    return [trajectory for group in [*batch.used, *batch.left_out] for trajectory in group.trajectories]


def _reason(batch: Batch) -> str:
    """Why the advantages of a batch are 0, with what to do."""
    trajectories = _episodes(batch)
    summary = RunSummary()
    for trajectory in trajectories:
        summary.add(trajectory)
    events = Counter(turn.event for trajectory in trajectories for turn in trajectory.turns)
    rewards = {trajectory.outcome.reward for trajectory in trajectories}
    replies, groups = events.total(), len(batch.used) + len(batch.left_out)
    equal = (
        f"every episode has the reward {min(rewards):.3f}"
        if len(rewards) == 1
        else f"the episodes of each of the {groups} groups have equal rewards"
    )
    if summary.causes.failures > _MOST * summary.episodes:
        return f"{summary.causes.words(summary.episodes)}; correct that first"
    if events["truncated"] > _MOST * replies:
        return (
            f"{equal}, and {events['truncated']} of {replies} replies were cut by a limit of tokens; raise "
            "`limits.turn_tokens`, or teach the model the format first (`train.kind: sft`)"
        )
    if events["malformed"] > _MOST * replies:
        return (
            f"{equal}, and {events['malformed']} of {replies} replies were malformed; check `model.tool_calls` and "
            "the prompt, or teach the model the format first (`train.kind: sft`)"
        )
    return (
        f"{equal}, so no reply is better than another; make the tasks easier or harder, let rewards differ, or raise "
        "`rollout.samples_per_task`"
    )
