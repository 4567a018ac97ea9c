"""Filters over the index: the same expressions as `--filter` of `engine export`, without reading the episodes again.

An expression that reads only `task`, `limits`, `run` and `episode` is evaluated for all episodes; any other one holds only for
finished episodes. An episode for which the expression has no value (it has no such fact, for example) is not chosen, and counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, cast

from pydantic_core import from_json

from engine.errors import GuardError, StoreError
from engine.machine.guards import Guard
from engine.machine.variables import BOOL, INT, STRING, Variable, VariableField
from engine.plugins.show.listing.heads import EpisodeHead, read_head
from engine.plugins.show.listing.index import DAMAGED, VARIABLES, WHOLE, Index
from engine.plugins.show.listing.sources import Source
from engine.store.codec import damaged
from engine.store.episode_filter import EPISODE_VARIABLES, compile_filter, feedback_value, stored_limits
from engine.store.reader import RunReader
from engine.store.reading import decoding, reading

RUN = Variable(
    doc="The run that an episode belongs to.",
    fields={
        "id": VariableField(types=STRING, doc="Its name in the list."),
        "evaluation": VariableField(types=BOOL, doc="Whether it is an evaluation."),
        "step": VariableField(
            types=INT, doc="The step of the training that used the episode, or whose weights it measured; -1 without."
        ),
    },
)
LISTING_VARIABLES: Mapping[str, Variable] = {**EPISODE_VARIABLES, "run": RUN}
"""Variables of filters over a list of episodes."""
_BEFORE_THE_END = frozenset({"task", "limits", "run", "episode"})
_EPISODE = (
    "e.number, e.status, e.id, e.task_id, e.sample_index, e.attempt, e.started, e.ended, e.trainable, e.branches, e.images, "
    "e.trained, e.version, e.oldest_version, e.step"
)


@dataclass(slots=True)
class Matching:
    """The episodes that a filter and a text choose."""

    keys: list[tuple[int, int]] = field(default_factory=list)
    """(source, number)."""
    evaluated: int = 0
    """Number of episodes for which the filter was evaluated."""
    skipped: int = 0
    """Number of those for which it has no value."""
    because: str | None = None
    """The message for the first of them."""


def checked(expression: str) -> Guard:
    """Compile a filter over a list.

    Raises:
        StoreError: it is not valid.
    """
    return compile_filter(expression, "filter", LISTING_VARIABLES)


def needs_details(guard: Guard | None) -> bool:
    """Whether an expression reads what the index has only after `Index.detail`."""
    return guard is not None and not guard.names <= {"task", "limits", "run"}


def matching(index: Index, stores: Mapping[int, tuple[Source, RunReader]], guard: Guard | None, text: str) -> Matching:
    """Choose episodes of stores whose details are in the index.

    Args:
        index: The index, up to date.
        stores: The stores by their number in the index.
        guard: From `checked`; None chooses all.
        text: Only finished episodes in which this was said, with any case; empty chooses all.

    Raises:
        StoreError: the filter has no value for any episode; the message says why.
    """
    found = Matching()
    for number, (source, store) in stores.items():
        if guard is None:
            rows = index.connection.execute("SELECT number FROM episodes WHERE source = ?", (number,))
            keys = [row[0] for row in rows]
        else:
            keys = [key for key, scope in _scopes(index, number, source, store, guard) if _holds(guard, scope, found)]
            if not guard.names <= _BEFORE_THE_END:
                _count_damaged(index, number, found)
        if text:
            keys = _said(store, keys, text.casefold())
        found.keys += [(number, key) for key in keys]
    if found.skipped and found.skipped == found.evaluated:
        raise StoreError(f"filter: {found.because}")
    return found


def _holds(guard: Guard, scope: dict[str, Any], found: Matching) -> bool:
    found.evaluated += 1
    try:
        return guard.evaluate(scope)
    except GuardError as error:
        found.skipped += 1
        found.because = found.because or f"{scope['']}: {error}{_nearest(scope, error)}"
        return False


def _count_damaged(index: Index, number: int, found: Matching) -> None:
    query = f"SELECT id, message FROM episodes WHERE source = ? AND status = 'done' AND detailed = {DAMAGED}"
    for id, message in index.connection.execute(query, (number,)):
        found.evaluated += 1
        found.skipped += 1
        found.because = found.because or f"{id}: {message}"


def _scopes(
    index: Index, number: int, source: Source, store: RunReader, guard: Guard
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The variables of each episode that the expression may hold for, by the episode's number."""
    names = guard.names
    stored = [name for name in VARIABLES if name in names]
    columns = "".join(f', v."{name}"' for name in stored)
    query = f"SELECT {_EPISODE}{columns} FROM episodes e LEFT JOIN variables v ON v.source = e.source AND v.number = e.number WHERE e.source = ?"
    if not names <= _BEFORE_THE_END:
        query += f" AND e.status = 'done' AND e.detailed = {WHOLE}"
    limits = stored_limits(store) if "limits" in names else None
    tasks = _tasks(store) if "task" in names else {}
    said = _user_turns(store) if "feedback" in names else {}
    for row in index.connection.execute(query, (number,)):
        scope: dict[str, Any] = {"": row[2], **{name: from_json(row[15 + at]) for at, name in enumerate(stored)}}
        if limits is not None:
            scope["limits"] = limits
        if "task" in names:
            with decoding(store.path, str(row[2])), damaged("its task"):
                scope["task"] = from_json(tasks[row[3]])
        if "feedback" in names:
            with decoding(store.path, str(row[2])), damaged("the user's turn"):
                scope["feedback"] = _feedback(said.get(row[0]))
        if "episode" in names:
            scope["episode"] = _episode(row[:15])
        if "run" in names:
            step = source.step if row[14] is None else row[14]
            scope["run"] = {"id": source.key, "evaluation": source.evaluation, "step": -1 if step is None else step}
        yield row[0], scope


