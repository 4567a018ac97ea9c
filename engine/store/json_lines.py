"""A file of JSON objects, one a line.

Invariant: a line is on disk when `append` returns. A kill leaves at most one incomplete last line, which readers pass
over and the next `append` removes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from engine.errors import StoreError
from engine.store.private import private_file, sync_path, whole_file

T = TypeVar("T")


@dataclass(eq=False)
class JsonLines(Generic[T]):
    """Appends to a file that one process writes.

    Args:
        path: The file; the first line makes it.
        decode: Makes a value of a line's object. What it raises of ValueError, TypeError or KeyError names the line.
    """

    path: Path
    decode: Callable[[dict[str, Any]], T]

    def read(self) -> list[T]:
        """The values of all complete lines, oldest first; none if there is no file.

        Raises:
            StoreError: the file cannot be read, or a line is damaged.
        """
        return [value for _, value in self._lines()]

    def append(self, *lines: Any) -> None:
        """Add objects or structs, and wait for the disk. Raises: StoreError: none of them was added."""
        data = "".join(f"{json.dumps(line, default=asdict)}\n" for line in lines).encode()
        try:
            with private_file(self.path).open("r+b") as file:
                end = _end(file)
                try:
                    file.truncate(end)
                    file.seek(end)
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                except OSError:
                    os.truncate(self.path, end)
                    raise
        except OSError as error:
            raise StoreError(f"cannot write {self.path}: {error}; is the disk full?") from error

    def cut(self, stays: Callable[[T], bool]) -> int:
        """Move lines to `NAME.cut.jsonl` unless `stays`. A crash loses none and may copy some twice. Returns how many.

        Raises:
            StoreError: as `read` and `append`.
        """
        staying: list[dict[str, Any]] = []
        gone: list[dict[str, Any]] = []
        for line, value in self._lines():
            (staying if stays(value) else gone).append(line)
        if gone:
            JsonLines(self.path.with_suffix(".cut.jsonl"), dict).append(*gone)
            with whole_file(self.path) as draft:
                JsonLines(draft, dict).append(*staying)
            sync_path(self.path.parent)
        return len(gone)

    def _lines(self) -> list[tuple[dict[str, Any], T]]:
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"{self.path} cannot be read: {error.strerror or error}") from error
        lines = []
        for number, text in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), start=1):
            try:
                if text:
                    line = json.loads(text)
                    lines.append((line, self.decode(line)))
            except (ValueError, KeyError, TypeError) as error:
                raise StoreError(f"{self.path}:{number} is damaged ({error!r}); remove the line") from error
        return lines


def _end(file: BinaryIO) -> int:
    """Where the last complete line ends."""
    size = file.seek(0, os.SEEK_END)
    if size:
        file.seek(size - 1)
        if file.read(1) != b"\n":
            file.seek(0)
            return file.read().rfind(b"\n") + 1
    return size
