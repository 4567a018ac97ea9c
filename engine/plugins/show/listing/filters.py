"""Filters over the episodes of a store: the same expressions as `--filter` of `engine export`, decided by SQL where it
can (`engine.plugins.show.listing.sql_filter`), else by the evaluator of guards, one episode at a time.

An expression that reads only `task`, `limits`, `run` and `episode` is evaluated for all episodes; any other one holds
only for finished episodes. An episode for which the expression has no value (it has no such fact, for example) is not
chosen, and counted.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, cast
from urllib.parse import quote

from pydantic_core import from_json

from engine.errors import GuardError, StoreError
from engine.machine.guards import Guard
from engine.machine.variables import BOOL, INT, STRING, Variable, VariableField
from engine.plugins.show.listing.heads import EpisodeHead, read_head
from engine.plugins.show.listing.sources import Source
from engine.plugins.show.listing.sql_filter import SqlFilter
from engine.store import summaries
from engine.store.codec import damaged
from engine.store.dropped import dropped_among
from engine.store.episode_filter import END_VALUES, EPISODE_VARIABLES, feedback_value, stored_limits
from engine.store.reader import STORE, RunReader
from engine.store.reading import reading

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
FROM = (
    "FROM {} LEFT JOIN summaries s ON s.episode = e.number AND s.attempt = e.attempt LEFT JOIN tasks t ON t.id "
    "= e.task_id LEFT JOIN side.steps p ON p.source = :source AND p.task = e.task_id"
)
"""The tables of a query over the episodes of a store, to be given the first: `episodes e`. SQLite leaves out those that
a query does not read."""
_ROW = (
    "e.id, e.task_id, e.sample_index, e.status, e.attempt, e.started, e.ended, e.trainable, e.state, e.event, "
    'e."limit", '
    "e.failure, e.blame, e.solved, e.reward, s.solved_turn, s.rewards, s.facts, s.branches, s.images, s.trained, "
    "s.version, s.oldest_version, t.fields, coalesce(:step, p.step, -1)"
)
_NAMES = [name.split(".")[-1].strip('"') for name in _ROW.split(", ")[:-3]] + ["step"]
_STORED = ("outcome", "facts")
"""Variables whose values a summary has."""


class Contents:
    """The content of the episodes of a store, and what summaries would have of those that have none.

    One store of a divided run is open at a time.
    """

    def __init__(self, store: RunReader) -> None:
        self._store = store
        self._part = -1
        self._open: Iterator[tuple[sqlite3.Connection, int]] = iter(())
        self._connection: sqlite3.Connection | None = None
        self._last: tuple[int, tuple[Any, ...]] = (-1, ())

    def close(self) -> None:
        """Close the store that is open."""
        if self._connection is not None:
            self._open.close()  # type: ignore[attr-defined]  # a generator
        self._connection, self._part = None, -1

    def of(self, number: int) -> tuple[sqlite3.Connection, int]:
        """Return a connection to the store of an episode, and the episode's number there."""
        part = number // STORE
        if self._connection is None or part != self._part:
            self.close()
            self._open = iter(self._store.contents([number]))
            self._connection, _ = next(self._open)
            self._part = part
        return self._connection, number % STORE

    def text(self, number: int) -> str:
        """Return the JSON of an episode's result. Raises: StoreError: it is not there; the message says why."""
        connection, here = self.of(number)
        with reading(connection):
            row = connection.execute("SELECT trajectory FROM trajectories WHERE episode = ?", (here,)).fetchone()
            if row is None and dropped_among(connection, [here]):
                raise StoreError("its content was dropped to save space")
        if row is None:
            raise StoreError("its trajectory is missing, so the file is damaged")
        return str(row[0])

    def summary(self, number: int) -> tuple[Any, ...]:
        """Return the summary of a finished episode that has none stored. Of one that is damaged: the problem as its
        message."""
        if self._last[0] != number:
            try:
                head = read_head(self.text(number))
                connection, here = self.of(number)
                query = "SELECT tokens, weight_versions FROM branches WHERE episode = ?"
                with damaged("the episode"):
                    values = summaries.summary_of(head, connection.execute(query, (here,)).fetchall())
            except StoreError as error:
                values = (str(error), *[None] * (len(summaries.COLUMNS) - 1))
            self._last = (number, values)
        return self._last[1]

    def feedback(self, number: int, attempt: int) -> dict[str, Any]:
        """Return the variable `feedback` at the end of an episode."""
        connection, here = self.of(number)
        query = "SELECT payload FROM journal WHERE episode = ? AND attempt = ? AND kind = 'user' ORDER BY seq DESC"
        row = connection.execute(query, (here, attempt)).fetchone()
        if row is None:
            return feedback_value({})
        with damaged("the user's turn"):
            values = from_json(row[0])
            turn = values["turn"]
            return feedback_value(
                turn["facts"], solved=turn["solved"], satisfied=turn["satisfied"], malformed=values["canned"]
            )

    def live(self, number: int, attempt: int) -> dict[str, Any]:
        """Return what the journal of an episode has that is not done: turns, sampled tokens, state."""
        connection, here = self.of(number)
        query = (
            "SELECT coalesce(sum(kind = 'generation'), 0), coalesce(sum(length(tokens)) / 8, 0), (SELECT dest FROM "
            "journal WHERE episode = ?1 AND attempt = ?2 ORDER BY seq DESC LIMIT 1) FROM journal WHERE episode = ?1 "
            "AND attempt = ?2"
        )
        row = connection.execute(query, (here, attempt)).fetchone()
        return dict(zip(("turns", "tokens", "state"), row, strict=True))

    def said(self, number: int, attempt: int, text: str) -> bool:
        """Whether a text (case-folded) was said in an episode: in the conversation, or by a judge."""
        # These parts stand in the stored JSON as they are. They only save time: what was said decides.
        needles = [part for part in re.split(r'["\\\x00-\x1f\x7f]', text) if part]
        connection, here = self.of(number)
        query = "SELECT payload FROM journal WHERE episode = ? AND attempt = ? AND kind = 'score'"
        with suppress(StoreError, ValueError, AttributeError, TypeError):  # a damaged one says nothing
            told = self.text(number)
            folded = told.casefold()
            if all(part in folded for part in needles) and text in _told(told).casefold():
                return True
            for (record,) in connection.execute(query, (here, attempt)):
                if text in "\n".join(from_json(record).get("replies", ())).casefold():
                    return True
        return False


