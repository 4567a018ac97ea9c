"""What a training run measures: `metrics.jsonl`, one JSON object a step, and the trackers that show it as well.

Invariants:
- What `write` has returned from survives a crash of the process or the machine, and the file holds whole lines alone once it is
  opened again.
- After `truncate`, each tracker shows the lines of the file, also those that an earlier process was killed before it sent. A
  step never has two values in a tracker: where shown steps are cut and the tracker cannot remove them, it gets another run with
  the lines that stay.

This module knows nothing of what the numbers mean.
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
    from engine.schemas.train import TrackingSpec
    from engine.train.sinks import Sink

log = structlog.get_logger(__name__)

FILE = "metrics.jsonl"
CUT = "metrics.cut.jsonl"
"""What was cut off when a run was resumed from before its end."""
TRACKERS = "trackers.json"
"""How far each tracker is: the newest step that it was sent, and the number of its run."""
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
        tracking: TrackingSpec | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open, or go on with, the metrics in `folder`.

        Args:
            folder: The run's; made where it is not there.
            report: Where the values go as well: `tensorboard`, `trackio`, `wandb`, `mlflow`.
            run: The run's name there.
            config: What the run was begun with, shown there beside it.
            tracking: Project, name, group and tags of the run there.
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
        self._run = (tracking.name if tracking is not None else None) or run or folder.name
        self._tracking = tracking
        self._config = dict(config or {})
        self._progress: dict[str, dict[str, int]] = {}
        """By tracker: `sent`, the newest step that it was sent, and `run`, the number of its run."""
        self._silent: set[str] = set()
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            self._mend()
            newest = max((int(line["step"]) for _, line in _lines(self.path)), default=-1)
            known = json.loads(stored.read_text()) if (stored := folder / TRACKERS).exists() else {}
            for name in report:
                self._progress[name] = known.get(name, {"sent": newest, "run": 1})
                self._sinks[name] = open_sink(name, folder, self._name_of(name), self._config, tracking)
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
        for name in self._sinks:
            self._send(name, step, numbers)
        self._store_progress()

    def truncate(self, step: int) -> int:
        """Put what came after `step` aside: the run goes on from there. Trackers get the lines that they miss.

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
        lines = [json.loads(text) for text in kept]
        for name in self._sinks:
            self._catch_up(name, step, lines)
        self._store_progress()
        return len(gone)

    def _catch_up(self, name: str, step: int, lines: Sequence[Mapping[str, Any]]) -> None:
        """Make a tracker show these lines and no other steps."""
        progress, sink = self._progress[name], self._sinks[name]
        if progress["sent"] > step and not sink.truncate(step):
            from engine.train.sinks import forget_run, open_sink

            sink.close()
            forget_run(name, self._folder)
            progress["run"] += 1
            progress["sent"] = -1
            self._sinks[name] = open_sink(name, self._folder, self._name_of(name), self._config, self._tracking)
        # What a buffer held when the process was killed is sent again: the same value of the same step.
        sent = min(progress["sent"], step) - (sink.buffers and bool(progress.get("open")))
        for line in lines:
            if line["step"] > sent:
                values = {
                    key: math.nan if value is None else value for key, value in line.items() if key not in _RESERVED
                }
                self._send(name, line["step"], values)

    def _send(self, name: str, step: int, values: Mapping[str, float]) -> None:
        """Show values in a tracker. A failure is logged once."""
        try:
            self._sinks[name].write(step, values)
            self._progress[name]["sent"] = step
        except Exception as error:  # noqa: BLE001  a server that is gone must not end the training
            if name not in self._silent:
                self._silent.add(name)
                log.warning(
                    "metrics did not reach it; they are in the file", sink=name, file=str(self.path), reason=repr(error)
                )

    def _name_of(self, name: str) -> str:
        """The name of a tracker's run: that of the training, with a number from its second run on."""
        number = self._progress[name]["run"]
        return self._run if number == 1 else f"{self._run}-{number}"

    def _store_progress(self, *, closed: bool = False) -> None:
        if not self._progress:
            return
        told = {name: {**progress, "open": int(not closed)} for name, progress in self._progress.items()}
        draft = self._folder / f".{TRACKERS}"
        draft.write_text(json.dumps(told))
        draft.replace(self._folder / TRACKERS)

    def close(self) -> None:
        """Close the file and everything else; once is enough."""
        sinks, self._sinks = self._sinks, {}
        if sinks:
            self._store_progress(closed=True)
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
