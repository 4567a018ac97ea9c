"""Rules about limits: contradictions, limits that are never reached, and actions without a deadline."""

from __future__ import annotations

from collections.abc import Iterator

from engine.actions.facts import seconds_of
from engine.spec.text.diagnostic import DataPath
from engine.validate.context import CheckContext
from engine.validate.registry import Finding, rule
from engine.validate.worst_case import COUNTS, context_bound, key_of, most_counts


@rule("limits.contradiction", "error", "one limit contradicts another")
def contradiction(ctx: CheckContext) -> Iterator[Finding]:
    """More tokens for a turn than for the episode or the model; a deadline longer than the episode's."""
    limits = ctx.spec.limits
    turn: DataPath = ("limits", "turn_tokens")
    bound = context_bound(ctx)
    if bound.most is not None and limits.turn_tokens >= bound.most:
        yield Finding(
            f"a turn may have {limits.turn_tokens} tokens, and the whole sequence, prompt included, "
            f"{bound.most:.0f} ({bound.by})",
            next((key for key in (turn, key_of(bound.by, turn)) if ctx.written(*key)), turn),
            "give a turn fewer tokens, or the episode more",
        )
    episode_seconds = limits.episode_seconds
    if episode_seconds is None:
        return
    environment = [] if ctx.spec.environment is None else [ctx.spec.environment]
    named: list[tuple[DataPath, float | None, str]] = [
        (("limits", "tool_seconds"), limits.tool_seconds, "one tool call"),
        *((("tools", index, "timeout"), tool.timeout, "this tool") for index, tool in enumerate(ctx.spec.tools)),
        *(((*path, "timeout"), user.timeout, "one answer of the user") for path, user in ctx.users),
        *((("environment", "timeout"), item.timeout, "one call of the environment") for item in environment),
    ]
    for path, seconds, what in named:
        if seconds is not None and seconds > episode_seconds and ctx.written(*path):
            yield Finding(
                f"{what} may take {seconds:g} s, and the whole episode {episode_seconds:g} s",
                path,
                "set it below `limits.episode_seconds`, or give the episode longer",
            )


@rule("limits.too-wide", "info", "the limits allow too many combinations of counters to check each")
def too_wide(ctx: CheckContext) -> Iterator[Finding]:
    """The maximum of a counter is then its limit, and conditions that depend on counters may have either result."""
    if ctx.graph.walked and not ctx.graph.exact:
        yield Finding(
            "too many combinations of turns and calls: nothing that depends on their counts is proved",
            ("limits",),
            "set lower limits to have them checked exactly",
            key=True,
        )


@rule("limits.never-binds", "info", "a limit that can never be reached")
def never_binds(ctx: CheckContext) -> Iterator[Finding]:
    """Other limits or the machine end the episode first."""
    limits = ctx.spec.limits
    if ctx.graph.exact:
        for index, name in enumerate(COUNTS):
            value = limits.value_of(name)
            most = most_counts(ctx.graph)[index] if value is not None and ctx.written("limits", name) else None
            if most is not None and most < value:
                ever = f"at most {most:.0f} can occur" if most else "none can occur"
                yield Finding(f"`limits.{name}: {value}` is never reached: {ever}", ("limits", name), "remove it")
    bound = context_bound(ctx)
    if limits.episode_tokens is not None and bound.most is not None and bound.most < limits.episode_tokens:
        yield Finding(
            f"`limits.episode_tokens: {limits.episode_tokens}` is never reached: {bound.by} is {bound.most:.0f}",
            ("limits", "episode_tokens"),
            "remove it",
        )
    sampled = ctx.spec.sampling.max_new_tokens
    if sampled is not None and sampled < limits.turn_tokens and ctx.written("limits", "turn_tokens"):
        yield Finding(
            f"`limits.turn_tokens: {limits.turn_tokens}` is never reached: `sampling.max_new_tokens` is {sampled}",
            ("limits", "turn_tokens"),
            "remove one of the two",
        )
    timed = [tool.timeout is not None for tool in ctx.spec.tools]
    if timed and all(timed) and ctx.written("limits", "tool_seconds") and ctx.spec.environment is None:
        yield Finding(
            "`limits.tool_seconds` is never reached: every tool has a `timeout` of its own",
            ("limits", "tool_seconds"),
            "remove it",
        )


@rule("limits.no-deadline", "info", "a tool, a user or the environment has the default deadline")
def no_deadline(ctx: CheckContext) -> Iterator[Finding]:
    """A slow one delays its episode for that long; set the deadline explicitly."""
    spec = ctx.spec
    if not ctx.written("limits", "tool_seconds"):
        for index, tool in enumerate(spec.tools):
            if tool.timeout is None:
                yield Finding(
                    "this tool has no `timeout`: `limits.tool_seconds` holds, by default "
                    f"{spec.limits.tool_seconds:g} s",
                    ("tools", index),
                    "add `timeout: 5s`, or set `limits.tool_seconds`",
                )
    for path, user in ctx.users:
        if user.timeout is None or not ctx.written(*path, "timeout"):
            yield Finding(f"this user has no `timeout`: the default is {user.seconds:g} s", path, "add `timeout: 30s`")
    if spec.environment is not None and not ctx.written("environment", "timeout"):
        yield Finding(
            f"this environment has no `timeout`: the default is {spec.environment.timeout:g} s",
            ("environment",),
            "add `timeout: 30s`",
        )


@rule("limits.no-time", "warning", "nothing ends an episode in which the model or the server hangs")
def no_time(ctx: CheckContext) -> Iterator[Finding]:
    """`episode_seconds: null`, and an action without a deadline."""
    if ctx.spec.limits.episode_seconds is not None:
        return
    for name, state in ctx.states.items():
        if name in ctx.reachable and seconds_of(ctx.spec, state) == float("inf"):
            yield Finding(
                f"`{name}` ({state.action}) has no deadline, and the episode has none either",
                ("limits", "episode_seconds"),
                "set `limits.episode_seconds`",
            )
            return
