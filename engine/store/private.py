"""Files and folders that only their owner may read: runs hold what models and users said."""

from __future__ import annotations

import os
from pathlib import Path


def private_folder(path: Path, *, exist_ok: bool = False) -> None:
    """Make a folder of mode 0700; folders above it are made as the umask says.

    Raises:
        OSError: it exists, or cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=exist_ok)


def private_file(path: Path) -> Path:
    """Make an empty file of mode 0600, unless it is there; what writes to it keeps the mode.

    Raises:
        OSError: it cannot be made.
    """
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    return path
