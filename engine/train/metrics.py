"""Metrics of a training run: `metrics.jsonl`, one JSON object per step.

After `write` returns, the line survives a crash of the process or the machine. Opening the file removes an incomplete
last line. This module does not interpret the values.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from engine.errors import StoreError
from engine.store.training import METRICS

log = structlog.get_logger(__name__)

CUT = "metrics.cut.jsonl"
"""Lines that were removed because the run was resumed from an earlier step."""
_RESERVED = frozenset({"step", "time"})


class MetricsLog:
    """Writes the metrics of a run, one line per step.

        log = MetricsLog(folder)
        log.write(1, {"reward/mean": 0.4, "loss": 0.02})
        log.truncate(0)     # resumed from the checkpoint after step 0: moves later lines to `metrics.cut.jsonl`
        log.close()

    A line holds `step`, `time` (seconds since 1970) and the values by name; a value that is not finite
    is null.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        """Open the metrics in `folder`, or continue them.

        Args:
            folder: The run's folder; made if it does not exist.
            clock: Seconds since 1970.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / METRICS
        self._folder = folder
        self._clock = clock
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            self._drop_incomplete_line()
        except BaseException:
            self.close()
            raise

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a line, and wait until it is on disk.

        Raises:
            ValueError: a value is named `step` or `time`.
        """
        if reserved := _RESERVED & values.keys():
            raise ValueError(f"a metric cannot be named {sorted(reserved)[0]!r}: each line has a field of that name")
        numbers = {name: float(value) for name, value in values.items()}
        line = {"step": step, "time": self._clock()} | {
            name: value if math.isfinite(value) else None for name, value in numbers.items()
        }
        _append(self._file, [json.dumps(line)])

    def truncate(self, step: int) -> int:
        """Remove the lines after `step`, from which the run continues.

        Removed lines are first appended to `metrics.cut.jsonl`, so a crash loses none (it may write some twice).

        Returns:
            Number of removed lines.
        """
        staying: list[str] = []
        gone: list[str] = []
        for text, line in _lines(self.path):
            (gone if line["step"] > step else staying).append(text)
        if gone:
            side = os.open(self._folder / CUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                _append(side, gone)
            finally:
                os.close(side)
            self._replace(staying)
        return len(gone)

    def close(self) -> None:
        """Close the file. Later calls do nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _drop_incomplete_line(self) -> None:
        """Remove an incomplete last line, which a crash may leave."""
        data = self.path.read_bytes()
        complete = data.rfind(b"\n") + 1
        if complete < len(data):
            log.warning("an incomplete last line of metrics was removed", file=str(self.path))
            os.ftruncate(self._file, complete)
            os.fsync(self._file)

    def _replace(self, lines: Sequence[str]) -> None:
        fresh = self.path.with_name(f".{METRICS}.new")
        made = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            _append(made, lines)
        finally:
            os.close(made)
        fresh.replace(self.path)
        _sync_folder(self._folder)
        os.close(self._file)
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Read the lines of a `metrics.jsonl`, or of the one in a run's folder, in order.

    A null becomes nan. An incomplete last line is ignored.

    Raises:
        StoreError: It cannot be read, or a line before the last is not a JSON object with a `step`.
    """
    file = path / METRICS if path.is_dir() else path
    try:
        return [
            {name: math.nan if value is None else value for name, value in line.items()} for _, line in _lines(file)
        ]
    except OSError as error:
        raise StoreError(f"{file} cannot be read: {error.strerror or error}") from error


def values_of(line: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a line, without its `step` and `time`."""
    return {name: value for name, value in line.items() if name not in _RESERVED}


def series(lines: Iterable[Mapping[str, float]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric; of several values at one step, the last."""
    by_step = {int(line["step"]): line[name] for line in lines if name in line}
    steps = sorted(by_step)
    return steps, [by_step[step] for step in steps]


def _lines(file: Path) -> Iterable[tuple[str, dict[str, Any]]]:
    """Text and decoded object of each complete line."""
    texts = file.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, text in enumerate(texts, start=1):
        if not text:
            continue
        try:
            line = json.loads(text)
            if not isinstance(line["step"], int):
                raise TypeError("`step` is not an integer")
        except (ValueError, KeyError, TypeError) as error:
            if number == len(texts):  # incomplete: text after the last line break
                return
            raise StoreError(f"{file}:{number} is not a line of metrics ({error!r}); remove the line") from error
        yield text, line


def _append(file: int, lines: Sequence[str]) -> None:
    """Write whole lines and wait for the disk."""
    data = "".join(f"{line}\n" for line in lines).encode()
    while data:
        data = data[os.write(file, data) :]
    os.fsync(file)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
