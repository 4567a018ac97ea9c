"""Rules about `train.report_to` and `train.tracking`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from engine.plugins.report.spec import ReportSpec
from engine.validate.context import CheckContext, without_effect
from engine.validate.registry import Finding, rule

_OWN = ("tensorboard", "trackio", "wandb", "mlflow")
"""The trackers of this plugin; each is the name of its package and of the extra that installs it. Of others nothing is
known here."""
_TRACKED = {
    "project": ("wandb", "trackio", "mlflow"),
    "name": ("wandb", "trackio", "mlflow"),
    "group": ("wandb",),
    "tags": ("wandb", "mlflow"),
}
"""Those of them that read each key of `train.tracking`."""


def _report(ctx: CheckContext) -> ReportSpec:
    train = ctx.spec.train
    return ReportSpec() if train is None else ReportSpec.or_default(train)


@rule("report.no-effect", "warning", "a key of `train.tracking` is read by none of the trackers")
def report_no_effect(ctx: CheckContext) -> Iterator[Finding]:
    """Keys of `train.tracking` without a tracker that reads them."""
    names = set(_report(ctx).report_to)
    yield from without_effect(
        ctx,
        [
            (
                names <= set(_OWN) - set(trackers),
                f"train.tracking.{key}",
                f"`train.report_to` names none of {', '.join(trackers)}",
            )
            for key, trackers in _TRACKED.items()
        ],
    )


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # imported without a spec
        return True


@rule("report.no-package", "info", "the package of a tracker is not installed")
def report_no_package(ctx: CheckContext) -> Iterator[Finding]:
    """The packages of `train.report_to`."""
    for index, name in enumerate(_report(ctx).report_to):
        if name in _OWN and not _installed(name):
            yield Finding(
                f"`{name}` is not installed, and `engine train` needs it for this",
                ("train", "report_to", index),
                f"pip install 'episode-engine[{name}]'",
            )
