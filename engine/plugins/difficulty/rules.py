"""The rule about `train.difficulty`: no task is drawn again after its window is full."""

from __future__ import annotations

import math
from collections.abc import Iterator

from engine.plugins.difficulty.spec import DifficultySpec
from engine.validate.context import CheckContext, without_effect
from engine.validate.registry import Finding, rule


@rule("train.difficulty-no-effect", "warning", "the difficulty filter never has the episodes that it needs")
def difficulty_no_effect(ctx: CheckContext) -> Iterator[Finding]:
    """A training that samples nothing, or too few draws of each task."""
    train = ctx.spec.train
    section = None if train is None else DifficultySpec.section_of(train)
    if train is None or section is None or (why := _why(ctx, section)) is None:
        return
    yield from without_effect(ctx, [(True, "train.difficulty", why)])


def _why(ctx: CheckContext, section: DifficultySpec) -> str | None:
    train = ctx.spec.train
    assert train is not None
    if not train.samples_episodes:
        return f"no tasks are drawn with `train.kind: {train.kind}`"
    if train.epochs is not None or ctx.spec.tasks.mix is not None:
        return None
    tasks = ctx.task_count()
    draws = train.steps * train.tasks_per_step * (train.max_sampling_rounds if train.dynamic_sampling else 1)
    if not tasks:
        return None
    episodes = (math.ceil(draws / tasks) - 1) * ctx.spec.rollout.samples_per_task
    if episodes >= section.window:
        return None
    return (
        f"{draws} draws of {tasks} tasks leave at most {episodes} episodes of a task before its last draw (`window` is "
        f"{section.window})"
    )
