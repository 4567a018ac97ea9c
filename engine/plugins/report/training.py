"""Sends the metrics of a training to its trackers.

Invariants:
- After `continued`, each tracker shows the lines of `metrics.jsonl`, including those that an earlier process did not send because
  it was killed.
- A step never has two values in a tracker: if sent steps must be removed and the tracker cannot remove them, a new run is started
  in the tracker with the lines that remain.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from engine.masking import mask_values
from engine.plugins.report.spec import ReportSpec
from engine.plugins.report.trackers import discard_run_id, open_tracker
from engine.runner.observers import TrainingObserver
from engine.schemas.sections import dump
from engine.store.training import METRICS
from engine.train.metrics import read_metrics, values_of

if TYPE_CHECKING:
    from engine.plugins.report.trackers import Tracker
    from engine.spec.load import LoadedSpec

log = structlog.get_logger(__name__)

PROGRESS = "trackers.json"
"""Progress of each tracker: the newest step that was sent to it, and the number of its run."""


class TrackedTraining(TrainingObserver):
    """Sends each step to the trackers of a spec.

    Args:
        report: What `train` says of trackers.
        folder: The folder of the training, with its `metrics.jsonl`.
        config: The configuration of the training, shown in the trackers.
    """

    def __init__(self, report: ReportSpec, folder: Path, config: Mapping[str, Any]) -> None:
        self._report = report
        self._folder = folder
        self._config = config
        self._run = report.tracking.name or folder.name
        self._trackers: dict[str, Tracker] = {}
        self._progress: dict[str, dict[str, int]] = {}
        """By tracker: `sent`, the newest step that was sent to it, and `run`, the number of its run."""
        self._silent: set[str] = set()

    def began(self) -> None:
        """Open the trackers.

        Raises:
            TrainError: Kind `train_setup`: a tracker is not installed or could not start.
        """
        newest = max((int(line["step"]) for line in read_metrics(self._folder)), default=-1)
        known = json.loads(stored.read_text()) if (stored := self._folder / PROGRESS).exists() else {}
        for name in self._report.report_to:
            self._progress[name] = known.get(name, {"sent": newest, "run": 1})
            self._open(name)

    def continued(self, step: int) -> None:
        """Send trackers the lines that they lack, and remove steps after this one."""
        lines = read_metrics(self._folder)
        for name in self._trackers:
            self._synchronise(name, step, lines)
        self._store_progress()

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send a step."""
        for name in self._trackers:
            self._send(name, step, metrics)
        self._store_progress()

    def close(self) -> None:
        """Close the trackers. Later calls do nothing."""
        trackers, self._trackers = self._trackers, {}
        if trackers:
            self._store_progress(closed=True)
        for name, tracker in trackers.items():
            try:
                tracker.close()
            except Exception as error:  # noqa: BLE001  all metrics are in the file
                log.warning("a tracker could not be closed", tracker=name, reason=repr(error))

    def _open(self, name: str) -> None:
        """Open a tracker. The name of its run has a number from the second run on."""
        number = self._progress[name]["run"]
        run = self._run if number == 1 else f"{self._run}-{number}"
        self._trackers[name] = open_tracker(name, self._folder, run, self._config, self._report.tracking)

    def _synchronise(self, name: str, step: int, lines: Sequence[Mapping[str, float]]) -> None:
        """Make a tracker show these lines and no other steps."""
        progress, tracker = self._progress[name], self._trackers[name]
        if progress["sent"] > step and not tracker.truncate(step):
            tracker.close()
            discard_run_id(name, self._folder)
            progress["run"] += 1
            progress["sent"] = -1
            self._open(name)
        # Steps that were buffered when the process was killed are sent again, with the same values.
        sent = min(progress["sent"], step) - (tracker.buffers and bool(progress.get("open")))
        for line in lines:
            if line["step"] > sent:
                self._send(name, int(line["step"]), values_of(line))

    def _send(self, name: str, step: int, values: Mapping[str, float]) -> None:
        """Send values to a tracker. A failure is logged once per tracker."""
        try:
            self._trackers[name].write(step, values)
            self._progress[name]["sent"] = step
        except Exception as error:  # noqa: BLE001  a lost tracker must not end the training
            if name not in self._silent:
                self._silent.add(name)
                log.warning(
                    "metrics could not be sent to a tracker; they are in the file",
                    tracker=name,
                    file=str(self._folder / METRICS),
                    reason=repr(error),
                )

    def _store_progress(self, *, closed: bool = False) -> None:
        if not self._progress:
            return
        state = {name: {**progress, "open": int(not closed)} for name, progress in self._progress.items()}
        draft = self._folder / f".{PROGRESS}"
        draft.write_text(json.dumps(state))
        draft.replace(self._folder / PROGRESS)


def observe(loaded: LoadedSpec, folder: Path) -> TrackedTraining | None:
    """The hook `observe_training`."""
    train = loaded.spec.train
    report = ReportSpec.section_of(train) if train is not None else None
    if report is None or not report.report_to:
        return None
    return TrackedTraining(report, folder, mask_values(dump(loaded.spec)))
