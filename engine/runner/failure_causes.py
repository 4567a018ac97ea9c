"""Failures -> their number by cause: kind, blame, and place in the spec.

Invariant: a failure with blame `policy` is a result of the run, so it never stops the run. A wait for a server does not
stop it either, because it fails no episode.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from engine.errors import FailingError
from engine.machine.machine import resolved_machine
from engine.schemas.base import Struct

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.schemas.environment import Task
    from engine.schemas.trajectory import Blame, Failure, Trajectory
    from engine.spec.load import LoadedSpec
    from engine.spec.text.diagnostic import DataPath

FIRST = 16
"""If the first finished episodes, up to this number, all fail with one cause, the run stops."""
REPAIRED = "bridge_differs"
"""The kind of a failure whose cause is gone when it is found; see `engine.runner.guarded`."""
BACKEND_SHARE = 0.1
"""Maximum share of episodes that the backend may fail; with more, the run counts as failed."""
_TRACE_LINES = 12
_CAUSES = 3
"""Number of causes that one line names."""
_TOOL = re.compile(r"^tool `([^`]+)`")


class Cause(Struct, frozen=True, kw_only=True):
    """The common cause of several failures."""

    kind: str
    blame: Blame
    place: str
    """Place in the spec, `file:line:column`; empty if it is unknown."""

    def __str__(self) -> str:
        return f"{self.kind} ({self.blame})" + (f" at {self.place}" if self.place else "")


@dataclass(slots=True)
class Causes:
    """Counts of failures by cause.

    Args:
        place: Returns the place in the spec that caused a failure; without it causes have no place.
    """

    place: Callable[[Trajectory, Failure], str] | None = None
    counts: Counter[Cause] = field(default_factory=Counter)
    first: dict[Cause, Failure] = field(default_factory=dict)
    """The first failure of each cause."""

    def add(self, trajectory: Trajectory) -> Cause | None:
        """Count a finished episode, and return its cause if it failed."""
        failure = trajectory.outcome.failure
        if failure is None:
            return None
        cause = Cause(
            kind=failure.kind, blame=failure.blame, place=self.place(trajectory, failure) if self.place else ""
        )
        self.counts[cause] += 1
        self.first.setdefault(cause, failure)
        return cause

    def merge(self, other: Causes) -> None:
        """Add the counts of other episodes of the same spec."""
        self.counts.update(other.counts)
        for cause, failure in other.first.items():
            self.first.setdefault(cause, failure)

    @property
    def failures(self) -> int:
        """Return the number of failures."""
        return sum(self.counts.values())

    def blamed(self, blame: Blame) -> int:
        """Return the number of failures with this blame."""
        return sum(count for cause, count in self.counts.items() if cause.blame == blame)

    def words(self, episodes: int) -> str:
        """Say how many of `episodes` failed of what:
        `40 of 40 episodes failed: 30 user_error (user), 10 tool_timeout (tool)`."""
        listed = [f"{count} {cause}" for cause, count in self.counts.most_common()]
        others = [f"{len(listed) - _CAUSES} other causes"] if len(listed) > _CAUSES else []
        return f"{self.failures} of {episodes} episodes failed: {', '.join([*listed[:_CAUSES], *others])}"

    def example(self) -> str:
        """Return the message of a failure with the first cause, with the end of its traceback."""
        return with_trace(next(iter(self.first.values())))


@dataclass(slots=True, eq=False)
class Verdict:
    """Detects that the first finished episodes of a launch all failed with one cause.

    Args:
        total: Returns the planned number of episodes; 0 if it is not known.
    """

    total: Callable[[], int]
    seen: int = 0
    cause: Cause | None = None
    decided: bool = False

    def add(self, cause: Cause | None, failure: Failure | None) -> None:
        """Count a finished episode.

        Raises:
            FailingError: this is the last of the first min(16, total) episodes, and all failed with one cause.
        """
        if self.decided or (cause is not None and cause.kind == REPAIRED):
            return
        if cause is None or failure is None or cause.blame == "policy" or self.cause not in (None, cause):
            self.decided = True
            return
        self.cause = cause
        self.seen += 1
        if self.seen >= min(FIRST, self.total() or FIRST):
            self.decided = True
            raise FailingError(
                f"the first {self.seen} finished episode{'s' if self.seen > 1 else ''} failed with one cause, {cause}",
                cause=with_trace(failure),
            )


def with_trace(failure: Failure) -> str:
    """Return a failure's message, with the end of its traceback."""
    lines = (failure.trace or "").rstrip().splitlines()
    shown = lines if len(lines) <= _TRACE_LINES else ["…", *lines[-_TRACE_LINES:]]
    return "\n".join([failure.message, *shown])


def places(loaded: LoadedSpec, tasks: Sequence[Task]) -> Callable[[Trajectory, Failure], str]:
    """Return a function that finds the place in the spec of a failure: the entry whose code or server failed."""
    chosen = loaded.spec.tasks.user is not None
    users: Mapping[str, str | None] = {task.id: task.user for task in tasks} if chosen else {}
    actions = {name: state.action for name, state in resolved_machine(loaded.spec).states.items()}
    return partial(_place, loaded, users, actions)


def _place(
    loaded: LoadedSpec,
    users: Mapping[str, str | None],
    actions: Mapping[str, str | None],
    trajectory: Trajectory,
    failure: Failure,
) -> str:
    spec = loaded.spec
    entry: DataPath
    match failure.blame:
        case "backend":
            return str(loaded.origin(("backend",)))
        case "user":
            user = users.get(trajectory.task_id)
            entry = ("users", user) if spec.users and user else ("user",)
        case "environment" if actions.get(failure.state) in ("score", "judge") and spec.rewards.scorer is not None:
            entry = ("rewards", "scorer")
        case "environment":
            entry = ("environment",)
        case "tool":
            named = _TOOL.match(failure.message)
            names = [(tool.name, tool.use.rpartition(":")[2]) for tool in spec.tools]
            at = next((at for at, of_tool in enumerate(names) if named and named[1] in of_tool), None)
            entry = ("tools",) if at is None else ("tools", at)
        case "spec":
            states: DataPath = ("machine", "states", failure.state)
            return str(loaded.origin(states if failure.state in spec.machine.states else ("machine",)))
        case _:
            return ""
    return str(loaded.origin((*entry, "use")))
