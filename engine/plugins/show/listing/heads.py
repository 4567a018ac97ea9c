"""Decodes a stored trajectory without its token arrays and without validation: about 20 times faster than
`RunReader.trajectory`.

A head has the attributes of a `Trajectory` that filters and evaluations read (`engine.store.episode_filter`,
`engine.plugins.evaluation.measures`).
`branches` and `postings` are empty.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import msgspec
from pydantic_core import from_json

from engine.errors import StoreError
from engine.schemas.trajectory import Outcome, Turn
from engine.store import codec, database, summaries
from engine.store.dropped import dropped_among
from engine.store.episode_filter import feedback_value
from engine.store.reader import STORE
from engine.store.reading import decoding, reading
from engine.store.reviews import review_facts

if TYPE_CHECKING:
    from engine.schemas.trajectory import Trajectory
    from engine.store.reader import RunReader

_PAGE = 256
"""Episodes that are read at a time: a long read would prevent the writer from resetting its WAL."""
_LONGEST = 160
"""Maximum number of characters of a text in a list."""
_AROUND = 60
"""Characters before and after a searched text."""


class _Part(msgspec.Struct):
    type: str
    text: str = ""
    image: str = ""


class _Call(msgspec.Struct):
    name: str = ""
    arguments: Any = None


class MessageHead(msgspec.Struct):
    """A message; see `engine.schemas.message.Message`."""

    role: str
    content: str | list[_Part] = ""
    reasoning: str | None = None
    tool_calls: list[_Call] = []

    @property
    def text(self) -> str:
        """The text parts, joined."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content if part.type == "text")

    @property
    def images(self) -> list[_Part]:
        """The images, in order."""
        return [] if isinstance(self.content, str) else [part for part in self.content if part.type == "image"]


class _Condensation(msgspec.Struct):
    turn: int
    thread: list[int | MessageHead]
    said: int = -1


class EpisodeHead(msgspec.Struct):
    """A finished episode without its branches and postings; see `engine.schemas.trajectory.Trajectory`."""

    episode_id: str
    task_id: str
    sample_index: int
    outcome: Outcome
    messages: list[MessageHead]
    turns: list[Turn]
    facts: dict[str, Any] = {}
    path: list[tuple[str, str, str]] = []
    counts: dict[str, int] = {}
    seconds: dict[str, float] = {}
    condensations: list[_Condensation] = []
    branches: tuple[()] = ()
    postings: tuple[()] = ()

    def said(self) -> str:
        """Everything that was said, for text search: contents, reasoning and tool calls of all messages, one per
        line."""
        lines: list[str] = []
        for message in self.messages:
            lines += filter(None, (message.reasoning, message.text))
            lines += (f"{call.name} {codec.json_of(call.arguments)}" for call in message.tool_calls)
        return "\n".join(lines)


_decode = msgspec.json.Decoder(EpisodeHead).decode


def read_head(text: str) -> Trajectory:
    """Decode the JSON of a stored trajectory. The result is an `EpisodeHead`; functions over trajectories accept it.

    Raises:
        StoreError: the JSON does not hold a trajectory.
    """
    try:
        head = _decode(text)
    except msgspec.DecodeError:
        with codec.damaged("the trajectory"):
            try:
                head = msgspec.convert(from_json(text), EpisodeHead)  # NaN and infinities, which JSON does not have
            except msgspec.ValidationError as error:
                raise StoreError(f"the trajectory is damaged ({error})") from error
    return cast("Trajectory", head)


def heads(store: RunReader) -> Iterator[Trajectory]:
    """Yield the finished episodes of a run as heads, in the order of tasks and samples.

    Raises:
        StoreError: an episode is damaged.
    """
    query = "SELECT e.number, e.id FROM episodes e WHERE e.status = 'done' ORDER BY task_index, sample_index, number"
    with store.snapshot() as connection:
        rows = connection.execute(query).fetchall()
    for start in range(0, len(rows), _PAGE):
        part = rows[start : start + _PAGE]
        texts: dict[int, str] = {}
        for connection, base in store.contents([row[0] for row in part]):
            own = [number - base for number, _ in part if 0 < number - base < STORE]
            query = f"SELECT episode, trajectory FROM trajectories WHERE episode IN ({', '.join('?' * len(own))})"
            with reading(connection):
                texts |= {base + number: text for number, text in connection.execute(query, own)}
        gone = store.dropped_ids() if len(texts) < len(part) else ()
        for number, name in part:
            with decoding(store.folder / database.FILE, name):
                if number in texts:
                    yield read_head(texts[number])
                elif name not in gone:
                    raise StoreError("its trajectory is missing, so the file is damaged")


