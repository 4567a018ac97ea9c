"""Groups on the wire: an Arrow IPC stream, or JSON lines. docs/rows.md has the format.

Invariant: both forms have the same rows; each group comes with its three sums, which the reader compares with what it
has read.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import orjson

from engine.schemas.experts import experts_as_text
from engine.store.rows.export import arrow_schema, record_batch
from engine.store.rows.row import columns_of

if TYPE_CHECKING:
    import pyarrow as pa

    from engine.store.rows.row import TrainingRow

ARROW, JSONL = "application/vnd.apache.arrow.stream", "application/jsonl"
"""The media types."""
NOTE = "note"
"""The key of a record batch's metadata that has the JSON about it."""


@cache
def wire_schema() -> pa.Schema:
    """The columns of a training row (docs/rows.md), and `image_data`: the bytes of images that no row before it in the
    group has."""
    import pyarrow as pa

    image = pa.struct([("image", pa.string()), ("mime", pa.string()), ("data", pa.binary())])
    return arrow_schema().append(pa.field("image_data", pa.list_(image)))


def _image_data(rows: Sequence[TrainingRow], images: Mapping[str, tuple[str, bytes]]) -> Iterator[list[dict[str, Any]]]:
    seen: set[str] = set()
    for row in rows:
        new = list(dict.fromkeys(image.image for image in row.branch.images if image.image not in seen))
        seen.update(new)
        yield [{"image": name, "mime": images[name][0], "data": images[name][1]} for name in new]


class ArrowWriter:
    """One Arrow IPC stream: one record batch for each group, and an empty one at the end."""

    content_type = ARROW

    def __init__(self) -> None:
        import pyarrow as pa

        self._sink = io.BytesIO()
        self._stream = pa.ipc.new_stream(self._sink, wire_schema())

    def group(
        self, rows: Sequence[TrainingRow], images: Mapping[str, tuple[str, bytes]], note: Mapping[str, Any]
    ) -> bytes:
        """The bytes of one group.

        Args:
            rows: Its rows; none if nothing of it can be trained on.
            images: Media type and bytes by digest, of all images of the rows.
            note: What is said about the group.
        """
        return self._written(rows, list(_image_data(rows, images)), {"group": note})

    def end(self, note: Mapping[str, Any]) -> bytes:
        """The bytes at the end of the answer."""
        return self._written([], [], {"end": note}, last=True)

    def _written(
        self,
        rows: Sequence[TrainingRow],
        data: list[list[dict[str, Any]]],
        note: Mapping[str, Any],
        *,
        last: bool = False,
    ) -> bytes:
        import pyarrow as pa

        schema = wire_schema()
        batch = record_batch(list(columns_of(rows)))
        arrays = [*batch.columns, pa.array(data, schema.field("image_data").type)]
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
        self._stream.write_batch(batch, custom_metadata={NOTE: orjson.dumps(note)})
        if last:
            self._stream.close()
        written = self._sink.getvalue()
        self._sink.seek(0)
        self._sink.truncate()
        return written


class JsonWriter:
    """JSON lines: `{"row": …}` for each row, `{"group": …}` after a group's rows, `{"end": …}` at the end."""

    content_type = JSONL

    def group(
        self, rows: Sequence[TrainingRow], images: Mapping[str, tuple[str, bytes]], note: Mapping[str, Any]
    ) -> bytes:
        """See `ArrowWriter`."""
        lines = []
        for columns, data in zip(columns_of(rows), _image_data(rows, images), strict=True):
            shown = [image | {"data": base64.b64encode(image["data"]).decode()} for image in data]
            experts = columns["routed_experts"]
            columns["routed_experts"] = None if experts is None else experts_as_text(experts)
            columns["image_data"] = shown
            lines.append(_line({"row": columns}))
        return b"".join([*lines, _line({"group": note})])

    def end(self, note: Mapping[str, Any]) -> bytes:
        """See `ArrowWriter`."""
        return _line({"end": note})


def _line(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


WireWriter = ArrowWriter | JsonWriter
"""Writes one answer."""
