"""What a training run measures: `metrics.jsonl`, one JSON object a step, and whatever else is asked to show it.

Invariant: what `write` has returned from survives a crash of the process or the machine, and the file holds whole lines
alone once it is opened again. Knows nothing of what the numbers mean.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from engine.errors import StoreError

if TYPE_CHECKING:
    from engine.train.sinks import Sink

log = structlog.get_logger(__name__)

FILE = "metrics.jsonl"
CUT = "metrics.cut.jsonl"
"""What was cut off when a run was resumed from before its end."""
_RESERVED = frozenset({"step", "time"})


class MetricsLog:
    """Metrics of a run, step by step.

        log = MetricsLog(folder, ["tensorboard"], "arithmetic-1", config)
        log.write(1, {"reward/mean": 0.4, "loss": 0.02})
        log.truncate(0)     # resumed from the checkpoint after step 0: what came later is put aside
        log.close()

    A line holds `step`, `time` (seconds since 1970) and the values by name; a value that is no number (nan, infinite)
    is null.
    """

    def __init__(
        self,
        folder: Path,
        report: Sequence[str] = (),
        run: str = "",
        config: Mapping[str, Any] | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open, or go on with, the metrics in `folder`.

        Args:
            folder: The run's; made where it is not there.
            report: Where the values go as well: `tensorboard`, `trackio`, `wandb`, `mlflow`.
            run: The run's name there.
            config: What the run was begun with, shown there beside it.
            clock: Seconds since 1970.

        Raises:
            TrainError: Kind `train_setup`: a package of `report_to` is not installed, or could not begin.
        """
        from engine.train.sinks import open_sink

        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE
        self._folder = folder
        self._clock = clock
        self._sinks: dict[str, Sink] = {}
        self._silent: set[str] = set()
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            self._mend()
            for name in report:
                self._sinks[name] = open_sink(name, folder, run or folder.name, dict(config or {}))
        except BaseException:
            self.close()
            raise

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a line, and wait until it is on disk.

        Raises:
            ValueError: a value is named `step` or `time`.
        """
        if taken := _RESERVED & values.keys():
            raise ValueError(f"a metric cannot be named {sorted(taken)[0]!r}: every line has one")
        numbers = {name: float(value) for name, value in values.items()}
        line = {"step": step, "time": self._clock()} | {
            name: value if math.isfinite(value) else None for name, value in numbers.items()
        }
        _append(self._file, [json.dumps(line)])
        for name, sink in self._sinks.items():
            try:
                sink.write(step, numbers)
            except Exception as error:  # noqa: BLE001  a server that is gone must not end the training
                if name not in self._silent:
                    self._silent.add(name)
                    log.warning(
                        "metrics did not reach it; they are in the file",
                        sink=name,
                        file=str(self.path),
                        reason=repr(error),
                    )

    def truncate(self, step: int) -> int:
        """Put what came after `step` aside: the run goes on from there.

        Lines that go are added to `metrics.cut.jsonl` first, so a crash between loses none (it may write some twice).

        Returns:
            How many lines went.
        """
        kept: list[str] = []
        gone: list[str] = []
        for text, line in _lines(self.path):
            (gone if line["step"] > step else kept).append(text)
        if gone:
            side = os.open(self._folder / CUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                _append(side, gone)
            finally:
                os.close(side)
            self._replace(kept)
        for sink in self._sinks.values():
            sink.truncate(step)
        return len(gone)

    def close(self) -> None:
        """Close the file and everything else; once is enough."""
        sinks, self._sinks = self._sinks, {}
        for name, sink in sinks.items():
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001  what is written is written
                log.warning("metrics were not closed", sink=name, reason=repr(error))
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _mend(self) -> None:
        """Cut off a line that a crash left unfinished."""
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            log.warning("a line of metrics was left unfinished and is dropped", file=str(self.path))
            os.ftruncate(self._file, whole)
            os.fsync(self._file)

    def _replace(self, lines: Sequence[str]) -> None:
        fresh = self.path.with_name(f".{FILE}.new")
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
    """The lines of a `metrics.jsonl`, or of the one in a run's folder, in order.

    A null is nan again. A last line that is broken off is left out.

    Raises:
        StoreError: It cannot be read, or a line before the last is no JSON object with a `step`.
    """
    file = path / FILE if path.is_dir() else path
    try:
        return [
            {name: math.nan if value is None else value for name, value in line.items()} for _, line in _lines(file)
        ]
    except OSError as error:
        raise StoreError(f"{file} cannot be read: {error.strerror or error}") from error


def series(lines: Iterable[Mapping[str, float]], name: str) -> tuple[list[int], list[float]]:
    """One metric's steps and values, where it was measured; of several values at one step the last."""
    found = {int(line["step"]): line[name] for line in lines if name in line}
    steps = sorted(found)
    return steps, [found[step] for step in steps]


def _lines(file: Path) -> Iterable[tuple[str, dict[str, Any]]]:
    """Each whole line's text and what it says."""
    texts = file.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, text in enumerate(texts, start=1):
        if not text:
            continue
        try:
            line = json.loads(text)
            if not isinstance(line["step"], int):
                raise TypeError("`step` is no whole number")
        except (ValueError, KeyError, TypeError) as error:
            if number == len(texts):  # what comes after the last line break was being written
                return
            raise StoreError(f"{file}:{number} is no line of metrics ({error!r}); remove it") from error
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