def _told(trajectory: str) -> str:
    return cast("EpisodeHead", read_head(trajectory)).said()


@dataclass(slots=True)
class Matching:
    """How a filter chose episodes."""

    evaluated: int = 0
    """Number of episodes for which the filter was evaluated."""
    skipped: int = 0
    """Number of those for which it has no value."""
    because: str | None = None
    """The message for the first of them."""
    error: BaseException | None = field(default=None)
    """What stopped a function that SQLite called."""


@contextmanager
def listed(
    number: int, source: Source, store: RunReader, side: str
) -> Iterator[tuple[sqlite3.Connection, dict[str, Any], Contents]]:
    """Open a store for queries over `FROM`: the connection, the parameters of `FROM`, and the content of its episodes.

    Args:
        number: The number of the store in the list.
        source: The store's place.
        store: The store.
        side: The SQLite file of the list, attached as `side`.
    """
    with store.snapshot() as connection, closing(Contents(store)) as contents:
        connection.execute("COMMIT")  # nothing was read yet, and the modes of a file are set outside of a transaction
        connection.execute("ATTACH ? AS side", (f"file:{quote(side)}?mode=rw",))
        connection.execute("PRAGMA side.journal_mode = OFF")
        connection.execute("PRAGMA side.synchronous = OFF")
        connection.execute("BEGIN")
        if connection.execute("SELECT 1 FROM main.sqlite_master WHERE name = 'summaries'").fetchone() is None:
            connection.execute(summaries.TABLE.replace("CREATE TABLE", "CREATE TEMP TABLE"))
        connection.create_function("made", 2, lambda episode, column: contents.summary(episode)[column])
        yield connection, {"source": number, "step": source.step}, contents


