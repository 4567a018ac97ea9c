"""The columns of rows for supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from engine.plugins.datasets.sft_rows import ExportedTurns, sft_rows

if TYPE_CHECKING:
    from engine.store.reader import RunReader
    from engine.store.rows.columns import Columns


def sft_columns(store: RunReader, selection: ExportedTurns) -> Iterator[Columns]:
    """The columns of the rows of these episodes."""
    return sft_rows(store, selection)
