"""Rules about `traces`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from engine.plugins.traces.spec import TracesSpec
from engine.validate.context import CheckContext, without_effect
from engine.validate.registry import Finding, rule


@rule("traces.no-effect", "warning", "an option of `traces` has no effect in this combination")
def traces_no_effect(ctx: CheckContext) -> Iterator[Finding]:
    """`of` and `content` where nothing, or no span, is written."""
    traces = TracesSpec.or_default(ctx.spec)
    yield from without_effect(
        ctx,
        [
            (not traces.active, "traces.of", "no trace is written (`otlp`, `spans` or `episodes`)"),
            (
                not traces.makes_spans,
                "traces.content",
                "no spans are written (`otlp` or `spans`); `episodes` always has the messages",
            ),
        ],
        "remove it, or set one of them",
    )


@rule("traces.no-package", "info", "the packages that write spans are not installed")
def traces_no_package(ctx: CheckContext) -> Iterator[Finding]:
    """OpenTelemetry, for `traces.otlp` and `traces.spans`."""
    traces = TracesSpec.or_default(ctx.spec)
    if traces.makes_spans and find_spec("opentelemetry") is None:
        yield Finding(
            "`opentelemetry-sdk` is not installed, and spans need it",
            ("traces", "otlp" if traces.otlp is not None else "spans"),
            "pip install 'episode-engine[otel]'",
            key=True,
        )
