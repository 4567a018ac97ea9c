"""The rule about `rollout.keep`."""

from __future__ import annotations

from collections.abc import Iterator

from engine.plugins.retention.spec import KeepSpec
from engine.validate.context import CheckContext, without_effect
from engine.validate.registry import Finding, rule


@rule("rollout.no-effect", "warning", "an option of `rollout.keep` has no effect in this combination")
def keep_no_effect(ctx: CheckContext) -> Iterator[Finding]:
    """`keep` where nothing is ever dropped, and keys of it that another one includes."""
    keep, train = KeepSpec.section_of(ctx.spec.rollout), ctx.spec.train
    if keep is None:
        return
    more = 0 if train is None else round((train.asynchrony.oversample - 1) * train.tasks_per_step)
    key = why = ""
    if train is None or not train.samples_episodes:
        kind = "the spec has no `train`" if train is None else "`train.kind: sft` samples no episodes"
        why = f"only a training drops episodes, and {kind}"
    elif keep.sample == 1.0:
        key, why = "sample", "it keeps every group, so nothing is dropped"
    elif train.epochs is None and keep.steps >= train.steps:
        key, why = "steps", f"`train.steps` is {train.steps}, so every group is kept and nothing is dropped"
    elif keep.trained and not train.dynamic_sampling and train.asynchrony.max_staleness == 0 and more == 0:
        key = "trained"
        why = "with `train.dynamic_sampling: false` and without over-sampling every group trains, so nothing is dropped"
    name = f"rollout.keep.{key}" if key and ctx.written("rollout", "keep", key) else "rollout.keep"
    yield from without_effect(ctx, [(why != "", name, why)])
