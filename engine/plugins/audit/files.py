"""Opens files of rows from strangers: JSON, JSON lines, Parquet, safetensors, pickles and files of `torch.save`.

Nothing in a file is executed, and a file above `MAX_BYTES` is refused before it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import from_json

from engine.errors import AuditError
from engine.plugins.audit.pickles import plain, read_pickle, read_torch

MAX_BYTES = 2 << 30
"""Maximum size of a file."""
MAX_UNPACKED = 8 << 30
"""Maximum size of a Parquet file's columns when they are unpacked."""
ENDINGS = (".jsonl", ".json", ".parquet", ".pt", ".pth", ".bin", ".pkl", ".pickle", ".safetensors")
"""Endings of the files that are read in a folder."""


class ForeignDocument(NamedTuple):
    """A file's content."""

    path: Path
    value: Any
    """Plain values and NumPy arrays; inert records for objects of other classes."""
    lines: bool
    """Whether `value` is a list with one record for each line or table row."""


def find_files(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the files to read: for a folder, those directly in it with a known ending, by name; numbers in numerical
    order.

    Raises:
        AuditError: There is no such file, or no file in the folder.
    """
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        found = [each for each in path.iterdir() if each.suffix in ENDINGS and each.is_file()]
        if not found:
            raise AuditError(f"{path}: no file of rows ({', '.join(ENDINGS)})")
        yield from sorted(
            found, key=lambda each: (not each.stem.isdecimal(), len(each.stem) * each.stem.isdecimal(), each.name)
        )


def open_document(path: Path) -> ForeignDocument:
    """Read a file. Its form is found by its first bytes; the ending `.jsonl` says that a single object is one row.

    Raises:
        AuditError: It cannot be read, is too large, damaged, or of no known form.
    """
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise AuditError(f"{path} has {size:,} bytes; at most {MAX_BYTES:,} are read: split the file")
        data = path.read_bytes()
    except OSError as error:
        raise AuditError(f"{path} cannot be read: {error.strerror or error}") from error
    if not data:
        raise AuditError(f"{path} is empty")
    try:
        if data[:4] == b"PAR1":
            return ForeignDocument(path, _parquet(data), lines=True)
        if data[:4] == b"PK\x03\x04":
            return ForeignDocument(path, read_torch(data), lines=False)
        if data[:1] == b"\x80":
            return ForeignDocument(path, plain(read_pickle(data)), lines=False)
        if data[8:9] == b"{" and int.from_bytes(data[:8], "little") < len(data):
            return ForeignDocument(path, _safetensors(data), lines=False)
        return _json(path, data)
    except AuditError as error:
        raise AuditError(f"{path}: {error}") from error


def _json(path: Path, data: bytes) -> ForeignDocument:
    if data.lstrip()[:1] not in (b"{", b"["):
        raise AuditError(
            "the file is none of JSON, JSON lines, Parquet, safetensors, a pickle (protocol 2 or later) and a file of "
            "torch.save"
        )
    try:
        value = from_json(data)
        one_row = path.suffix == ".jsonl" and isinstance(value, dict)
        return ForeignDocument(path, [value] if one_row else value, lines=one_row)
    except ValueError as whole:
        rows = []
        for number, line in enumerate(data.splitlines(), 1):
            if not line.strip():
                continue
            try:
                rows.append(from_json(line))
            except ValueError as error:
                why = f"line {number} is not JSON ({error})" if rows else f"not JSON ({whole})"
                raise AuditError(why) from error
        return ForeignDocument(path, rows, lines=True)


def _parquet(data: bytes) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(data))
        unpacked = sum(file.metadata.row_group(at).total_byte_size for at in range(file.metadata.num_row_groups))
        if unpacked > MAX_UNPACKED:
            raise AuditError(f"its columns have {unpacked:,} bytes; at most {MAX_UNPACKED:,} are read")
        rows: list[dict[str, Any]] = file.read().to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise AuditError(f"not a readable Parquet file ({error})") from error
    return rows


def _safetensors(data: bytes) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return dict(load(data))
    except (SafetensorError, ValueError, KeyError) as error:
        raise AuditError(f"not a readable safetensors file ({error})") from error
