"""Parquet files that `datasets` reads with types of its own: JSON values as they were, images as images.

Invariant: a JSON value that is read back equals the one that was written, without keys that other rows have. A plain
struct column would give every message the keys of all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import orjson

from engine.store.private import private_file, private_folder, whole_file
from engine.store.rows.columns import json_text

if TYPE_CHECKING:
    import pyarrow as pa

    from engine.store.reader import RunReader

Kind = Literal["text", "int", "float", "json", "jsons", "images"]
"""Type of a column: `json` is one value, `jsons` a list of values, `images` a list of images."""
_ROWS = 256
"""Rows in a row group."""


def write_table(
    rows: Iterator[dict[str, Any]],
    columns: Mapping[str, Kind],
    path: Path,
    metadata: Mapping[str, str],
    *,
    image: Callable[[str], dict[str, Any]],
) -> int:
    """Write rows as Parquet and return their number. The file appears only when it is complete.

    Args:
        rows: The rows; in a column of type `images` the digests. A column that a row lacks is null.
        columns: The types of the columns.
        path: The file.
        metadata: Texts for the file's metadata.
        image: The struct `{bytes, path}` of an image, by its digest.

    Raises:
        StoreError: the file cannot be written.
    """
    import pyarrow.parquet as pq

    schema = _schema(columns, metadata)
    count = 0
    with whole_file(path) as draft, pq.ParquetWriter(draft, schema, compression="zstd") as writer:
        while batch := list(islice(rows, _ROWS)):
            writer.write_table(_arrow(batch, columns, schema, image))
            count += len(batch)
    return count


def _schema(columns: Mapping[str, Kind], metadata: Mapping[str, str]) -> pa.Schema:
    import pyarrow as pa

    types = {
        "text": (pa.string(), {"dtype": "string", "_type": "Value"}),
        "int": (pa.int64(), {"dtype": "int64", "_type": "Value"}),
        "float": (pa.float64(), {"dtype": "float64", "_type": "Value"}),
        "json": (pa.json_(), {"_type": "Json"}),
        "jsons": (pa.list_(pa.json_()), {"feature": {"_type": "Json"}, "_type": "List"}),
        "images": (
            pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
            {"feature": {"_type": "Image"}, "_type": "List"},
        ),
    }
    features = {name: types[kind][1] for name, kind in columns.items()}
    schema_metadata = {"huggingface": json.dumps({"info": {"features": features}}), **metadata}
    return pa.schema([(name, types[kind][0]) for name, kind in columns.items()], metadata=schema_metadata)


def _arrow(
    rows: list[dict[str, Any]], columns: Mapping[str, Kind], schema: pa.Schema, image: Callable[[str], dict[str, Any]]
) -> pa.Table:
    import pyarrow as pa

    arrays = []
    for name, kind in columns.items():
        values = [row.get(name) for row in rows]
        if kind == "json":
            texts = pa.array([None if value is None else json_text(value) for value in values], pa.string())
            arrays.append(pa.ExtensionArray.from_storage(pa.json_(), texts))
        elif kind == "jsons":
            lists = pa.array(
                [None if value is None else [json_text(item) for item in value] for value in values],
                pa.list_(pa.string()),
            )
            items = pa.ExtensionArray.from_storage(pa.json_(), lists.values)
            missing = pa.array([value is None for value in values])
            arrays.append(pa.ListArray.from_arrays(lists.offsets, items, mask=missing))
        elif kind == "images":
            made = [None if value is None else [image(digest) for digest in value] for value in values]
            arrays.append(pa.array(made, schema.field(name).type))
        else:
            arrays.append(pa.array(values, schema.field(name).type))
    return pa.Table.from_arrays(arrays, schema=schema)


def image_struct(store: RunReader, folder: Path | None, digest: str) -> dict[str, Any]:
    """An image as the bytes of its file; with a folder as the absolute path of a file there, written if it is new."""
    stored = store.image(digest)
    name = f"{digest.removeprefix('sha256:')}.{stored.mime.rpartition('/')[2] or 'bin'}"
    if folder is None:
        return {"bytes": stored.data, "path": name}
    path = folder.absolute() / name
    if not path.exists():
        if not folder.exists():
            private_folder(folder)
        draft = private_file(path.with_name(f".{path.name}.part"))
        draft.write_bytes(stored.data)
        draft.replace(path)
    return {"bytes": None, "path": str(path)}


def identity(*values: Any) -> bytes:
    """What tells two rows apart."""
    return orjson.dumps(values, default=str)
