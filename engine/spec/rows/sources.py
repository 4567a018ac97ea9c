"""Opens the source that `tasks` names: which files it means, and what reads them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import SpecError
from engine.plugin import load
from engine.spec.access import OUTSIDE_FIX
from engine.spec.code.entry import EntryError, load_entry
from engine.spec.rows.parquet_rows import ParquetRows
from engine.spec.rows.row import DatasetRows, ListRows, RowFault, Rows
from engine.spec.rows.text_rows import CsvRows, JsonlRows
from engine.spec.text.diagnostic import DataPath, Diagnostic, Origin
from engine.spec.text.near import nearest_name, short
from engine.storable import words_of

if TYPE_CHECKING:
    from engine.spec.load import LoadedSpec


TASKS: DataPath = ("tasks",)
SUFFIXES = {"jsonl": (".jsonl", ".ndjson"), "csv": (".csv", ".tsv"), "parquet": (".parquet",)}
"""The files of a folder that a source reads."""
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
"""Names of splits: if no file of a folder has one, all its files are the split `train`."""
STREAMED = 10_000
"""Most rows of a data set on the hub that are read without downloading it."""


def open_rows(loaded: LoadedSpec, limit: int | None) -> Rows:
    """The rows of a spec's source, of which the first `limit` are needed; None: any of them may be.

    Raises:
        SpecError: the source is not there.
        RowFault: its rows cannot be read.
    """
    tasks = loaded.spec.tasks
    try:
        opens: Callable[[LoadedSpec, int | None], Rows] = _SOURCES.get(tasks.source) or load(tasks.facts.opens)
    except (ImportError, AttributeError) as error:
        message = f"the source `{tasks.source}` of a plugin cannot be used: {error}"
        raise fault(loaded, "tasks.unreadable", message, None, loaded.origin((*TASKS, "source"))) from error
    return opens(loaded, limit)


def fault(loaded: LoadedSpec, rule: str, message: str, fix: str | None, origin: Origin | None) -> SpecError:
    """What is wrong with the tasks, as an error with one finding."""
    return SpecError([Diagnostic(rule, "error", message, fix, origin or loaded.origin(TASKS), TASKS)])


def task_file(loaded: LoadedSpec) -> Path:
    """The file, or folder of files, that `tasks.path` names.

    Raises:
        SpecError: it is not there.
    """
    named = loaded.spec.tasks.file
    path = loaded.resolve(named, (*TASKS, "path"))
    at = loaded.origin((*TASKS, "path"))
    near: str | None = None
    try:
        if not loaded.access.allows(path):
            raise fault(loaded, "tasks.no-file", f"`{short(named)}` lies outside of what is read", OUTSIDE_FIX, at)
        if path.is_file() or path.is_dir():
            return path
        if path.exists():
            raise fault(loaded, "tasks.no-file", f"`{short(named)}` is not a file of rows", f"looked at {path}", at)
        if loaded.access.is_dir(path.parent):
            near = nearest_name(path.name, (item.name for item in path.parent.iterdir()))
    except OSError as error:
        message = f"the task file `{short(named)}` cannot be had: {error.strerror}"
        raise fault(loaded, "tasks.no-file", message, None, at) from error
    fix = f"did you mean `{Path(named).parent / near}`?" if near else f"looked for {path}"
    raise fault(loaded, "tasks.no-file", f"the task file `{named}` does not exist", fix, at)


def row_files(loaded: LoadedSpec) -> list[Path]:
    """The files that `tasks.path` and `tasks.split` mean: a file, or those of a folder, sorted by name.

    Raises:
        SpecError: there are none, or one of them may not be opened.
    """
    path = task_file(loaded)
    spec = loaded.spec.tasks
    files = [path]
    if path.is_dir():
        files = _files_of_split(loaded, path)
    elif spec.split_name not in (None, "train"):
        message = f"`{short(path.name)}` is one file, so there is no split `{spec.split_name}`"
        fix = "name a folder with a file for each split, or take a part of the rows: `split: '[:90%]'`"
        raise fault(loaded, "tasks.split", message, fix, loaded.origin((*TASKS, "split")))
    for file in files:
        if not loaded.access.is_file(file):
            message = f"`{short(file.name)}` is no regular file that may be opened"
            raise fault(loaded, "tasks.bad-file", message, OUTSIDE_FIX, loaded.origin((*TASKS, "path")))
    return files


def _files_of_split(loaded: LoadedSpec, folder: Path) -> list[Path]:
    """The files of a folder whose names, or whose folders' names, begin with the split's name."""
    spec = loaded.spec.tasks
    suffixes = SUFFIXES[spec.source]
    every = sorted(file for file in folder.iterdir() if file.suffix in suffixes)
    every = every or sorted(file for file in folder.rglob("*") if file.suffix in suffixes)
    if not every:
        message = f"the folder `{short(str(spec.path))}` has no file that ends with {' or '.join(suffixes)}"
        raise fault(loaded, "tasks.no-file", message, None, loaded.origin((*TASKS, "path")))
    name = spec.split_name
    if name is None:
        return every
    matching = [file for file in every if _is_of(file.relative_to(folder), name)]
    if not matching:
        if name == "train" and not any(_is_of(file.relative_to(folder), other) for file in every for other in SPLITS):
            return every
        names = ", ".join(file.name for file in every[:5])
        message = f"the folder `{short(str(spec.path))}` has no file of the split `{name}`"
        raise fault(loaded, "tasks.split", message, f"its files: {names}", loaded.origin((*TASKS, "split")))
    return matching


def _is_of(file: Path, split: str) -> bool:
    rest = file.stem.removeprefix(split)
    return split in file.parts[:-1] or (rest != file.stem and (not rest or not rest[0].isalnum()))


def _text(kind: type[JsonlRows] | type[CsvRows], loaded: LoadedSpec, limit: int | None) -> Rows:
    def opened(path: Path) -> Any:
        try:
            return loaded.access.open(path)
        except OSError as error:
            message = f"the task file `{path}` cannot be read: {error.strerror}"
            raise RowFault(message, None, "tasks.no-file") from error

    return kind(row_files(loaded), opened)


def _hub(loaded: LoadedSpec, limit: int | None) -> Rows:
    spec = loaded.spec.tasks
    at = loaded.origin((*TASKS, "path"))
    _may_import(loaded, at)
    try:
        import datasets
    except ImportError as error:
        fix = "pip install 'episode-engine[hub]'"
        raise fault(loaded, "tasks.hub", "`source: hub` needs the package `datasets`", fix, at) from error
    named, split = str(spec.path), spec.split_name or "train"
    folder = loaded.resolve(named, (*TASKS, "path"))
    rows: list[Any] = []
    try:
        if (folder / "dataset_dict.json").is_file():
            return DatasetRows(datasets.load_from_disk(str(folder))[split])
        if (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file():
            return DatasetRows(datasets.load_from_disk(str(folder)))
        if folder.exists() or limit is None or limit > STREAMED:
            return DatasetRows(datasets.load_dataset(str(folder) if folder.exists() else named, spec.name, split=split))
        streamed = datasets.load_dataset(named, spec.name, split=split, streaming=True)
        rows.extend(islice(streamed.decode(False), limit))
    except Exception as error:  # the library raises whatever its transports raise
        message = f"row {len(rows) + 1} of the data set `{named}` (split `{split}`) cannot be had: {words_of(error)}"
        raise fault(loaded, "tasks.hub", message, "check `path`, `name` and `split`", at) from error
    return ListRows(rows)


def _python(loaded: LoadedSpec, limit: int | None) -> Rows:
    spec = loaded.spec.tasks
    use = str(spec.use)
    at = loaded.origin((*TASKS, "use"))
    _may_import(loaded, at)
    try:
        source = load_entry(use, loaded.base)
    except EntryError as error:
        raise fault(loaded, "code.import", str(error), None, at) from error
    rows: list[Any] = []
    try:
        answer = source(**spec.with_)
        if hasattr(answer, "__len__") and hasattr(answer, "__getitem__") and not isinstance(answer, list | tuple):
            return ListRows(answer, use=use)
        rows.extend(islice(answer, limit))
    except Exception as error:  # whatever the user's own code raises
        message = f"`{use}` failed at row {len(rows) + 1}: {words_of(error)}"
        raise fault(loaded, "tasks.python", message, None, at) from error
    return ListRows(rows)


_SOURCES: dict[str, Callable[[LoadedSpec, int | None], Rows]] = {
    "inline": lambda loaded, _: ListRows(
        loaded.spec.tasks.rows or [], lambda position: loaded.origin((*TASKS, "rows", position))
    ),
    "jsonl": partial(_text, JsonlRows),
    "csv": partial(_text, CsvRows),
    "parquet": lambda loaded, _: ParquetRows(row_files(loaded)),
    "hub": _hub,
    "python": _python,
}


def _may_import(loaded: LoadedSpec, at: Origin) -> None:
    """Refuse sources whose rows are made by code."""
    if not loaded.access.imports:
        raise fault(loaded, "tasks.python", "these rows are made by code, which is not run here", "add `--import`", at)
