"""Exports the training rows of a run: as dicts, as JSON lines, and as Parquet with typed lists and row groups of
bounded size.

    for row in training_rows(store): ...                              # typed
    write_jsonl(export_rows(store), Path("rows.jsonl"))               # dicts, arrays as numpy

`columns.py` has the meaning of each column of a row, `arrow_schema` its type; docs/rows.md has both. `loader.py` makes
batches of rows.

Invariant: a Parquet file has the same columns and shapes as JSONL; it also keeps NaN and infinities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from engine.schemas.experts import experts_as_text, pack_experts
from engine.store.private import whole_file
from engine.store.reviews import with_reviews
from engine.store.rows.build import RowBuilder
from engine.store.rows.row import columns_of

if TYPE_CHECKING:
    import pyarrow as pa

    from engine.schemas.credit import CreditSpec
    from engine.schemas.trajectory import Trajectory
    from engine.store.reader import RunReader
    from engine.store.rows.columns import Columns
    from engine.store.rows.row import TrainingRow
    from engine.tokens.vision import Vision


GROUP_ROWS = 1024
"""Maximum number of rows in a row group."""
GROUP_TOKENS = 2_000_000
"""Number of tokens after which a row group is written, also with few rows; eight characters of text count as one
token."""


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
    stored = with_reviews(store, store.trajectories(score))
    for task_id, group in groupby(stored, key=lambda trajectory: trajectory.task_id):
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
        vision: The model's images (`vision_of(store)`, or a run's own `format.vision`): a row of a branch with images
            then also has the tensors that a forward pass needs besides `input_ids`, under the names of the model's
            family: `pixel_values` and `image_grid_thw` for Qwen-VL.
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


@cache
def arrow_schema() -> pa.Schema:
    """Return the Arrow schema of the columns of `rows/columns.py`."""
    import pyarrow as pa

    part = pa.struct(
        [
            ("type", pa.string()),
            ("text", pa.string()),
            ("image", pa.string()),
            ("mime", pa.string()),
            ("width", pa.int32()),
            ("height", pa.int32()),
        ]
    )
    call = pa.struct([("id", pa.string()), ("name", pa.string()), ("arguments", pa.string())])
    message = pa.struct(
        [
            ("role", pa.string()),
            ("content", pa.string()),
            ("parts", pa.list_(part)),
            ("reasoning", pa.string()),
            ("tool_calls", pa.list_(call)),
            ("tool_call_id", pa.string()),
            ("name", pa.string()),
        ]
    )
    image = pa.struct(
        [("image", pa.string()), ("start", pa.int32()), ("end", pa.int32()), ("grid", pa.list_(pa.int32()))]
    )
    experts = pa.struct([("shape", pa.list_(pa.int64())), ("dtype", pa.string()), ("data", pa.binary())])
    failure = pa.struct(
        [
            ("kind", pa.string()),
            ("blame", pa.string()),
            ("message", pa.string()),
            ("state", pa.string()),
            ("turn", pa.int32()),
            ("trace", pa.string()),
        ]
    )
    outcome = pa.struct(
        [
            ("state", pa.string()),
            ("event", pa.string()),
            ("limit", pa.string()),
            ("failure", failure),
            ("solved", pa.bool_()),
            ("solved_turn", pa.int32()),
            ("trainable", pa.bool_()),
            ("reward", pa.float64()),
            ("rewards", pa.list_(pa.struct([("name", pa.string()), ("value", pa.float64())]))),
        ]
    )
    metadata = pa.struct(
        [
            ("spec", pa.string()),
            ("model", pa.string()),
            ("engine_version", pa.string()),
            ("created", pa.float64()),
            ("credit", pa.string()),
            ("score", pa.string()),
        ]
    )
    return pa.schema(
        [
            ("run_id", pa.string()),
            ("task_id", pa.string()),
            ("episode_id", pa.string()),
            ("task_index", pa.int64()),
            ("sample_index", pa.int32()),
            ("branch", pa.int32()),
            ("seed", pa.int64()),
            ("trainable", pa.bool_()),
            ("input_ids", pa.list_(pa.int32())),
            ("loss_mask", pa.list_(pa.int32())),
            ("logprobs", pa.list_(pa.float32())),
            ("weight_versions", pa.list_(pa.int32())),
            ("turn_ids", pa.list_(pa.int32())),
            ("token_rewards", pa.list_(pa.float32())),
            ("advantages", pa.list_(pa.float32())),
            ("unchecked_prompts", pa.int32()),
            ("turn_rewards", pa.list_(pa.float64())),
            ("outcome", outcome),
            ("messages", pa.list_(message)),
            ("images", pa.list_(image)),
            ("routed_experts", experts),
            ("task_fields", pa.string()),
            ("facts", pa.string()),
            ("metadata", metadata),
        ]
    )


def write_parquet(rows: Iterable[Columns], path: Path, metadata: dict[str, str] | None = None) -> int:
    """Write rows as Parquet, one row group at a time, and return their number.

    Args:
        rows: Rows of `export_rows`.
        path: The file; it appears under its name only when it is complete.
        metadata: Stored in the file's schema.

    Raises:
        StoreError: the file cannot be written.
    """
    import pyarrow.parquet as pq

    schema = arrow_schema().with_metadata(metadata or {})
    count = 0
    with whole_file(path) as draft, pq.ParquetWriter(draft, schema, compression="zstd") as writer:
        for batch in record_batches(rows):
            writer.write_batch(batch)
            count += batch.num_rows
    return count


def _bytes(columns: Columns) -> int:
    """Return the size of a row's long texts and its experts. A row group can hold at most 2 GiB of one column."""
    texts = sum(len(message["content"]) for message in columns["messages"])
    texts += len(columns["task_fields"] or "") + len(columns["facts"])
    experts = columns["routed_experts"]
    return texts + (0 if experts is None else int(experts.nbytes))


def record_batches(rows: Iterable[Columns]) -> Iterator[pa.RecordBatch]:
    """Yield rows as Arrow record batches of bounded size, each a row group of a file."""
    waiting: list[Columns] = []
    tokens = 0
    for columns in rows:
        waiting.append(columns)
        tokens += len(columns["input_ids"]) + _bytes(columns) // 8
        if len(waiting) >= GROUP_ROWS or tokens >= GROUP_TOKENS:
            yield record_batch(waiting)
            waiting, tokens = [], 0
    if waiting:
        yield record_batch(waiting)


def record_batch(rows: Sequence[Columns]) -> pa.RecordBatch:
    """Return rows as one Arrow record batch with the columns of `arrow_schema`."""
    import pyarrow as pa

    schema = arrow_schema()
    values = {field.name: [columns[field.name] for columns in rows] for field in schema}
    values["routed_experts"] = [
        None if experts is None else pack_experts(experts) for experts in values["routed_experts"]
    ]
    return pa.RecordBatch.from_arrays([pa.array(values[field.name], field.type) for field in schema], schema=schema)
