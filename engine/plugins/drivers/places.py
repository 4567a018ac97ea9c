"""A folder of files that are written once: a local folder, or a URL of an object store through fsspec
(`s3://bucket/runs`).

Invariant: a file appears under its name when it is complete. Locally it is written under another name and renamed. An
object store shows an object when its upload is complete; what an interrupted upload leaves is not listed. On other
remote file systems the file is uploaded under another name and moved.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from engine.errors import StoreError
from engine.store.private import private_folder, whole_file

_OBJECTS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "r2", "memory"})
"""Protocols of stores in which an upload is visible only as a whole."""
_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
}
_DRAFT = ".draft-"


def is_url(place: str) -> bool:
    """Return whether a place is a URL and not a path."""
    return "://" in place


class ShardPlace:
    """A folder of files by its path or URL.

    Raises:
        StoreError: the URL's package is not installed, or its settings are wrong.
    """

    def __init__(self, place: str | Path) -> None:
        self.name = str(place).rstrip("/")
        self.folder: Path | None = None
        if self.name.startswith("file://") or not is_url(self.name):
            self.folder = Path(self.name.removeprefix("file://")).absolute()
            self.name = str(self.folder)
            return
        import fsspec  # type: ignore[import-untyped]

        protocol = self.name.partition("://")[0]
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.name)
        except ImportError as error:
            package = _PACKAGES.get(protocol)
            fix = f"pip install {package}" if package else "install the fsspec package of this protocol"
            raise StoreError(f"cannot open {self.name}: {error}; {fix}") from error
        except Exception as error:
            raise StoreError(f"cannot open {self.name}: {error}; is the URL right?") from error
        self._whole = protocol in _OBJECTS

    def path(self, name: str) -> str:
        """Return the path or URL of a file."""
        return f"{self.name}/{name}"

    def names(self) -> list[str]:
        """Return the names of the complete files, sorted; of a folder that does not exist: none.

        Raises:
            StoreError: it cannot be listed.
        """
        with self._errors("list", self.name):
            if self.folder is not None:
                names = [entry.name for entry in self.folder.iterdir()] if self.folder.is_dir() else []
            else:
                try:
                    names = [path.rpartition("/")[2] for path in self._files.ls(self._root, detail=False, refresh=True)]
                except FileNotFoundError:
                    names = []
            return sorted(name for name in names if name and not name.startswith("."))

    def put(self, file: Path, name: str) -> None:
        """Copy a local file into the place.

        Raises:
            StoreError: it cannot be written.
        """
        with self._errors("write", self.path(name)):
            if self.folder is not None:
                private_folder(self.folder, exist_ok=True)
                with whole_file(self.folder / name) as draft:
                    shutil.copyfile(file, draft)
                    with draft.open("rb") as copied:
                        os.fsync(copied.fileno())
            elif self._whole:
                self._files.put_file(str(file), f"{self._root}/{name}")
            else:
                self._files.makedirs(self._root, exist_ok=True)
                draft_name = f"{self._root}/{_DRAFT}{os.getpid()}-{name}"
                self._files.put_file(str(file), draft_name)
                self._files.mv(draft_name, f"{self._root}/{name}")

    def get(self, name: str, file: Path) -> None:
        """Copy a file of the place to a local path, where it appears when it is complete.

        Raises:
            StoreError: there is none, or it cannot be read.
        """
        with self._errors("read", self.path(name)), whole_file(file) as draft:
            if self.folder is not None:
                shutil.copyfile(self.folder / name, draft)
            else:
                self._files.get_file(f"{self._root}/{name}", str(draft))

    def read(self, names: Sequence[str]) -> list[bytes]:
        """Return the bytes of files; from an object store they are read at the same time.

        Raises:
            StoreError: one does not exist, or cannot be read.
        """
        with self._errors("read", self.path(names[0]) if len(names) == 1 else f"{len(names)} files of {self.name}"):
            if self.folder is not None:
                return [(self.folder / name).read_bytes() for name in names]
            paths = [f"{self._root}/{name}" for name in names]
            contents: dict[str, bytes] = (
                self._files.cat(paths) if len(paths) > 1 else {paths[0]: self._files.cat_file(paths[0])}
            )
            return [contents[path] for path in paths]

    @contextmanager
    def _errors(self, what: str, where: str) -> Iterator[None]:
        """Convert the errors of file systems and their libraries to StoreError with the address."""
        try:
            yield
        except StoreError:
            raise
        except FileNotFoundError as error:
            raise StoreError(f"cannot {what} {where}: it does not exist") from error
        except Exception as error:
            variables = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL"
            settings = variables if self.name.startswith("s3") else "fsspec's settings"
            advice = f"check the URL, the network and the credentials ({settings})"
            if self.folder is not None:
                advice = "is the folder there, and may this user use it?"
            raise StoreError(f"cannot {what} {where}: {type(error).__name__}: {error}; {advice}") from error
