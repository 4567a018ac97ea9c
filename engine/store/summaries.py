"""The end of an episode -> its row of the table `summaries`: what lists sort and filter by, beside the columns of the
table `episodes`.

A row belongs to one attempt and is written in the commit that ends it. A store of an older engine has none: lists then
make it of the episode's content.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.store.codec import json_of

if TYPE_CHECKING:
    from engine.schemas.trajectory import Trajectory

COLUMNS = (
    "message", "failed_state", "failed_turn", "solved_turn", "user_turns", "tool_calls", "tool_errors", "sampled",
    "context", "trained", "total", "branches", "images", "oldest_version", "version", "cost", "rewards", "facts",
)  # fmt: skip
"""`rewards` and `facts` are JSON. `facts` is NULL where it has more than `LONGEST` characters, versions where no token
was sampled."""
LONGEST = 4_000
TABLE = (
    "CREATE TABLE IF NOT EXISTS summaries (episode INTEGER PRIMARY KEY REFERENCES episodes (number), attempt INTEGER "
    f"NOT NULL, {', '.join(COLUMNS)})"
)


INSERT = f"INSERT OR REPLACE INTO summaries VALUES ({', '.join('?' * (2 + len(COLUMNS)))})"


def summary_of(trajectory: Trajectory, branches: Iterable[Sequence[Any]]) -> tuple[Any, ...]:
    """Return the values of `COLUMNS`.

    Args:
        trajectory: The result, or its head without branches.
        branches: (tokens, weight versions as stored) of each branch.
    """
    rows = [*branches]
    versions = np.frombuffer(b"".join([versions for _, versions in rows]), "<i4")
    sampled = versions[versions >= 0]
    outcome, counts = trajectory.outcome, trajectory.counts
    failure = outcome.failure
    facts = json_of(trajectory.facts)
    return (
        failure.message if failure else None,
        failure.state if failure else None,
        failure.turn if failure else None,
        outcome.solved_turn,
        counts.get("user_turns", 0),
        counts.get("tool_calls", 0),
        counts.get("tool_errors", 0),
        counts.get("sampled_tokens", 0),
        counts.get("context_tokens", 0),
        len(sampled),
        sum([tokens for tokens, _ in rows]),
        len(rows),
        sum([len(message.images) for message in trajectory.messages if not isinstance(message.content, str)]),
        int(sampled.min()) if len(sampled) else None,
        int(sampled.max()) if len(sampled) else None,
        sum([turn.cost for turn in trajectory.turns]),
        json_of(outcome.rewards),
        facts if len(facts) <= LONGEST else None,
    )
