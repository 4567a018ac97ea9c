"""Reads Geometry3K in its published layouts, and returns rows of one layout.

The layouts are: the 301 problems that ship with the project; the hub's `hiyouga/geometry3k` as Parquet (`images`, a list of
`{bytes, path}`; `problem`, with `<image>` where the picture stands; `answer`); the versions of verl and slime
(`extra_info.question`, `reward_model.ground_truth`; images as `data:` URIs); and JSON lines with `image` or `images`,
paths relative to the file.

Invariant: every returned row has `id`, `question`, `images` (references: a path that is absolute, or a URI),
`answer` and `tolerance`. A row without them is an error that names its file and number.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.schemas.message import image_part

SHIPPED = Path(__file__).parent / "data" / "geo3k" / "problems.jsonl"
_REFERENCES = ("sha256:", "data:", "file:", "http:", "https:")


def problems(path: str | None = None, split: str | None = None, tolerance: float = 0.01) -> Iterator[dict[str, Any]]:
    """Rows with `id`, `question`, `images`, `answer` and `tolerance`.

    Args:
        path: A `.parquet` or `.jsonl` file, or a folder of such files (for example a copy of the hub's), relative to the
            current folder. None: the problems that ship with the project.
        split: Read only files of the folder whose names begin with this: `train`, `validation`, `test`.
        tolerance: Maximum relative error of an answer, for rows without their own: the public set rounds some of its
            answers to two decimals.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A row has no question, answer or picture.
    """
    for file in _files(SHIPPED if path is None else Path(path).expanduser(), split):
        rows = _parquet(file) if file.suffix == ".parquet" else _jsonl(file)
        for number, row in enumerate(rows, start=1):
            try:
                yield _task(row, file, number, tolerance)
            except (ValueError, TypeError) as error:
                raise ValueError(f"{file.name}, row {number}: {error}") from error


def _files(path: Path, split: str | None) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"there is no {path}; name a .parquet or .jsonl file, or a folder of them")
    found = sorted(file for file in path.rglob("*") if file.suffix in (".parquet", ".jsonl"))
    chosen = [file for file in found if split is None or file.name.startswith(split)]
    if not chosen:
        names = ", ".join(file.name for file in found) or "no such file"
        wanted = "" if split is None else f" whose name begins with {split!r}"
        raise FileNotFoundError(f"no .parquet or .jsonl file{wanted} in {path}; it holds {names}")
    return chosen


def _jsonl(file: Path) -> Iterator[Any]:
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                yield json.loads(line)


def _parquet(file: Path) -> Iterator[Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as table:
        for batch in table.iter_batches(batch_size=64):
            yield from batch.to_pylist()


def _task(row: Any, file: Path, number: int, tolerance: float) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise ValueError(f"a row must be a mapping, not {type(row).__name__}")
    extra, judged = _mapping(row.get("extra_info")), _mapping(row.get("reward_model"))
    question = _first(row.get("question"), row.get("problem"), extra.get("question"))
    answer = _first(row.get("answer"), extra.get("answer"), judged.get("ground_truth"))
    if question is None or answer is None:
        missing = "question (`question` or `problem`)" if question is None else "`answer`"
        raise ValueError(f"it has no {missing}; its fields: {', '.join(map(str, row)) or 'none'}")
    images = row.get("images", row.get("image"))
    if isinstance(images, str | bytes | Mapping):
        images = [images]
    if not isinstance(images, Sequence) or not images:
        raise ValueError(f"it has no picture (`image` or `images`); its fields: {', '.join(map(str, row))}")
    return {
        "id": str(row["id"]) if row.get("id") is not None else f"{file.stem}-{number}",
        "question": str(question),
        "images": [_reference(image, file.parent) for image in images],
        "answer": str(answer),
        "tolerance": float(row.get("tolerance", tolerance)),
    }


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None and value != ""), None)


def _reference(image: Any, folder: Path) -> str:
    """An image as a reference: bytes as a `data:` URI, a path made absolute."""
    if isinstance(image, Mapping):
        data, path = image.get("bytes"), image.get("path")
        image = data if data else path
    if isinstance(image, str):
        return image if image.startswith(_REFERENCES) else str((folder / image).resolve())
    if isinstance(image, bytes) and image:
        return image_part(image).image
    raise ValueError(f"a picture is {type(image).__name__}; it must be bytes, a path, or a `data:` URI")
