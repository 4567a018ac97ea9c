"""Files and folders that only their owner can read, because runs contain conversations."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import StoreError


def private_folder(path: Path, *, exist_ok: bool = False) -> None:
    """Create a folder with mode 0700. Missing parent folders get mode 0755, restricted by the umask.

    If others could write to the folder, they could replace the run.

    Raises:
        OSError: the folder exists, or cannot be created.
    """
    for folder in reversed(path.parents):
        folder.mkdir(mode=0o755, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=exist_ok)


def private_file(path: Path) -> Path:
    """Create an empty file with mode 0600 if it does not exist. Writing to it keeps the mode.

    Raises:
        OSError: the file cannot be created.
    """
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    return path


def sync_path(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk. Raises: OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a temporary file to write; it is renamed to `path` if the block succeeds, and removed if not.

    Raises:
        StoreError: the file cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        private_file(draft)
        try:
            yield draft
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error}") from error
