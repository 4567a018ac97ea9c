"""Training rows as Parquet: typed lists, row groups of bounded size, written as they come.

Invariant: what JSONL says, this says too, and NaN and infinities besides. Content that is text alone is in
`content`; content of several parts is in `parts` as well, in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.store.export import Row, whole_file

if TYPE_CHECKING:
    import pyarrow as pa

GROUP_ROWS = 1024
"""Most rows in a row group."""
GROUP_TOKENS = 2_000_000
"""Tokens after which a row group is written, however few its rows."""


@cache
def arrow_schema() -> pa.Schema:
    """The columns of `export.py` as Arrow types."""
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
            ("rewards", pa.map_(pa.string(), pa.float64())),
        ]
    )
    return pa.schema(
        [
            ("run_id", pa.string()),
            ("task_id", pa.string()),
            ("episode_id", pa.string()),
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
            ("turn_rewards", pa.list_(pa.float64())),
            ("outcome", outcome),
            ("messages", pa.list_(message)),
            ("images", pa.list_(image)),
        ]
    )


def write_parquet(rows: Iterable[Row], path: Path, metadata: dict[str, str] | None = None) -> int:
    """Write rows as Parquet, a row group at a time; returns how many.

    Args:
        rows: As `export_rows` gives them.
        path: The file; it appears under its name only when it is complete.
        metadata: Kept in the file's schema.

    Raises:
        StoreError: the file cannot be written.
    """
    import pyarrow.parquet as pq

    schema = arrow_schema().with_metadata(metadata or {})
    count = 0
    with whole_file(path) as draft, pq.ParquetWriter(draft, schema, compression="zstd") as writer:
        waiting: list[Row] = []
        tokens = 0
        for row in rows:
            waiting.append(row)
            tokens += len(row["input_ids"])
            count += 1
            if len(waiting) >= GROUP_ROWS or tokens >= GROUP_TOKENS:
                writer.write_batch(_batch(waiting))
                waiting, tokens = [], 0
        if waiting:
            writer.write_batch(_batch(waiting))
    return count


def _batch(rows: list[Row]) -> pa.RecordBatch:
    import pyarrow as pa

    schema = arrow_schema()
    columns = []
    for column in schema:
        values: list[Any] = [row[column.name] for row in rows]
        if column.name == "messages":
            values = [[_message(message) for message in messages] for messages in values]
        elif column.name == "outcome":
            values = [outcome | {"rewards": list(outcome["rewards"].items())} for outcome in values]
        columns.append(pa.array(values, column.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _message(message: Row) -> Row:
    """A message in the columns of its struct; arguments, which have no fixed type, as JSON."""
    import orjson

    content = message["content"]
    parts = content if isinstance(content, list) else None
    return message | {
        "content": content if parts is None else "".join(part["text"] for part in parts if part["type"] == "text"),
        "parts": parts,
        "tool_calls": [
            call | {"arguments": orjson.dumps(call["arguments"]).decode()} for call in message.get("tool_calls", [])
        ],
    }
