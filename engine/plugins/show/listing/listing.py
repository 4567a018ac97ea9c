"""A list of the episodes of one or several stores: pages, filters, text search, causes of failures, neighbours.

    with Listing([find("latest")]) as listing:
        page = listing.page('outcome.reward < 0.5 && task.level == "hard"', "sorry", "reward", False, 0, 50)
        listing.causes()

Stores may be running: every method reads their newest state. Stores are only read. What a filter chose is kept in a
temporary file as long as no store changes, so the next page needs no evaluation.
"""

from __future__ import annotations

import heapq
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, suppress
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, cast

from msgspec.structs import replace

from engine.errors import EngineError, StoreError
from engine.machine.guards import Guard
from engine.plugins.show.listing.filters import LISTING_VARIABLES, Matching, choose, condition_of, listed, tables_of
from engine.plugins.show.listing.heads import Contents, EpisodeHead, excerpts, planned_excerpts, read_head
from engine.plugins.show.listing.rows import EPISODE, MADE, Cause, Neighbours, Page, Row, Totals, row_of
from engine.plugins.show.listing.sources import Source, is_training, open_stores, stores_of
from engine.plugins.show.listing.training import sampled_tasks
from engine.store.codec import damaged
from engine.store.episode_filter import compile_filter
from engine.store.reader import RunReader
from engine.store.reading import decoding
from engine.store.reviews import FACT
from engine.store.training import BATCHES

if TYPE_CHECKING:
    from engine.schemas.trajectory import Trajectory

_TAIL = ["task_index", "sample_index", "e.number"]
_PLACES = ("order", "run", "episode")
"""The sort keys that are places of episodes, which have no columns of their own."""
_SORTS: dict[str, list[str]] = {
    **{name: [] for name in _PLACES},
    **{name: [name] for name in ("state", "failure", "blame", "reward", "turns", "tokens", "started", "ended", "seed")},
    **{name: [MADE[name]] for name in ("version", "branches", "images", "cost")},
    "task": ["e.task_id"],
    "sample": ["sample_index"],
    "status": ["e.status"],
    "outcome": ["failure IS NULL", "failure", "blame", '"limit" IS NULL', '"limit"', "solved", "event"],
    "limit": ['"limit"'],
    "turns.user": [MADE["user_turns"]],
    "turns.tool": [MADE["tool_calls"]],
    "tokens.trained": [MADE["trained"]],
    "tokens.total": [MADE["total"]],
    "tokens.context": [MADE["context"]],
    "seconds": ["ended - started"],
    "step": ["coalesce(:step, p.step)"],
    "attempt": ["e.attempt"],
}
"""The SQL of each sort key, before the order of tasks and samples. `reward:NAME` sorts by one reward."""
SORTS = (*_SORTS, "reward:NAME")
"""The names that `Listing.page` can sort by."""
_COUNTS = (
    "SELECT count(*), total(e.status = 'done'), total(solved), count(failure), count(CASE WHEN failure IS NULL THEN "
    '"limit" END), count(reward), total(reward), count(*) - count({decides}) {}'
)
_AT_ONCE = 4096
"""Rows of one query of `Listing._rows`."""
_SETTLED = 2_000_000_000
"""Age in ns of the newest write after which equal file times mean equal content: times of files have a resolution."""
_SIDE = """
CREATE TABLE chosen (source INTEGER, number INTEGER, PRIMARY KEY (source, number)) WITHOUT ROWID;
CREATE TABLE steps (source INTEGER, task TEXT, step INTEGER, PRIMARY KEY (source, task)) WITHOUT ROWID;
"""