def choose(
    connection: sqlite3.Connection,
    parameters: Mapping[str, Any],
    contents: Contents,
    matching: Matching,
    about: tuple[Source, RunReader],
    guard: Guard | None,
    text: str,
) -> None:
    """Write the numbers of the chosen episodes of one store to the table `chosen`.

    Args:
        connection: From `listed`, as `parameters` and `contents`.
        matching: Counts the episodes for which the filter has no value.
        about: The store.
        guard: A filter over `LISTING_VARIABLES`; None chooses all.
        text: Only finished episodes in which this was said, with any case; empty chooses all.

    Raises:
        StoreError: the content of an episode cannot be read.
    """
    source, store = about
    names = guard.names if guard is not None else frozenset[str]()
    done = "e.status = 'done'" if text or not names <= {"task", "limits", "run", "episode"} else "TRUE"
    condition = "TRUE"
    values = dict(parameters)
    if guard is not None:
        constants: dict[str, dict[str, Any]] = {"run": {"id": source.key, "evaluation": source.evaluation}}
        if "limits" in names:
            constants["limits"] = dict(stored_limits(store))
        in_sql = SqlFilter(guard.expression, constants)
        values |= in_sql.parameters
        condition = f"coalesce({in_sql.sql}, ask(e.number))"

        def ask(number: int) -> bool:
            row = connection.execute(
                f"SELECT {_ROW} {FROM.format('episodes e')} WHERE e.number = :number", {**parameters, "number": number}
            )
            scope = dict(zip(_NAMES, row.fetchone(), strict=True))
            try:
                context = _context(names, number, scope, contents, constants)
                return guard.evaluate(context)
            except GuardError as error:
                problem = f"{error}{_nearest(context, error)}"
            except StoreError as error:
                problem = str(error)
            matching.skipped += 1
            matching.because = matching.because or f"{scope['id']}: {problem}"
            return False

        connection.create_function("ask", 1, _noting(matching, ask))
    if text:
        said = _noting(matching, lambda number, attempt: contents.said(number, attempt, text.casefold()))
        connection.create_function("said", 2, said)
        condition += " AND said(e.number, e.attempt)"
    query = (
        f"INSERT INTO side.chosen SELECT :source, e.number {FROM.format('episodes e')} WHERE {done} AND {condition} "
        "ORDER BY e.number"
    )
    try:
        connection.execute(query, values)
    except sqlite3.OperationalError:
        if matching.error is not None:
            raise matching.error from None
        raise
    if matching.skipped:
        matching.evaluated += connection.execute(f"SELECT count(*) FROM episodes e WHERE {done}").fetchone()[0]
    connection.execute("COMMIT")


def _noting(matching: Matching, function: Any) -> Any:
    """A function for SQLite, which replaces an exception by one of its own: the exception is kept in `matching`."""

    def called(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except BaseException as error:
            matching.error = error
            raise

    return called


def _context(
    names: frozenset[str], number: int, row: Mapping[str, Any], contents: Contents, constants: Mapping[str, Any]
) -> dict[str, Any]:
    """The values of the variables `names` for one episode.

    Raises:
        StoreError: its content is damaged or was dropped.
    """
    context: dict[str, Any] = {}
    ends = names & END_VALUES.keys()
    if ends and (not ends <= set(_STORED) or row["facts"] is None):
        head = read_head(contents.text(number))
        context |= {name: END_VALUES[name](head) for name in ends}
    else:
        if "facts" in names:
            context["facts"] = from_json(row["facts"])
        if "outcome" in names:
            context["outcome"] = _outcome(row)
    if "limits" in names:
        context["limits"] = constants["limits"]
    if "task" in names:
        with damaged("its task"):
            context["task"] = from_json(row["fields"])
    if "feedback" in names:
        context["feedback"] = contents.feedback(number, row["attempt"])
    if "episode" in names:
        context["episode"] = _episode(number, row, contents)
    if "run" in names:
        context["run"] = {**constants["run"], "step": row["step"]}
    return context


def _outcome(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{name: row[name] or "" for name in ("state", "event", "limit", "failure", "blame")},
        "solved": bool(row["solved"]),
        "solved_turn": -1 if row["solved_turn"] is None else row["solved_turn"],
        "reward": float("nan") if row["reward"] is None else row["reward"],
        "rewards": from_json(row["rewards"]),
    }


def _episode(number: int, row: Mapping[str, Any], contents: Contents) -> dict[str, Any]:
    ended, started = row["ended"], row["started"]
    values: dict[str, Any] = {
        name: row[name] for name in ("branches", "images", "trained", "version", "oldest_version")
    }
    if row["status"] == "done" and values["branches"] is None:
        made = dict(zip(summaries.COLUMNS, contents.summary(number), strict=True))
        if made["branches"] is None:
            raise StoreError(made["message"])
        values = {name: made[name] for name in values}
    return {
        "id": row["id"],
        "task": row["task_id"],
        "sample": row["sample_index"],
        "status": row["status"],
        "attempt": row["attempt"],
        "seconds": ended - started if ended and started else 0.0,
        "trainable": bool(row["trainable"]),
        **{name: values[name] or 0 for name in ("branches", "images", "trained")},
        **{name: -1 if values[name] is None else values[name] for name in ("version", "oldest_version")},
    }


def _nearest(scope: Mapping[str, Any], error: GuardError) -> str:
    """The nearest name that a task or the facts have, for a name that they do not have."""
    for name in ("task", "facts"):
        missing = re.search(rf"`{name}\.(\w+)` does not exist", str(error))
        if missing is not None and name in scope:
            near = get_close_matches(missing[1], list(scope[name]), 1)
            fields = ", ".join(f"`{field}`" for field in list(scope[name])[:8]) or "no fields"
            return f". Did you mean `{name}.{near[0]}`?" if near else f". `{name}` has {fields}"
    return ""
