"""Rows of files: read as a stream, and one by one by position. What is held in memory is an index, not the rows.

    source = JsonlRows([Path("rows.jsonl")], open=Path.open)
    len(source)                     # 8 bytes of memory a row
    [row.fields for row in source]  # one row at a time
    source.row(1_000)               # any row, by its position from 0

Invariant: `row(n)` is the n-th row of iterating, with the same number. A file that changes after it was indexed is an error, not
other rows. Reads by position may come from several threads.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import tempfile
import threading
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from engine.spec.diagnostic import Origin

MAX_CELL = 2**27
"""Characters of one cell of a CSV file."""
GROUP_BYTES = 64 * 2**20
"""Largest row group of a Parquet file, uncompressed, that is decoded whole to read one row. A file with a larger one is copied once
into a temporary file, from which any row can be read."""
KEPT_BYTES = 64 * 2**20
"""Decoded row groups of a Parquet file that are kept in memory, in bytes; the newest is always kept."""
BATCH_BYTES = 8 * 2**20
"""Rows of a Parquet file that are decoded at a time, in bytes."""


class RowFault(Exception):
    """Rows that cannot be read.

    Args:
        message: What is wrong.
        origin: Where, in a text file.
        rule: The rule of the finding.
    """

    def __init__(self, message: str, origin: Origin | None = None, rule: str = "tasks.bad-row") -> None:
        super().__init__(message)
        self.origin = origin
        self.rule = rule


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a source, and where it stands."""

    number: int
    """From 1, as `row 3` in messages."""
    fields: Any
    origin: Origin | None
    """Its line in a file, where it has one."""


class Rows(ABC):
    """The rows of a source."""

    @abstractmethod
    def __len__(self) -> int:
        """How many there are."""

    @abstractmethod
    def __iter__(self) -> Iterator[Row]:
        """All rows, in order. Raises: RowFault."""

    @abstractmethod
    def row(self, position: int) -> Row:
        """One row, by its position from 0. Raises: RowFault."""


class ListRows(Rows):
    """Rows in memory, or of an object with a length and items by position.

    Args:
        rows: The rows.
        origin: Where a row is written, by position.
    """

    def __init__(self, rows: Sequence[Any], origin: Callable[[int], Origin | None] = lambda _: None) -> None:
        self._rows = rows
        self._origin = origin

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        for position, fields in enumerate(self._rows):
            yield Row(position + 1, fields, self._origin(position))

    def row(self, position: int) -> Row:
        """See `Rows.row`."""
        return Row(position + 1, self._rows[position], self._origin(position))


class _TextRows(Rows):
    """Rows of text files, found by the place where each begins."""

    def __init__(self, files: Sequence[Path], open: Callable[[Path], BinaryIO]) -> None:
        self._files = list(files)
        self._open = open
        self._index: list[tuple[array[int], array[int]]] | None = None
        """For each file: where its rows begin, in bytes, and the end of the last; the lines on which they begin."""
        self._starts: list[int] = []
        self._streams: list[BinaryIO] = []
        self._stamps: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    @abstractmethod
    def _records(self, file: int, stream: BinaryIO) -> Iterator[tuple[int, int, Any]]:
        """(byte, line, record) of each row of a file, in order; the record is what `_fields` takes."""

    @abstractmethod
    def _fields(self, file: int, record: Any, number: int, origin: Origin) -> Any: ...

    @abstractmethod
    def _record(self, data: bytes, number: int, origin: Origin) -> Any:
        """The record in the bytes of one row."""

    def __len__(self) -> int:
        self._indexed()
        return self._starts[-1]

    def __iter__(self) -> Iterator[Row]:
        number = 0
        for file, path in enumerate(self._files):
            with self._open(path) as stream:
                for _, line, record in self._records(file, stream):
                    number += 1
                    origin = Origin(str(path), line, 1)
                    yield Row(number, self._fields(file, record, number, origin), origin)

    def row(self, position: int) -> Row:
        """See `Rows.row`."""
        index = self._indexed()
        file = bisect_right(self._starts, position) - 1
        at = position - self._starts[file]
        offsets, lines = index[file]
        origin = Origin(str(self._files[file]), lines[at], 1)
        handle = self._streams[file].fileno()
        if _stamp(handle) != self._stamps[file]:
            raise RowFault("the file has changed since its rows were counted", origin, "tasks.bad-file")
        data = os.pread(handle, offsets[at + 1] - offsets[at], offsets[at])
        number = position + 1
        return Row(number, self._fields(file, self._record(data, number, origin), number, origin), origin)

    def _indexed(self) -> list[tuple[array[int], array[int]]]:
        with self._lock:
            if self._index is None:
                index = []
                for file, path in enumerate(self._files):
                    stream = self._open(path)
                    self._streams.append(stream)
                    self._stamps.append(_stamp(stream.fileno()))
                    offsets, lines = array("Q"), array("Q")
                    for offset, line, _ in self._records(file, stream):
                        offsets.append(offset)
                        lines.append(line)
                    offsets.append(os.fstat(stream.fileno()).st_size)
                    index.append((offsets, lines))
                self._starts = [0, *accumulate(len(lines) for _, lines in index)]
                self._index = index
            return self._index


