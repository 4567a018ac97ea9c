"""The notices that a run has sent, in `notices.jsonl` of its folder, so that none is repeated too soon.

A training that is restarted automatically after each failure fails again with the same reason. The file makes the second launch know
what the first has sent. A damaged or missing file only means that a notice is sent again.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from engine.store.private import private_file

FILE = "notices.jsonl"

log = structlog.get_logger(__name__)


class NoticeHistory:
    """What was sent, and when.

    Args:
        folder: The folder of the run or training; None keeps the history only in memory.
        repeat_after: A notice is not repeated for this time, in seconds.
        clock: Unix time.
    """

    def __init__(self, folder: Path | None, repeat_after: float, clock: Callable[[], float] = time.time) -> None:
        self._path = folder / FILE if folder is not None else None
        self._repeat_after = repeat_after
        self._clock = clock
        self._sent: dict[str, float] = {}
        self._read()

    def is_repeated(self, event: Mapping[str, Any]) -> bool:
        """Whether a notice that differs only in numbers was sent less than `repeat_after` ago."""
        at = self._sent.get(_key(event))
        return at is not None and 0 <= self._clock() - at < self._repeat_after

    def add(self, event: Mapping[str, Any]) -> None:
        """Remember a notice that at least one channel has delivered. Never raises."""
        self._sent[_key(event)] = self._clock()
        if self._path is None:
            return
        try:
            with private_file(self._path).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"at": self._clock(), "key": _key(event), "text": event["text"]}) + "\n")
        except OSError as error:
            log.debug("the notice was not recorded", reason=str(error))

    def _read(self) -> None:
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines() if self._path is not None else []
        except (OSError, ValueError):
            return
        for line in lines:
            try:
                noted = json.loads(line)
                self._sent[str(noted["key"])] = float(noted["at"])
            except (ValueError, KeyError, TypeError):
                continue


def _key(event: Mapping[str, Any]) -> str:
    """What makes two notices the same: kind, and reason without its numbers."""
    return f"{event['kind']}: {re.sub(r'[0-9]+', '#', str(event.get('reason', '')))}"
