"""Rules of `engine validate` about the loss; pages/tilt.no-effect.md explains them."""

from __future__ import annotations

from collections.abc import Iterator

from engine.validate.context import CheckContext
from engine.validate.registry import Finding, rule
from tilt_loss.spec import TiltLoss


@rule("tilt.no-effect", "warning", "a maximum weight that no token reaches")
def no_effect(ctx: CheckContext) -> Iterator[Finding]:
    """`most` with `tilt: 0`: each weight is 1."""
    train = ctx.spec.train
    if train is None or not isinstance(train.loss, TiltLoss):
        return
    if train.loss.tilt == 0 and "most" in train.loss.model_fields_set:
        yield Finding("`most` has no effect with `tilt: 0`", ("train", "loss", "most"), "set `tilt`, or remove `most`")
