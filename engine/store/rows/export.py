"""Exports the training rows of a run: as dicts, and as JSON lines.

    for row in training_rows(store): ...                              # typed
    write_jsonl(export_rows(store), Path("rows.jsonl"))               # dicts, arrays as numpy

`columns.py` has the meaning of each column of a row, `parquet.py` its type; docs/rows.md has both. `loader.py` makes batches of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from engine.schemas.experts import experts_as_text
from engine.store.private import whole_file
from engine.store.rows.build import RowBuilder
from engine.store.rows.row import columns_of

if TYPE_CHECKING:
    from engine.schemas.credit import CreditSpec
    from engine.schemas.trajectory import Trajectory
    from engine.store.reader import RunReader
    from engine.store.rows.columns import Columns
    from engine.store.rows.row import TrainingRow
    from engine.tokens.vision import Vision


def training_rows(
    store: RunReader,
    *,
    credit: CreditSpec | None = None,
    trainable_only: bool = False,
    score: str | None = None,
    values: Mapping[str, Sequence[Sequence[float]]] | None = None,
    keep: Callable[[Trajectory], bool] | None = None,
) -> Iterator[TrainingRow]:
    """Yield the training rows of every finished episode, in the order of tasks, samples and branches.

    Only one task's episodes are in memory at a time. In an evaluation (`engine eval`) no row is trainable.

    Args:
        store: The run, which may still be running.
        credit: How turn rewards become advantages. The default is the method of the run's spec, or of the score.
        trainable_only: Leave out rows that are not trainable.
        score: Label of a score of `engine rescore`, whose rewards are used.
        values: A critic's values, for methods that need them: episode id -> for each turn, one for each sampled token.
        keep: Which episodes have rows. Advantages are computed from all episodes of the group, as without it.

    Raises:
        StoreError: the run has no such score.
        LedgerError: the credit method needs values that are missing.
    """
    builder = RowBuilder.of_run(store, credit=credit, score=score, values=values)
    for task_id, group in groupby(store.trajectories(score), key=lambda trajectory: trajectory.task_id):
        episodes = list(group)
        chosen = {trajectory.episode_id for trajectory in episodes if keep is None or keep(trajectory)}
        for row in builder.rows(episodes, store.task(task_id)) if chosen else ():
            if row.episode.episode_id in chosen and (row.trainable or not trainable_only):
                yield row


def export_rows(
    store: RunReader,
    *,
    credit: CreditSpec | None = None,
    trainable_only: bool = False,
    score: str | None = None,
    values: Mapping[str, Sequence[Sequence[float]]] | None = None,
    vision: Vision | None = None,
    keep: Callable[[Trajectory], bool] | None = None,
) -> Iterator[Columns]:
    """Yield the columns of `training_rows`, which has the other arguments and the errors.

    Args:
        vision: The model's images (`vision_of(store)`, or a run's own `format.vision`): a row of a branch with images then also has the
            tensors that a forward pass needs besides `input_ids`, under the names of the model's family: `pixel_values`
            and `image_grid_thw` for Qwen-VL.
    """
    rows = training_rows(store, credit=credit, trainable_only=trainable_only, score=score, values=values, keep=keep)
    for columns in columns_of(rows):
        if vision is not None and columns["images"]:
            columns.update(vision.tensors([[image["image"] for image in columns["images"]]]))
        yield columns


def write_jsonl(rows: Iterable[Columns], path: Path) -> int:
    """Write rows as JSON lines, one at a time, and return their number.

    Numbers are written with the fewest digits that give the same float back. JSON has no NaN and no infinities: they
    become null. The file appears under its name only when it is complete.

    Raises:
        StoreError: the file cannot be written.
    """
    import orjson

    count = 0
    with whole_file(path) as draft, draft.open("wb") as file:
        for columns in rows:
            experts = columns.get("routed_experts")
            line = columns if experts is None else {**columns, "routed_experts": experts_as_text(experts)}
            file.write(orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
            count += 1
    return count
