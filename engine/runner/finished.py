"""Expressions about finished episodes: `engine export --filter` and `--turns`.

    keep = EpisodeFilter(store, "outcome.solved && turns.assistant <= 4")
    keep(trajectory)

The language is that of guards (`engine.machine.guards`), over the same variables with their values at the end of the episode, and
`outcome`; in `--turns` also `turn`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from engine.episode import limit_variables
from engine.errors import GuardError, StoreError
from engine.machine.guards import Guard, guard_problems
from engine.machine.variables import BOOL, DOUBLE, DYN, INT, STRING, VARIABLES, Member, Variable
from engine.schemas.journal import UserRecord
from engine.schemas.limits import LimitsSpec
from engine.store.sft_rows import reply_numbers, shown_messages

if TYPE_CHECKING:
    from engine.schemas.trajectory import Trajectory, Turn
    from engine.store.reader import RunReader

OUTCOME = Variable(
    "How the episode ended.",
    {
        "state": Member(STRING, "The final state."),
        "event": Member(STRING, "The event that led there."),
        "limit": Member(STRING, "The limit that ended it; empty if none did."),
        "failure": Member(STRING, "The kind of the failure; empty if there is none."),
        "blame": Member(STRING, "Who caused the failure; empty if there is none."),
        "solved": Member(BOOL, "Whether a user, a tool or the environment reported the task as solved."),
        "solved_turn": Member(INT, "The newest turn when that happened first; -1 if it did not."),
        "reward": Member(DOUBLE, "Sum of all rewards."),
        "rewards": Member(DYN, 'Sum by name: `outcome.rewards["answer"]`.'),
    },
)
TURN = Variable(
    "The turn.",
    {
        "index": Member(INT, "Its number, from 0."),
        "last": Member(BOOL, "Whether it is the newest of the episode."),
        "event": Member(STRING, "`tool_calls`, `answered`, `truncated` or `malformed`."),
        "finish": Member(STRING, "`stop` or `length`."),
        "tokens": Member(INT, "Sampled tokens."),
        "reward": Member(DOUBLE, "Sum of its rewards."),
        "rewards": Member(DYN, "Its rewards by name."),
        "text": Member(STRING, "Its text."),
    },
)
EPISODE_VARIABLES: Mapping[str, Variable] = {**VARIABLES, "outcome": OUTCOME}
"""Variables of `--filter`."""
TURN_VARIABLES: Mapping[str, Variable] = {**EPISODE_VARIABLES, "turn": TURN}
"""Variables of `--turns`."""


class EpisodeFilter:
    """An expression over a finished episode.

    Args:
        store: The run.
        expression: In CEL.
        option: The option that has it, for messages.
        variables: What it may read.

    Raises:
        StoreError: The expression is not valid.
    """

    def __init__(
        self,
        store: RunReader,
        expression: str,
        option: str = "--filter",
        variables: Mapping[str, Variable] = EPISODE_VARIABLES,
    ) -> None:
        for problem in guard_problems(expression, variables):
            fix = f"; {problem.fix}" if problem.fix else ""
            raise StoreError(f"{option} `{expression}`, column {problem.column}: {problem.message}{fix}")
        self._guard = Guard(expression, variables)
        self._option = option
        self._store = store
        self._limits = limit_variables(LimitsSpec.model_validate(store.header.spec.get("limits") or {}))

    def __call__(self, trajectory: Trajectory, turn: Turn | None = None) -> bool:
        """Whether it holds.

        Raises:
            StoreError: It has no value for this episode, for example because a fact is missing.
        """
        names = self._guard.names
        context = {name: _VALUES[name](trajectory) for name in names if name in _VALUES}
        if "limits" in names:
            context["limits"] = self._limits
        if "task" in names:
            context["task"] = self._store.task(trajectory.task_id).fields
        if "feedback" in names:
            context["feedback"] = self._feedback(trajectory)
        if turn is not None and "turn" in names:
            context["turn"] = _turn(trajectory, turn)
        try:
            return self._guard.evaluate(context)
        except GuardError as error:
            where = trajectory.episode_id if turn is None else f"{trajectory.episode_id}, turn {turn.index}"
            raise StoreError(f"{self._option}: {where}: {error}") from error

    def _feedback(self, trajectory: Trajectory) -> dict[str, Any]:
        found: dict[str, Any] = {"solved": False, "satisfied": False, "malformed": False}
        for entry in self._store.journal(trajectory.episode_id):
            if isinstance(entry.record, UserRecord):
                user = entry.record.turn
                said = {"solved": user.solved, "satisfied": user.satisfied, "malformed": entry.record.canned}
                found = {**user.facts, **said}
        return found


def _rewards(trajectory: Trajectory) -> dict[str, float]:
    totals = [float(sum(turn.rewards.values())) for turn in trajectory.turns]
    return {"total": trajectory.outcome.reward, "last": ([0.0, *totals])[-1], "previous": ([0.0, 0.0, *totals])[-2]}


def _last(trajectory: Trajectory) -> dict[str, Any]:
    if not trajectory.turns:
        return {"finish": "", "tokens": 0, "calls": 0, "malformed": False, "text": ""}
    turn = trajectory.turns[-1]
    message = trajectory.messages[reply_numbers(trajectory)[-1]]
    return {
        "finish": turn.finish.type,
        "tokens": turn.end - turn.start,
        "calls": len(message.tool_calls),
        "malformed": turn.event == "malformed",
        "text": message.text,
    }


def _images(trajectory: Trajectory) -> int:
    if not trajectory.turns:
        return sum(len(message.images) for message in trajectory.messages)
    last = len(trajectory.turns) - 1
    shown, _ = shown_messages(trajectory, last)
    after = trajectory.messages[reply_numbers(trajectory)[last] + 1 :]
    return sum(len(message.images) for message in (*shown, *after))


def _outcome(trajectory: Trajectory) -> dict[str, Any]:
    outcome = trajectory.outcome
    failure = outcome.failure
    return {
        "state": outcome.state,
        "event": outcome.event,
        "limit": outcome.limit or "",
        "failure": failure.kind if failure else "",
        "blame": failure.blame if failure else "",
        "solved": outcome.solved,
        "solved_turn": -1 if outcome.solved_turn is None else outcome.solved_turn,
        "reward": float(outcome.reward),
        "rewards": outcome.rewards,
    }


def _turn(trajectory: Trajectory, turn: Turn) -> dict[str, Any]:
    return {
        "index": turn.index,
        "last": turn.index == len(trajectory.turns) - 1,
        "event": turn.event,
        "finish": turn.finish.type,
        "tokens": turn.end - turn.start,
        "reward": float(sum(turn.rewards.values())),
        "rewards": turn.rewards,
        "text": trajectory.messages[reply_numbers(trajectory)[turn.index]].text,
    }


def _counted(trajectory: Trajectory, name: str) -> int:
    return trajectory.counts.get(name, 0)


_VALUES: dict[str, Callable[[Trajectory], Any]] = {
    "turns": lambda each: {"assistant": len(each.turns), "user": _counted(each, "user_turns")},
    "tools": lambda each: {"calls": _counted(each, "tool_calls"), "errors": _counted(each, "tool_errors")},
    "tokens": lambda each: {
        "sampled": _counted(each, "sampled_tokens"),
        "context": _counted(each, "context_tokens"),
    },
    "images": lambda each: {"shown": _images(each)},
    "condensed": lambda each: {"times": len(each.condensations)},
    "rewards": _rewards,
    "last": _last,
    "facts": lambda each: each.facts,
    "outcome": _outcome,
}
"""The variables whose values a trajectory has. `condensed.times` counts only condensations that made the prompt shorter."""
