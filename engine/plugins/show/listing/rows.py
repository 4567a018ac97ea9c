"""The data classes of a list of episodes. All are structs: `row.plain()` gives JSON values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from engine.schemas.base import Struct
from engine.store.summaries import COLUMNS

MADE = {
    name: f"CASE WHEN s.episode IS NULL AND e.status = 'done' THEN made(e.number, {at}) ELSE s.{name} END"
    for at, name in enumerate(COLUMNS)
}
"""The SQL of the columns of a summary; of an episode that has none stored, it is made."""
_STORED = (
    "number", "id", "task_id", "sample_index", "seed", "status", "attempt", "state", "event", "limit", "failure",
    "blame", "solved", "trainable", "reward", "turns", "tokens", "started", "ended",
)  # fmt: skip
_LISTED = tuple(name for name in COLUMNS if name not in ("solved_turn", "sampled", "facts"))
EPISODE = ", ".join(
    (*(f'e."{name}"' for name in _STORED), *(MADE[name] for name in _LISTED), "coalesce(:step, p.step)", "t.fields")
)
"""What `row_of` reads, in order, over the tables of `Listing`."""


class Row(Struct, frozen=True, kw_only=True):
    """One episode in a list. Values that are known only at its end are None before it."""

    run: str
    """The key of its store; see `Source`."""
    episode: str
    """Its id in the store: `<task>/<sample>`."""
    task: str
    sample: int
    """Its number among the episodes of the task, from 0."""
    seed: str | None
    """A text, because it may be larger than JavaScript's integers."""
    status: str
    """`pending`, `running` or `done`."""
    attempt: int
    """From 0."""
    outcome: str
    """How it ended, in words: `solved`, `failed: tool_timeout (tool)`, `limit: assistant_turns`, else the final event;
    empty before."""
    state: str | None
    """The final state; of a running episode, the current one."""
    event: str | None
    limit: str | None
    failure: str | None
    """The kind of the failure."""
    blame: str | None
    message: str | None
    """The message of the failure."""
    failed_state: str | None
    failed_turn: int | None
    solved: bool | None
    trainable: bool | None
    reward: float | None
    """Sum of all rewards."""
    rewards: dict[str, float]
    """Sums by name."""
    turns: dict[str, int]
    """`assistant`, `user`, and `tool` (tool calls). Of a running episode: `assistant` so far."""
    tool_errors: int | None
    tokens: dict[str, int]
    """`sampled`; `trained`: loss mask 1; `total`: all rows; `context`: the last prompt with its reply."""
    seconds: float | None
    """Wall time from its beginning to its end."""
    started: float | None
    """Unix time."""
    ended: float | None
    versions: list[int]
    """The oldest and the newest weight version of its sampled tokens; empty if there is none."""
    step: int | None
    """The step of the training that used it; for an evaluation, the step whose weights it measured."""
    branches: int | None
    """Training rows."""
    images: int | None
    """Images in its messages."""
    cost: float | None
    task_fields: dict[str, Any]
    review: dict[str, Any] | None = None
    """What people say about it, as the fact `review`; None in a run without reviews."""


class Page(Struct, frozen=True, kw_only=True):
    """A part of a list of episodes."""

    rows: list[Row]
    total: int
    """Number of episodes in the whole list."""
    skipped: int = 0
    """Number of episodes that are not in the list because the filter has no value for them, for example without a fact
    that it reads."""
    skipped_because: str | None = None
    """The message for the first of them."""


class Cause(Struct, frozen=True, kw_only=True):
    """A cause for which episodes failed or were ended by a limit."""

    failure: str | None
    """The kind of the failure; None for a limit."""
    blame: str | None
    state: str | None
    """The state in which the first one failed."""
    limit: str | None
    count: int
    share: float
    """Part of the finished episodes of the list."""
    message: str | None
    """The message of the first one."""
    run: str
    """The store of the first one."""
    episode: str
    """The id of the first one."""
    filter: str
    """An expression that holds for exactly these failures or limits, for `Listing.page`."""


class Neighbours(Struct, frozen=True, kw_only=True):
    """The episodes before and after one in a list."""

    previous: tuple[str, str] | None
    """(run, episode); None for the first."""
    next: tuple[str, str] | None
    position: int
    """From 0; -1 if the episode is not in the list."""
    total: int


class Totals(Struct, frozen=True, kw_only=True):
    """Sums over a list of episodes."""

    episodes: int
    done: int
    solved: int
    failed: int
    limited: int
    """Number of episodes that a limit ended."""
    reward: float | None
    """Mean over the finished ones."""


def status_word(status: str, run: str) -> str:
    """An episode's status, given its run's: an episode that was running when its run ended was broken off."""
    return "broken off" if status == "running" and run != "running" else status


def outcome_word(failure: str | None, blame: str | None, limit: str | None, solved: bool | None, event: str) -> str:
    """How a finished episode ended, in a word or two."""
    if failure is not None:
        return f"failed: {failure} ({blame})"
    if limit is not None:
        return f"limit: {limit}"
    return "solved" if solved else event


def row_of(run: str, values: Sequence[Any], live: Mapping[str, Any], review: dict[str, Any] | None) -> Row:
    """Make a row from the columns `EPISODE`. `live`: of a running episode, those that its journal has."""
    v = {**dict(zip(_NAMES, values, strict=True)), **live}
    done = v["status"] == "done"
    counted = {"sampled": v["tokens"], "trained": v["trained"], "total": v["total"], "context": v["context"]}
    turned = {"assistant": v["turns"], "user": v["user_turns"], "tool": v["tool_calls"]}
    return Row(
        run=run,
        episode=v["id"],
        task=v["task_id"],
        sample=v["sample_index"],
        outcome=outcome_word(v["failure"], v["blame"], v["limit"], v["solved"], v["event"] or "") if done else "",
        seed=None if v["seed"] is None else str(v["seed"]),
        solved=None if v["solved"] is None else bool(v["solved"]),
        trainable=None if v["trainable"] is None else bool(v["trainable"]),
        rewards=from_json(v["rewards"]) if v["rewards"] else {},
        turns={name: count for name, count in turned.items() if count is not None},
        tokens={name: count for name, count in counted.items() if count is not None},
        seconds=v["ended"] - v["started"] if v["ended"] and v["started"] else None,
        versions=[] if v["version"] is None else [v["oldest_version"], v["version"]],
        task_fields=from_json(v["fields"]),
        review=review,
        **{name: v[name] for name in _AS_STORED},
    )


_NAMES = (*_STORED, *_LISTED, "step", "fields")
_AS_STORED = (
    "status", "attempt", "state", "event", "limit", "failure", "blame", "message", "failed_state", "failed_turn",
    "reward", "tool_errors", "started", "ended", "step", "branches", "images", "cost",
)  # fmt: skip
