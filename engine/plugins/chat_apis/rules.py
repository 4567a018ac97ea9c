"""Rules about `rollout.max_cost`."""

from __future__ import annotations

from collections.abc import Iterator

from engine.plugins.chat_apis.spec import CostSpec
from engine.spec.added import backends_of
from engine.validate.context import CheckContext
from engine.validate.registry import Finding, rule


@rule("backend.no-prices", "error", "a limit on the cost of a run in which nothing has a price")
def no_prices(ctx: CheckContext) -> Iterator[Finding]:
    """`rollout.max_cost` without `prices` of any backend of the spec."""
    if CostSpec.or_default(ctx.spec.rollout).max_cost is None:
        return
    if not any(backend.priced for backend in backends_of(ctx.spec).values()):
        yield Finding(
            "`max_cost` has no effect: no backend of this spec has `prices`",
            ("rollout", "max_cost"),
            "give the API's `prices` in `backend`, or remove `max_cost`",
        )
