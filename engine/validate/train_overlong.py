"""The rule for `train.overlong`."""

from __future__ import annotations

from collections.abc import Iterator

from engine.schemas.train import OverlongPenalty
from engine.validate.context import CheckContext
from engine.validate.registry import Finding, rule


@rule("train.overlong", "warning", "every reply of the model has the penalty for long replies")
def overlong(ctx: CheckContext) -> Iterator[Finding]:
    """`train.overlong.margin` is not below `limits.turn_tokens`."""
    train, most = ctx.spec.train, ctx.spec.limits.turn_tokens
    if (
        train is not None
        and train.samples_episodes
        and isinstance(train.overlong, OverlongPenalty)
        and train.overlong.margin >= most
    ):
        message = f"replies are penalized in the last {train.overlong.margin} tokens before the limit, which is {most}: all of them are"
        yield Finding(message, ("train", "overlong", "margin"), "set it to a part of `limits.turn_tokens`")
