"""Trackers that get the metrics in addition to the training's own file: TensorBoard, trackio, Weights & Biases, MLflow.

Each is an extra of this package and is imported when a training names it. Their own environment variables apply
(`WANDB_MODE`, `WANDB_PROJECT`, `TRACKIO_DIR`, `MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_NAME` …).

Each class is a few calls of the tracker's own package. `accelerate.tracking` has classes for the same four, but keeps no run
id with which a resumed training continues its run, removes no steps of TensorBoard that a resume repeats, needs steps of
Weights & Biases that only rise, and passes on names that MLflow rejects, such as `eval/pass@4`.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from engine.errors import TrainError
from engine.plugin import installed, load
from engine.plugins.report.spec import TrackingSpec

PROJECT = "episode-engine"
"""Default project or experiment, used if the environment does not set one."""


class Tracker(Protocol):
    """A tracker that gets metrics. A plugin names its class in `trackers`."""

    buffers: bool
    """Whether the newest values are lost if the process is killed."""

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
        ...

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values of a step."""
        ...

    def truncate(self, step: int) -> bool:
        """Remove values after `step`. Returns False if the tracker cannot remove values."""
        ...

    def close(self) -> None:
        """Send buffered values and close the tracker."""
        ...


class TensorBoard:
    """Event files in the run's `tensorboard` folder. Removed steps are purged."""

    buffers = False

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


class Trackio:
    """A run of this name in trackio's project; a resumed training continues the run of the same name."""

    buffers = True

    def __init__(self, folder: Path, run: str, config: Mapping[str, Any], tracking: TrackingSpec) -> None:
        import trackio

        self._trackio = trackio
        project = tracking.project or os.environ.get("TRACKIO_PROJECT", PROJECT)
        trackio.init(project=project, name=run, config=dict(config), resume="allow", embed=False)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._trackio.log(dict(values), step=step)

    def truncate(self, step: int) -> bool:
        return False

    def close(self) -> None:
        self._trackio.finish()


class Wandb:
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

    def truncate(self, step: int) -> bool:
        return False

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """A run of MLflow; its id is stored in the run's folder, so that a resumed training continues it."""

    buffers = False
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
            made = self._client.create_run(number, run_name=run, tags=dict.fromkeys(tracking.tags, "")).info.run_id
            parameters = [Param(key, str(value)[:500]) for key, value in _flat(config).items()]
            for start in range(0, len(parameters), 100):
                self._client.log_batch(made, params=parameters[start : start + 100])
            return str(made)

        self._id = _stored_run_id(folder / "mlflow_run", begin)
        self._client.update_run(self._id, status="RUNNING")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        import time

        now = int(time.time() * 1000)
        # MLflow rejects other characters: `eval/pass@4` becomes `eval/pass_4`.
        metrics = [self._metric(re.sub(r"[^\w\-. /]", "_", name), value, now, step) for name, value in values.items()]
        for start in range(0, len(metrics), self._MAX_METRICS):
            self._client.log_batch(self._id, metrics=metrics[start : start + self._MAX_METRICS])

    def truncate(self, step: int) -> bool:
        return False

    def close(self) -> None:
        self._client.set_terminated(self._id)


def open_tracker(name: str, folder: Path, run: str, config: Mapping[str, Any], tracking: TrackingSpec) -> Tracker:
    """Open a tracker for a run. Arguments as those of `Tracker`; `name` is a value of `train.report_to`.

    Raises:
        TrainError: Kind `train_setup`: the tracker is not installed or could not start; the message names the package to install.
    """
    face = next(face for face in installed().plugins.values() if name in face.trackers)
    try:
        tracker: Tracker = load(face.trackers[name])(folder, run, config, tracking)
        return tracker
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


def discard_run_id(name: str, folder: Path) -> None:
    """Remove the stored run id, so that the next `open_tracker` starts a new run in this tracker."""
    (folder / f"{name}_run").unlink(missing_ok=True)


def _stored_run_id(file: Path, make: Callable[[], str]) -> str:
    """Read a run id from the file, or make one and store it."""
    if file.exists():
        return file.read_text(encoding="utf-8").strip()
    made = make()
    file.write_text(f"{made}\n", encoding="utf-8")
    return made


def _flat(config: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{before}{name}.")
        else:
            found[f"{before}{name}"] = value
    return found
