"""What an SFT training must know of each row before it begins: read in several processes, and kept on disk.

Reading a row of 12,000 tokens takes about 13 ms, almost all of it for its JSON; the facts of a row have about 200
bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from engine.errors import TrainError
from engine.plugins.preparing.jobs import ALONE, PreparedCache, digest_of_files, digest_of_parts, prepare
from engine.spec.rows.parquet_rows import ParquetRows
from engine.spec.rows.row import ListRows, RowFault, Rows
from engine.spec.rows.text_rows import JsonlRows
from engine.tokens.catalogue import prepared_folder

if TYPE_CHECKING:
    from engine.store.rows.columns import Columns

COLUMNS = (
    "run_id",
    "task_id",
    "episode_id",
    "branch",
    "trainable",
    "input_ids",
    "loss_mask",
    "turn_ids",
    "outcome",
)
"""Columns that a row needs."""
PART_BYTES = 1 << 22
"""About the size of the rows of one job, in bytes of the file."""
_REMOTE = f"{__name__}:read_part"


class RowFacts(NamedTuple):
    """One row of a file."""

    number: int
    """From 1, as in messages."""
    run: str
    episode: str
    trainable: bool
    """Whether the export marks it as trainable, and it has a trained token."""
    reward: float | None
    """The sum of the episode's rewards."""
    rewards: dict[str, float]
    """The first reward of each name."""
    identity: str
    """Digest of run, episode, branch and tokens, as hexadecimal digits."""
    tokens: int
    largest_id: int
    trained: int
    """Number of trained tokens."""
    images: list[str]
    """Digests."""


def open_rows(file: Path) -> Rows:
    """The rows of one file of `engine export`."""
    return ParquetRows([file]) if file.suffix == ".parquet" else JsonlRows([file], lambda path: path.open("rb"))


def facts_of(file: Path, rows: Rows, processes: int | None = None, alone: float = ALONE) -> Iterator[RowFacts]:
    """The facts of a file's rows, in order.

    Args:
        file: The file.
        rows: Its rows.
        processes: Number of worker processes. Default: see `engine.plugins.preparing.jobs`.
        alone: Seconds of work in this process before workers start.

    Raises:
        RowFault: A row cannot be read.
        TrainError: kind `train_setup`: a row is not a row of `engine export`.
    """
    if isinstance(rows, ListRows):  # rendered for this model: not what the file has
        yield from (_facts(row, file) for row in rows)
        return
    count, (size, changed) = len(rows), _stamp(file)
    step = max(1, min(4096, PART_BYTES * count // max(size, 1)))
    inputs = digest_of_parts(digest_of_files([file]), digest_of_files([Path(__file__)]), file.suffix)
    parts = prepare(
        (
            (digest_of_parts(inputs, f"{start}/{step}"), [str(file), start, min(start + step, count), size, changed])
            for start in range(0, count, step)
        ),
        local=lambda part: _read(rows, part),
        remote=_REMOTE,
        common=None,
        cache=PreparedCache(prepared_folder() / "rows"),
        processes=processes,
        alone=alone,
    )
    for part in parts:
        for values in part:
            yield RowFacts(*values)


def read_part(common: None, part: list[Any]) -> list[RowFacts]:
    """The facts of rows [start, end) of a file, in a worker process: see `facts_of`."""
    return _read(_opened(part[0]), part)


@lru_cache(maxsize=2)
def _opened(name: str) -> Rows:
    return open_rows(Path(name))


def _stamp(file: Path) -> tuple[int, int]:
    """Size, and time of the last change."""
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def _read(rows: Rows, part: list[Any]) -> list[RowFacts]:
    file, start, end, *stamp = Path(part[0]), *part[1:]
    facts = [_facts(rows.row(position), file) for position in range(start, end)]
    if [*_stamp(file)] != stamp:  # else facts of other rows would be kept under the digest of these
        raise RowFault("the file has changed since its rows were counted", None, "tasks.bad-file")
    return facts


def _facts(source: Any, file: Path) -> RowFacts:
    columns = _checked(source.fields, f"{file}: row {source.number}")
    outcome = columns["outcome"] or {}
    named: dict[str, float] = {}
    for reward in outcome.get("rewards") or ():
        named.setdefault(reward["name"], reward["value"])
    ids, trained = np.asarray(columns["input_ids"], np.int64), int(sum(columns["loss_mask"]))
    # trainings name their runs alike, so ids of runs and episodes alone do not identify a row
    identity = blake2b(f"{columns['run_id']}\n{columns['episode_id']}\n{columns['branch']}\n".encode(), digest_size=16)
    identity.update(ids.tobytes())
    identity.update(np.asarray(columns["loss_mask"], np.int8).tobytes())
    return RowFacts(
        number=source.number,
        run=str(columns["run_id"]),
        episode=str(columns["episode_id"]),
        trainable=bool(columns["trainable"]) and 1 in columns["loss_mask"],
        reward=outcome.get("reward"),
        rewards=named,
        identity=identity.hexdigest(),
        tokens=len(ids),
        largest_id=int(ids.max()),
        trained=trained,
        images=[image["image"] for image in columns["images"]],
    )


def _checked(fields: Any, where: str) -> Columns:
    """A row of a file, after a check of its columns.

    Raises:
        TrainError: kind `train_setup`: it is not a row of `engine export`.
    """
    missing = [name for name in COLUMNS if name not in fields] if isinstance(fields, dict) else list(COLUMNS)
    if missing:
        words = f"it has no `{missing[0]}`"
    elif not len(fields["input_ids"]) == len(fields["loss_mask"]) == len(fields["turn_ids"]):
        words = "`input_ids`, `loss_mask` and `turn_ids` have different lengths"
    elif not fields["input_ids"]:
        words = "`input_ids` is empty"
    elif fields["loss_mask"][0] == 1:
        words = "its first token is trained, and nothing predicts it"
    else:
        columns: Columns = {"images": []} | fields
        return columns
    raise TrainError(f"{where} is not a row of `engine export`: {words}", kind="train_setup")
