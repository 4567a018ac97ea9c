"""Names of rewards and facts that the code of a spec writes, read from the text of its modules, and whether it may
write others.

A name counts as written if it occurs anywhere in the text, as a string or as the name of an argument. So a name that
does not occur is written by nobody, unless the text computes names: `RewardEvent(name=prefix + kind)`,
`facts=vars(self)`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from engine.actions.facts import ACTIONS
from engine.schemas.base import Struct
from engine.validate.code.source import Module, is_function_environment, last_name, lineage

if TYPE_CHECKING:
    from engine.validate.context import CheckContext

_ANSWERS = frozenset({"Reset", "Step", "UserTurn", "ToolReply"})
"""Classes of answers with `facts` and `rewards`."""
_SAYS = frozenset({"Say", "End"})
"""Classes of answers of a function environment: their `rewards` are a mapping too."""
_COPIES = frozenset({"model_copy", "model_validate", "model_validate_json", "model_construct"})
"""Methods that build an answer out of data."""
_CHANGES = frozenset({"update", "setdefault", "__setitem__"})
MAX_STEPS = 12
"""Maximum number of names that are followed for one value."""


class WrittenNames(Struct, frozen=True, kw_only=True):
    """What the text of modules says."""

    texts: frozenset[str] = frozenset()
    """All strings, and all names of arguments of calls."""
    other_facts: bool = False
    """Whether it may write facts with other names."""
    other_rewards: bool = False
    """Whether it may write rewards with other names."""

    def __or__(self, other: WrittenNames) -> WrittenNames:
        facts, rewards = self.other_facts or other.other_facts, self.other_rewards or other.other_rewards
        return WrittenNames(texts=self.texts | other.texts, other_facts=facts, other_rewards=rewards)


ANY_NAME = WrittenNames(other_facts=True, other_rewards=True)
"""Of code that cannot be read."""


@lru_cache(maxsize=256)
def written_names(module: Module) -> WrittenNames:
    """Return what one module writes."""
    nodes = list(ast.walk(module.tree))
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    texts |= {node.arg for node in nodes if isinstance(node, ast.keyword) and node.arg}
    assigned: dict[str, list[ast.expr | None]] = {}
    functions: dict[str, list[ast.AST]] = {}
    for node in nodes:
        for name, value in _assignments(node):
            assigned.setdefault(name, []).append(value)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.setdefault(node.name, []).append(node)
    closed = partial(_closed, assigned=assigned, functions=functions)
    facts = rewards = any(_renames(node) for node in nodes)
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        called = last_name(node.func)
        given = {item.arg: item.value for item in node.keywords}
        if called in _COPIES or (called == "replace" and {"facts", "rewards"} & set(given)):
            facts = rewards = True
        elif called in _ANSWERS or called in _SAYS:
            facts = facts or None in given or not closed(given.get("facts"))
            mapped = called in _SAYS and not isinstance(given.get("rewards"), ast.List)
            rewards = rewards or None in given or (mapped and not closed(given.get("rewards")))
        elif called == "RewardEvent":
            rewards = rewards or None in given or not _is_text(given.get("name"))
    return WrittenNames(texts=frozenset(texts), other_facts=facts, other_rewards=rewards)


def _renames(node: ast.AST) -> bool:
    """Whether a statement gives a class of answers another name, or derives a class from it."""
    answers = _ANSWERS | _SAYS | {"RewardEvent"}
    if isinstance(node, ast.ImportFrom):
        return any(item.name in answers and item.asname not in (None, item.name) for item in node.names)
    if isinstance(node, ast.ClassDef):
        return any(last_name(item) in answers for item in node.bases)
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Name | ast.Attribute)
        and last_name(node.value) in answers
    )


def _is_text(value: ast.expr | None) -> bool:
    if isinstance(value, ast.IfExp):
        return _is_text(value.body) and _is_text(value.orelse)
    return value is None or isinstance(value, ast.Constant)


def _closed(
    value: ast.expr | None,
    steps: int = 0,
    *,
    assigned: Mapping[str, list[ast.expr | None]],
    functions: Mapping[str, list[ast.AST]],
) -> bool:
    """Whether all keys of a mapping are strings in the text.

    Args:
        value: The mapping.
        steps: Number of names that led to it.
        assigned: The values of each variable and attribute; None: something that is not followed.
        functions: The functions of each name.
    """
    if value is None or (isinstance(value, ast.Constant) and value.value is None):
        return True
    if steps > MAX_STEPS:
        return False
    closed = partial(_closed, steps=steps + 1, assigned=assigned, functions=functions)
    match value:
        case ast.Dict():
            items = zip(value.keys, value.values, strict=True)
            return all(isinstance(key, ast.Constant) or (key is None and closed(item)) for key, item in items)
        case ast.IfExp(body=one, orelse=other) | ast.BinOp(left=one, right=other):
            return closed(one) and closed(other)
        case ast.BoolOp(values=values):
            return all(map(closed, values))
        case _ if ast.unparse(value) == "view.facts":
            return True  # others wrote them
        case ast.Name() | ast.Attribute():
            return all(item is not None and closed(item) for item in assigned.get(last_name(value) or "", [None]))
        case ast.Call() if last_name(value.func) == "dict":
            return all(map(closed, (*value.args, *(item.value for item in value.keywords if item.arg is None))))
        case ast.Call():
            nodes = [node for made in functions.get(last_name(value.func) or "", []) for node in ast.walk(made)]
            results = [node.value for node in nodes if isinstance(node, ast.Return)]
            return bool(results) and all(map(closed, results))
    return False


def _assignments(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """Names that a node binds or changes, with their values."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
                continue
            named = target.value if isinstance(target, ast.Subscript) else target
            if isinstance(named, ast.Name | ast.Attribute):
                yield last_name(named) or "", node.value if named is target else None
            else:
                yield from ((item.id, None) for item in ast.walk(target) if isinstance(item, ast.Name))
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr | ast.AugAssign):
        if isinstance(node.target, ast.Name | ast.Attribute) and node.value is not None:
            yield last_name(node.target) or "", node.value
    elif isinstance(node, ast.arg):
        yield node.arg, None
    elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        yield from ((item.id, None) for item in ast.walk(node.target) if isinstance(item, ast.Name))
    elif isinstance(node, ast.withitem) and isinstance(node.optional_vars, ast.Name):
        yield node.optional_vars.id, None
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (((item.asname or item.name).partition(".")[0], None) for item in node.names)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
        yield last_name(node.func.value) or "", None


