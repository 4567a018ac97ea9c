"""A list of the episodes of one or several stores: pages, filters, text search, causes of failures, neighbours.

    with Listing.open([find("latest")]) as listing:
        page = listing.page('outcome.reward < 0.5 && task.level == "hard"', "sorry", "reward", False, 0, 50)
        listing.causes()

Stores may be running: every method reads their newest state. Stores are only read (`engine.plugins.show.listing.index`
has the side file).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from pydantic_core import from_json

from engine.errors import StoreError
from engine.plugins.show.listing.filters import LISTING_VARIABLES, Matching, matching
from engine.plugins.show.listing.index import CHUNK, Index
from engine.plugins.show.listing.rows import EPISODE, Cause, Neighbours, Page, Row, Totals, row_of
from engine.plugins.show.listing.sources import Source, open_stores
from engine.store.codec import damaged
from engine.store.episode_filter import compile_filter
from engine.store.reader import RunReader
from engine.store.reading import decoding

_OUTCOME = 'failure IS NULL, failure, blame, "limit" IS NULL, "limit", solved, event'
_SORTS: dict[str, tuple[str, bool]] = {
    "order": ("e.source, task_index, sample_index, number", False),
    "run": ("e.source", False),
    "episode": ("task_index, sample_index, number", False),
    "task": ("task_id", False),
    "sample": ("sample_index", False),
    "status": ("status", False),
    "outcome": (_OUTCOME, False),
    "state": ("state", False),
    "failure": ("failure", False),
    "blame": ("blame", False),
    "limit": ('"limit"', False),
    "reward": ("reward", False),
    "turns": ("turns", False),
    "turns.user": ("user_turns", True),
    "turns.tool": ("tool_calls", True),
    "tokens": ("tokens", False),
    "tokens.trained": ("trained", True),
    "tokens.total": ("total", True),
    "tokens.context": ("context", True),
    "seconds": ("ended - started", False),
    "started": ("started", False),
    "ended": ("ended", False),
    "version": ("version", True),
    "step": ("step", False),
    "branches": ("branches", True),
    "images": ("images", True),
    "cost": ("cost", True),
    "attempt": ("attempt", False),
    "seed": ("seed", False),
}
"""The SQL expression of each sort key, and whether it needs details. `reward:NAME` sorts by one reward."""
SORTS = (*_SORTS, "reward:NAME")
"""The names that `Listing.page` can sort by."""


class Listing:
    """Episodes of stores. Methods may be called from several threads; they take turns."""

    def __init__(self, paths: Iterable[Path | str], index: Index) -> None:
        self._index = index
        self._lock = threading.RLock()
        self._paths = list(paths)
        self._stores: dict[int, tuple[Source, RunReader]] = {}
        self._open_new()
        self._matched: tuple[tuple[str, str], Matching] | None = None

    @classmethod
    def open(cls, paths: Iterable[Path | str]) -> Listing:
        """Open the stores of runs and trainings (`engine.plugins.show.listing.sources.find` gives their folders).

        Raises:
            StoreError: one cannot be read, or there are none.
        """
        index = Index.cached()
        try:
            return cls(paths, index)
        except BaseException:
            index.close()
            raise

    def close(self) -> None:
        """Close the index."""
        self._index.close()

    def __enter__(self) -> Listing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def sources(self) -> list[Source]:
        """The stores, in the order in which they were given; of a training that goes on, those of the newest query."""
        return [source for source, _ in self._stores.values()]

    def store(self, run: str) -> RunReader:
        """Return the store with a key of `sources`.

        Raises:
            StoreError: there is none.
        """
        return self._stores[self._number(run)][1]

    # --- queries ---

    def page(
        self,
        filter: str | None = None,
        text: str | None = None,
        sort: str = "order",
        descending: bool = False,
        offset: int = 0,
        limit: int = 100,
    ) -> Page:
        """Return a part of the list.

        Args:
            filter: An expression in CEL over `LISTING_VARIABLES`; None or empty: all episodes.
            text: Only finished episodes in which this was said, in any case.
            sort: One of `SORTS`. Episodes without a value come last.
            descending: The largest first.
            offset: Number of episodes before the page.
            limit: Maximum number of rows.

        Raises:
            StoreError: the filter is not valid or has no value for any episode, or there is no such sort key.
        """
        with self._lock:
            order, parameters, details = _order(sort, descending)
            chosen = self._choose(filter, text, details=details)
            query = f"SELECT e.source, {EPISODE} {self._from(chosen)} ORDER BY {order} LIMIT ? OFFSET ?"
            rows = self._rows(query, (*parameters, limit, offset))
            total = self._index.connection.execute(f"SELECT count(*) {self._from(chosen)}").fetchone()[0]
            if chosen is None:
                return Page(rows=rows, total=total)
            return Page(rows=rows, total=total, skipped=chosen.skipped, skipped_because=chosen.because)

    def causes(self, filter: str | None = None, text: str | None = None) -> list[Cause]:
        """Return the failures of the list by kind and blame, and the episodes that limits ended, the largest count
        first.

        Raises:
            StoreError: the filter is not valid.
        """
        with self._lock:
            chosen = self._choose(filter, text, details=True)
            done = self._index.connection.execute(
                f"SELECT count(*) {self._from(chosen)} AND status = 'done'"
            ).fetchone()[0]
            query = (
                'SELECT e.source, failure, blame, failed_state, CASE WHEN failure IS NULL THEN "limit" END AS '
                "ended_by, "
                f"count(*), min(task_index * 1000000000 + sample_index), id, message {self._from(chosen)} "
                "AND status = 'done' AND (failure IS NOT NULL OR \"limit\" IS NOT NULL) "
                "GROUP BY failure, blame, ended_by ORDER BY count(*) DESC, failure, ended_by"
            )
            return [
                Cause(
                    failure=failure,
                    blame=blame,
                    state=state,
                    limit=limit,
                    count=count,
                    share=count / done,
                    message=message,
                    run=self._stores[source][0].key,
                    episode=id,
                    filter=f'outcome.limit == "{limit}" && outcome.failure == ""'
                    if failure is None
                    else f'outcome.failure == "{failure}" && outcome.blame == "{blame}"',
                )
                for source, failure, blame, state, limit, count, _, id, message in self._index.connection.execute(query)
            ]

    def totals(self, filter: str | None = None, text: str | None = None) -> Totals:
        """Return counts and mean rewards over the list. Raises: StoreError: the filter is not valid."""
        with self._lock:
            chosen = self._choose(filter, text, details=False)
            counted = self._index.connection.execute(
                "SELECT count(*), sum(status = 'done'), sum(coalesce(solved, 0)), sum(failure IS NOT NULL), "
                "sum(failure IS NULL AND \"limit\" IS NOT NULL), avg(CASE WHEN status = 'done' THEN reward END) "
                f"{self._from(chosen)}"
            ).fetchone()
            episodes, *sums, reward = counted
            done, solved, failed, limited = (total or 0 for total in sums)
            return Totals(episodes=episodes, done=done, solved=solved, failed=failed, limited=limited, reward=reward)

    def group(self, run: str, task: str) -> list[Row]:
        """Return the samples of a task, in order.

        Raises:
            StoreError: there is no such run or task.
        """
        rows = self._of(run, "task_id", task)
        if not rows:
            raise StoreError(f"{run} has no task `{task}`")
        return rows

    def row(self, run: str, episode: str) -> Row:
        """Return one episode.

        Raises:
            StoreError: there is no such run or episode.
        """
        rows = self._of(run, "id", episode)
        if not rows:
            raise StoreError(f"{run} has no episode `{episode}`")
        return rows[0]

    def _of(self, run: str, column: str, value: str) -> list[Row]:
        """The episodes of a run with a value in a column of the index, in order."""
        with self._lock:
            number = self._number(run)
            self._refresh()
            query = f"SELECT source, {EPISODE} FROM episodes WHERE source = ? AND {column} = ?"
            return self._rows(f"{query} ORDER BY task_index, sample_index, number", (number, value))

    def neighbours(
        self,
        run: str,
        episode: str,
        filter: str | None = None,
        text: str | None = None,
        sort: str = "order",
        descending: bool = False,
    ) -> Neighbours:
        """Return the episodes before and after one in the list that `page` shows with the same arguments.

        Raises:
            StoreError: as `page`.
        """
        keys = self.keys(filter, text, sort, descending)
        at = keys.index((run, episode)) if (run, episode) in keys else -1
        return Neighbours(
            previous=keys[at - 1] if at > 0 else None,
            next=keys[at + 1] if 0 <= at < len(keys) - 1 else None,
            position=at,
            total=len(keys),
        )

    def keys(
        self, filter: str | None = None, text: str | None = None, sort: str = "order", descending: bool = False
    ) -> list[tuple[str, str]]:
        """Return (run, episode) of the whole list, in the order of `page`. Raises: StoreError, as `page`."""
        with self._lock:
            order, parameters, details = _order(sort, descending)
            chosen = self._choose(filter, text, details=details)
            query = f"SELECT e.source, id {self._from(chosen)} ORDER BY {order}"
            names = {number: source.key for number, (source, _) in self._stores.items()}
            return [(names[source], id) for source, id in self._index.connection.execute(query, parameters)]

    def prepare(self) -> None:
        """Read everything that filters need, so that the next query is fast. Safe to call in a thread of its own."""
        while True:
            with self._lock:
                self._refresh()
                missing = self._index.missing(list(self._stores), CHUNK)
                if not missing:
                    return
                for number, episodes in missing.items():
                    self._index.detail(number, self._stores[number][1], episodes)

    # --- the index ---

    def _number(self, run: str) -> int:
        for number, (source, _) in self._stores.items():
            if source.key == run:
                return number
        keys = ", ".join(source.key for source in self.sources[:5])
        raise StoreError(f"there is no run `{run}` in this list; it has {keys}")

    def _open_new(self) -> None:
        """Open stores that are not open yet: a training that goes on makes one for each evaluation."""
        for source, store in open_stores(self._paths, self.sources):
            self._stores[self._index.add(source, store)] = (source, store)

    def _refresh(self) -> None:
        self._open_new()
        for number, (source, store) in self._stores.items():
            if self._index.refresh(number, source, store):
                self._matched = None

    def _choose(self, filter: str | None, text: str | None, *, details: bool) -> Matching | None:
        """Update the index and choose episodes into the table `matching`; None: all of them."""
        guard = compile_filter(filter, "filter", LISTING_VARIABLES) if filter and filter.strip() else None
        self._refresh()
        if details or (guard is not None and not guard.names <= {"task", "limits", "run"}):
            for number, episodes in self._index.missing(list(self._stores)).items():
                self._index.detail(number, self._stores[number][1], episodes)
        wanted = (filter or "", text or "")
        if guard is None and not text:
            return None
        if self._matched is None or self._matched[0] != wanted:
            chosen = matching(self._index, self._stores, guard, text or "")
            connection = self._index.connection
            connection.execute(
                "CREATE TEMP TABLE IF NOT EXISTS matching (source INTEGER, number INTEGER, PRIMARY KEY (source, "
                "number)) WITHOUT ROWID"
            )
            connection.execute("BEGIN")
            connection.execute("DELETE FROM matching")
            connection.executemany("INSERT INTO matching VALUES (?, ?)", chosen.keys)
            connection.execute("COMMIT")
            self._matched = (wanted, chosen)
        return self._matched[1]

    def _from(self, chosen: Matching | None) -> str:
        """The tables and the condition of a query over the list; `AND …` may follow."""
        if chosen is not None:
            return "FROM matching JOIN episodes e USING (source, number) WHERE TRUE"
        return f"FROM episodes e WHERE e.source IN ({', '.join(map(str, self._stores))})"

    def _rows(self, query: str, parameters: tuple[Any, ...]) -> list[Row]:
        """Run a query for `source` and `EPISODE`, with the details of its rows."""
        rows = self._index.connection.execute(query, parameters).fetchall()
        numbers: dict[int, list[int]] = {}
        for source, number, *_ in rows:
            numbers.setdefault(source, []).append(number)
        missing = {source: self._index.missing_of(source, of_source) for source, of_source in numbers.items()}
        for source, undone in missing.items():
            self._index.detail(source, self._stores[source][1], undone)
        if any(missing.values()):
            rows = self._index.connection.execute(query, parameters).fetchall()
        fields = {
            source: _task_fields(self._stores[source][1], {row[3] for row in rows if row[0] == source})
            for source in numbers
        }
        return [row_of(self._stores[source][0].key, row, fields[source][row[2]]) for source, *row in rows]


def _task_fields(store: RunReader, tasks: set[str]) -> dict[str, Any]:
    marks = ", ".join("?" * len(tasks))
    with store.snapshot() as connection:
        rows = connection.execute(f"SELECT id, fields FROM tasks WHERE id IN ({marks})", tuple(tasks)).fetchall()
    with decoding(store.path, "tasks"), damaged("the fields of a task"):
        return {task: from_json(fields) for task, fields in rows}


def _order(sort: str, descending: bool) -> tuple[str, tuple[str, ...], bool]:
    """The SQL of a sort key, its parameters, and whether it needs details."""
    way = "DESC" if descending else "ASC"
    tail = "e.source, task_index, sample_index, number"
    if sort.startswith("reward:"):
        path = '$."' + sort.removeprefix("reward:").replace('"', "") + '"'
        return f"json_extract(e.rewards, ?) {way} NULLS LAST, {tail}", (path,), True
    if sort not in _SORTS:
        raise StoreError(f"cannot sort by `{sort}`; the names are {', '.join(SORTS)}")
    columns, details = _SORTS[sort]
    return f"{', '.join(f'{column} {way} NULLS LAST' for column in columns.split(', '))}, {tail}", (), details
