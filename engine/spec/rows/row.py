"""Rows of a source: iterated as a stream, and one by one by position.

Invariant: `row(n)` is the n-th row of iterating, with the same number. A file that changes after it was indexed is an
error, not other rows. Reads by position may come from several threads.

Rows of files are in text_rows.py (JSONL, CSV) and parquet_rows.py. What `plain` returns is JSON, except for values that
it does not know, which `engine.storable.refusal` refuses. An image becomes a reference that
`engine.schemas.message.ImagePart` takes: a path, or a
`data:` URI with the same bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

from pydantic_core import to_jsonable_python

from engine.schemas.base import Struct
from engine.schemas.message import image_part
from engine.spec.text.diagnostic import Origin
from engine.storable import words_of


class RowFault(Exception):
    """Rows that cannot be read: what is wrong, where in a text file, and the rule of the finding."""

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

    def __iter__(self) -> Iterator[Row]:
        """All rows, in order. Raises: RowFault."""
        return map(self.row, range(len(self)))

    @abstractmethod
    def row(self, position: int) -> Row:
        """One row, by its position from 0. Raises: RowFault."""


class ListRows(Rows):
    """Rows in memory, or of an object with a length and items by position, which the code `use` has made; `origin` says
    where a row is written, by position."""

    def __init__(
        self, rows: Sequence[Any], origin: Callable[[int], Origin | None] = lambda _: None, use: str = ""
    ) -> None:
        self._rows = rows
        self._origin = origin
        self._use = use

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, position: int) -> Row:
        """See `Rows.row`."""
        try:
            fields = self._rows[position]
        except Exception as error:  # whatever the user's own code raises
            message = f"`{self._use}` failed at row {position + 1}: {words_of(error)}"
            raise RowFault(message, None, "tasks.python") from error
        return Row(number=position + 1, fields=fields, origin=self._origin(position))


class DatasetRows(Rows):
    """Rows of a `datasets.Dataset`, which maps its files into memory. Images stay the structs that they are in the
    files."""

    def __init__(self, table: Any) -> None:
        self._table = table.with_format("arrow")

    def __len__(self) -> int:
        return len(self._table)

    def __iter__(self) -> Iterator[Row]:
        for start in range(0, len(self), 64):
            for number, fields in enumerate(self._table[start : start + 64].to_pylist(), start + 1):
                yield Row(number=number, fields=fields, origin=None)

    def row(self, position: int) -> Row:
        """See `Rows.row`."""
        return Row(number=position + 1, fields=self._table[position : position + 1].to_pylist()[0], origin=None)


_STRUCT = frozenset({"bytes", "path"})
"""The keys of an image as Hugging Face stores it in Parquet and Arrow files."""
_NO_IMAGE = "data:application/octet-stream"


def find(name: str, fields: Mapping[str, Any]) -> tuple[bool, Any]:
    """(whether it is there, the value) of a dotted name: `reward_model.ground_truth`, `images.0`.

    A field that is itself called `a.b` comes before the key `b` of the field `a`.
    """
    if name in fields:
        return True, fields[name]
    value: Any = fields
    for key in name.split("."):
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, Sequence) and not isinstance(value, str | bytes) and key.isdigit() and len(key) < 10:
            if int(key) >= len(value):
                return False, None
            value = value[int(key)]
        else:
            return False, None
    return True, value


def plain(value: Any) -> Any:
    """A row's value as JSON.

    Dates, times and decimals become text. The bytes of an image file, a PIL image and the struct `{bytes, path}` become
    image references. Everything else stays as it is.
    """
    kind = type(value)
    if kind is str or kind is int or kind is float or kind is bool or value is None:
        return value
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        data = value["bytes"] if value.keys() == _STRUCT else value
        if isinstance(data, bytes) and data:
            return _reference(data)
        if data is None or data == b"":
            return value["path"]
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, date | time | timedelta | Decimal):
        return to_jsonable_python(value)
    if isinstance(value, bytes) or (callable(getattr(value, "save", None)) and hasattr(value, "convert")):
        return _reference(value)
    return value


def _reference(image: Any) -> Any:
    """A `data:` URI; bytes that are no image stay bytes, which are refused."""
    reference = image_part(image).image
    return image if reference.startswith(_NO_IMAGE) else reference