def names_of_plugins(ctx: CheckContext) -> frozenset[str]:
    """Return the names of rewards and facts that the actions of plugins write."""
    actions = (ACTIONS.get(str(state.action)) for state in ctx.states.values())
    return frozenset(name for facts in actions if facts is not None for name in facts.writes)


def code_names(ctx: CheckContext) -> WrittenNames:
    """The names that environment, tools, users, scorer and actions write, with all texts in their `with`."""
    names = WrittenNames(texts=names_of_plugins(ctx))
    for item in ctx.spec_code:
        adapted = item.role == "environment" and ctx.spec.environment and ctx.spec.environment.adapter
        names |= WrittenNames(texts=frozenset(_texts_in(item.entry.with_)))
        names |= ANY_NAME if item.role == "tool server" or adapted else names_of(ctx, item.entry.use, item.role)
    for _, state in ctx.own_actions:
        names |= WrittenNames(texts=frozenset(_texts_in(state.with_))) | names_of(ctx, str(state.action), "action")
    return names


def names_of(ctx: CheckContext, use: str, role: str) -> WrittenNames:
    """What the modules of an entry point, of its base classes and of the spec's own modules that it imports write."""
    code = ctx.code_text(use)
    is_class = code is not None and isinstance(code.definition.node, ast.ClassDef)
    if code is None or (
        not is_class and role in ("environment", "user") and not is_function_environment(code.definition.node)
    ):
        return ANY_NAME  # what a function builds may be any class
    classes, complete = lineage(code.definition, ctx.sources) if is_class else ((), True)
    if not complete:
        return ANY_NAME
    names = WrittenNames()
    waiting: list[Module | None] = [code.definition.module]
    waiting += [item.module for item in classes]
    seen: set[str] = set()
    while waiting:
        module = waiting.pop()
        if module is None:
            return ANY_NAME
        if module.name not in seen:
            seen.add(module.name)
            names |= written_names(module)
            waiting += ctx.sources.own_imports(module)
    return names


def _texts_in(value: Any) -> Iterator[str]:
    """Yield all texts and keys in a value of a document."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from (str(key), *_texts_in(item))
    elif isinstance(value, list):
        for item in value:
            yield from _texts_in(item)
