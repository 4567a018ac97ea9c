"""The requests for groups that a service has taken, in a file beside the run's store.

Invariant: a request is on the disk before any of its episodes begins. So after `kill -9` a repeated request has the
same tasks, and its finished episodes are found in the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from engine.schemas.base import Struct
from engine.store.json_lines import JsonLines

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


@dataclass
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
        self._lines = JsonLines(self.folder / FILE, self._take)
        self._lines.read()

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
        self._lines.append(entry)
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
