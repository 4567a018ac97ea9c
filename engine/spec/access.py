"""Which files reading a spec may open, and whether code that the spec names may be imported.

A command that runs a spec may do both. `engine validate` reads the specs of strangers: it opens regular files below a
few folders alone, and imports nothing. Symbolic links are resolved before a path is compared with the folders.

    access = Access.for_spec(Path("specs/task.yaml"))
    with access.open(Path("specs/rows.jsonl")) as stream: ...
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

OUTSIDE_FIX = "move it beside the spec, or allow its folder: `engine validate --allow-path FOLDER`"


class OutsideError(PermissionError):
    """A file that is outside the folders that may be read."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EACCES, "it is outside the folders that may be read", str(path))


@dataclass(frozen=True)
class Access:
    """What reading one spec may touch; without arguments, everything."""

    roots: tuple[Path, ...] | None = None
    """Folders below which files may be opened, resolved; None: any file."""
    files: tuple[Path, ...] = ()
    """Files that may be opened too, resolved."""
    imports: bool = True
    """Whether code that the spec names may be imported and called."""

    @classmethod
    def for_spec(cls, spec: Path, allowed: Iterable[Path] = (), *, imports: bool = False) -> Access:
        """What `engine validate` may touch for one spec: the spec's folder, the current one, and what the user allows.

        The root of the file system is no such folder, unless the user names it.
        """
        folders = [folder for folder in (_real(spec.parent), _real(Path())) if folder != folder.parent]
        spec_file = _real(spec.parent) / spec.name  # not what a link of that name leads to
        return cls((*folders, *map(_real, allowed)), (spec_file,), imports)

    def below(self, *folders: Path) -> Access:
        """The same, with more folders."""
        return self if self.roots is None else replace(self, roots=(*self.roots, *map(_real, folders)))

    def allows(self, path: Path) -> bool:
        """Whether a file may be opened, by where its links lead; whether it exists is not looked at."""
        if self.roots is None:
            return True
        try:
            real = _real(path)
        except (OSError, ValueError):
            return True  # it cannot be opened at all, and the attempt says why
        return real in self.files or any(real.is_relative_to(root) for root in self.roots)

    def is_file(self, path: Path) -> bool:
        """Whether there is such a regular file, and it may be opened."""
        return self.allows(path) and os.path.isfile(path)  # noqa: PTH113  (never raises)

    def is_dir(self, path: Path) -> bool:
        """Whether there is such a folder, and it may be listed."""
        return self.allows(path) and os.path.isdir(path)  # noqa: PTH112  (never raises)

    def open(self, path: Path) -> BinaryIO:
        """A file, for reading bytes.

        Raises:
            OutsideError: it lies outside of the folders.
            OSError: it cannot be opened or, where files are restricted, is not a regular file (a FIFO would block).
            ValueError: no file can have this name.
        """
        if self.roots is None:
            return path.open("rb")
        real = _real(path)
        if not self.allows(real):
            raise OutsideError(path)
        opened = os.open(real, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0))
        try:
            mode = os.fstat(opened).st_mode
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            if not stat.S_ISREG(mode):
                raise OSError(errno.EINVAL, "it is not a regular file", str(path))
            return os.fdopen(opened, "rb")
        except BaseException:
            os.close(opened)
            raise

    def read(self, path: Path, most: int) -> bytes | None:
        """A file's bytes; None where it has more than `most`. Raises what `open` does."""
        with self.open(path) as stream:
            data = stream.read(most + 1)
        return data if len(data) <= most else None


def _real(path: Path) -> Path:
    try:
        return path.resolve()
    except RuntimeError as error:  # links that lead in a circle
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from error
