"""Rules that compare transitions: which are never taken, and where their order decides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from engine.machine.machine import ResolvedTransition
from engine.spec.text.diagnostic import DataPath
from engine.validate.context import CheckContext
from engine.validate.logic import ALWAYS, MAX_CASES, Formula, implies, overlap
from engine.validate.registry import Finding, rule

_ANY_RANGES: dict[str, tuple[float, float]] = {}


class _Pair(NamedTuple):
    """A transition of the spec for one (source, trigger), and the earlier one that is always taken instead."""

    edge: ResolvedTransition
    before: ResolvedTransition | None
    same: bool
    """Whether the two are identical."""


def _guard(ctx: CheckContext, edge: ResolvedTransition) -> Formula:
    return ALWAYS if edge.conditions is None else ctx.formula(edge.conditions)


def _pairs(ctx: CheckContext) -> dict[int, list[_Pair]]:
    """Every transition of the spec, by its index.

    Raises:
        WorkLimitError: there are too many to compare.
    """
    groups: dict[tuple[str, str], list[ResolvedTransition]] = {}
    pairs: dict[int, list[_Pair]] = {}
    for edge in ctx.machine.transitions:
        group = groups.setdefault((edge.source, edge.trigger), [])
        if edge.index is not None:
            pairs.setdefault(edge.index, []).append(_settled(ctx, edge, group))
        group.append(edge)
    return pairs


def _settled(ctx: CheckContext, edge: ResolvedTransition, group: list[ResolvedTransition]) -> _Pair:
    mine = _guard(ctx, edge)
    for before in group:
        ctx.work.spend(3)
        same = (before.conditions, before.dest) == (edge.conditions, edge.dest)
        if same or before.conditions is None or _implies(ctx, mine, _guard(ctx, before)):
            return _Pair(edge, before, same)
    return _Pair(edge, None, False)


def _implies(ctx: CheckContext, first: Formula, second: Formula) -> bool:
    ctx.work.spend(_weight(first, second))
    return implies(first, second, _ANY_RANGES)


def _overlap(ctx: CheckContext, first: Formula, second: Formula) -> bool:
    ctx.work.spend(_weight(first, second))
    return overlap(first, second, ctx.hull)


def _weight(first: Formula, second: Formula) -> int:
    """About how many comparisons it takes to look at two guards together."""
    return min(first.weight * second.weight, MAX_CASES) if first.known and second.known else 1


def _path(index: int) -> DataPath:
    return ("machine", "transitions", index)


def _place(ctx: CheckContext, edge: ResolvedTransition) -> str:
    """Where a transition is written: `the one in line 12`."""
    if edge.index is None:
        return "the preset's"
    origin = ctx.loaded.origin(_path(edge.index))
    return f"the one in line {origin.line}" if origin.via == "" else f"the one of {origin.via}"


@rule("machine.duplicate-transition", "warning", "a transition is written twice")
def duplicate_transition(ctx: CheckContext) -> Iterator[Finding]:
    """An earlier one has the same source, trigger, condition and destination."""
    for index, pairs in _pairs(ctx).items():
        first = next((pair.before for pair in pairs if pair.before is not None), None)
        if first is not None and all(pair.same for pair in pairs):
            yield Finding(f"this transition says the same as {_place(ctx, first)}", _path(index), "remove it")


@rule("machine.shadowed", "error", "a transition can never be taken: an earlier one always is")
def shadowed(ctx: CheckContext) -> Iterator[Finding]:
    """An earlier one has no condition, or one that holds whenever this one's does."""
    for index, pairs in _pairs(ctx).items():
        if all(pair.same for pair in pairs):
            continue
        whole = all(pair.before is not None for pair in pairs)
        for pair in pairs:
            edge, before = pair.edge, pair.before
            if before is None or (not whole and (edge.wildcard or pair.same)):
                continue  # a wildcard stands for the events that earlier transitions do not handle
            what = f"`{edge.trigger}` in `{edge.source}`"
            fix = "put it before that one" if edge.conditions else "remove it, or give the one before it a condition"
            yield Finding(f"never taken for {what}: {_place(ctx, before)} is tried first", _path(index), fix)
            if whole:
                break


