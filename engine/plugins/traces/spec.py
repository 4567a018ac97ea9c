"""TracesSpec: the `traces:` section of a spec."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from engine.schemas.sections import SpecSection


class TracesSpec(SpecSection):
    """Traces of ended episodes: as OpenTelemetry spans and as lines of JSON. They are written from the journal, beside
    the episodes that run."""

    of: Literal["all", "failed"] = "all"
    """The episodes that are traced: all, or those with a failure."""
    otlp: str | None = Field(default=None, pattern=r"^(https?://\S+|\$\{\w+\})$")
    """URL of a collector that takes OTLP over HTTP (`/v1/traces` is added if it has no path). Headers are those of
    `OTEL_EXPORTER_OTLP_HEADERS`."""
    spans: bool = False
    """Write the spans to `traces/spans.jsonl` of the run's folder, as OTLP in JSON."""
    episodes: bool = False
    """Write messages, turns and outcome of each episode to `traces/finished.jsonl` or `traces/failed.jsonl` of the
    run's folder."""
    content: bool = False
    """Spans also hold messages, and arguments and results of tools."""

    @property
    def makes_spans(self) -> bool:
        """Whether episodes become spans."""
        return self.spans or self.otlp is not None

    @property
    def active(self) -> bool:
        """Whether anything is written or sent."""
        return self.makes_spans or self.episodes
