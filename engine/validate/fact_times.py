"""The rule about facts that a guard may read too early: which states' code sets a fact, and which paths leave it unset.

Invariant: what the text of code leaves open counts as setting the fact, so the rule finds nothing there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache

from engine.machine.expression import Constant, ExpressionError, Index, Name, Node, Operation, Select, parse
from engine.schemas.limits import ALWAYS
from engine.spec.text.diagnostic import DataPath
from engine.validate.code.source import is_function_environment, last_name
from engine.validate.code.written_names import code_names, names_of_plugins
from engine.validate.context import CheckContext
from engine.validate.registry import Finding, rule

_ANSWER = {"reset": "Reset", "step": "Step", "user": "UserTurn", "tool": "ToolReply"}
"""By what is asked, the class of the answer that may hold facts."""
_ROLES = {"reset": ("environment", "reset"), "step": ("environment", "step"), "ask_user": ("user", "user")}
"""By action, the role of the code that it calls, and what that is asked."""


@lru_cache(maxsize=256)
def _certain_reads(expression: str) -> tuple[tuple[str, int], ...]:
    """The facts that an expression reads whatever the values are, each with its index in the text.

    What stands right of `&&`, `||` and `?` may be guarded by what stands left of it.
    """
    try:
        waiting: list[Node] = [parse(expression)]
    except ExpressionError:
        return ()  # `guard.parse` reports it
    reads: list[tuple[str, int]] = []
    while waiting:
        node = waiting.pop()
        if isinstance(node, Operation):
            waiting += node.args[:1] if node.operator in ("&&", "||", "?:") else node.args
        elif isinstance(node, Select) and isinstance(node.of, Name) and node.of.name == "facts":
            reads += [] if node.test else [(node.field, node.end - len(node.field))]
        elif isinstance(node, Index) and isinstance(node.of, Name) and node.of.name == "facts":
            reads += [(str(node.key.value), node.key.start)] if isinstance(node.key, Constant) else []
        elif isinstance(node, Select):
            waiting.append(node.of)
    text = expression.replace(" ", "")
    return tuple(read for read in reads if f"has(facts.{read[0]})" not in text and f'"{read[0]}"infacts' not in text)


@rule("guard.fact-may-miss", "warning", "a guard may read a fact before anything sets it, which fails the episode")
def fact_may_miss(ctx: CheckContext) -> Iterator[Finding]:
    """`facts.<name>` without `has(facts.<name>)`, where a path of the machine leads there and leaves it unset."""
    names = code_names(ctx) if any("facts" in text for _, _, _, text in _guards(ctx)) else None
    if names is None or names.other_facts:
        return
    for path, state, event, text in _guards(ctx):
        for fact, offset in _certain_reads(text):
            ctx.work.spend(len(ctx.live))
            if fact not in names.texts or fact in names_of_plugins(ctx):
                continue  # `guard.unknown-fact` reports the first
            if state in _unset(ctx, fact) and not _sets(ctx, state, event, fact):
                when = f"after `{event}` in {state}" if event else f"in {state}"
                yield Finding(
                    f"`facts.{fact}` may not be set {when}: an episode that comes there without it fails",
                    path,
                    f"write `has(facts.{fact}) && …`, or set it in every answer of the code, `reset` first",
                    offset=offset if path[-1] in ("conditions", "when") else None,
                )


def _guards(ctx: CheckContext) -> Iterator[tuple[DataPath, str, str | None, str]]:
    """Each guard with its place, the state and event after which it is evaluated (None: any), and its text."""
    for edge in ctx.live:
        if edge.conditions is not None and edge.index is not None and edge.trigger not in ALWAYS:
            written = ctx.spec.machine.transitions[edge.index]
            key = "conditions" if written.conditions is not None else "unless"
            path: DataPath = ("machine", "transitions", edge.index, key)
            yield (
                (path if isinstance(getattr(written, key), str) else (*path, 0)),
                edge.source,
                edge.trigger,
                edge.conditions,
            )
    for index, item in enumerate(ctx.spec.rewards.reassign):
        if item.when is not None and item.at in ctx.states:
            yield ("rewards", "reassign", index, "when"), item.at, None, item.when


def _unset(ctx: CheckContext, fact: str) -> frozenset[str]:
    """The states that an episode without failures may enter before the fact is set."""
    unset, waiting = {ctx.machine.initial}, [ctx.machine.initial]
    while waiting:
        state = waiting.pop()
        for edge in ctx.live:
            if edge.source == state and edge.trigger not in ALWAYS and edge.dest not in unset:
                guarded = edge.conditions is not None and f"has(facts.{fact})" in edge.conditions.replace(" ", "")
                if not guarded and not _sets(ctx, state, edge.trigger, fact):
                    unset.add(edge.dest)
                    waiting.append(edge.dest)
    return frozenset(unset)


def _sets(ctx: CheckContext, state: str, event: str | None, fact: str) -> bool:
    """Whether the fact is surely set after a state's action, with an event; where that is not known, it is."""
    action = ctx.states[state].action or ""
    if ctx.states[state].final or action == "score":
        return action == "score"
    if action == "call_tools":
        tools = [item for item in ctx.spec_code if item.role.startswith("tool")]
        return len(tools) == 1 and _answers_set(ctx, tools[0].entry.use, "tool", event, fact)
    if ":" in action:
        return _answers_set(ctx, action, "step", event, fact)
    if action not in _ROLES:
        return action != "generate"
    role, asked = _ROLES[action]
    code = [item.entry.use for item in ctx.spec_code if item.role == role]
    played = role == "user" and any(user.use is None for _, user in ctx.users)
    return bool(code) and not played and all(_answers_set(ctx, use, asked, event, fact) for use in code)