def _stamp(handle: int) -> tuple[int, int]:
    status = os.fstat(handle)
    return status.st_mtime_ns, status.st_size


class JsonlRows(_TextRows):
    """One JSON value a line; empty lines are left out."""

    def _records(self, file: int, stream: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
        offset = 0
        for line, data in enumerate(stream, start=1):
            if data.strip():
                yield offset, line, data
            offset += len(data)

    def _record(self, data: bytes, number: int, origin: Origin) -> bytes:
        return data.partition(b"\n")[0]

    def _fields(self, file: int, record: bytes, number: int, origin: Origin) -> Any:
        try:
            return json.loads(record.decode("utf-8-sig" if origin.line == 1 else "utf-8").rstrip())
        except UnicodeDecodeError as error:
            raise RowFault(f"row {number} is not UTF-8 (byte {error.start})", origin) from error
        except json.JSONDecodeError as error:
            at = Origin(origin.file, origin.line, error.colno)
            raise RowFault(f"row {number} is no JSON: {error.msg}", at) from error
        except (ValueError, RecursionError) as error:
            raise RowFault(f"row {number} is no usable JSON: {error}", origin) from error


class CsvRows(_TextRows):
    """Cells between commas, or tabs in a `.tsv` file. The first row names the fields; all values are text."""

    def __init__(self, files: Sequence[Path], open: Callable[[Path], BinaryIO]) -> None:
        super().__init__(files, open)
        self._names: dict[int, list[str]] = {}

    def _reader(self, lines: Iterator[str], file: int) -> Iterator[list[str]]:
        csv.field_size_limit(max(MAX_CELL, csv.field_size_limit()))
        delimiter = "\t" if self._files[file].suffix == ".tsv" else ","
        return csv.reader(lines, delimiter=delimiter, strict=True)

    def _records(self, file: int, stream: BinaryIO) -> Iterator[tuple[int, int, list[str]]]:
        path = str(self._files[file])
        read = [0, 0]  # bytes and lines that the reader has taken

        def lines() -> Iterator[str]:
            for data in stream:
                first = not read[0]
                read[0] += len(data)
                read[1] += 1
                try:
                    yield data.decode("utf-8-sig" if first else "utf-8")
                except UnicodeDecodeError as error:
                    raise RowFault(f"it is not UTF-8 (byte {error.start})", Origin(path, read[1], 1)) from error

        reader, headed = self._reader(lines(), file), False
        while True:
            offset, line = read[0], read[1] + 1
            try:
                cells = next(reader, None)
            except csv.Error as error:
                raise RowFault(f"it is no CSV: {error}", Origin(path, line, 1)) from error
            if cells is None:
                return
            if not cells:
                continue
            if headed:
                yield offset, line, cells
            else:
                self._set_names(file, cells, Origin(path, line, 1))
                headed = True

    def _set_names(self, file: int, names: list[str], origin: Origin) -> None:
        double = next((name for at, name in enumerate(names) if name in names[:at]), None)
        if double is not None or "" in names:
            what = f"the column `{double}` twice" if double else "a column without a name"
            raise RowFault(f"the first row has {what}", origin, "tasks.bad-file")
        self._names[file] = names

    def _record(self, data: bytes, number: int, origin: Origin) -> list[str]:
        file = next(at for at, path in enumerate(self._files) if str(path) == origin.file)
        return next(self._reader((line.decode() for line in BytesIO(data)), file))

    def _fields(self, file: int, record: list[str], number: int, origin: Origin) -> dict[str, str]:
        names = self._names[file]
        if len(record) != len(names):
            raise RowFault(f"row {number} has {len(record)} values; the first row names {len(names)} columns", origin)
        return dict(zip(names, record, strict=True))


class ParquetRows(Rows):
    """Rows of Parquet files, decoded a few at a time."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = list(files)
        self._starts: list[int] = []
        self._open: dict[int, Callable[[int], dict[str, Any]]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        if not self._starts:
            import pyarrow.parquet

            counts = [int(self._guarded(path, pyarrow.parquet.read_metadata).num_rows) for path in self._files]
            self._starts = [0, *accumulate(counts)]
        count: int = self._starts[-1]
        return count

    def __iter__(self) -> Iterator[Row]:
        import pyarrow

        number = 0
        for path in self._files:
            file = self._guarded(path, _parquet_file)
            try:
                for batch in file.iter_batches(batch_size=_batch_rows(file.metadata)):
                    for fields in batch.to_pylist():
                        number += 1
                        yield Row(number, fields, None)
            except (OSError, pyarrow.ArrowException) as error:
                raise _not_parquet(path, error) from error
            finally:
                file.close()

    def row(self, position: int) -> Row:
        """See `Rows.row`."""
        len(self)
        at = bisect_right(self._starts, position) - 1
        with self._lock:
            if at not in self._open:
                self._open[at] = self._guarded(self._files[at], _by_position)
            fields = self._open[at]
            return Row(
                position + 1, self._guarded(self._files[at], lambda _: fields(position - self._starts[at])), None
            )

    @staticmethod
    def _guarded(path: Path, call: Callable[[Path], Any]) -> Any:
        import pyarrow

        try:
            return call(path)
        except (OSError, pyarrow.ArrowException) as error:
            raise _not_parquet(path, error) from error


def _not_parquet(path: Path, error: Exception) -> RowFault:
    return RowFault(f"`{path}` cannot be read as Parquet: {error}", None, "tasks.bad-file")


def _parquet_file(path: Path) -> Any:
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(path, memory_map=True, pre_buffer=False)


def _batch_rows(metadata: Any) -> int:
    size = sum(int(metadata.row_group(at).total_byte_size) for at in range(metadata.num_row_groups))
    rows = int(metadata.num_rows)
    return max(1, min(1024, BATCH_BYTES * max(rows, 1) // max(size, 1)))


def _by_position(path: Path) -> Callable[[int], dict[str, Any]]:
    """A function from a position in a Parquet file to its row.

    It decodes whole row groups and keeps the newest, up to KEPT_BYTES. When it has decoded twice as many groups as the file has,
    as in a shuffled order, it copies the file once, if there is space: then each row is found without decoding others.
    """
    file = _parquet_file(path)
    groups = [file.metadata.row_group(at) for at in range(file.metadata.num_row_groups)]
    if any(group.total_byte_size > GROUP_BYTES for group in groups):
        return _copied(file)
    starts = [0, *accumulate(group.num_rows for group in groups)]
    kept: OrderedDict[int, Any] = OrderedDict()
    copied: list[Callable[[int], dict[str, Any]]] = []
    decoded = 0
    may_copy = True

    def row(position: int) -> dict[str, Any]:
        nonlocal decoded, may_copy
        if copied:
            return copied[0](position)
        at = bisect_right(starts, position) - 1
        if at not in kept:
            decoded += 1
            if may_copy and decoded > 2 * len(groups):
                may_copy = _space_for(sum(group.total_byte_size for group in groups))
                if may_copy:
                    kept.clear()
                    copied.append(_copied(file))
                    return copied[0](position)
            kept[at] = file.read_row_group(at)
            while len(kept) > 1 and sum(table.nbytes for table in kept.values()) > KEPT_BYTES:
                kept.popitem(last=False)
        kept.move_to_end(at)
        found: dict[str, Any] = kept[at].slice(position - starts[at], 1).to_pylist()[0]
        return found

    return row


def _space_for(size: int) -> bool:
    """Whether a copy of so many bytes leaves at least as many free where temporary files are."""
    return shutil.disk_usage(tempfile.gettempdir()).free > 2 * size


def _copied(file: Any) -> Callable[[int], dict[str, Any]]:
    """The same for a file with large row groups: its rows are copied into a temporary file that is mapped into memory."""
    import pyarrow

    with tempfile.NamedTemporaryFile(prefix="rows-", suffix=".arrow") as copy:
        counts = []
        with pyarrow.ipc.new_file(copy.name, file.schema_arrow) as writer:
            for batch in file.iter_batches(batch_size=_batch_rows(file.metadata)):
                writer.write_batch(batch)
                counts.append(batch.num_rows)
        mapped = pyarrow.ipc.open_file(pyarrow.memory_map(copy.name))  # stays readable after the file's name is gone
    starts = [0, *accumulate(counts)]

    def row(position: int) -> dict[str, Any]:
        at = bisect_right(starts, position) - 1
        found: dict[str, Any] = mapped.get_batch(at).slice(position - starts[at], 1).to_pylist()[0]
        return found

    return row


class DatasetRows(Rows):
    """Rows of a `datasets.Dataset`, which maps its files into memory. Images stay the structs that they are in the files.

    Args:
        table: The data set.
    """

    def __init__(self, table: Any) -> None:
        self._table = table.with_format("arrow")

    def __len__(self) -> int:
        return len(self._table)

    def __iter__(self) -> Iterator[Row]:
        number = 0
        for start in range(0, len(self), 64):
            for fields in self._table[start : start + 64].to_pylist():
                number += 1
                yield Row(number, fields, None)

    def row(self, position: int) -> Row:
        """See `Rows.row`."""
        return Row(position + 1, self._table[position : position + 1].to_pylist()[0], None)
