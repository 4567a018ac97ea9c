"""The requests for groups that a service has taken, in a file beside the run's store.

Invariant: a request is on the disk before any of its episodes begins. So after `kill -9` a repeated request has the
same tasks, and its finished episodes are found in the store.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import orjson

from engine.errors import StoreError
from engine.schemas.base import Struct
from engine.store.private import private_file

FILE = "requests.jsonl"


class TakenRequest(Struct, frozen=True):
    """A request that was taken."""

    id: str
    asked: Mapping[str, Any]
    """What it asked for; a repeated request must ask for the same."""
    tasks: tuple[tuple[str, int], ...]
    """The task of each group, and how many groups had it before."""
    samples: int
    sampling: Mapping[str, Any]


@dataclass(slots=True)
class RequestLog:
    """The file. Appending is durable when it returns.

    Raises:
        StoreError: The file cannot be read.
    """

    folder: Path
    requests: dict[str, TakenRequest] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    began: dict[tuple[str, int], int] = field(default_factory=dict)
    """The weight version at which each group began, by request and number."""
    uses: dict[str, int] = field(default_factory=dict)
    """How many groups each task has had."""
    following: int = 0
    """How many groups `next` has given."""
    version: int = 0

    def __post_init__(self) -> None:
        path = self.folder / FILE
        try:
            data = path.read_bytes() if path.exists() else b""
            whole = data.rfind(b"\n") + 1
            if whole < len(data):  # the engine died while it wrote the last line, so nothing of it had begun
                os.truncate(path, whole)
            for number, line in enumerate(data[:whole].splitlines(), 1):
                try:
                    self._take(orjson.loads(line))
                except (ValueError, KeyError, TypeError) as error:
                    raise StoreError(f"{path}:{number}: the line is damaged ({error}); remove it") from error
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error}") from error

    def add(self, request: TakenRequest, following: int) -> None:
        """Take a request. Raises: StoreError."""
        self._append({"request": msgspec.structs.asdict(request), "following": following})

    def begin(self, request: str, number: int, version: int) -> None:
        """Note that a group begins. Raises: StoreError."""
        self._append({"began": [request, number, version]})

    def cancel(self, request: str) -> None:
        """Note that a request was cancelled. Raises: StoreError."""
        self._append({"cancelled": request})

    def tell(self, version: int) -> None:
        """Note the trainer's weight version. Raises: StoreError."""
        self._append({"version": version})

    def _append(self, entry: dict[str, Any]) -> None:
        path = self.folder / FILE
        try:
            if not path.exists():
                private_file(path)
            with path.open("ab") as file:
                size = file.tell()
                try:
                    file.write(orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE))
                    file.flush()
                    os.fsync(file.fileno())
                except OSError:
                    os.truncate(path, size)
                    raise
        except OSError as error:
            raise StoreError(f"{path} cannot be written: {error}; is the disk full?") from error
        self._take(entry)

    def _take(self, entry: Mapping[str, Any]) -> None:
        if (given := entry.get("request")) is not None:
            tasks = tuple((str(name), int(use)) for name, use in given["tasks"])
            request = TakenRequest(given["id"], given["asked"], tasks, given["samples"], given["sampling"])
            self.requests[request.id] = request
            self.following += entry["following"]
            for name, _ in tasks:
                self.uses[name] = self.uses.get(name, 0) + 1
        elif (began := entry.get("began")) is not None:
            self.began.setdefault((began[0], began[1]), began[2])
        elif "cancelled" in entry:
            self.cancelled.add(entry["cancelled"])
        else:
            self.version = entry["version"]
