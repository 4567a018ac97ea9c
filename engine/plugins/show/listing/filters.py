"""Filters over the index: the same expressions as `--filter` of `engine export`, without reading the episodes again.

An expression that reads only `task`, `limits`, `run` and `episode` is evaluated for all episodes; any other one holds
only for finished episodes. An episode for which the expression has no value (it has no such fact, for example) is not
chosen, and counted.
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
from engine.store.episode_filter import EPISODE_VARIABLES, feedback_value, stored_limits
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
_COLUMNS = (
    "number", "status", "id", "task_id", "sample_index", "attempt", "started", "ended", "trainable", "branches",
    "images", "trained",
    "version", "oldest_version", "step",
)  # fmt: skip


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

    def skip(self, message: str) -> None:
        """Count an episode for which the filter has no value."""
        self.evaluated += 1
        self.skipped += 1
        self.because = self.because or message


def matching(index: Index, stores: Mapping[int, tuple[Source, RunReader]], guard: Guard | None, text: str) -> Matching:
    """Choose episodes of stores whose details are in the index.

    Args:
        index: The index, up to date.
        stores: The stores by their number in the index.
        guard: A filter over `LISTING_VARIABLES`; None chooses all.
        text: Only finished episodes in which this was said, with any case; empty chooses all.

    Raises:
        StoreError: the filter has no value for any episode; the message says why.
    """
    chosen = Matching()
    for number, (source, store) in stores.items():
        if guard is None:
            rows = index.connection.execute("SELECT number FROM episodes WHERE source = ?", (number,))
            keys = [row[0] for row in rows]
        else:
            keys = [key for key, scope in _scopes(index, number, source, store, guard) if _holds(guard, scope, chosen)]
            damaged_query = (
                f"SELECT id, message FROM episodes WHERE source = ? AND status = 'done' AND detailed = {DAMAGED}"
            )
            for id, message in index.connection.execute(damaged_query, (number,)) if _reads_the_end(guard) else ():
                chosen.skip(f"{id}: {message}")
        if text:
            keys = _said(store, keys, text.casefold())
        chosen.keys += [(number, key) for key in keys]
    if chosen.skipped and chosen.skipped == chosen.evaluated:
        raise StoreError(f"filter: {chosen.because}")
    return chosen


def _reads_the_end(guard: Guard) -> bool:
    """Whether an expression reads what only finished episodes have."""
    return not guard.names <= {"task", "limits", "run", "episode"}


def _holds(guard: Guard, scope: dict[str, Any], chosen: Matching) -> bool:
    try:
        holds = guard.evaluate(scope)
    except GuardError as error:
        chosen.skip(f"{scope['']}: {error}{_nearest(scope, error)}")
        return False
    chosen.evaluated += 1
    return holds


def _scopes(
    index: Index, number: int, source: Source, store: RunReader, guard: Guard
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The variables of each episode that the expression may hold for, by the episode's number."""
    names = guard.names
    stored = [name for name in VARIABLES if name in names]
    columns = ", ".join((*(f"e.{name}" for name in _COLUMNS), *(f'v."{name}"' for name in stored)))
    query = (
        f"SELECT {columns} FROM episodes e LEFT JOIN variables v ON v.source = e.source AND v.number = e.number WHERE "
        "e.source = ?"
    )
    if _reads_the_end(guard):
        query += f" AND e.status = 'done' AND e.detailed = {WHOLE}"
    limits = stored_limits(store) if "limits" in names else None
    tasks: dict[str, str] = {}
    if "task" in names:
        with store.snapshot() as connection:
            tasks = dict(connection.execute("SELECT id, fields FROM tasks"))
    user_turns = _user_turns(store) if "feedback" in names else {}
    for values in index.connection.execute(query, (number,)):
        row = dict(zip(_COLUMNS, values, strict=False))
        scope: dict[str, Any] = {"": row["id"]}
        scope |= {name: from_json(value) for name, value in zip(stored, values[len(_COLUMNS) :], strict=True)}
        if limits is not None:
            scope["limits"] = limits
        if "task" in names:
            with decoding(store.path, row["id"]), damaged("its task"):
                scope["task"] = from_json(tasks[row["task_id"]])
        if "feedback" in names:
            with decoding(store.path, row["id"]), damaged("the user's turn"):
                scope["feedback"] = _feedback(user_turns.get(row["number"]))
        if "episode" in names:
            scope["episode"] = _episode(row)
        if "run" in names:
            step = source.step if row["step"] is None else row["step"]
            scope["run"] = {"id": source.key, "evaluation": source.evaluation, "step": -1 if step is None else step}
        yield row["number"], scope


