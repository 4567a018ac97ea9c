"""Rules over `isolation`: what it says must have an effect."""

from __future__ import annotations

from collections.abc import Iterator

from engine.schemas.entry import IsolationSpec
from engine.spec.added import added_code
from engine.spec.text.diagnostic import DataPath
from engine.validate.context import CheckContext
from engine.validate.registry import Finding, rule

_PROCESS = "write `mode: process`"


def _parts(ctx: CheckContext) -> Iterator[tuple[DataPath, IsolationSpec | None, bool]]:
    """Each part that may have the key: where it is, what its key says, and whether it has code that runs."""
    spec = ctx.spec
    if spec.environment is not None:
        yield ("environment",), spec.environment.isolation, True
    for index, tool in enumerate(spec.tools):
        yield ("tools", index), tool.isolation, True
    for path, user in ctx.users:
        yield path, user.isolation, not user.model_played or user.grader is not None
    if spec.rewards.scorer is not None:
        yield ("rewards", "scorer"), spec.rewards.scorer.isolation, not spec.rewards.scorer.model_played
    for code in added_code(spec):
        if code.isolated:
            yield code.path, code.isolation, True


@rule("isolation.no-effect", "error", "a setting of `isolation` has no effect")
def no_effect(ctx: CheckContext) -> Iterator[Finding]:
    """Limits without `mode: process`, and the key on a part that has no code or in a spec that has none."""
    spec = ctx.spec
    parts = list(_parts(ctx))
    for path, isolation, runs in parts:
        if isolation is None:
            continue
        at = (*path, "isolation")
        if not runs:
            yield Finding(
                "a model plays this part, so it has no code that could run in its own process",
                at,
                "remove `isolation`, or give the part `use`",
                key=True,
            )
        elif isolation.limits and spec.isolation_of(isolation, _default(ctx, path)).mode == "thread":
            yield Finding(
                f"{_names(isolation)} cannot limit code that runs in the engine's process", at, _PROCESS, key=True
            )
    of_spec = spec.isolation
    if of_spec is None:
        return
    if not any(runs for _, _, runs in parts) and not ctx.own_actions:
        yield Finding(
            "the spec has no environment, tool, user, scorer or action of its own that could be isolated",
            ("isolation",),
            "remove `isolation`",
            key=True,
        )
    elif (
        of_spec.mode is None
        and of_spec.limits
        and not any(
            runs and spec.isolation_of(isolation, _default(ctx, path)).mode != "thread"
            for path, isolation, runs in parts
        )
    ):
        yield Finding(
            f"{_names(of_spec)} cannot limit code that runs in the engine's process", ("isolation",), _PROCESS
        )


def _default(ctx: CheckContext, path: DataPath) -> str:
    """Where a part runs if neither its own `isolation` nor the spec's says it."""
    environment = ctx.spec.environment
    return environment.default_mode if environment is not None and path == ("environment",) else "thread"


def _names(isolation: IsolationSpec) -> str:
    return " and ".join(f"`{name}`" for name in isolation.limits)
