"""Rows -> tasks, whatever they come from.

Invariant: a task that comes out has an id that no other has and every field of `tasks.map`; the first row that
cannot become one is named by its number and, where it stands in a file, by its line. Rows are read one by one
and no further than `tasks.limit`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import SpecError
from engine.schemas.environment import Task
from engine.schemas.tasks import TasksSpec
from engine.spec.access import OUTSIDE_FIX
from engine.spec.conversation import RowError, conversation_of, tools_of
from engine.spec.diagnostic import DataPath, Diagnostic, Origin
from engine.spec.entry import EntryError, load_entry
from engine.spec.near import near_or_known, nearest_name, short
from engine.spec.row_values import find, plain
from engine.storable import refusal, stored_fields, words_of

if TYPE_CHECKING:
    from engine.spec.load import LoadedSpec

TASKS: DataPath = ("tasks",)

MAX_COUNTED = 100_000
"""Rows of a function that are counted: some never end."""
MAX_READ = 256 * 2**20
"""Bytes of a file whose rows are counted."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a source, and where it stands."""

    number: int
    """From 1, as `row 3` in messages."""
    fields: Any
    origin: Origin | None
    """Its line in a file, where it has one."""


def load_tasks(loaded: LoadedSpec) -> list[Task]:
    """Every task of a spec, in the order of its source.

    Raises:
        SpecError: the source cannot be read, a row is not a mapping, lacks a mapped field or its id, or two rows
            share an id. Only the first bad row is reported.
    """
    spec = loaded.spec.tasks
    tasks: list[Task] = []
    seen: dict[str, int] = {}
    for index, row in enumerate(rows_of(loaded, spec.limit)):
        task = task_of(row, index, spec, loaded)
        if task.id in seen:
            raise _fault(
                loaded,
                "tasks.duplicate-id",
                f"rows {seen[task.id]} and {row.number} share the id `{task.id}`",
                "name a field of unique values under `tasks.id`, or leave it out",
                row.origin or loaded.origin((*TASKS, "id")),
            )
        seen[task.id] = row.number
        tasks.append(task)
    if not tasks:
        raise _fault(loaded, "tasks.empty", "the task source has no rows", None, loaded.origin(TASKS, key=True))
    return tasks


def count_tasks(loaded: LoadedSpec) -> int | None:
    """How many tasks a spec has; for a data set on the hub, no more is said than `tasks.limit`.

    The same holds for a function whose code may not be imported.

    Raises:
        SpecError: the source is not there, or its function fails.
    """
    spec = loaded.spec.tasks
    found: int | None = None
    if spec.source == "inline":
        found = len(spec.rows or [])
    elif spec.source == "jsonl":
        file = task_file(loaded)
        if file.stat().st_size > MAX_READ:
            return spec.limit
        with loaded.access.open(file) as stream:
            found = sum(1 for line in stream if line.strip())
    elif spec.source == "parquet":
        found = _parquet_rows(parquet_files(loaded))
    elif spec.source == "python" and loaded.access.imports:
        found = sum(1 for _ in rows_of(loaded, spec.limit or MAX_COUNTED + 1))
        found = found if found <= MAX_COUNTED else None
    if found is None:
        return spec.limit
    return found if spec.limit is None else min(found, spec.limit)


def parquet_files(loaded: LoadedSpec) -> list[Path]:
    """The files that `tasks.path` means where it names a Parquet file, or a folder of such.

    Raises:
        SpecError: it is not there, or one of them may not be opened.
    """
    path = task_file(loaded)
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    for file in files:
        if not loaded.access.is_file(file):
            message = f"`{short(file.name)}` is no regular file that may be opened"
            raise _fault(loaded, "tasks.bad-file", message, OUTSIDE_FIX, loaded.origin((*TASKS, "path")))
    return files


def _parquet_rows(files: list[Path]) -> int | None:
    """By the files' own footers."""
    import pyarrow
    import pyarrow.parquet

    try:
        return sum(int(pyarrow.parquet.read_metadata(file).num_rows) for file in files)
    except (OSError, pyarrow.ArrowException):
        return None


