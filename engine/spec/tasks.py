"""Rows -> tasks, whatever they come from.

Invariant: a task that comes out has an id that no other has and every field of `tasks.map`; the first row that
cannot become one is named by its number and, where it stands in a file, by its line. Rows are read one by one
and, in the order of the source, no further than `tasks.limit`. None but those of `inline` and of a generator are held
in memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.schemas.environment import Task
from engine.schemas.tasks import TasksSpec
from engine.spec.conversation import RowError, conversation_of, tools_of
from engine.spec.rows.mix import TaskList, mixed_tasks
from engine.spec.rows.row import Row, RowFault, Rows, find, plain
from engine.spec.rows.sources import TASKS, fault, open_rows, row_files
from engine.spec.text.diagnostic import Origin
from engine.spec.text.near import near_or_known
from engine.storable import refusal, stored_fields

if TYPE_CHECKING:
    from engine.spec.load import LoadedSpec


MAX_COUNTED = 100_000
"""Rows of a function that are counted: some never end."""
MAX_READ = 256 * 2**20
"""Bytes of files whose rows are counted."""


class TaskTable(TaskList):
    """The tasks of one source, in the order in which they run. Rows are read when they are asked for.

    `positions` are those in the source of the rows that are tasks, in order, [count]; None for the first `count` rows.
    """

    def __init__(self, loaded: LoadedSpec, rows: Rows, positions: np.ndarray | None, count: int) -> None:
        self._loaded = loaded
        self._rows = rows
        self._positions = positions
        self._count = count

    def __len__(self) -> int:
        return self._count

    def _at(self, index: int) -> Task:
        position = index if self._positions is None else int(self._positions[index])
        with _row_faults(self._loaded):
            row = self._rows.row(position)
        return self._task(row)

    def __iter__(self) -> Iterator[Task]:
        if self._positions is None:
            with _row_faults(self._loaded):
                yield from map(self._task, islice(self._rows, self._count))
        else:
            yield from (self[at] for at in range(self._count))

    def chosen(self, places: np.ndarray) -> TaskTable:
        positions = places if self._positions is None else self._positions[places]
        return TaskTable(self._loaded, self._rows, positions, len(positions))

    def _task(self, row: Row) -> Task:
        return task_of(row, row.number - 1, self._loaded.spec.tasks, self._loaded)


def load_tasks(loaded: LoadedSpec) -> TaskList:
    """The tasks of a spec: those of its source or, mixed by weight, of its sources.

    Raises:
        SpecError: as `load_table`.
    """
    spec = loaded.spec.tasks
    if spec.mix is None:
        return load_table(loaded)
    tables = {name: load_table(source) for name, source in mixed_sources(loaded).items()}
    return mixed_tasks(tables, [one.weight for one in spec.mix.values()], seed=spec.shuffle, limit=spec.limit)


def mixed_sources(loaded: LoadedSpec) -> dict[str, LoadedSpec]:
    """The spec with each source of its mix as `tasks`, by name. A source has no more than `tasks.limit` tasks."""
    spec = loaded.spec.tasks
    tables = {}
    for name, source in spec.mixed().items():
        most = min((limit for limit in (source.limit, spec.limit) if limit is not None), default=None)
        tables[name] = loaded.with_tasks_of(source.model_copy(update={"limit": most}), (*TASKS, "mix", name))
    return tables


def load_table(loaded: LoadedSpec) -> TaskTable:
    """The tasks of one source: the rows of `split`, in the order of the source or of `shuffle`, the first `limit` of
    them.

    Every one of them is read once here, so that a bad row is found before the first episode.

    Raises:
        SpecError: the source cannot be read, a row is not a mapping, lacks a mapped field or its id, or two rows
            share an id. Only the first bad row is reported.
    """
    spec = loaded.spec.tasks
    count = 0
    with _row_faults(loaded):
        rows = open_rows(loaded, spec.limit)
        positions = _positions(loaded, rows)
        digests, places = array("Q"), array("Q")
        read: Iterable[Row] = islice(rows, spec.limit)
        if positions is not None:
            read = (rows.row(int(position)) for position in np.sort(positions))
        for row in read:
            task = task_of(row, row.number - 1, spec, loaded)
            count += 1
            if spec.id is not None:  # else it is the row's position
                digests.append(int.from_bytes(blake2b(task.id.encode(), digest_size=8).digest(), "big"))
                places.append(row.number - 1)
        _check_ids(loaded, rows, digests, places)
    if not count:
        raise fault(loaded, "tasks.empty", "the task source has no rows", None, loaded.origin(TASKS, key=True))
    return TaskTable(loaded, rows, positions, count)


def _check_ids(loaded: LoadedSpec, rows: Rows, digests: array[int], positions: array[int]) -> None:
    """Refuse two rows with one id, by digests: 16 bytes of memory a row."""
    numbers = np.frombuffer(digests, np.uint64)
    order = np.argsort(numbers, kind="stable")
    same = numbers[order][1:] == numbers[order][:-1]
    seen: dict[str, int] = {}
    for place in sorted({*order[:-1][same].tolist(), *order[1:][same].tolist()}):  # two ids may share a digest
        row = rows.row(positions[place])
        task = task_of(row, row.number - 1, loaded.spec.tasks, loaded)
        if task.id in seen:
            raise fault(
                loaded,
                "tasks.duplicate-id",
                f"rows {seen[task.id]} and {row.number} share the id `{task.id}`",
                "name a field of unique values under `tasks.id`, or leave it out",
                row.origin or loaded.origin((*TASKS, "id")),
            )
        seen[task.id] = row.number


def _positions(loaded: LoadedSpec, rows: Rows) -> np.ndarray | None:
    """Which rows are tasks, in the order in which they run; None: the first ones, in the order of the source."""
    spec = loaded.spec.tasks
    start, stop = spec.rows_of_split
    if start is None and stop is None and spec.shuffle is None:
        return None
    count = len(rows)
    positions = np.arange(*slice(_bound(start, count), _bound(stop, count)).indices(count))
    if spec.shuffle is not None:
        positions = positions[shuffled(len(positions), spec.shuffle)]
    return positions[: spec.limit]


def _bound(text: str | None, count: int) -> int | None:
    """An end of a split's slice: a number of rows, or a percentage that is rounded to the nearest row, as `datasets`
    does."""
    if text is None:
        return None
    return round(int(text[:-1]) * count / 100) if text.endswith("%") else int(text)


def shuffled(count: int, seed: int) -> np.ndarray:
    """A random order of `count` rows, int64 [count]. It depends on these two numbers alone, not on any library's
    version.

    The rows are sorted by the 64-bit numbers of SplitMix64 (Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom
    Number Generators"), one a row.
    """
    gamma = 0x9E3779B97F4A7C15
    first = int.from_bytes(blake2b(f"tasks.shuffle/{seed}".encode(), digest_size=8).digest(), "big")
    with np.errstate(over="ignore"):
        state = np.uint64(first) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(gamma)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(state ^ (state >> np.uint64(31)), kind="stable")


def count_tasks(loaded: LoadedSpec) -> int | None:
    """How many tasks a spec has; for a data set on the hub, no more is said than `tasks.limit`.

    The same holds for a function whose code may not be imported.

    Raises:
        SpecError: the source is not there, or its function fails.
    """
    spec = loaded.spec.tasks
    if spec.mix is not None:
        counts = [count_tasks(source) for source in mixed_sources(loaded).values()]
        if None in counts:
            return spec.limit
        total = sum(count for count in counts if count is not None)
        return total if spec.limit is None else min(total, spec.limit)
    if spec.facts.outside and not (spec.source == "python" and loaded.access.imports):
        return spec.limit
    if spec.source == "python":
        counted = sum(1 for _ in rows_of(loaded, spec.limit or MAX_COUNTED + 1))
        return counted if counted <= MAX_COUNTED else spec.limit
    if spec.source in ("jsonl", "csv") and sum(file.stat().st_size for file in row_files(loaded)) > MAX_READ:
        return spec.limit
    with _row_faults(loaded):
        rows = open_rows(loaded, None)
        positions = _positions(loaded, rows)
        count = len(rows) if positions is None else len(positions)
    return count if spec.limit is None else min(count, spec.limit)


def task_of(row: Row, index: int, spec: TasksSpec, loaded: LoadedSpec) -> Task:
    """A row as a task.

    Raises:
        SpecError: it cannot be one.
    """
    where, at = f"row {row.number}", row.origin or loaded.origin(TASKS)
    if not isinstance(row.fields, Mapping) or not all(isinstance(key, str) for key in row.fields):
        message = f"{where} is no mapping of names to values, but {type(row.fields).__name__}"
        raise fault(loaded, "tasks.bad-row", message, None, at)
    fields = {key: plain(value) for key, value in row.fields.items()}
    try:
        fields = fields if spec.preset is None else spec.preset.task_fields(fields)
    except ValueError as error:
        raise fault(loaded, "tasks.bad-row", f"{where}: {error}", None, at) from error
    if (problem := refusal(stored_fields(fields))) is not None:
        raise fault(loaded, "tasks.bad-row", f"{where} cannot be stored: {problem}", None, at)
    for name, source in spec.map.items():
        if not find(source, fields)[0]:
            message, fix = f"{where} has no field `{source}`", _near(source, fields)
            raise fault(loaded, "tasks.missing-field", message, fix, row.origin or loaded.origin((*TASKS, "map", name)))
    mapped = {name: find(source, fields)[1] for name, source in spec.map.items()} if spec.map else fields
    _check_conversation(row, mapped, loaded)
    id, user = str(index), None
    if spec.user is not None:
        user, at = _named_field(row, fields, "user", spec.user, loaded)
        users = loaded.spec.users
        if not isinstance(user, str) or user not in users:
            near = get_close_matches(str(user), list(users), n=1)
            fix = f"did you mean `{near[0]}`?" if near else f"`users` has {', '.join(users)}"
            raise fault(loaded, "tasks.unknown-user", f"{where}: there is no user {user!r}", fix, at)
    if spec.id is not None:
        value, at = _named_field(row, fields, "id", spec.id, loaded)
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            message = f"{where}: the id `{spec.id}` must be text or a whole number; it is {value!r}"
            raise fault(loaded, "tasks.bad-row", message, None, at)
        id = str(value)
    return Task(id=id, index=index, fields=mapped, user=user)


def _check_conversation(row: Row, fields: Mapping[str, Any], loaded: LoadedSpec) -> None:
    """Refuse a row whose own conversation cannot be shown, if the spec takes it from there."""
    source = loaded.spec.conversation
    if source is None:
        return
    fix: str | None = None
    try:
        messages = conversation_of(fields, source)
        tools_of(fields, source)
        if messages[-1].role != "assistant" or loaded.spec.environment is not None:
            return
        message = f"`{source.field}` ends with a message of the assistant, and the model replies next"
        fix = "remove that message from the row"
    except RowError as error:
        message = str(error)
        if not find(source.field, fields)[0]:
            fix = _near(source.field, fields)
    raise fault(loaded, "tasks.bad-row", f"row {row.number}: {message}", fix, row.origin or loaded.origin(TASKS))


def _named_field(row: Row, fields: Mapping[str, Any], key: str, name: str, loaded: LoadedSpec) -> tuple[Any, Origin]:
    """The value of the field that a key of `tasks` names, and the place of what is wrong with it."""
    at = row.origin or loaded.origin((*TASKS, key))
    there, value = find(name, fields)
    if not there:
        message = f"row {row.number} has no field `{name}`, which `tasks.{key}` names"
        raise fault(loaded, "tasks.missing-field", message, _near(name, fields), at)
    return value, at


def rows_of(loaded: LoadedSpec, limit: int | None = None) -> Iterator[Row]:
    """The rows of the one source that `tasks` names, from its first, read as they are asked for. `split` and `shuffle`
    choose among them later.

    Raises:
        SpecError: the source, or a row of it, cannot be read.
    """
    with _row_faults(loaded):
        yield from islice(open_rows(loaded, limit), limit)


@contextmanager
def _row_faults(loaded: LoadedSpec) -> Iterator[None]:
    """What is wrong with a row or its file, as a finding."""
    try:
        yield
    except RowFault as bad:
        origin = bad.origin or loaded.origin((*TASKS, "path"))
        raise fault(loaded, bad.rule, str(bad), None, origin) from bad


def _near(name: str, fields: Mapping[str, Any]) -> str:
    return near_or_known(name, list(fields), what="its fields")
