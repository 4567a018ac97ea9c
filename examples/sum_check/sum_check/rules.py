"""Rules of `engine validate` about the section; pages/sum_check.no-effect.md explains them."""

from __future__ import annotations

from collections.abc import Iterator

from engine.validate.context import CheckContext
from engine.validate.registry import Finding, rule
from sum_check.facts import ACTION


@rule("sum_check.no-effect", "warning", "rewards for sums that no state checks")
def no_effect(ctx: CheckContext) -> Iterator[Finding]:
    """`right` or `wrong` without a state with the action `check_sums`."""
    if any(state.action == ACTION for state in ctx.states.values()):
        return
    for key in ("right", "wrong"):
        if ctx.written("sum_check", key):
            fix = f"add a state with `action: {ACTION}`, or remove `{key}`"
            yield Finding(f"`{key}` has no effect: no state checks sums", ("sum_check", key), fix)