def task_of(row: Row, index: int, spec: TasksSpec, loaded: LoadedSpec) -> Task:
    """A row as a task.

    Raises:
        SpecError: it cannot be one.
    """
    where = f"row {row.number}"
    if not isinstance(row.fields, Mapping) or not all(isinstance(key, str) for key in row.fields):
        kind = type(row.fields).__name__
        fault = f"{where} is no mapping of names to values, but {kind}"
        raise _fault(loaded, "tasks.bad-row", fault, None, row.origin or loaded.origin(TASKS))
    fields = {key: plain(value) for key, value in row.fields.items()}
    problem = refusal(stored_fields(fields))
    if problem is not None:
        at = row.origin or loaded.origin(TASKS)
        raise _fault(loaded, "tasks.bad-row", f"{where} cannot be stored: {problem}", None, at)
    for name, source in spec.map.items():
        if not find(source, fields)[0]:
            fault, fix = f"{where} has no field `{source}`", _near(source, fields)
            raise _fault(loaded, "tasks.missing-field", fault, fix, row.origin or loaded.origin((*TASKS, "map", name)))
    mapped = {name: find(source, fields)[1] for name, source in spec.map.items()} if spec.map else fields
    _check_conversation(row, mapped, loaded)
    user = _user(row, fields, spec, loaded) if spec.user is not None else None
    return Task(id=_id(row, index, fields, spec, loaded), index=index, fields=mapped, user=user)


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
        fault = f"`{source.field}` ends with a message of the assistant, and the model replies next"
        fix = "remove that message from the row"
    except RowError as error:
        fault = str(error)
        if not find(source.field, fields)[0]:
            fix = _near(source.field, fields)
    raise _fault(loaded, "tasks.bad-row", f"row {row.number}: {fault}", fix, row.origin or loaded.origin(TASKS))


def _user(row: Row, fields: Mapping[str, Any], spec: TasksSpec, loaded: LoadedSpec) -> str:
    """The name in the field that `tasks.user` names: one of `users`."""
    at = row.origin or loaded.origin((*TASKS, "user"))
    there, name = find(str(spec.user), fields)
    if not there:
        fault = f"row {row.number} has no field `{spec.user}`, which `tasks.user` names"
        raise _fault(loaded, "tasks.missing-field", fault, _near(str(spec.user), fields), at)
    known = loaded.spec.users
    if not isinstance(name, str) or name not in known:
        near = get_close_matches(str(name), list(known), n=1)
        fix = f"did you mean `{near[0]}`?" if near else f"`users` has {', '.join(known)}"
        raise _fault(loaded, "tasks.unknown-user", f"row {row.number}: there is no user {name!r}", fix, at)
    return name


def _id(row: Row, index: int, fields: Mapping[str, Any], spec: TasksSpec, loaded: LoadedSpec) -> str:
    if spec.id is None:
        return str(index)
    at = row.origin or loaded.origin((*TASKS, "id"))
    there, value = find(spec.id, fields)
    if not there:
        fault = f"row {row.number} has no field `{spec.id}`, which `tasks.id` names"
        raise _fault(loaded, "tasks.missing-field", fault, _near(spec.id, fields), at)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        fault = f"row {row.number}: the id `{spec.id}` must be text or a whole number; it is {value!r}"
        raise _fault(loaded, "tasks.bad-row", fault, None, at)
    return str(value)


def rows_of(loaded: LoadedSpec, limit: int | None = None) -> Iterator[Row]:
    """The source's rows, read as they are asked for.

    Raises:
        SpecError: the source, or a row of it, cannot be read.
    """
    rows = _SOURCES[loaded.spec.tasks.source](loaded, limit)
    return rows if limit is None else islice(rows, limit)


def _inline(loaded: LoadedSpec, limit: int | None) -> Iterator[Row]:
    for index, fields in enumerate(loaded.spec.tasks.rows or []):
        yield Row(index + 1, fields, loaded.origin((*TASKS, "rows", index)))


def task_file(loaded: LoadedSpec) -> Path:
    """The file that `tasks.path` names.

    Raises:
        SpecError: it is not there.
    """
    named = loaded.spec.tasks.path or ""
    path = loaded.resolve(named, (*TASKS, "path"))
    at = loaded.origin((*TASKS, "path"))
    near: str | None = None
    try:
        if not loaded.access.allows(path):
            raise _fault(loaded, "tasks.no-file", f"`{short(named)}` lies outside of what is read", OUTSIDE_FIX, at)
        if path.is_file() or (path.is_dir() and loaded.spec.tasks.source == "parquet"):
            return path
        if path.exists():
            raise _fault(loaded, "tasks.no-file", f"`{short(named)}` is no file of rows", f"looked at {path}", at)
        if loaded.access.is_dir(path.parent):
            near = nearest_name(path.name, (item.name for item in path.parent.iterdir()))
    except OSError as error:
        fault = f"the task file `{short(named)}` cannot be had: {error.strerror}"
        raise _fault(loaded, "tasks.no-file", fault, None, at) from error
    fix = f"did you mean `{Path(named).parent / near}`?" if near else f"looked for {path}"
    raise _fault(loaded, "tasks.no-file", f"the task file `{named}` does not exist", fix, at)


