"""Results on disk, under the digest of everything that they depend on. Nothing is ever out of date: other inputs have another digest.

Invariants:
- An entry is complete or absent: it is written under a temporary name and renamed. Processes that write the same entry write the
  same bytes.
- An entry that is damaged counts as absent, and is made again. An entry holds the digest of its content.
- A cache that cannot be written only costs time.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import structlog

from engine.plugins.preparing.inputs import digest_of_parts

log = structlog.get_logger(__name__)

MOST_BYTES = 1 << 29
"""Size of a cache folder above which the entries that were written first are deleted."""
_CHECK = 32
"""Bytes of an entry's own digest, as hexadecimal digits."""


class PreparedCache:
    """JSON values on disk.

    Args:
        folder: The folder; created at the first entry.
        most_bytes: Size of the folder above which the entries that were written first are deleted.
    """

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self.folder = folder
        self._most = most_bytes
        self._usable = True
        self._written = False

    def _file(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"

    def get(self, key: str) -> Any | None:
        """The value of a key; None if there is none, or if its entry is damaged."""
        try:
            data = self._file(key).read_bytes()
        except OSError:
            return None
        if data[:_CHECK] != digest_of_parts(key, data[_CHECK:]).encode():
            return None
        return json.loads(data[_CHECK:])

    def put(self, key: str, value: Any) -> None:
        """Write a value. A folder that cannot be written is reported once and not used again."""
        if not self._usable:
            return
        body = json.dumps(value, separators=(",", ":")).encode()
        path = self._file(key)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, draft = tempfile.mkstemp(prefix=".draft-", dir=path.parent)  # mode 0600
            try:
                with os.fdopen(handle, "wb") as stream:
                    stream.write(digest_of_parts(key, body).encode() + body)
                Path(draft).replace(path)
            except BaseException:
                with contextlib.suppress(OSError):
                    Path(draft).unlink()
                raise
            self._written = True
        except OSError as error:
            self._usable = False
            log.warning("prepared data is not kept", reason=f"{self.folder} cannot be written: {error}")

    def prune(self) -> None:
        """Delete the entries that were written first, if this object has written and the folder is too large."""
        if not self._written:
            return
        found = []
        for file in self.folder.glob("*/*"):  # entries, and drafts of processes that were killed
            with contextlib.suppress(OSError):
                status = file.stat()
                found.append((status.st_mtime, status.st_size, file))
        size = sum(each for _, each, _ in found)
        for _, each, file in sorted(found):
            if size <= self._most:
                return
            with contextlib.suppress(OSError):
                file.unlink()
            size -= each
