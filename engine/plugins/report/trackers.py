"""Sends the metrics of a training, each step once, to trackers: TensorBoard, trackio, Weights & Biases, MLflow.

Each is an extra of this package and is imported when a training names it. Their own environment variables apply
(`WANDB_MODE`, `WANDB_PROJECT`, `TRACKIO_DIR`, `MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_NAME` …).

Each class is a few calls of the tracker's own package. `accelerate.tracking` has classes for the same four, but keeps
no run id with which a resumed training continues its run, removes no steps of TensorBoard that a resume repeats, needs
steps of Weights & Biases that only rise, and passes on names that MLflow rejects, such as `eval/pass@4`.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from engine.errors import TrainError
from engine.masking import mask_values
from engine.plugin import installed, load
from engine.plugins.report.spec import ReportSpec, TrackingSpec
from engine.runner.observers import TrainingObserver
from engine.schemas.sections import dump
from engine.store.training import METRICS
from engine.train.metrics import read_metrics, values_of

if TYPE_CHECKING:
    from engine.spec.load import LoadedSpec

PROJECT = "episode-engine"
"""Default project or experiment, used if the environment does not set one."""


class Tracker(ABC):
    """A tracker that gets metrics. A plugin names its class in `trackers`."""

    buffers = False
    """Whether the newest values are lost if the process is killed."""

    @abstractmethod
    def __init__(self, folder: Path, run: str, config: Mapping[str, Any], tracking: TrackingSpec) -> None:
        """Begin a run of the tracker, or continue it.

        Args:
            folder: The folder of the training.
            run: The name of the run. A run that was begun with this name in this folder is continued.
            config: The configuration of the training.
            tracking: Project, group and tags.

        Raises:
            ImportError: the tracker's package is not installed.
        """

    @abstractmethod
    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values of a step."""

    def truncate(self, step: int) -> bool:
        """Remove values after `step`. Returns False if the tracker cannot remove values."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Send buffered values and close the tracker."""


class TensorBoard(Tracker):
    """Event files in the run's `tensorboard` folder. Removed steps are purged."""

    def __init__(self, folder: Path, run: str, config: Mapping[str, Any], tracking: TrackingSpec) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make: Callable[..., Any] = lambda **more: SummaryWriter(str(folder / "tensorboard"), **more)
        self._writer = self._make()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def truncate(self, step: int) -> bool:
        self._writer.close()
        self._writer = self._make(purge_step=step + 1)
        return True

    def close(self) -> None:
        self._writer.close()


class Trackio(Tracker):
    """A run of this name in trackio's project; a resumed training continues the run of the same name."""

    buffers = True

    def __init__(self, folder: Path, run: str, config: Mapping[str, Any], tracking: TrackingSpec) -> None:
        import trackio

        self._trackio = trackio
        project = tracking.project or os.environ.get("TRACKIO_PROJECT", PROJECT)
        trackio.init(project=project, name=run, config=dict(config), resume="allow", embed=False)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        self._trackio.finish()


class Wandb(Tracker):
    """A run of Weights & Biases; its id is stored in the run's folder, so that a resumed training continues it."""

    buffers = True

    def __init__(self, folder: Path, run: str, config: Mapping[str, Any], tracking: TrackingSpec) -> None:
        import wandb

        name = _stored_run_id(folder / "wandb_run", lambda: secrets.token_hex(4))
        project = tracking.project or os.environ.get("WANDB_PROJECT", PROJECT)
        self._run = wandb.init(
            project=project,
            id=name,
            name=run,
            group=tracking.group,
            tags=tracking.tags or None,
            dir=str(folder),
            config=dict(config),
            resume="allow",
            reinit="create_new",
        )
        # Its own step count only rises. Our `step` is the axis, because it may go back when a run is resumed.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()


