"""Metrics of a training run: `metrics.jsonl`, one JSON object per step. This module does not interpret the values."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from engine.errors import StoreError
from engine.store.json_lines import JsonLines
from engine.store.training import METRICS

_RESERVED = frozenset({"step", "time"})


class MetricsLog(JsonLines[dict[str, float]]):
    """Writes the metrics of a run, one line per step.

        log = MetricsLog(folder)
        log.write(1, {"reward/mean": 0.4, "loss": 0.02})
        log.truncate(0)     # resumed from the checkpoint after step 0: moves later lines to `metrics.cut.jsonl`

    A line holds `step`, `time` (seconds since 1970) and the values by name; a value that is not finite
    is null.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        """Open the metrics in `folder`, or continue them.

        Args:
            folder: The run's folder; made if it does not exist.
            clock: Seconds since 1970.
        """
        super().__init__(folder / METRICS, _numbers)
        self._clock = clock
        folder.mkdir(parents=True, exist_ok=True)
        self.append()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a line, and wait until it is on disk.

        Raises:
            ValueError: a value is named `step` or `time`.
        """
        if reserved := _RESERVED & values.keys():
            raise ValueError(f"a metric cannot be named {sorted(reserved)[0]!r}: each line has a field of that name")
        numbers = {name: float(value) for name, value in values.items()}
        self.append({"step": step, "time": self._clock()} | finite(numbers))

    def truncate(self, step: int) -> int:
        """Remove the lines after `step`, from which the run continues, and return how many.

        Removed lines are first appended to `metrics.cut.jsonl`, so a crash loses none (it may write some twice).
        """
        return self.cut(lambda line: line["step"] <= step)


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Metrics as a line has them: a value that is not finite is None."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Read the lines of a `metrics.jsonl`, or of the one in a run's folder, in order.

    A null becomes nan. An incomplete last line is ignored.

    Raises:
        StoreError: It cannot be read, or a line before the last is not a JSON object with a `step`.
    """
    file = path / METRICS if path.is_dir() else path
    if not file.exists():
        raise StoreError(f"{file} cannot be read: No such file")
    return JsonLines(file, _numbers).read()


def _numbers(line: dict[str, Any]) -> dict[str, float]:
    if not isinstance(line["step"], int):
        raise TypeError("`step` is not an integer")
    return {name: math.nan if value is None else value for name, value in line.items()}


def values_of(line: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a line, without its `step` and `time`."""
    return {name: value for name, value in line.items() if name not in _RESERVED}


def series(lines: Iterable[Mapping[str, float]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric; of several values at one step, the last."""
    by_step = {int(line["step"]): line[name] for line in lines if name in line}
    steps = sorted(by_step)
    return steps, [by_step[step] for step in steps]