class Listing(AbstractContextManager["Listing"]):
    """Episodes of stores. Methods may be called from several threads; they take turns.

    Args:
        paths: Folders of runs and trainings, from `engine.plugins.show.listing.sources.find`; none: an empty list.
        stores: Stores that are open already.

    Raises:
        StoreError: a store cannot be read, or the folders have none.
    """

    def __init__(self, paths: Iterable[Path | str], stores: Iterable[tuple[Source, RunReader]] = ()) -> None:
        self._lock = threading.RLock()
        self._paths = [Path(path).absolute() for path in paths]
        self._stores = dict(enumerate(stores))
        if self._paths:
            self._open(self._paths)
        self._folder = TemporaryDirectory(prefix="episode-engine-list-")
        self._side = str(Path(self._folder.name) / "list.db")
        with closing(sqlite3.connect(self._side)) as connection:
            connection.executescript(_SIDE)
        self._chosen: tuple[Any, Matching] | None = None
        self._state: tuple[Any, ...] | None = None
        self._counted: tuple[Matching | None, Any, Totals | None] = (None, None, None)
        self._steps: dict[int, Any] = {}
        self._seen: dict[int, Any] = {}

    def close(self) -> None:
        """Remove the temporary file."""
        self._folder.cleanup()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def sources(self) -> list[Source]:
        """The stores, in the order in which they were given; of a training that goes on, those of the newest query."""
        return [source for source, _ in self._stores.values()]

    @property
    def trainings(self) -> list[Path]:
        """The folders of its trainings, sorted by name, also of those that have no episodes."""
        return sorted(
            {
                *(path for path in self._paths if is_training(path)),
                *(Path(source.training) for source in self.sources if source.training is not None),
            }
        )

    def add(self, paths: Iterable[Path]) -> list[str]:
        """Add runs and trainings that are not in the list; return why others cannot be read."""
        problems = []
        with self._lock:
            for path in (path.absolute() for path in paths if path.absolute() not in self._paths):
                try:
                    if not is_training(path) or stores_of(path):
                        self._open([path])
                    self._paths.append(path)
                except EngineError as error:
                    problems.append(str(error))
        return problems

    def only(self, name: str) -> Listing:
        """Return the list of one store, named by its key, or of one training, named by its folder.

        Raises:
            StoreError: there is none.
        """
        with self._lock:
            folder = next((folder for folder in self.trainings if folder.name == name), None)
            if folder is None:
                return Listing((), [self._stores[self._number(name)]])
            return Listing([folder], [pair for pair in self._stores.values() if pair[0].training == str(folder)])

    def statuses(self) -> dict[str, str]:
        """The status of each store now, by its key. The file of one that has not changed is not read again."""
        with self._lock:
            for number, (source, store) in self._stores.items():
                state = _states(store)
                if self._seen.get(number) != state or source.status == "running":
                    self._seen[number] = state
                    self._stores[number] = replace(source, status=store.status), store
            return {source.key: source.status for source in self.sources}

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
            _order(sort)  # a wrong key is an error before anything is read
            matching = self._choose(filter, text)
            keys = [key[:2] for key in self._ordered(matching, sort, descending, offset, limit)]
            total = self._totals(matching).episodes
            skipped, because = (0, None) if matching is None else (matching.skipped, matching.because)
            return Page(rows=self._rows(keys), total=total, skipped=skipped, skipped_because=because)

    def query(self, query: str, filter: str, text: str, **parameters: Any) -> list[tuple[Any, ...]]:
        """Return the rows that a query has in each store of the list, one store after another. `{}` stands for its
        tables (`tables_of`) and the condition of the list.

        Raises:
            StoreError: the filter is not valid.
        """
        with self._lock:
            return [*chain(*self._each(query, self._choose(filter, text), **parameters))]

    def heads(self, filter: str, text: str, most: int) -> list[Trajectory]:
        """Return finished episodes of the list with content, evenly chosen, about so many.

        Raises:
            StoreError: the filter is not valid.
        """
        with self._lock:
            matching = self._choose(filter, text)
            stride = max(1, self._totals(matching).done // most)
            query = "SELECT e.number {} AND e.status = 'done' AND e.number % :stride = 0 LIMIT :most"
            found: list[Trajectory] = []
            for number in self._stores:
                numbers = [row[0] for row in self._of_store(number, query, matching, {"stride": stride, "most": most})]
                with closing(Contents(self._stores[number][1])) as contents:
                    for episode in numbers[: most - len(found)]:
                        with suppress(StoreError):  # it was dropped, or is damaged
                            found.append(read_head(contents.text(episode)))
            return found

    def excerpts(self, rows: Sequence[Row], text: str) -> list[dict[str, Any]]:
        """Return the texts of each row; see `heads.excerpts`."""
        texts: dict[tuple[str, str], dict[str, Any]] = {}
        with self._lock:
            for run in dict.fromkeys(row.run for row in rows):
                store = self.store(run)
                ended = [row.episode for row in rows if row.run == run and row.status == "done"]
                with store.snapshot() as connection, closing(Contents(store)) as contents:
                    query = f"SELECT id, number FROM episodes WHERE id IN ({', '.join('?' * len(ended))})"
                    for episode, number in connection.execute(query, ended):
                        with suppress(StoreError):  # it was dropped, or is damaged
                            texts[run, episode] = excerpts(cast(EpisodeHead, read_head(contents.text(number))), text)
        return [texts.get((row.run, row.episode)) or planned_excerpts(row.task_fields) for row in rows]

    def causes(self, filter: str | None = None, text: str | None = None) -> list[Cause]:
        """Return the failures of the list by kind and blame, and the episodes that limits ended, the largest count
        first.

        Raises:
            StoreError: the filter is not valid.
        """
        with self._lock:
            matching = self._choose(filter, text)
            totals = self._totals(matching)
            if not totals.failed + totals.limited:  # no need to look at each episode again
                return []
            query = (
                'SELECT :source, failure, blame, CASE WHEN failure IS NULL THEN "limit" END AS ended_by, count(*), '
                "min(task_index * 1000000000 + sample_index), e.number {} AND e.status = 'done' AND (failure IS NOT "
                'NULL OR "limit" IS NOT NULL) GROUP BY failure, blame, ended_by'
            )
            groups: dict[tuple[Any, ...], tuple[int, int, tuple[int, int]]] = {}
            for source, *cause, count, order, number in chain(*self._each(query, matching)):
                others, first, key = groups.get(tuple(cause), (0, order, (source, number)))
                groups[tuple(cause)] = (count + others, *((order, (source, number)) if order < first else (first, key)))
            rows = dict(zip(groups, self._rows([key for _, _, key in groups.values()]), strict=True))
            ranked = sorted(
                groups, key=lambda cause: (-groups[cause][0], *((word is not None, word or "") for word in cause))
            )
            return [
                Cause(
                    failure=failure,
                    blame=blame,
                    state=rows[failure, blame, limit].failed_state,
                    limit=limit,
                    count=groups[failure, blame, limit][0],
                    share=groups[failure, blame, limit][0] / totals.done,
                    message=rows[failure, blame, limit].message,
                    run=rows[failure, blame, limit].run,
                    episode=rows[failure, blame, limit].episode,
                    filter=f'outcome.limit == "{limit}" && outcome.failure == ""'
                    if failure is None
                    else f'outcome.failure == "{failure}" && outcome.blame == "{blame}"',
                )
                for failure, blame, limit in ranked
            ]

    def totals(self, filter: str | None = None, text: str | None = None) -> Totals:
        """Return counts and mean rewards over the list. Raises: StoreError: the filter is not valid."""
        with self._lock:
            return self._totals(self._choose(filter, text))

    def group(self, run: str, task: str) -> list[Row]:
        """Return the samples of a task, in order.

        Raises:
            StoreError: there is no such run or task.
        """
        return self._of(run, "task", task)

    def row(self, run: str, episode: str) -> Row:
        """Return one episode.

        Raises:
            StoreError: there is no such run or episode.
        """
        return self._of(run, "episode", episode)[0]

    def _of(self, run: str, what: Literal["task", "episode"], id: str) -> list[Row]:
        """The episodes of a task, or one episode. Raises: StoreError: there is none."""
        with self._lock:
            source = self._number(run)
            self._refresh()
            # a task's episodes are next to each other in the index of the order
            of_task = "task_index = (SELECT position FROM tasks WHERE id = ?1) AND task_id = ?1"
            where = of_task if what == "task" else "id = ?1"
            query = f"SELECT e.number FROM episodes e WHERE {where} ORDER BY {', '.join(_TAIL)}"
            with self._stores[source][1].snapshot() as connection:
                keys = [(source, number) for (number,) in connection.execute(query, (id,))]
            if not keys:
                raise StoreError(f"{run} has no {what} `{id}`")
            return self._rows(keys)

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
        with self._lock:
            wanted = (self._number(run), episode)
            position, total = -1, 0
            newest = before = after = None
            for source, _, id in self._ordered(self._choose(filter, text), sort, descending):
                if (source, id) == wanted:
                    position, before = total, newest
                elif total == position + 1 > 0:
                    after = source, id
                newest = source, id
                total += 1
            previous, next = (None if key is None else (self._stores[key[0]][0].key, key[1]) for key in (before, after))
            return Neighbours(previous=previous, next=next, position=position, total=total)

    def keys(
        self, filter: str | None = None, text: str | None = None, sort: str = "order", descending: bool = False
    ) -> list[tuple[str, str]]:
        """Return (run, episode) of the whole list, in the order of `page`. Raises: StoreError, as `page`."""
        with self._lock:
            names = {number: source.key for number, (source, _) in self._stores.items()}
            return [
                (names[source], id) for source, _, id in self._ordered(self._choose(filter, text), sort, descending)
            ]

    # --- stores ---

    def _number(self, run: str) -> int:
        for number, (source, _) in self._stores.items():
            if source.key == run:
                return number
        keys = ", ".join(source.key for source in self.sources[:5])
        raise StoreError(f"there is no run `{run}` in this list; it has {keys}")

    def _open(self, paths: Iterable[Path]) -> None:
        """Open stores that are not open yet: a training that goes on makes one for each evaluation."""
        for pair in open_stores(paths, self.sources):
            self._stores[len(self._stores)] = pair

    def _refresh(self) -> tuple[Any, ...] | None:
        """Read what stores and trainings have since. Returns what is equal as long as nothing changes; None if that
        cannot be told yet."""
        if self._paths:
            self._open(self._paths)
        signatures: list[Any] = []
        for number, (source, store) in self._stores.items():
            store.refresh()
            files = [*_states(store), *map(_state, sorted(store.folder.glob("*.jsonl")))]  # logs, such as reviews
            if source.training is not None and source.step is None:
                file = Path(source.training) / BATCHES
                files.append(_state(file))
                if self._steps.get(number) != files[-1]:
                    self._steps[number] = files[-1]
                    steps = ((number, task, step) for step, tasks in sampled_tasks(file) for task in tasks)
                    with closing(sqlite3.connect(self._side)) as connection, connection:
                        connection.executemany("INSERT OR REPLACE INTO steps VALUES (?, ?, ?)", steps)
            signatures += files
        newest = max((changed for _, changed in signatures), default=0)
        return tuple(signatures) if time.time_ns() - newest > _SETTLED else None

    def _choose(self, filter: str | None, text: str | None) -> Matching | None:
        """Read the newest state, and choose episodes into the table `chosen`; None: all of them."""
        guard = compile_filter(filter, "filter", LISTING_VARIABLES) if filter and filter.strip() else None
        state = self._state = self._refresh()
        if guard is None and not text:
            return None
        wanted = (filter, text, state)
        if self._chosen is None or state is None or self._chosen[0] != wanted:
            matching = Matching()
            self._chosen = None
            if guard is not None and not text and self._counts_by_columns(matching, guard):
                self._chosen = (wanted, matching)
                return matching
            with closing(sqlite3.connect(self._side)) as connection, connection:
                connection.execute("DELETE FROM chosen")
            for number, (source, store) in self._stores.items():
                with listed(number, source, store, self._side) as (connection, parameters, contents):
                    choose(connection, parameters, contents, matching, (source, store), guard, text or "")
            if matching.skipped and matching.skipped == matching.evaluated:
                raise StoreError(f"filter: {matching.because}")
            self._chosen = (wanted, matching)
        return self._chosen[1]

    # --- queries of each store ---

    def _counts_by_columns(self, matching: Matching, guard: Guard) -> bool:
        """Count what a filter chooses in the same pass that evaluates it, and write nothing down. False: SQL cannot
        decide for each episode."""
        for number, about in self._stores.items():
            if (condition := condition_of(about, guard)) is None:
                return False
            matching.conditions[number] = condition
        counted = list(chain(*self._each(_COUNTS, matching)))
        if any(undecided for *_, undecided in counted):
            matching.conditions.clear()
            return False
        self._counted = (matching, self._state, _totals_of(counted))
        return True

    def _totals(self, matching: Matching | None) -> Totals:
        """The totals of what `_choose` returned; counted again when a store has changed."""
        of, state, totals = self._counted
        if totals is not None and of is matching and state is not None and state == self._state:
            return totals
        totals = _totals_of(chain(*self._each(_COUNTS, matching)))
        self._counted = (matching, self._state, totals)
        return totals

    def _each(self, query: str, matching: Matching | None, **more: Any) -> list[Iterator[tuple[Any, ...]]]:
        """The rows of a query over the list, by store. `{}` stands for its tables and its condition."""
        return [self._of_store(number, query, matching, more) for number in self._stores]

    def _of_store(
        self, number: int, query: str, matching: Matching | None, more: dict[str, Any]
    ) -> Iterator[tuple[Any, ...]]:
        tables, where, decides, values = "episodes e", "TRUE", "TRUE", dict[str, Any]()
        if matching is not None and matching.conditions:
            decides, values = matching.conditions[number]
            where = f"({decides}) IS NOT FALSE"
        elif matching is not None:
            tables, where = "side.chosen c JOIN episodes e ON e.number = c.number", "c.source = :source"
        of_list = f"{tables_of(tables, query, where, decides)} WHERE {where}"
        with listed(number, *self._stores[number], self._side) as (connection, parameters, _):
            of_filter = parameters | values
            if hidden := of_filter.keys() & more.keys():
                raise ValueError(f"parameters of a query that the list has too: {sorted(hidden)}")
            yield from connection.execute(query.format(of_list, decides=decides), of_filter | more)

    def _ordered(
        self, matching: Matching | None, sort: str, descending: bool, offset: int = 0, limit: int = -1
    ) -> Iterator[tuple[int, int, str]]:
        """(source, number, id) of the episodes of the list, in order."""
        columns, more = _order(sort)
        way = "DESC" if descending else "ASC"
        placed = sort in _PLACES
        terms = [f"{column} {way}" for column in _TAIL] if placed else [f"{c} {way} NULLS LAST" for c in columns]
        terms += [] if placed else _TAIL
        alone = len(self._stores) == 1
        most = limit if alone or limit < 0 else offset + limit
        query = (
            f"SELECT {', '.join((':source', 'e.number', 'e.id', *_TAIL[:2], *columns))} {{}} ORDER BY "
            f"{', '.join(terms)} LIMIT :most OFFSET :skip"
        )
        parts = self._each(query, matching, most=most, skip=offset if alone else 0, **more)

        def place(row: tuple[Any, ...]) -> Any:
            source, number, _, task, sample, *values = row
            tail = (source, task, sample, number) if sort in ("order", "run") else (task, sample, number)
            if placed:
                return _Place(tail, descending)
            return (
                [(value is None, _Place((isinstance(value, str), value), descending)) for value in values],
                source,
                *tail,
            )

        merged = parts[0] if alone else heapq.merge(*parts, key=place)
        for row in merged if alone else islice(merged, offset, None if limit < 0 else offset + limit):
            yield row[:3]

    def _rows(self, keys: Sequence[tuple[int, int]]) -> list[Row]:
        """The rows of (source, number) in the given order."""
        rows: dict[tuple[int, int], Row] = {}
        for source in dict.fromkeys(source for source, _ in keys):
            numbers = [number for of, number in keys if of == source]
            about, store = self._stores[source]
            with listed(source, about, store, self._side) as (connection, parameters, contents):
                for start in range(0, len(numbers), _AT_ONCE):
                    listing = ", ".join(map(str, numbers[start : start + _AT_ONCE]))
                    query = f"SELECT {EPISODE} {tables_of('episodes e', EPISODE)} WHERE e.number IN ({listing})"
                    for row in connection.execute(query, parameters):
                        live = contents.live(row[0], row[6]) if row[5] == "running" else {}
                        with decoding(store.path, "tasks"), damaged("the fields of a task"):
                            rows[source, row[0]] = row_of(about.key, row, live, contents.review_facts(row[1]).get(FACT))
        return [rows[key] for key in keys if key in rows]


def _totals_of(counted: Iterable[tuple[Any, ...]]) -> Totals:
    """The totals of a list, from the rows of `_COUNTS`."""
    *counts, reward, _ = (sum(values) for values in zip([0] * 8, *counted, strict=True))
    episodes, done, solved, failed, limited, rewarded = map(int, counts)
    return Totals(
        episodes=episodes,
        done=done,
        solved=solved,
        failed=failed,
        limited=limited,
        reward=reward / rewarded if rewarded else None,
    )


class _Place:
    """A place in an order that may be reversed."""

    __slots__ = ("descending", "value")

    def __init__(self, value: Any, descending: bool) -> None:
        self.value, self.descending = value, descending

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Place) and bool(self.value == other.value)

    def __lt__(self, other: _Place) -> bool:
        return bool(other.value < self.value if self.descending else self.value < other.value)


def _states(store: RunReader) -> list[tuple[int, int]]:
    """Size and time of the store's files."""
    return [_state(file) for file in (store.path, Path(f"{store.path}-wal"))]


def _state(file: Path) -> tuple[int, int]:
    """Size and time of a file; zeros if there is none."""
    with suppress(OSError):
        status = file.stat()
        return status.st_size, status.st_mtime_ns
    return 0, 0


def _order(sort: str) -> tuple[list[str], dict[str, str]]:
    """The columns of a sort key, and their parameters. Raises: StoreError: there is no such key."""
    if sort.startswith("reward:"):
        path = '$."' + sort.removeprefix("reward:").replace('"', "") + '"'
        return [f"json_extract({MADE['rewards']}, :path)"], {"path": path}
    if sort not in _SORTS:
        raise StoreError(f"cannot sort by `{sort}`; the names are {', '.join(SORTS)}")
    return _SORTS[sort], {}