def _answers_set(ctx: CheckContext, use: str, asked: str, event: str | None, fact: str) -> bool:
    """Whether every answer in the text of an entry point that leads to the event holds the fact."""
    code = ctx.code_text(use)
    if code is None:
        return True
    node = code.definition.node
    if is_function_environment(node):
        answers = _dialogue(node, asked, event)
    else:
        of_class = [
            item for item in ast.walk(node) if isinstance(item, ast.Call) and last_name(item.func) == _ANSWER[asked]
        ]
        answers = [item for item in of_class if _may_lead(item, asked, event)]
        if not answers:
            return asked != "tool" or bool(of_class)  # a tool that returns a plain value sets no fact
    return all(_holds(item, fact) for item in answers)


def _may_lead(call: ast.Call, asked: str, event: str | None) -> bool:
    """Whether an answer may be followed by an event, by what its text says of it."""
    given = {item.arg: item.value for item in call.keywords}
    if event is None or asked in ("reset", "tool"):
        return True
    if asked == "user":
        satisfied = given.get("satisfied", ast.Constant(False))
        return not isinstance(satisfied, ast.Constant) or bool(satisfied.value) == (event == "satisfied")
    written = given.get("event", call.args[0] if call.args else None)
    return not isinstance(written, ast.Constant) or written.value == event


def _dialogue(node: ast.AST, asked: str, event: str | None) -> list[ast.expr | None]:
    """The answers of a function environment: its first `yield` is that of `reset`."""
    yields = sorted((item for item in ast.walk(node) if isinstance(item, ast.Yield)), key=lambda item: item.lineno)
    if asked == "reset":
        return [item.value for item in yields[:1]]
    ends: list[ast.expr | None] = [item.value for item in ast.walk(node) if isinstance(item, ast.Return)]
    says = [item.value for item in yields[1:]]
    return says if event == "continue" else ends if event == "done" else [*says, *ends]


def _holds(answer: ast.expr | None, fact: str) -> bool:
    """Whether an answer has the fact, or its text leaves that open."""
    if isinstance(answer, ast.Constant | ast.JoinedStr):
        return False
    if isinstance(answer, ast.IfExp):
        return _holds(answer.body, fact) and _holds(answer.orelse, fact)
    if not isinstance(answer, ast.Call) or any(item.arg is None for item in answer.keywords):
        return True
    facts = next((item.value for item in answer.keywords if item.arg == "facts"), ast.Dict([], []))
    if not isinstance(facts, ast.Dict) or any(not isinstance(key, ast.Constant) for key in facts.keys):
        return True
    return any(isinstance(key, ast.Constant) and key.value == fact for key in facts.keys)
