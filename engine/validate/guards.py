"""Rules about guards (`conditions` and `unless` of transitions, `when` of reward rules, `state_key` of credit) and the
names that they read: facts, and fields of the task, are known only in part."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache, partial

from engine.machine.expression import Constant, ExpressionError, Index, Name, Node, Operation, Select, parse
from engine.machine.guards import MAX_CHARACTERS, guard_problems
from engine.machine.inference import Kind
from engine.machine.variables import VARIABLES
from engine.rewards.state_key import is_fact_name
from engine.schemas.limits import ALWAYS
from engine.spec.text.diagnostic import DataPath
from engine.spec.text.near import nearest_name
from engine.validate.code.source import is_function_environment, last_name
from engine.validate.code.written_names import ANY_NAME, code_names, names_of_plugins
from engine.validate.context import CheckContext, closure
from engine.validate.prompts import known_rows, no_field
from engine.validate.registry import Finding, rule

STATE_KEY: DataPath = ("rewards", "credit", "state_key")
"""The one expression whose result may have any type."""


def expressions(ctx: CheckContext) -> Iterator[tuple[DataPath, str]]:
    """Yield the position and the text of every expression that the spec itself contains."""
    for index, item in enumerate(ctx.spec.machine.transitions):
        for word, value in (("conditions", item.conditions), ("unless", item.unless)):
            path: DataPath = ("machine", "transitions", index, word)
            if isinstance(value, list):
                yield from (((*path, position), text) for position, text in enumerate(value))
            elif value is not None:
                yield path, value
    for index, reassign in enumerate(ctx.spec.rewards.reassign):
        if reassign.when is not None:
            yield ("rewards", "reassign", index, "when"), reassign.when
    key = ctx.spec.rewards.credit.declared_state_key
    if key is not None and not is_fact_name(key):
        yield STATE_KEY, key


_problems = lru_cache(maxsize=8192)(guard_problems)


def _problems_of_kind(ctx: CheckContext, kind: Kind) -> Iterator[Finding]:
    for path, expression in expressions(ctx):
        ctx.work.spend(min(len(expression), MAX_CHARACTERS))
        for problem in _problems(expression):
            if problem.kind == kind and not (kind == "not-boolean" and path == STATE_KEY):
                yield Finding(problem.message, path, problem.fix, offset=problem.column - 1)


ABOUT: dict[Kind, str] = {
    "parse": "a guard is not valid CEL",
    "unknown-name": "a guard names a variable, a field or a function that does not exist",
    "wrong-type": "types in a guard do not match",
    "not-boolean": "a guard does not return true or false",
    "too-costly": "a guard may take too long",
}
"""What each kind of problem is; each is a rule."""
for _kind, _about in ABOUT.items():
    rule(f"guard.{_kind}", "error", _about)(partial(_problems_of_kind, kind=_kind))


@lru_cache(maxsize=256)
def _reads(expression: str) -> list[tuple[str, str, int]]:
    """The fields that an expression reads: (variable, field, index of the field in the text)."""
    try:
        nodes = list(parse(expression).walk())
    except ExpressionError:
        return []  # `guard.parse` reports it
    return [read for node in nodes if (read := _field(node)) is not None]


def _field(node: Node) -> tuple[str, str, int] | None:
    """The field that one node reads."""
    match node:
        case Select(of=Name(name=variable), field=field):
            return variable, field, node.end - len(field)
        case Index(of=Name(name=variable), key=Constant() as key):
            return variable, str(key.value), key.start
    return None


@rule("guard.unknown-fact", "warning", "a guard or `state_key` reads a fact that nothing writes")
def unknown_fact(ctx: CheckContext) -> Iterator[Finding]:
    """`facts.<name>` and `feedback.<name>` that no code of environments, users, tools and actions mentions."""
    read: list[tuple[DataPath, str, str, int | None]] = [
        (path, f"{variable}.{field}", field, at)
        for path, expression in expressions(ctx)
        for variable, field, at in _reads(expression)
        if variable in ("facts", "feedback") and field not in VARIABLES[variable].fields
    ]
    key = ctx.spec.rewards.credit.declared_state_key
    if key is not None and is_fact_name(key):
        read.append((STATE_KEY, key, key, None))
    written = code_names(ctx) if read else ANY_NAME
    if written.other_facts:
        return
    names = written.texts | {name for _, user in ctx.users for mark in user.marks for name in mark.facts}
    for path, shown, name, offset in read:
        if name not in names:
            near = nearest_name(name, sorted(item for item in names if item.isidentifier()))
            yield Finding(
                f"nothing writes the fact `{shown}`: the code of environments, users and tools does not mention it",
                path,
                f"did you mean `{near}`?" if near else "check its name in the code that writes it",
                offset=offset,
            )


@rule("guard.unknown-field", "warning", "a guard reads a field that tasks do not have")
def unknown_field(ctx: CheckContext) -> Iterator[Finding]:
    """`task.<field>`, compared with `tasks.map` or the rows. A field inside of `has()` may be missing."""
    read = [
        (path, field, at)
        for path, expression in expressions(ctx)
        for variable, field, at in _reads(expression)
        if variable == "task" and f"has(task.{field})" not in expression.replace(" ", "")
    ]
    rows = known_rows(ctx) if read else []
    for path, field, offset in read:
        ctx.work.spend(1)
        yield from no_field(ctx, rows, field, path, offset)


# ---- facts that may not be set yet: what the text of code leaves open counts as setting the fact

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
        variable, fact, offset = _field(node) or ("", "", 0)
        if isinstance(node, Operation):
            waiting += node.args[:1] if node.operator in ("&&", "||", "?:") else node.args
        elif variable == "facts":
            reads += [] if isinstance(node, Select) and node.test else [(fact, offset)]
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
            unset = closure(  # the states that an episode without failures may enter before the fact is set
                [ctx.machine.initial],
                (
                    (edge.source, edge.dest)
                    for edge in ctx.live
                    if edge.trigger not in ALWAYS
                    and f"has(facts.{fact})" not in (edge.conditions or "").replace(" ", "")
                    and not _sets(ctx, edge.source, edge.trigger, fact)
                ),
            )
            if state in unset and not _sets(ctx, state, event, fact):
                after = f"after `{event}` in" if event else "in"
                yield Finding(
                    f"`facts.{fact}` may not be set {after} {state}: an episode that comes there without it fails",
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
