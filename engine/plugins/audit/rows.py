"""A row of another framework in one form, and what readers need to make it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np

from engine.errors import AuditError
from engine.plugins.audit.pickles import Inert
from engine.schemas.base import Struct

Vector = np.ndarray
"""A NumPy array of one dimension."""

MAX_ROWS = 1_000_000
"""Maximum number of rows of a file."""


class ForeignRow(Struct, frozen=True, kw_only=True):
    """One training row of another framework. `None` means that the framework's file does not have it."""

    place: str
    """Where it is, for people: `train.pt row 3`."""
    group: str = ""
    """The group whose rewards are compared; empty where the file names none."""
    trajectory: str = ""
    """The episode, where one episode may have several rows."""
    prompt_ids: Vector | None = None
    """int32 [prompt], without padding; None for a row of texts."""
    response_ids: Vector | None = None
    """int32 [response]: everything after the prompt, without padding."""
    loss_mask: Vector | None = None
    """int32 [response]: 1 on trained tokens."""
    logprobs: Vector | None = None
    """float32 [response]: the sampler's log-probs."""
    versions: Vector | None = None
    """int32 [response]: the weight version of each token, -1 where there is none."""
    row_versions: tuple[int, ...] = ()
    """Weight versions that the file names for the row as a whole."""
    token_rewards: Vector | None = None
    """float64 [response]."""
    reward: float | None = None
    """The row's reward: the sum of `token_rewards` where there are some."""
    turn_rewards: tuple[float, ...] = ()
    """Rewards by turn that the framework carries beside the tokens, in fields that its loss does not read."""
    messages: list[dict[str, Any]] | None = None
    """The messages that the prompt was made of."""
    prompt_text: str | None = None
    response_text: str | None = None
    finish: Literal["stop", "length", "abort"] | None = None
    label: Any = None
    """The task's answer, where the file has it: rows of one group have the same one."""
    images: bool = False
    """Whether it has images, whose tokens are not checked."""
    excluded: bool = False
    """Whether the framework leaves the row out of the loss."""
    fields: dict[str, Any] = msgspec.field(default_factory=dict)
    """Other values of the row."""

    @property
    def has_ids(self) -> bool:
        """Whether token ids are known."""
        return self.prompt_ids is not None and self.response_ids is not None

    @property
    def ids(self) -> Vector:
        """int32 [tokens]: prompt and response; empty for a row of texts."""
        if self.prompt_ids is None or self.response_ids is None:
            return np.empty(0, np.int32)
        return np.concatenate([self.prompt_ids, self.response_ids])

    @property
    def mask(self) -> Vector:
        """int32 [response]: `loss_mask`, or ones where the file has none."""
        if self.loss_mask is not None:
            return self.loss_mask
        return np.ones(0 if self.response_ids is None else len(self.response_ids), np.int32)