def _episode(row: Mapping[str, Any]) -> dict[str, Any]:
    ended, started = row["ended"], row["started"]
    version, oldest = row["version"], row["oldest_version"]
    return {
        "id": row["id"],
        "task": row["task_id"],
        "sample": row["sample_index"],
        "status": row["status"],
        "attempt": row["attempt"],
        "seconds": ended - started if ended and started else 0.0,
        "trainable": bool(row["trainable"]),
        "branches": row["branches"] or 0,
        "images": row["images"] or 0,
        "trained": row["trained"] or 0,
        "version": -1 if version is None else version,
        "oldest_version": -1 if oldest is None else oldest,
    }


def _user_turns(store: RunReader) -> dict[int, str]:
    """The newest record of the user in each episode's journal, as JSON, by the episode's number."""
    query = (
        "SELECT j.episode, j.payload FROM journal j JOIN episodes e ON e.number = j.episode AND e.attempt = j.attempt "
        "WHERE j.kind = 'user' ORDER BY j.episode, j.seq"
    )
    records: dict[int, str] = {}
    for connection, base in store.contents():
        with reading(connection):
            records |= {base + number: record for number, record in connection.execute(query)}
    return records


def _feedback(record: str | None) -> dict[str, Any]:
    if record is None:
        return feedback_value({})
    values = from_json(record)
    turn = values["turn"]
    return feedback_value(turn["facts"], solved=turn["solved"], satisfied=turn["satisfied"], malformed=values["canned"])


def _nearest(scope: Mapping[str, Any], error: GuardError) -> str:
    """The nearest name that a task or the facts have, for a name that they do not have."""
    for name in ("task", "facts"):
        missing = re.search(rf"`{name}\.(\w+)` does not exist", str(error))
        if missing is not None and name in scope:
            near = get_close_matches(missing[1], list(scope[name]), 1)
            fields = ", ".join(f"`{field}`" for field in list(scope[name])[:8]) or "no fields"
            return f". Did you mean `{name}.{near[0]}`?" if near else f". `{name}` has {fields}"
    return ""


def _said(store: RunReader, keys: Sequence[int], text: str) -> list[int]:
    """Those of the finished episodes `keys` in which `text` (case-folded) was said: in the conversation, or by a
    judge."""
    wanted = set(keys)
    # These parts stand in the stored JSON as they are. They only save time: what was said decides.
    needles = [part for part in re.split(r'["\\\x00-\x1f\x7f]', text) if part]
    matching: set[int] = set()
    for connection, base in store.contents(keys):
        with reading(connection):
            for query, said in ((_TRAJECTORIES, _told), (_SCORES, _judged)):
                for number, stored in connection.execute(query):
                    folded = stored.casefold()
                    if base + number in wanted and all(part in folded for part in needles):
                        with suppress(StoreError, ValueError, AttributeError, TypeError):  # a damaged one says nothing
                            if text in said(stored).casefold():
                                matching.add(base + number)
    return [key for key in keys if key in matching]


_TRAJECTORIES = "SELECT episode, trajectory FROM trajectories"
_SCORES = (
    "SELECT j.episode, j.payload FROM journal j JOIN trajectories t ON t.episode = j.episode "
    "JOIN episodes e ON e.number = j.episode AND e.attempt = j.attempt WHERE j.kind = 'score'"
)


def _told(trajectory: str) -> str:
    return cast("EpisodeHead", read_head(trajectory)).said()


def _judged(record: str) -> str:
    """What a judge said, by the JSON of a `ScoreRecord`."""
    return "\n".join(from_json(record).get("replies", ()))
