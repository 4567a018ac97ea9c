"""Metrics of a training run: `metrics.jsonl`, one JSON object per step, and copies in trackers.

Invariants:
- After `write` returns, the line survives a crash of the process or the machine. Opening the file removes an incomplete last
  line.
- After `truncate`, each tracker shows the lines of the file, including those that an earlier process did not send because it was
  killed. A step never has two values in a tracker: if sent steps must be removed and the tracker cannot remove them, a new run
  is started in the tracker with the lines that remain.

This module does not interpret the values.
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
from engine.store.training import METRICS

if TYPE_CHECKING:
    from engine.plugins.report.trackers import Sink
    from engine.schemas.train import TrackingSpec

log = structlog.get_logger(__name__)

CUT = "metrics.cut.jsonl"
"""Lines that were removed because the run was resumed from an earlier step."""
TRACKERS = "trackers.json"
"""Progress of each tracker: the newest step that was sent to it, and the number of its run."""
_RESERVED = frozenset({"step", "time"})


class MetricsLog:
    """Writes the metrics of a run, one line per step.

        log = MetricsLog(folder, ["tensorboard"], "arithmetic-1", config)
        log.write(1, {"reward/mean": 0.4, "loss": 0.02})
        log.truncate(0)     # resumed from the checkpoint after step 0: moves later lines to `metrics.cut.jsonl`
        log.close()

    A line holds `step`, `time` (seconds since 1970) and the values by name; a value that is not finite
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
        """Open the metrics in `folder`, or continue them.

        Args:
            folder: The run's folder; made if it does not exist.
            report: Trackers that get the values in addition: `tensorboard`, `trackio`, `wandb`, `mlflow`.
            run: The run's name in the trackers.
            config: The run's configuration, shown in the trackers.
            tracking: Project, name, group and tags of the run in the trackers.
            clock: Seconds since 1970.

        Raises:
            TrainError: Kind `train_setup`: a tracker of `report_to` is not installed or could not start.
        """
        from engine.plugins.report.trackers import open_sink

        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / METRICS
        self._folder = folder
        self._clock = clock
        self._sinks: dict[str, Sink] = {}
        self._run = (tracking.name if tracking is not None else None) or run or folder.name
        self._tracking = tracking
        self._config = dict(config or {})
        self._progress: dict[str, dict[str, int]] = {}
        """By tracker: `sent`, the newest step that was sent to it, and `run`, the number of its run."""
        self._silent: set[str] = set()
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            self._drop_incomplete_line()
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
        if reserved := _RESERVED & values.keys():
            raise ValueError(f"a metric cannot be named {sorted(reserved)[0]!r}: each line has a field of that name")
        numbers = {name: float(value) for name, value in values.items()}
        line = {"step": step, "time": self._clock()} | {
            name: value if math.isfinite(value) else None for name, value in numbers.items()
        }
        _append(self._file, [json.dumps(line)])
        for name in self._sinks:
            self._send(name, step, numbers)
        self._store_progress()

    def truncate(self, step: int) -> int:
        """Remove the lines after `step`, from which the run continues, and send trackers the lines that they lack.

        Removed lines are first appended to `metrics.cut.jsonl`, so a crash loses none (it may write some twice).

        Returns:
            Number of removed lines.
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
            self._synchronise(name, step, lines)
        self._store_progress()
        return len(gone)

    def _synchronise(self, name: str, step: int, lines: Sequence[Mapping[str, Any]]) -> None:
        """Make a tracker show these lines and no other steps."""
        progress, sink = self._progress[name], self._sinks[name]
        if progress["sent"] > step and not sink.truncate(step):
            from engine.plugins.report.trackers import discard_run_id, open_sink

            sink.close()
            discard_run_id(name, self._folder)
            progress["run"] += 1
            progress["sent"] = -1
            self._sinks[name] = open_sink(name, self._folder, self._name_of(name), self._config, self._tracking)
        # Steps that were buffered when the process was killed are sent again, with the same values.
        sent = min(progress["sent"], step) - (sink.buffers and bool(progress.get("open")))
        for line in lines:
            if line["step"] > sent:
                values = {
                    key: math.nan if value is None else value for key, value in line.items() if key not in _RESERVED
                }
                self._send(name, line["step"], values)

    def _send(self, name: str, step: int, values: Mapping[str, float]) -> None:
        """Send values to a tracker. A failure is logged once per tracker."""
        try:
            self._sinks[name].write(step, values)
            self._progress[name]["sent"] = step
        except Exception as error:  # noqa: BLE001  a lost tracker must not end the training
            if name not in self._silent:
                self._silent.add(name)
                log.warning(
                    "metrics could not be sent to a tracker; they are in the file",
                    sink=name,
                    file=str(self.path),
                    reason=repr(error),
                )

    def _name_of(self, name: str) -> str:
        """Name of a tracker's run: the training's name, with a number from the second run on."""
        number = self._progress[name]["run"]
        return self._run if number == 1 else f"{self._run}-{number}"

    def _store_progress(self, *, closed: bool = False) -> None:
        if not self._progress:
            return
        state = {name: {**progress, "open": int(not closed)} for name, progress in self._progress.items()}
        draft = self._folder / f".{TRACKERS}"
        draft.write_text(json.dumps(state))
        draft.replace(self._folder / TRACKERS)

    def close(self) -> None:
        """Close the file and the trackers. Later calls do nothing."""
        sinks, self._sinks = self._sinks, {}
        if sinks:
            self._store_progress(closed=True)
        for name, sink in sinks.items():
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001  all metrics are in the file
                log.warning("a tracker could not be closed", sink=name, reason=repr(error))
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _drop_incomplete_line(self) -> None:
        """Remove an incomplete last line, which a crash may leave."""
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            log.warning("an incomplete last line of metrics was removed", file=str(self.path))
            os.ftruncate(self._file, whole)
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


def series(lines: Iterable[Mapping[str, float]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric; of several values at one step, the last."""
    found = {int(line["step"]): line[name] for line in lines if name in line}
    steps = sorted(found)
    return steps, [found[step] for step in steps]


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