def runs_of(mask: Vector) -> list[tuple[int, int]]:
    """The runs (start, end), without `end`, of ones in a mask [tokens]."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], (mask != 0).astype(np.int8), [0]])))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


class Columns:
    """Columns of a batch or keys of a record, read with errors that name place and column.

    Args:
        values: The columns: a dict.
        place: Where they are, for messages.

    Raises:
        AuditError: `values` is not a dict.
    """

    def __init__(self, values: Any, place: str) -> None:
        if not isinstance(values, dict):
            raise AuditError(f"{place}: not an object")
        self._values: dict[Any, Any] = values
        self.place = place

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def get(self, name: str, default: Any = None) -> Any:
        """A column as it is; `default` where it is missing or null."""
        value = self._values.get(name)
        return default if value is None else value

    def tokens(
        self, name: str, at: int, shown: Vector, dtype: type[np.generic], place: str, of: str = "responses"
    ) -> Vector | None:
        """Row `at` of a table [rows, columns] without its padding, [tokens]; None where there is no such column.

        Args:
            name: The column.
            at: The row.
            shown: bool [columns]: which elements are no padding.
            dtype: The type of the elements.
            place: Where the row is, for messages.
            of: What has as many columns, for messages.

        Raises:
            AuditError: The table has another number of rows or columns.
        """
        if name not in self:
            return None
        table = batch_of(self.get(name), f"{place}: {name}")
        if len(table) <= at or table.shape[1] != len(shown):
            raise AuditError(f"{place}: `{name}` has the shape {list(table.shape)}; {of} have {len(shown)} tokens")
        return aligned(table[at][shown], int(shown.sum()), dtype, f"{place}: {name}")

    def rows(self, name: str, count: int, default: Any = None) -> list[Any]:
        """A column with one value for each of `count` rows; `default` for each where there is none.

        Raises:
            AuditError: It has another length.
        """
        column = self._values.get(name)
        if column is None:
            return [default] * count
        if (size := size_of(column)) != count:
            length = f"a {type(column).__name__}" if size is None else f"{size} values"
            raise AuditError(f"{self.place}: `{name}` has {length}; the file has {count} rows")
        return list(column)

    def count(self, name: str) -> int:
        """The number of rows of a column.

        Raises:
            AuditError: It is not a list.
        """
        size = size_of(self._values.get(name))
        if size is None:
            raise AuditError(f"{self.place}: `{name}` is not a list with one value for each row")
        return size

    def need(self, *names: str) -> None:
        """Refuse a file without these columns.

        Raises:
            AuditError: One is missing; the message lists those that there are.
        """
        missing = ", ".join(f"`{name}`" for name in names if self._values.get(name) is None)
        if missing:
            there = ", ".join(sorted(map(str, self._values))[:30]) or "none"
            raise AuditError(f"{self.place}: no {missing}; it has {there}")


def size_of(value: Any) -> int | None:
    """The length of a list or array; None for anything else, also for an array of no dimension."""
    if isinstance(value, np.ndarray):
        return len(value) if value.ndim else None
    return len(value) if isinstance(value, list | tuple) else None


def vector(value: Any, dtype: type[np.generic], place: str) -> Vector:
    """Convert a list or array to a vector [n].

    Raises:
        AuditError: It is not a flat list of numbers of that type.
    """
    if isinstance(value, Inert):
        raise AuditError(f"{place} is a `{value.name}`, not a list of numbers")
    try:
        numbers = np.asarray(value)
        if numbers.dtype == object:
            numbers = np.asarray([float("nan") if item is None else item for item in value])
    except (ValueError, TypeError) as error:
        raise AuditError(f"{place} is not a flat list of numbers") from error
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "biuf"):
        raise AuditError(
            f"{place} is not a flat list of numbers, but of shape {list(numbers.shape)} and type {numbers.dtype}"
        )
    if np.issubdtype(dtype, np.integer) and numbers.size:
        exact = numbers.dtype.kind in "biu" or bool(
            np.all(np.isfinite(numbers)) and np.all(numbers == np.trunc(numbers))
        )
        bounds = np.iinfo(np.int32)
        if not exact or numbers.min() < bounds.min or numbers.max() > bounds.max:
            raise AuditError(f"{place} holds values that are not 32-bit integers")
    return numbers.astype(dtype)


def ids_of(value: Any, place: str) -> Vector:
    """Token ids, int32 [tokens]. Raises: AuditError: they are not a flat list of ids from 0."""
    ids = vector(value, np.int32, place)
    if ids.size and ids.min() < 0:
        raise AuditError(f"{place} holds the id {ids.min()}; ids are 0 or larger")
    return ids


def aligned(value: Any, size: int, dtype: type[np.generic], place: str) -> Vector | None:
    """A vector [response] with one element for each response token; None for None.

    Raises:
        AuditError: It has another length.
    """
    if value is None:
        return None
    numbers = vector(value, dtype, place)
    if len(numbers) != size:
        raise AuditError(f"{place} has {len(numbers)} elements; the response has {size} tokens")
    return numbers


def number(value: Any) -> float | None:
    """A float of a number, a NumPy number or an array of one; None for anything else."""
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.reshape(-1)[0]
    return float(value) if isinstance(value, int | float | np.number) else None


def text_of(value: Any) -> str | None:
    """A text, or None for anything else."""
    return value if isinstance(value, str) else None


def messages_of(value: Any) -> list[dict[str, Any]] | None:
    """Chat messages with role and content, or None for anything else."""
    if not size_of(value):
        return None
    messages = list(value)
    return messages if all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in messages) else None


def batch_of(value: Any, place: str) -> Vector:
    """A table of numbers, [rows, columns].

    Raises:
        AuditError: It is not one.
    """
    table = value if isinstance(value, np.ndarray) else np.asarray(value)
    if table.ndim != 2 or table.dtype.kind not in "biuf":
        raise AuditError(f"{place} is not a table of numbers [rows, tokens], but of shape {list(table.shape)}")
    return table
