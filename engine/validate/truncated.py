"""A rule about what a reply that was cut off costs."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from engine.schemas.credit import ReassignRule
from engine.schemas.train import OverlongPenalty
from engine.spec.text.diagnostic import DataPath
from engine.validate.code.source import Def
from engine.validate.context import CheckContext
from engine.validate.registry import Finding, rule

_FINISH = "last.finish"
Cost = tuple[float, str]
"""A cost, more than 0, and the key or code that states it."""


@rule("rewards.truncated-pays", "info", "a reply that is cut off costs less than a wrong reply")
def truncated_pays(ctx: CheckContext) -> Iterator[Finding]:
    """`truncated` leads to a final state, which nothing judges, and the spec or its code takes rewards from wrong replies."""
    for name, state in ctx.states.items():
        if state.action != "generate" or name not in ctx.reachable:
            continue
        ends = [edge.dest for edge in ctx.live if edge.source == name and edge.trigger == "truncated"]
        end = next((dest for dest in ends if dest in ctx.states and ctx.states[dest].final), None)
        paid = None if end is None else _cut_off(ctx, name, end)
        wrong = max(_wrong(ctx), default=None)
        if end is None or paid is None or wrong is None or wrong[0] <= paid:
            continue
        judge = next(each for each in _judges(ctx))
        yield Finding(
            f"a reply that is cut off ends the episode and costs {paid:g}; a wrong reply may cost {wrong[0]:g} ({wrong[1]}), "
            "so long replies without an answer pay",
            ctx.state_path(name),
            f"let `{judge}` judge it: add the transition `{{trigger: truncated, source: {name}, dest: {judge}}}`; or take as much "
            f"by `rewards.reassign: [{{at: {end}, when: \"{_FINISH} == 'length'\", op: add, value: {-wrong[0]:g}}}]`",
            key=True,
        )


def _judges(ctx: CheckContext) -> Iterator[str]:
    """Reachable states in which the environment or a user judges a reply."""
    for name, state in ctx.states.items():
        if name in ctx.reachable and state.action in ("step", "ask_user"):
            yield name


def _cut_off(ctx: CheckContext, state: str, end: str) -> float | None:
    """What a cut-off reply costs, if it leads from `state` to the final state `end`; None if it is judged there or not trained on."""
    train, scorer, environment = ctx.spec.train, ctx.spec.rewards.scorer, ctx.spec.environment
    if scorer is not None or (train is not None and train.overlong == "mask"):
        return None
    if environment is not None:
        node = _node(ctx, environment.entry.use)
        inherits = isinstance(node, ast.ClassDef) and bool(node.bases)
        if node is None or inherits or any(getattr(item, "name", "") == "score" for item in node.body):
            return None  # its `score` judges, or may be inherited
    cost = 0.0
    for item in _takes(ctx):
        if item.at in (state, end):
            if item.when is not None and _FINISH not in item.when:
                return None
            cost -= item.value or 0.0
    if train is not None and isinstance(train.overlong, OverlongPenalty):
        cost += train.overlong.coefficient
    return cost


def _takes(ctx: CheckContext) -> Iterator[ReassignRule]:
    """Rules that take a reward."""
    for item in ctx.spec.rewards.reassign:
        if item.op != "transfer" and (item.value or 0.0) < 0:
            yield item


def _wrong(ctx: CheckContext) -> Iterator[Cost]:
    """What a wrong reply may cost, by each key and line of code that says it."""
    judges = set(_judges(ctx))
    for item in _takes(ctx):
        if item.at in judges and item.value is not None:
            yield -item.value, f"`rewards.reassign` at `{item.at}`"
    actions = {ctx.states[name].action for name in judges}
    environment = ctx.spec.environment
    if environment is not None and environment.facts is None and "step" in actions:
        yield from _in_code(ctx, ("environment",), environment.use, environment.with_)
    if "ask_user" not in actions:
        return
    for path, user in ctx.users:
        for index, mark in enumerate(user.marks):
            for event in mark.rewards:
                if event.op != "transfer" and (event.value or 0.0) < 0:
                    yield -(event.value or 0.0), f"`{'.'.join(map(str, (*path, 'marks', index)))}`"
        code = user.grader if user.model_played else user
        if code is not None and code.use is not None:
            yield from _in_code(ctx, (*path, "grader") if user.model_played else path, code.use, code.with_)


def _in_code(ctx: CheckContext, path: DataPath, use: str, with_: Mapping[str, Any]) -> Iterator[Cost]:
    """Negative rewards that the code of `use` writes: literals, and parameters that `with` or their defaults set."""
    node = _node(ctx, use)
    if node is None:
        return
    ctx.work.spend(100)
    settings = {
        **_defaults(node),
        **{key: (value, ".".join(map(str, (*path, "with", key)))) for key, value in with_.items()},
    }
    for value in _reward_values(node):
        for each in ast.walk(value):
            if isinstance(each, ast.UnaryOp) and (cost := _number(each)) is not None and cost < 0:
                yield -cost, f"`{use}`"
            name = each.id if isinstance(each, ast.Name) else each.attr if isinstance(each, ast.Attribute) else ""
            setting, where = settings.get(name.lstrip("_"), (None, ""))
            if isinstance(setting, int | float) and setting < 0:
                yield -float(setting), f"`{where}`"


def _node(ctx: CheckContext, use: str) -> Def | None:
    """The definition of an entry point; None if its source cannot be read."""
    text = ctx.code_text(use)
    return None if text is None else text.definition.node


def _reward_values(node: ast.AST) -> Iterator[ast.expr]:
    """Amounts of rewards: `RewardEvent(value=…)`, and the values of `rewards={…: …}`."""
    for call in ast.walk(node):
        if not isinstance(call, ast.Call):
            continue
        name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
        for keyword in call.keywords:
            if name == "RewardEvent" and keyword.arg == "value":
                yield keyword.value
            elif keyword.arg == "rewards" and isinstance(keyword.value, ast.Dict):
                yield from keyword.value.values


def _defaults(node: Def) -> dict[str, tuple[float, str]]:
    """Numbers that are defaults of the parameters, and where they are."""
    function: ast.AST | None = node
    if isinstance(node, ast.ClassDef):
        function = next((item for item in node.body if getattr(item, "name", "") == "__init__"), None)
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return {}
    names = function.args
    pairs = [*zip(reversed(names.args), reversed(names.defaults), strict=False)]
    pairs += [(arg, value) for arg, value in zip(names.kwonlyargs, names.kw_defaults, strict=True) if value is not None]
    found = {arg.arg: _number(value) for arg, value in pairs}
    return {name: (value, f"{node.name}({name}={value:g})") for name, value in found.items() if value is not None}


def _number(node: ast.expr) -> float | None:
    """The value of a number that is written out."""
    sign = 1.0
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        sign, node = -1.0, node.operand
    known = isinstance(node, ast.Constant) and type(node.value) in (int, float)
    return sign * float(node.value) if known else None  # type: ignore[attr-defined]
