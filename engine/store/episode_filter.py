"""Expressions about finished episodes: `engine export --filter` and `--turns`.

    keep = EpisodeFilter(store, "outcome.solved && turns.assistant <= 4")
    keep(trajectory)

The language is that of guards (`engine.machine.guards`), over the same variables with their values at the end of the
episode, `outcome` and `episode`; in `--turns` also `turn`. Lists of episodes evaluate the same expressions over stored
summaries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from engine.errors import GuardError, StoreError
from engine.limits import limit_values
from engine.machine.guards import Guard, guard_problems
from engine.machine.variables import BOOL, DOUBLE, DYN, INT, STRING, VARIABLES, Variable, VariableField
from engine.schemas.journal import UserRecord
from engine.schemas.limits import LimitsSpec
from engine.schemas.sections import read_stored
from engine.store.reviews import review_facts
from engine.store.shown_messages import reply_numbers, shown_messages
from engine.terminal import around, brief

if TYPE_CHECKING:
    from engine.schemas.trajectory import Trajectory, Turn
    from engine.store.reader import RunReader
    from engine.store.reading import EpisodeRow

OUTCOME = Variable(
    doc="How the episode ended.",
    fields={
        "state": VariableField(types=STRING, doc="The final state."),
        "event": VariableField(types=STRING, doc="The event that led there."),
        "limit": VariableField(types=STRING, doc="The limit that ended it; empty if none did."),
        "failure": VariableField(types=STRING, doc="The kind of the failure; empty if there is none."),
        "blame": VariableField(types=STRING, doc="Who caused the failure; empty if there is none."),
        "solved": VariableField(
            types=BOOL, doc="Whether a user, a tool or the environment reported the task as solved."
        ),
        "solved_turn": VariableField(types=INT, doc="The newest turn when that happened first; -1 if it did not."),
        "reward": VariableField(types=DOUBLE, doc="Sum of all rewards."),
        "rewards": VariableField(types=DYN, doc='Sum by name: `outcome.rewards["answer"]`.'),
    },
)
TURN = Variable(
    doc="The turn.",
    fields={
        "index": VariableField(types=INT, doc="Its number, from 0."),
        "last": VariableField(types=BOOL, doc="Whether it is the newest of the episode."),
        "event": VariableField(types=STRING, doc="`tool_calls`, `answered`, `truncated` or `malformed`."),
        "finish": VariableField(types=STRING, doc="`stop` or `length`."),
        "tokens": VariableField(types=INT, doc="Sampled tokens."),
        "reward": VariableField(types=DOUBLE, doc="Sum of its rewards."),
        "rewards": VariableField(types=DYN, doc="Its rewards by name."),
        "text": VariableField(types=STRING, doc="Its text."),
    },
)
EPISODE = Variable(
    doc="The episode.",
    fields={
        "id": VariableField(types=STRING, doc="Its id: `<task>/<sample>`."),
        "task": VariableField(types=STRING, doc="The id of its task."),
        "sample": VariableField(types=INT, doc="Its number among the episodes of the task, from 0."),
        "status": VariableField(types=STRING, doc="`pending`, `running` or `done`."),
        "attempt": VariableField(types=INT, doc="How often it began again."),
        "seconds": VariableField(types=DOUBLE, doc="Wall time from its beginning to its end; 0.0 before its end."),
        "trainable": VariableField(types=BOOL, doc="Whether its rows may be trained on."),
        "branches": VariableField(types=INT, doc="Training rows."),
        "images": VariableField(types=INT, doc="Images in all of its messages."),
        "trained": VariableField(types=INT, doc="Tokens with loss mask 1 in its rows."),
        "version": VariableField(types=INT, doc="The newest weight version of its sampled tokens; -1 if it has none."),
        "oldest_version": VariableField(
            types=INT, doc="The oldest weight version of its sampled tokens; -1 if it has none."
        ),
    },
)
STATES = Variable(doc="Wall time in each state, in seconds; a state that was not entered has none.", open=True)
EPISODE_VARIABLES: Mapping[str, Variable] = {**VARIABLES, "outcome": OUTCOME, "episode": EPISODE, "states": STATES}
"""Variables of `--filter`."""
TURN_VARIABLES: Mapping[str, Variable] = {**EPISODE_VARIABLES, "turn": TURN}
"""Variables of `--turns`."""


def compile_filter(expression: str, option: str, variables: Mapping[str, Variable]) -> Guard:
    """Check and compile an expression over episodes.

    Args:
        expression: In CEL.
        option: The option that has it, for messages.
        variables: The variables that it may read.

    Raises:
        StoreError: it is not valid: a syntax error, an unknown name (the message has the nearest one), types that do
            not fit.
    """
    for problem in guard_problems(expression, variables):
        fix = f"; {problem.fix}" if problem.fix else ""
        place = f"{option} `{around(expression, problem.column - 1)}`, column {problem.column}"
        raise StoreError(brief(f"{place}: {problem.message}{fix}"))
    return Guard(expression, variables)


def stored_limits(store: RunReader) -> dict[str, int | float]:
    """Return the value of the variable `limits` for the episodes of a run."""
    return limit_values(read_stored(store.header.spec.get("limits") or {}, LimitsSpec, ("limits",)))


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
        self._guard = compile_filter(expression, option, variables)
        self._option = option
        self._store = store
        self._limits = stored_limits(store)
        self._review_facts = review_facts(store.folder)

    def __call__(self, trajectory: Trajectory, turn: Turn | None = None) -> bool:
        """Whether it holds.

        Raises:
            StoreError: It has no value for this episode, for example because a fact is missing.
        """
        names = self._guard.names
        context = {name: of(trajectory) for name, of in END_VALUES.items() if name in names}
        if "facts" in names:
            context["facts"] = {**trajectory.facts, **self._review_facts(trajectory.episode_id)}
        if "limits" in names:
            context["limits"] = self._limits
        if "task" in names:
            context["task"] = self._store.task(trajectory.task_id).fields
        if "feedback" in names:
            context["feedback"] = feedback_of(self._store, trajectory.episode_id)
        if "episode" in names:
            context["episode"] = _episode(trajectory, self._store.episode(trajectory.episode_id))
        if turn is not None and "turn" in names:
            context["turn"] = _turn(trajectory, turn)
        try:
            return self._guard.evaluate(context)
        except GuardError as error:
            where = trajectory.episode_id if turn is None else f"{trajectory.episode_id}, turn {turn.index}"
            raise StoreError(f"{self._option}: {where}: {error}") from error


def feedback_of(store: RunReader, episode_id: str) -> dict[str, Any]:
    """Return the value of the variable `feedback` at the end of an episode."""
    records = [entry.record for entry in store.journal(episode_id) if isinstance(entry.record, UserRecord)]
    if not records:
        return feedback_value({})
    turn = records[-1].turn
    return feedback_value(turn.facts, solved=turn.solved, satisfied=turn.satisfied, malformed=records[-1].canned)


def feedback_value(
    facts: Mapping[str, Any], *, solved: bool = False, satisfied: bool = False, malformed: bool = False
) -> dict[str, Any]:
    """Return the value of the variable `feedback` for a turn of the user."""
    return {**facts, "solved": solved, "satisfied": satisfied, "malformed": malformed}


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
    if not trajectory.condensations and all(isinstance(message.content, str) for message in trajectory.messages):
        return 0
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


def _episode(trajectory: Trajectory, row: EpisodeRow) -> dict[str, Any]:
    versions = [version for branch in trajectory.branches for version in branch.weight_versions[branch.loss_mask == 1]]
    return {
        "id": row.id,
        "task": row.task_id,
        "sample": row.sample_index,
        "status": row.status,
        "attempt": row.attempt,
        "seconds": row.ended - row.started if row.ended and row.started else 0.0,
        "trainable": trajectory.outcome.trainable,
        "branches": len(trajectory.branches),
        "images": sum(len(message.images) for message in trajectory.messages),
        "trained": sum(int(branch.loss_mask.sum()) for branch in trajectory.branches),
        "version": int(max(versions, default=-1)),
        "oldest_version": int(min(versions, default=-1)),
    }


END_VALUES: dict[str, Callable[[Trajectory], Any]] = {
    "turns": lambda each: {"assistant": len(each.turns), "user": each.counts.get("user_turns", 0)},
    "tools": lambda each: {"calls": each.counts.get("tool_calls", 0), "errors": each.counts.get("tool_errors", 0)},
    "tokens": lambda each: {
        "sampled": each.counts.get("sampled_tokens", 0),
        "context": each.counts.get("context_tokens", 0),
    },
    "images": lambda each: {"shown": _images(each)},
    "condensed": lambda each: {"times": len(each.condensations)},
    "rewards": _rewards,
    "last": _last,
    "facts": lambda each: each.facts,
    "outcome": _outcome,
    "states": lambda each: each.seconds,
}
"""The variables whose values a trajectory has. `condensed.times` counts only condensations that made the prompt
shorter."""
