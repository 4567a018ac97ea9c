"""Rows of a source: iterated as a stream, and one by one by position.

Invariant: `row(n)` is the n-th row of iterating, with the same number. A file that changes after it was indexed is an error, not
other rows. Reads by position may come from several threads.

Rows of files are in text_rows.py (JSONL, CSV) and parquet_rows.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from engine.schemas.base import Struct
from engine.spec.text.diagnostic import Origin


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


class Row(Struct, frozen=True, kw_only=True):
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
            yield Row(number=position + 1, fields=fields, origin=self._origin(position))

    def row(self, position: int) -> Row:
        """See `Rows.row`."""
        return Row(number=position + 1, fields=self._rows[position], origin=self._origin(position))


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
                yield Row(number=number, fields=fields, origin=None)

    def row(self, position: int) -> Row:
        """See `Rows.row`."""
        return Row(number=position + 1, fields=self._table[position : position + 1].to_pylist()[0], origin=None)
