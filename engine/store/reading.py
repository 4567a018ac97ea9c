"""A row of a run's tables -> a record of the engine, or an error that names the file and the record's owner."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import replace

from engine.errors import StoreError
from engine.schemas.base import Struct
from engine.schemas.journal import FailureRecord, JournalEntry
from engine.store import codec, database
from engine.store.header import RunHeader

ENTRY = "seq, state, event, dest, kind, payload, tokens, at, seconds"
EPISODE = (
    "number, id, task_id, task_index, sample_index, seed, status, attempt, state, event, "
    '"limit", failure, blame, solved, trainable, reward, turns, tokens, started, ended'
)


class EpisodeRow(Struct, frozen=True, kw_only=True):
    """Summary of one episode. The fields after `attempt` are None until the episode is done (`started`: until it has
    begun)."""

    number: int
    id: str
    task_id: str
    task_index: int
    sample_index: int
    seed: int | None
    status: Literal["pending", "running", "done"]
    attempt: int
    """From 0; it increases by one each time the episode begins again."""
    state: str | None
    event: str | None
    limit: str | None
    failure: str | None
    """The kind of the failure."""
    blame: str | None
    solved: bool | None
    trainable: bool | None
    reward: float | None
    turns: int | None
    tokens: int | None
    """Sampled tokens."""
    started: float | None
    ended: float | None


def own_header(folder: Path) -> RunHeader:
    """Return the header of the run in `folder`.

    Raises:
        StoreError: there is no run, or it has another version or is damaged.
    """
    path = folder / database.FILE
    with closing(database.connect_reader(path)) as connection, reading(path):
        row = connection.execute("SELECT header FROM run").fetchone()
    with decoding(path, "run"), codec.damaged("the header"):
        return RunHeader.model_validate_json(row[0])


@contextmanager
def reading(source: Path | sqlite3.Connection) -> Iterator[None]:
    """Convert errors of SQLite to StoreError with the file's name; `source` is the file, or a connection to it."""
    try:
        yield
    except sqlite3.Error as error:
        if isinstance(source, sqlite3.Connection):
            source = Path(source.execute("PRAGMA database_list").fetchone()[2])
        raise database.problem(source, error) from error


@contextmanager
def decoding(path: Path, whose: str) -> Iterator[None]:
    """Add the file and the record's owner to the message of a StoreError about a damaged record."""
    try:
        yield
    except StoreError as error:
        raise StoreError(f"{path}: {whose}: {error}; restore the file from a copy, or leave it out") from error


def episode_row(row: tuple[Any, ...]) -> EpisodeRow:
    summary = EpisodeRow(**dict(zip(EpisodeRow.__struct_fields__, row, strict=True)))
    return replace(
        summary,
        solved=None if summary.solved is None else bool(summary.solved),
        trainable=None if summary.trainable is None else bool(summary.trainable),
    )


def journal_rows(connection: sqlite3.Connection, number: int, attempt: int) -> list[Any]:
    """Return the rows of one attempt's journal, in order, for `codec.read_entry`."""
    return connection.execute(
        f"SELECT {ENTRY} FROM journal WHERE episode = ? AND attempt = ? ORDER BY seq", (number, attempt)
    ).fetchall()


def never_built(journal: Sequence[JournalEntry]) -> bool:
    """Whether a journal belongs to an episode whose objects could not be built, so that it continued without them."""
    return bool(journal) and isinstance(first := journal[0].record, FailureRecord) and not first.built