@rule("machine.overlap", "warning", "two conditions may both hold, and the order of the transitions decides")
def overlapping(ctx: CheckContext) -> Iterator[Finding]:
    """Two transitions with conditions for one (state, event) lead to different states."""
    groups: dict[tuple[str, str], list[ResolvedTransition]] = {}
    for edge in ctx.live:
        if edge.conditions is not None and edge.index is not None:
            groups.setdefault((edge.source, edge.trigger), []).append(edge)
    told: set[tuple[int | None, int | None]] = set()
    for group in groups.values():
        for position, later in enumerate(group):
            for earlier in group[:position]:
                ctx.work.spend()
                pair = (earlier.index, later.index)
                if earlier.dest == later.dest or pair in told:
                    continue
                first, second = _guard(ctx, earlier), _guard(ctx, later)
                if _overlap(ctx, first, second) and not _implies(ctx, second, first):
                    told.add(pair)
                    message = (
                        f"`{later.trigger}` in `{later.source}`: this condition and that of {_place(ctx, earlier)} may "
                        f"both hold; the first leads to `{earlier.dest}`, this one to `{later.dest}`"
                    )
                    fix = f"if the order is intended, make it explicit: add `&& !({earlier.conditions})`"
                    yield Finding(message, (*_path(later.index or 0), "conditions"), fix)


@rule("machine.final-exits", "error", "a transition leaves a final state")
def final_exits(ctx: CheckContext) -> Iterator[Finding]:
    """The episode ends in that state, so the transition is never taken."""
    for index, item in enumerate(ctx.spec.machine.transitions):
        for position, source in enumerate(item.sources):
            if source in ctx.states and ctx.states[source].final:
                where: DataPath = (*_path(index), "source")
                path = where if isinstance(item.source, str) else (*where, position)
                fix = "remove the transition, or `final: true` from the state"
                yield Finding(f"`{source}` is final: the episode ends there, and no transition leaves it", path, fix)


@rule("guard.constant", "warning", "a condition always has the same result")
def constant_guard(ctx: CheckContext) -> Iterator[Finding]:
    """Within the spec's limits, and after what must have happened before the guard is evaluated."""
    asked: dict[int, list[tuple[str, str | None]]] = {}
    for edge in ctx.live:
        if edge.index is not None:
            asked.setdefault(edge.index, []).append((edge.source, edge.trigger))
    for index, item in enumerate(ctx.spec.machine.transitions):
        if item.conditions is not None:
            truth = _truth(ctx, item.conditions, asked.get(index, []))
            if truth is not None:
                fix = "leave `conditions` out" if truth else "remove the transition, or correct the condition"
                yield _constant(truth, item.conditions, (*_path(index), "conditions"), fix)
    for index, reassign in enumerate(ctx.spec.rewards.reassign):
        if reassign.when is not None:
            truth = _truth(ctx, reassign.when, [(reassign.at, None)])
            if truth is not None:
                fix = "leave `when` out" if truth else "remove the rule, or correct its `when`"
                yield _constant(truth, reassign.when, ("rewards", "reassign", index, "when"), fix)


def _constant(truth: bool, expression: str, path: DataPath, fix: str) -> Finding:
    how = "always" if truth else "never"
    return Finding(f"`{' '.join(expression.split())}` {how} holds here, within the spec's limits", path, fix)


def _truth(ctx: CheckContext, expression: str, asked: list[tuple[str, str | None]]) -> bool | None:
    """The result of a guard wherever it is evaluated; None if that varies, or it never is."""
    found = ctx.formula(expression)
    ctx.work.spend(len(expression))
    ctx.work.spend(found.weight)
    hull = found.truth(ctx.hull)
    truths: set[bool | None] = set()
    for state, event in asked:
        for place in ctx.graph.moments(state, event):
            ctx.work.spend()
            truths.add(hull if place.late else ctx.graph.truth(found, place, ctx.work))
            if None in truths or len(truths) > 1:
                return None
    return truths.pop() if truths else None
