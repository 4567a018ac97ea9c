"""Scores: results of the same episodes under other reward rules and another credit method.

Invariant: a score is written completely, for all its episodes, or not at all. The results of the run's own rules
are never changed.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace as replaced
from pydantic_core import from_json

import engine
from engine.errors import StoreError
from engine.schemas.base import Struct
from engine.schemas.reward import Posting
from engine.schemas.trajectory import Outcome, Trajectory
from engine.store import codec


class EpisodeScore(Struct, frozen=True, kw_only=True):
    """The result of a finished episode under other reward rules, stored beside the result of its own rules."""

    outcome: Outcome
    """It has a failure if these rules cannot be applied, or if they would have led to another event."""
    rewards: list[dict[str, float]]
    """The rewards of each turn, by name."""
    state_keys: list[str | None] = msgspec.field(default_factory=list)
    """`Turn.state_key` of each turn."""
    postings: list[Posting] = msgspec.field(default_factory=list)
    """The sealed ledger."""

    def over(self, trajectory: Trajectory) -> Trajectory:
        """Return the trajectory with this score's rewards, outcome and ledger; tokens and messages are the same."""
        turns = [
            replaced(turn, rewards=rewards, state_key=key)
            for turn, rewards, key in zip(trajectory.turns, self.rewards, self.state_keys, strict=True)
        ]
        return replaced(trajectory, outcome=self.outcome, turns=turns, postings=self.postings)


def read_score(text: str) -> EpisodeScore:
    """Read an episode's score. Raises StoreError if the JSON does not hold one."""
    with codec.damaged("the score"):
        return EpisodeScore.read(from_json(text))


class ScoreHead(Struct, frozen=True, kw_only=True):
    """The head of a score: its label, origin and reward rules."""

    label: str
    created: float
    """Unix time."""
    engine_version: str
    rewards: dict[str, Any]
    """The section `rewards` with all defaults."""
    spec_path: str


_HEAD = "label, created, engine_version, rewards, spec_path"


def read_heads(connection: sqlite3.Connection) -> list[ScoreHead]:
    """Return the heads of all scores of the run, oldest first."""

    rows = connection.execute(f"SELECT {_HEAD} FROM scores ORDER BY created, label").fetchall()
    with codec.damaged("the head of a score"):
        return [
            ScoreHead(label=label, created=created, engine_version=version, rewards=from_json(rewards), spec_path=path)
            for label, created, version, rewards, path in rows
        ]


def require(connection: sqlite3.Connection, label: str, run_id: str) -> ScoreHead:
    """Return the head of one score.

    Raises:
        StoreError: the run has no score with this label.
    """
    heads = {head.label: head for head in read_heads(connection)}
    if label not in heads:
        there = (
            f"it has {', '.join(heads)}" if heads else f"it has none; `engine rescore {run_id} --spec SPEC` makes one"
        )
        raise StoreError(f"{run_id} has no score `{label}`: {there}")
    return heads[label]


def write_score(
    connection: sqlite3.Connection,
    label: str,
    rewards: Mapping[str, Any],
    spec_path: str,
    scores: Mapping[str, str],
    *,
    replace: bool,
) -> None:
    """Write a score, inside the caller's transaction.

    Args:
        connection: A connection that is open for writing.
        label: The score's label.
        rewards: The section `rewards` of the score.
        spec_path: The file of that section.
        scores: Episode id -> the JSON of its `EpisodeScore`.
        replace: Replace an existing score with this label.

    Raises:
        StoreError: there is a score with this label already.
    """
    if replace:
        connection.execute("DELETE FROM scored WHERE label = ?", (label,))
        connection.execute("DELETE FROM scores WHERE label = ?", (label,))
    elif connection.execute("SELECT 1 FROM scores WHERE label = ?", (label,)).fetchone():
        raise StoreError(f"there is a score `{label}` already; give this one another --label, or --replace that one")
    head = (label, time.time(), engine.__version__, codec.json_of(dict(rewards)), spec_path)
    connection.execute("INSERT INTO scores VALUES (?, ?, ?, ?, ?)", head)
    numbers = dict(connection.execute("SELECT id, number FROM episodes"))
    connection.executemany(
        "INSERT INTO scored VALUES (?, ?, ?)", [(label, numbers[episode], text) for episode, text in scores.items()]
    )
