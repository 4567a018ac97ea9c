"""Other results of the same episodes: what other rules and another credit make of them, kept beside the first.

Invariant: a score is written whole, for every episode that it is of, or not at all; what the run's own rules came to
is never touched.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic_core import from_json

import engine
from engine.errors import StoreError
from engine.store import codec


class ScoreHead(NamedTuple):
    """What a run was scored by."""

    label: str
    created: float
    """Unix time."""
    engine_version: str
    rewards: dict[str, Any]
    """The section `rewards`, every default filled in."""
    spec_path: str


_HEAD = "label, created, engine_version, rewards, spec_path"


def read_heads(connection: sqlite3.Connection) -> list[ScoreHead]:
    """Every score of the run, oldest first."""

    rows = connection.execute(f"SELECT {_HEAD} FROM scores ORDER BY created, label").fetchall()
    return [
        ScoreHead(label, created, version, from_json(rewards), path) for label, created, version, rewards, path in rows
    ]


def require(connection: sqlite3.Connection, label: str, run_id: str) -> ScoreHead:
    """The head of one score.

    Raises:
        StoreError: the run has none of that name.
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
    """Write a score: one transaction of the caller's.

    Args:
        connection: Open for writing.
        label: Its name.
        rewards: The section `rewards` that it is by.
        spec_path: Where that was written.
        scores: Episode id -> the JSON of its `EpisodeScore`.
        replace: Take the place of an earlier score of that name.

    Raises:
        StoreError: there is a score of that name already.
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
