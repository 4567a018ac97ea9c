"""Rules about `tasks`: the source can be read, each row becomes a task, and each key is read with this source."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.errors import SpecError
from engine.schemas.tasks import PLUGIN_KEYS, all_sources
from engine.spec.load import LoadedSpec
from engine.spec.rows.sources import row_files
from engine.spec.tasks import rows_of, task_of
from engine.spec.text.diagnostic import Diagnostic
from engine.validate.context import TASKS, CheckContext, each_source, for_each_source, nearest
from engine.validate.registry import Finding, rule

MAX_ROWS = 20_000
"""Number of rows of a file that are checked; `engine run` reads all."""
LARGEST = 32 * 1024 * 1024
"""Maximum size of a file that is checked, in bytes."""
MAX_SCANS = 256
"""Sources whose results a process keeps."""


_Scan = tuple[Diagnostic | None, str]
"""The problem of the first bad row (the very first one is left to `tasks.unreadable`), and which rows are checked, with
their verb; empty: all."""


_scans: dict[tuple[Any, ...], _Scan] = {}
"""By the state of the files, and by what their rows need: a process may check the same files for several specs."""


def _scan(ctx: CheckContext) -> _Scan:
    """Read the rows of a source, as far as they are checked.

    Raises:
        SpecError: a file is not there.
        OSError: as it is read.
    """
    spec = ctx.spec
    if spec.tasks.source == "inline":
        return _scan_rows(ctx.loaded)
    files = [(str(file), file.stat()) for file in row_files(ctx.loaded)]
    if sum(status.st_size for _, status in files) > LARGEST:
        return None, "the first row is"
    needs = (spec.tasks, spec.prompt, sorted(spec.users), spec.environment is None)
    key = (repr(needs), *((file, status.st_mtime_ns, status.st_size) for file, status in files))
    if key not in _scans:
        if len(_scans) == MAX_SCANS:
            _scans.clear()
        _scans[key] = _scan_rows(ctx.loaded)
    return _scans[key]


def _scan_rows(loaded: LoadedSpec) -> _Scan:
    spec = loaded.spec.tasks
    most = min(MAX_ROWS, spec.limit or MAX_ROWS)
    seen: dict[str, int] = {}
    try:
        for index, row in enumerate(rows_of(loaded, most if spec.limit == most else most + 1)):
            if index == most:
                return None, f"the first {MAX_ROWS:,} rows are"
            task = task_of(row, index, spec, loaded)
            if task.id in seen:
                same_id = Diagnostic(
                    "tasks.row",
                    "error",
                    f"rows {seen[task.id]} and {row.number} share the id `{task.id}`",
                    "name a field of unique values under `tasks.id`, or leave it out",
                    row.origin or loaded.origin(("tasks", "id")),
                    ("tasks", "id"),
                )
                return same_id, ""
            seen[task.id] = row.number
    except SpecError as error:
        is_first = spec.source == "inline" or not seen
        return None if is_first else error.diagnostics[0], ""
    return None, ""


@rule("tasks.unreadable", "error", "the task source does not exist, or its first rows cannot become tasks")
@for_each_source
def tasks_unreadable(ctx: CheckContext) -> Iterator[Finding]:
    """The file exists; inline rows, and the first of a file, have what `map` and `id` name."""
    try:
        if ctx.spec.tasks.source in ("jsonl", "csv", "parquet"):
            row_files(ctx.loaded)
        for index, row in enumerate(ctx.first_rows()):
            task_of(row, index, ctx.spec.tasks, ctx.loaded)
    except SpecError as error:
        for item in error.diagnostics:
            yield Finding(item.message, item.path, item.fix, origin=item.origin)


@rule("tasks.row", "error", "a row of the task file cannot become a task")
@for_each_source
def task_rows(ctx: CheckContext) -> Iterator[Finding]:
    """The number of the first bad row: it is not JSON, lacks a field, or has the id of another row."""
    tasks = ctx.spec.tasks
    if tasks.source not in ("jsonl", "csv", "parquet", "inline"):
        return
    try:
        if tasks.source == "parquet":
            yield from _columns(ctx, row_files(ctx.loaded))
            return
        diagnostic, _ = _scan(ctx)
    except (SpecError, OSError):
        return  # `tasks.unreadable` reports it
    if diagnostic is not None:
        yield Finding(diagnostic.message, diagnostic.path, diagnostic.fix, origin=diagnostic.origin)


@rule("tasks.video", "warning", "tasks have videos, which no episode shows")
@for_each_source
def videos(ctx: CheckContext) -> Iterator[Finding]:
    """A field `video` or `videos` of the first row, or a column of that name."""
    tasks = ctx.spec.tasks
    try:
        if tasks.source == "parquet":
            import pyarrow.parquet

            fields = dict.fromkeys(pyarrow.parquet.read_schema(row_files(ctx.loaded)[0]).names, True)
        elif tasks.source in ("jsonl", "csv", "inline"):
            fields = next((dict(task_of(row, 0, tasks, ctx.loaded).fields) for row in rows_of(ctx.loaded, 1)), {})
        else:
            return
    except (SpecError, OSError, IndexError, ValueError):
        return  # `tasks.unreadable` reports it
    for name in ("video", "videos"):
        if fields.get(name):
            yield Finding(
                f"the tasks have a field `{name}`, and an episode shows only text and images",
                ("tasks",),
                "show frames as image parts, or omit the field with `tasks.map`",
                key=True,
            )


@rule("tasks.not-read", "info", "not every row of the task source is checked")
@for_each_source
def not_read(ctx: CheckContext) -> Iterator[Finding]:
    """Of a long file the first rows are checked, of a very large one none; `engine run` reads all."""
    tasks = ctx.spec.tasks
    if tasks.source not in ("jsonl", "csv", "inline") or (tasks.limit or LARGEST) <= MAX_ROWS:
        return
    try:
        _, checked = _scan(ctx)
    except (SpecError, OSError):
        return  # `tasks.unreadable` reports it
    if checked:
        yield Finding(
            f"only {checked} checked: a later row may lack a field or share its id",
            ("tasks", "rows" if tasks.source == "inline" else "path"),
        )


def _columns(ctx: CheckContext, files: list[Path]) -> Iterator[Finding]:
    """The columns of the first Parquet file, compared with `map` and `id`."""
    import pyarrow
    import pyarrow.parquet

    try:
        names = list(pyarrow.parquet.read_schema(files[0]).names) if files else []
    except (OSError, pyarrow.ArrowException) as error:
        yield Finding(f"`{files[0]}` cannot be read as Parquet: {error}", ("tasks", "path"))
        return
    tasks = ctx.spec.tasks
    for name, column in tasks.map.items():
        if column not in names and column.partition(".")[0] not in names:
            yield Finding(f"the file has no column `{column}`", ("tasks", "map", name), nearest(column, names))
    if tasks.id is not None and tasks.id not in names and tasks.id.partition(".")[0] not in names:
        yield Finding(f"the file has no column `{tasks.id}`", ("tasks", "id"), nearest(tasks.id, names))


@rule("tasks.no-effect", "warning", "a key of `tasks` is not read with this source")
def no_effect(ctx: CheckContext) -> Iterator[Finding]:
    """Keys that belong to another `source`."""
    kinds = all_sources()
    keys = dict.fromkeys([*(name for facts in kinds.values() for name in facts.keys), *PLUGIN_KEYS])
    for at, source in (*([(TASKS, ctx)] if ctx.spec.tasks.mixed() else []), *each_source(ctx)):
        tasks = source.spec.tasks
        for key in keys:
            if key not in tasks.facts.keys and source.written("tasks", key):
                readers = ", ".join(f"`{kind}`" for kind, facts in kinds.items() if key in facts.keys)
                yield Finding(
                    f"`{key}` has no effect with `source: {tasks.source}`"
                    + (f": it belongs to {readers}" if readers else ""),
                    (*at, key),
                    "remove it, or change `source`",
                    key=True,
                )
    spec = ctx.spec
    shown = spec.messages or spec.conversation or spec.opening_environment
    if spec.tasks.overlong is not None and spec.environment is not None and not shown:
        yield Finding(
            "`overlong` counts no prompt: what the environment's `reset` shows is not counted",
            (*TASKS, "overlong"),
            "write `prompt: {field: …}`, or give an environment without state `effects: pure`",
        )