def _episode(row: Sequence[Any]) -> dict[str, Any]:
    _, status, id, task, sample, attempt, started, ended, trainable, branches, images, trained, version, oldest, _ = row
    return {
        "id": id,
        "task": task,
        "sample": sample,
        "status": status,
        "attempt": attempt,
        "seconds": ended - started if ended and started else 0.0,
        "trainable": bool(trainable),
        "branches": branches or 0,
        "images": images or 0,
        "trained": trained or 0,
        "version": -1 if version is None else version,
        "oldest_version": -1 if oldest is None else oldest,
    }


def _tasks(store: RunReader) -> dict[str, str]:
    with store.snapshot() as connection:
        return dict(connection.execute("SELECT id, fields FROM tasks"))


def _user_turns(store: RunReader) -> dict[int, str]:
    """The newest record of the user in each episode's journal, as JSON, by the episode's number."""
    query = (
        "SELECT j.episode, j.payload FROM journal j JOIN episodes e ON e.number = j.episode AND e.attempt = j.attempt "
        "WHERE j.kind = 'user' ORDER BY j.episode, j.seq"
    )
    found: dict[int, str] = {}
    for connection, base in store.contents():
        with reading(connection):
            found |= {base + number: record for number, record in connection.execute(query)}
    return found


def _feedback(record: str | None) -> dict[str, Any]:
    if record is None:
        return feedback_value({})
    told = from_json(record)
    turn = told["turn"]
    return feedback_value(turn["facts"], solved=turn["solved"], satisfied=turn["satisfied"], malformed=told["canned"])


def _nearest(scope: Mapping[str, Any], error: GuardError) -> str:
    """The nearest name that a task or the facts have, for a name that they do not have."""
    for name in ("task", "facts"):
        missing = re.search(rf"`{name}\.(\w+)` does not exist", str(error))
        if missing is not None and name in scope:
            near = get_close_matches(missing[1], list(scope[name]), 1)
            known = ", ".join(f"`{field}`" for field in list(scope[name])[:8]) or "no fields"
            return f". Did you mean `{name}.{near[0]}`?" if near else f". `{name}` has {known}"
    return ""


def _said(store: RunReader, keys: Sequence[int], text: str) -> list[int]:
    """Those of the finished episodes `keys` in which `text` (case-folded) was said: in the conversation, or by a judge."""
    wanted = set(keys)
    # These parts stand in the stored JSON as they are. They only save time: what was said decides.
    needles = [part for part in re.split(r'["\\\x00-\x1f\x7f]', text) if part]
    found: set[int] = set()
    for connection, base in store.contents(keys):
        with reading(connection):
            for number, stored in connection.execute("SELECT episode, trajectory FROM trajectories"):
                if base + number not in wanted or not _contains(stored, needles):
                    continue
                with suppress(StoreError):  # a damaged episode says nothing
                    if text in cast("EpisodeHead", read_head(stored)).said().casefold():
                        found.add(base + number)
            for number, stored in connection.execute(_SCORES):
                if base + number in wanted and _contains(stored, needles) and text in _judged(stored):
                    found.add(base + number)
    return [key for key in keys if key in found]


_SCORES = (
    "SELECT j.episode, j.payload FROM journal j JOIN trajectories t ON t.episode = j.episode "
    "JOIN episodes e ON e.number = j.episode AND e.attempt = j.attempt WHERE j.kind = 'score'"
)


def _judged(stored: str) -> str:
    """What a judge said, case-folded, by the JSON of a `ScoreRecord`; nothing if it is damaged."""
    with suppress(ValueError, AttributeError, TypeError):
        return "\n".join(from_json(stored).get("replies", ())).casefold()
    return ""


def _contains(stored: str, needles: Sequence[str]) -> bool:
    folded = stored.casefold()
    return all(needle in folded for needle in needles)