class Mlflow(Tracker):
    """A run of MLflow; its id is stored in the run's folder, so that a resumed training continues it."""

    _MAX_METRICS = 1000
    """Maximum number of metrics in one call."""

    def __init__(self, folder: Path, run: str, config: Mapping[str, Any], tracking: TrackingSpec) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client = MlflowClient()

        def begin() -> str:
            name = tracking.project or os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            experiment = self._client.get_experiment_by_name(name)
            number = experiment.experiment_id if experiment else self._client.create_experiment(name)
            run_id = self._client.create_run(number, run_name=run, tags=dict.fromkeys(tracking.tags, "")).info.run_id
            parameters = [Param(key, str(value)[:500]) for key, value in _flat(config).items()]
            for start in range(0, len(parameters), 100):
                self._client.log_batch(run_id, params=parameters[start : start + 100])
            return str(run_id)

        self._id = _stored_run_id(folder / "mlflow_run", begin)
        self._client.update_run(self._id, status="RUNNING")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        import time

        now = int(time.time() * 1000)
        # MLflow rejects other characters: `eval/pass@4` becomes `eval/pass_4`.
        metrics = [self._metric(re.sub(r"[^\w\-. /]", "_", name), value, now, step) for name, value in values.items()]
        for start in range(0, len(metrics), self._MAX_METRICS):
            self._client.log_batch(self._id, metrics=metrics[start : start + self._MAX_METRICS])

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _stored_run_id(file: Path, make: Callable[[], str]) -> str:
    """Read a run id from the file, or make one and store it."""
    if file.exists():
        return file.read_text(encoding="utf-8").strip()
    run_id = make()
    file.write_text(f"{run_id}\n", encoding="utf-8")
    return run_id


def _flat(config: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= _flat(value, f"{before}{name}.") if isinstance(value, Mapping) else {f"{before}{name}": value}
    return flat


log = structlog.get_logger(__name__)

PROGRESS = "trackers.json"
"""Progress of each tracker: the newest step that was sent to it, and the number of its run."""


@dataclass(eq=False)
class TrackedTraining(TrainingObserver):
    """Sends each step to the trackers of a spec.

    Args:
        report: What `train` says of trackers.
        folder: The folder of the training, with its `metrics.jsonl`.
        config: The configuration of the training, shown in the trackers.
    """

    report: ReportSpec
    folder: Path
    config: Mapping[str, Any]
    _trackers: dict[str, Tracker] = field(default_factory=dict)
    _progress: dict[str, dict[str, int]] = field(default_factory=dict)
    """By tracker: `sent`, the newest step that was sent to it, and `run`, the number of its run."""
    _silent: set[str] = field(default_factory=set)

    def began(self) -> None:
        """Open the trackers.

        Raises:
            TrainError: Kind `train_setup`: a tracker is not installed or could not start.
        """
        newest = max((int(line["step"]) for line in read_metrics(self.folder)), default=-1)
        known = json.loads(stored.read_text()) if (stored := self.folder / PROGRESS).exists() else {}
        for name in self.report.report_to:
            self._progress[name] = known.get(name, {"sent": newest, "run": 1})
            self._open(name)

    def continued(self, step: int) -> None:
        """Send trackers the lines that they lack, and remove steps after this one."""
        lines = read_metrics(self.folder)
        for name, tracker in list(self._trackers.items()):
            progress = self._progress[name]
            if progress["sent"] > step and not tracker.truncate(step):
                tracker.close()
                (self.folder / f"{name}_run").unlink(missing_ok=True)  # its next run is a new one
                progress["run"] += 1
                progress["sent"] = -1
                self._open(name)
            # Steps that were buffered when the process was killed are sent again, with the same values.
            sent = min(progress["sent"], step) - (tracker.buffers and bool(progress.get("open")))
            for line in lines:
                if line["step"] > sent:
                    self._send(name, int(line["step"]), values_of(line))
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
        name_of_run = self.report.tracking.name or self.folder.name
        run = name_of_run if number == 1 else f"{name_of_run}-{number}"
        face = next(face for face in installed().plugins.values() if name in face.trackers)
        try:
            self._trackers[name] = load(face.trackers[name])(self.folder, run, self.config, self.report.tracking)
        except ImportError as error:
            install = f"pip install 'episode-engine[{name}]'" if face.name == "report" else face.install
            raise TrainError(
                f"train.report_to names {name}, which is not installed ({error}): {install}, or leave it out",
                kind="train_setup",
            ) from error
        except Exception as error:
            raise TrainError(
                f"train.report_to: {name} could not start: {type(error).__name__}: {error}", kind="train_setup"
            ) from error

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
                    file=str(self.folder / METRICS),
                    reason=repr(error),
                )

    def _store_progress(self, *, closed: bool = False) -> None:
        if not self._progress:
            return
        state = {name: {**progress, "open": int(not closed)} for name, progress in self._progress.items()}
        draft = self.folder / f".{PROGRESS}"
        draft.write_text(json.dumps(state))
        draft.replace(self.folder / PROGRESS)


def observe(loaded: LoadedSpec, folder: Path) -> TrackedTraining | None:
    """The hook `observe_training`."""
    train = loaded.spec.train
    report = ReportSpec.section_of(train) if train is not None else None
    if report is None or not report.report_to:
        return None
    return TrackedTraining(report, folder, mask_values(dump(loaded.spec)))