def _jsonl(loaded: LoadedSpec, limit: int | None) -> Iterator[Row]:
    path = task_file(loaded)
    number = 0
    try:
        with loaded.access.open(path) as stream:
            for line, data in enumerate(stream, start=1):
                if not data.strip():
                    continue
                number += 1
                yield Row(number, _json(data, number, Origin(str(path), line, 1), loaded), Origin(str(path), line, 1))
    except OSError as error:
        fault = f"the task file `{path}` cannot be read: {error.strerror}"
        raise _fault(loaded, "tasks.no-file", fault, None, loaded.origin((*TASKS, "path"))) from error


def _json(data: bytes, number: int, origin: Origin, loaded: LoadedSpec) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig" if origin.line == 1 else "utf-8").rstrip())
    except UnicodeDecodeError as error:
        raise _fault(
            loaded, "tasks.bad-row", f"row {number} is not UTF-8 (byte {error.start})", None, origin
        ) from error
    except json.JSONDecodeError as error:
        at = Origin(origin.file, origin.line, error.colno)
        raise _fault(loaded, "tasks.bad-row", f"row {number} is no JSON: {error.msg}", None, at) from error
    except (ValueError, RecursionError) as error:
        raise _fault(loaded, "tasks.bad-row", f"row {number} is no usable JSON: {error}", None, origin) from error


def _parquet(loaded: LoadedSpec, limit: int | None) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    for file in parquet_files(loaded):
        try:
            with pyarrow.parquet.ParquetFile(file) as table:
                for batch in table.iter_batches(batch_size=min(limit or 1024, 1024)):
                    for fields in batch.to_pylist():
                        number += 1
                        yield Row(number, fields, None)
        except (OSError, pyarrow.ArrowException) as error:
            fault = f"`{file}` cannot be read as Parquet: {error}"
            raise _fault(loaded, "tasks.bad-file", fault, None, loaded.origin((*TASKS, "path"))) from error


def _hub(loaded: LoadedSpec, limit: int | None) -> Iterator[Row]:
    spec = loaded.spec.tasks
    at = loaded.origin((*TASKS, "path"))
    _may_import(loaded, at)
    try:
        import datasets
    except ImportError as error:
        fix = "pip install 'episode-engine[hub]'"
        raise _fault(loaded, "tasks.hub", "`source: hub` needs the package `datasets`", fix, at) from error
    named = str(spec.path)
    local = loaded.resolve(named, (*TASKS, "path"))
    number = 0
    try:
        table = datasets.load_dataset(
            str(local) if local.exists() else named, spec.name, split=spec.split, streaming=limit is not None
        )
        for fields in table:
            number += 1
            yield Row(number, fields, None)
    except Exception as error:  # the library raises whatever its transports raise
        fault = f"row {number + 1} of the data set `{named}` (split `{spec.split}`) cannot be had: {words_of(error)}"
        raise _fault(loaded, "tasks.hub", fault, "check `path`, `name` and `split`", at) from error


def _python(loaded: LoadedSpec, limit: int | None) -> Iterator[Row]:
    spec = loaded.spec.tasks
    use = str(spec.use)
    at = loaded.origin((*TASKS, "use"))
    _may_import(loaded, at)
    try:
        source = load_entry(use, loaded.base)
    except EntryError as error:
        raise _fault(loaded, "world.import", str(error), None, at) from error
    number = 0
    try:
        rows: Iterable[Any] = source(**spec.with_)
        for fields in rows:
            number += 1
            yield Row(number, fields, None)
    except Exception as error:  # whatever the user's own code raises
        fault = f"`{use}` failed at row {number + 1}: {words_of(error)}"
        raise _fault(loaded, "tasks.python", fault, None, at) from error


_SOURCES: dict[str, Callable[[LoadedSpec, int | None], Iterator[Row]]] = {
    "inline": _inline,
    "jsonl": _jsonl,
    "parquet": _parquet,
    "hub": _hub,
    "python": _python,
}


def _may_import(loaded: LoadedSpec, at: Origin) -> None:
    """Refuse sources whose rows are made by code."""
    if not loaded.access.imports:
        raise _fault(loaded, "tasks.python", "these rows are made by code, which is not run here", "add `--import`", at)


def _near(name: str, fields: Mapping[str, Any]) -> str:
    return near_or_known(name, list(fields), what="its fields")


def _fault(loaded: LoadedSpec, rule: str, message: str, fix: str | None, origin: Origin | None) -> SpecError:
    return SpecError([Diagnostic(rule, "error", message, fix, origin or loaded.origin(TASKS), TASKS)])
