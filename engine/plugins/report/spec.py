"""ReportSpec: the trackers that get the metrics of a training."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from engine.schemas.base import Contract
from engine.schemas.sections import NameOf, SpecSection


class TrackingSpec(Contract):
    """How a training is named in the trackers of `report_to`. A key that is set wins over the tracker's environment
    variable."""

    project: str | None = Field(default=None, min_length=1)
    """Project of Weights & Biases and trackio, experiment of MLflow. Default: their environment variable, else
    `episode-engine`."""
    name: str | None = Field(default=None, min_length=1)
    """Name of the run. Default: the training's name."""
    group: str | None = Field(default=None, min_length=1)
    """Weights & Biases: group of the run."""
    tags: list[str] = Field(default_factory=list)
    """Weights & Biases: tags of the run. MLflow: tags with an empty value."""


class ReportSpec(SpecSection):
    """The trackers that get the metrics of a training."""

    RENAMED: ClassVar[dict[str, str]] = {"report": "report_to"}
    PLUGIN_NAMES: ClassVar[dict[str, str]] = {"report_to": "trackers"}

    report_to: list[Annotated[str, NameOf(point="trackers")]] = Field(default_factory=list)
    """Trackers that get the metrics in addition to the training's `metrics.jsonl`."""
    tracking: TrackingSpec = Field(default_factory=TrackingSpec)
    """Project, name, group and tags of the training in these trackers."""