class Contents:
    """The content of the episodes of a store, and the summaries that its tables do not have.

    One store of a divided run is open at a time.
    """

    def __init__(self, store: RunReader) -> None:
        self._store = store
        self._part = -1
        self._open: Iterator[tuple[sqlite3.Connection, int]] = iter(())
        self._connection: sqlite3.Connection | None = None
        self._last: tuple[int, tuple[Any, ...]] = (-1, ())

    @cached_property
    def review_facts(self) -> Callable[[str], dict[str, Any]]:
        """What reviews add to the facts of an episode, by its id."""
        return review_facts(self._store.folder)

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
        """Return the summary of a finished episode: of its part of a divided run, or made of its content. Of one that
        is damaged: the problem as its message."""
        if self._last[0] != number:
            values: tuple[Any, ...] | None = None
            try:
                if self._store.divided:
                    connection, here = self.of(number)
                    query = f"SELECT {', '.join(summaries.COLUMNS)} FROM summaries NATURAL JOIN trajectories"
                    with suppress(sqlite3.OperationalError):  # a part of an older engine has no such table
                        values = connection.execute(f"{query} WHERE episode = ?", (here,)).fetchone()
                if values is None:
                    head = read_head(self.text(number))
                    connection, here = self.of(number)
                    query = "SELECT tokens, weight_versions FROM branches WHERE episode = ?"
                    with codec.damaged("the episode"):
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
        with codec.damaged("the user's turn"):
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
        return dict(
            zip(("turns", "tokens", "state"), connection.execute(query, (here, attempt)).fetchone(), strict=True)
        )

    def said(self, number: int, attempt: int, text: str) -> bool:
        """Whether a text (case-folded) was said in an episode: in the conversation, or by a judge."""
        # These parts stand in the stored JSON as they are. They only save time: what was said decides.
        needles = [part for part in re.split(r'["\\\x00-\x1f\x7f]', text) if part]
        connection, here = self.of(number)
        query = "SELECT payload FROM journal WHERE episode = ? AND attempt = ? AND kind = 'score'"
        with suppress(StoreError, ValueError, AttributeError, TypeError):  # a damaged one says nothing
            trajectory = self.text(number)
            folded = trajectory.casefold()
            head = cast("EpisodeHead", read_head(trajectory)) if all(part in folded for part in needles) else None
            if head is not None and text in head.said().casefold():
                return True
            for (record,) in connection.execute(query, (here, attempt)):
                if text in "\n".join(from_json(record).get("replies", ())).casefold():
                    return True
        return False


def excerpts(head: EpisodeHead, wanted: str) -> dict[str, Any]:
    """Return `task` (the first message of the user), `answer` (the last message of the policy) and `hit`: what was said
    before the searched text, the text, and what was said after it; None where it is not in the conversation."""
    asked = next((message.text for message in head.messages if message.role == "user"), "")
    answers = [message for message in head.messages if message.role == "assistant"]
    answer = answers[-1].text or ", ".join(call.name for call in answers[-1].tool_calls) if answers else ""
    hit = None
    if wanted and (place := re.search(re.escape(wanted), said := head.said(), re.IGNORECASE)):
        start, end = place.span()
        hit = [said[max(0, start - _AROUND) : start], said[start:end], said[end : end + _AROUND]]
    return {"task": _short(asked), "answer": _short(answer), "hit": hit}


def planned_excerpts(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same of an episode that has not ended: the longest text of the task's fields."""
    return {
        "task": _short(max([value for value in fields.values() if isinstance(value, str)], key=len, default="")),
        "answer": "",
        "hit": None,
    }


def _short(text: str) -> str:
    line = " ".join(text[: 4 * _LONGEST].split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"
