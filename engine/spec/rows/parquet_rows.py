"""Rows of Parquet files, by position without decoding a file whole."""

from __future__ import annotations

import shutil
import tempfile
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from engine.spec.rows.row import Row, RowFault, Rows

GROUP_BYTES = 64 * 2**20
"""Largest row group of a Parquet file, uncompressed, that is decoded whole to read one row. A file with a larger one is
copied once into a temporary file, from which any row can be read."""
KEPT_BYTES = 64 * 2**20
"""Decoded row groups of a Parquet file that are kept in memory, in bytes; the newest is always kept."""
BATCH_BYTES = 8 * 2**20
"""Rows of a Parquet file that are decoded at a time, in bytes."""


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

            counts = []
            for path in self._files:
                with _reading(path):
                    counts.append(int(pyarrow.parquet.read_metadata(path).num_rows))
            self._starts = [0, *accumulate(counts)]
        return self._starts[-1]

    def __iter__(self) -> Iterator[Row]:
        number = 0
        for path in self._files:
            with _reading(path), _parquet_file(path) as file:
                for batch in file.iter_batches(batch_size=_batch_rows(file.metadata)):
                    for fields in batch.to_pylist():
                        number += 1
                        yield Row(number=number, fields=fields, origin=None)

    def row(self, position: int) -> Row:
        """See `Rows.row`."""
        len(self)
        at = bisect_right(self._starts, position) - 1
        with self._lock, _reading(self._files[at]):
            if at not in self._open:
                self._open[at] = _by_position(self._files[at])
            fields = self._open[at](position - self._starts[at])
        return Row(number=position + 1, fields=fields, origin=None)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """What pyarrow says of a file as a `RowFault`."""
    import pyarrow

    try:
        yield
    except (OSError, pyarrow.ArrowException) as error:
        raise RowFault(f"`{path}` cannot be read as Parquet: {error}", None, "tasks.bad-file") from error


def _parquet_file(path: Path) -> Any:
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(path, memory_map=True, pre_buffer=False)


def _batch_rows(metadata: Any) -> int:
    size = sum(int(metadata.row_group(at).total_byte_size) for at in range(metadata.num_row_groups))
    rows = int(metadata.num_rows)
    return max(1, min(1024, BATCH_BYTES * max(rows, 1) // max(size, 1)))


def _by_position(path: Path) -> Callable[[int], dict[str, Any]]:
    """A function from a position in a Parquet file to its row.

    It decodes whole row groups and keeps the newest, up to KEPT_BYTES. When it has decoded twice as many groups as the
    file has, as in a shuffled order, it copies the file once, if there is space: then each row is found without
    decoding others.
    """
    file = _parquet_file(path)
    groups = [file.metadata.row_group(at) for at in range(file.metadata.num_row_groups)]
    largest = max((group.total_byte_size for group in groups), default=0)
    if largest > GROUP_BYTES:
        return _copied(file)
    starts = [0, *accumulate(group.num_rows for group in groups)]
    table = lru_cache(maxsize=max(1, KEPT_BYTES // max(largest, 1)))(file.read_row_group)
    in_copy: Callable[[int], dict[str, Any]] | None = None
    has_space = True

    def row(position: int) -> dict[str, Any]:
        nonlocal in_copy, has_space
        if in_copy is None and has_space and table.cache_info().misses >= 2 * len(groups):
            size = sum(group.total_byte_size for group in groups)
            has_space = shutil.disk_usage(tempfile.gettempdir()).free > 2 * size
            if has_space:
                in_copy = _copied(file)
                table.cache_clear()
        if in_copy is not None:
            return in_copy(position)
        return _row_at(starts, table, position)

    return row


def _row_at(starts: Sequence[int], table: Callable[[int], Any], position: int) -> dict[str, Any]:
    """The row at a position of tables that begin at these positions."""
    at = bisect_right(starts, position) - 1
    fields: dict[str, Any] = table(at).slice(position - starts[at], 1).to_pylist()[0]
    return fields


def _copied(file: Any) -> Callable[[int], dict[str, Any]]:
    """The same for a file with large row groups: its rows are copied into a temporary file that is mapped into
    memory."""
    import pyarrow

    with tempfile.NamedTemporaryFile(prefix="rows-", suffix=".arrow") as copy:
        counts = []
        with pyarrow.ipc.new_file(copy.name, file.schema_arrow) as writer:
            for batch in file.iter_batches(batch_size=_batch_rows(file.metadata)):
                writer.write_batch(batch)
                counts.append(batch.num_rows)
        mapped = pyarrow.ipc.open_file(pyarrow.memory_map(copy.name))  # stays readable after the file's name is gone
    return partial(_row_at, [0, *accumulate(counts)], mapped.get_batch)
