"""The metrics of a training with trackers, without a training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from engine.plugin import Plugin
from engine.plugins.report.spec import ReportSpec, TrackingSpec
from engine.plugins.report.trackers import TrackedTraining
from engine.train.metrics import MetricsLog


class TrackedMetrics:
    """`metrics.jsonl` and its trackers, called as the trainer calls them."""

    def __init__(
        self,
        folder: Path,
        report: Sequence[str],
        config: Mapping[str, Any] | None = None,
        tracking: TrackingSpec | None = None,
        *,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.file = MetricsLog(folder, clock=clock)
        spec = ReportSpec.model_construct(report_to=[*report], tracking=tracking or TrackingSpec())
        self.trackers = TrackedTraining(spec, folder, config or {})
        self.trackers.began()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.file.write(step, values)
        self.trackers.stepped(step, values)

    def truncate(self, step: int) -> None:
        self.file.truncate(step)
        self.trackers.continued(step)

    def close(self) -> None:
        self.trackers.close()


class Tracker:
    """A tracker that keeps what it was sent, by run."""

    runs: ClassVar[dict[str, list[tuple[int, float]]]] = {}
    tracking: ClassVar[list[TrackingSpec]] = []
    buffers = False
    can_remove = False

    def __init__(self, folder: Path, run: str, config: object, tracking: TrackingSpec) -> None:
        self.tracking.append(tracking)
        self.shown = self.runs.setdefault(run, [])

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.shown.append((step, values["loss"]))

    def truncate(self, step: int) -> bool:
        if self.can_remove:
            self.shown[:] = [point for point in self.shown if point[0] <= step]
        return self.can_remove

    def close(self) -> None:
        pass


FACE = Plugin(
    name="made", about="A tracker of another package", install="pip install made", trackers={"made": "tracked:Tracker"}
)
"""The face of the package that has it."""
