"""Rows of JSONL and CSV files. What is held in memory is an index, not the rows.

source = JsonlRows([Path("rows.jsonl")], open=Path.open)
len(source)                     # 8 bytes of memory a row
[row.fields for row in source]  # one row at a time
source.row(1_000)               # any row, by its position from 0
"""

from __future__ import annotations

import csv
import json
import os
import threading
from abc import abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from engine.spec.rows.row import Row, RowFault, Rows
from engine.spec.text.diagnostic import Origin

MAX_CELL = 2**27
"""Characters of one cell of a CSV file."""


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

    def _record(self, data: bytes, origin: Origin) -> Any:
        """What `_records` gives for these bytes, which may end with blank lines."""
        return data

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
                    yield Row(number=number, fields=self._fields(file, record, number, origin), origin=origin)

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
        return Row(number=number, fields=self._fields(file, self._record(data, origin), number, origin), origin=origin)

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

    def _fields(self, file: int, record: bytes, number: int, origin: Origin) -> Any:
        try:
            text = record.partition(b"\n")[0].decode("utf-8-sig" if origin.line == 1 else "utf-8")
            return json.loads(text.rstrip())
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
                double = next((name for at, name in enumerate(cells) if name in cells[:at]), None)
                if double is not None or "" in cells:
                    what = f"the column `{double}` twice" if double else "a column without a name"
                    raise RowFault(f"the first row has {what}", Origin(path, line, 1), "tasks.bad-file")
                self._names[file], headed = cells, True

    def _record(self, data: bytes, origin: Origin) -> list[str]:
        file = next(at for at, path in enumerate(self._files) if str(path) == origin.file)
        return next(self._reader((line.decode() for line in BytesIO(data)), file))

    def _fields(self, file: int, record: list[str], number: int, origin: Origin) -> dict[str, str]:
        names = self._names[file]
        if len(record) != len(names):
            raise RowFault(f"row {number} has {len(record)} values; the first row names {len(names)} columns", origin)
        return dict(zip(names, record, strict=True))
