"""The syntax tree of an expression -> nested Python functions that compute its value from the variables.

Evaluation changes nothing, so one compiled expression may serve many threads. As in CEL, `&&` and `||` ignore an error
in one operand if the others decide the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from engine.machine.expression import (
    Call,
    Comprehension,
    Constant,
    ExpressionError,
    Index,
    ListOf,
    MapOf,
    Name,
    Node,
    Operation,
    Select,
)
from engine.machine.operators import (
    FUNCTIONS,
    NEGATION,
    OPERATORS,
    TYPE_NAMES,
    Function,
    TypeName,
    cannot_apply,
    contains,
    equal,
    type_name,
)

Scope = Mapping[str, Any]
"""Values of the variables by name."""
Evaluate = Callable[[Scope], Any]


class EvaluationError(Exception):
    """An expression has no value for these variables: a field is missing, types do not fit, or a value is out of
    range."""


def compile_tree(tree: Node, text: str) -> Evaluate:
    """Return the function that evaluates a tree.

    Args:
        tree: From `parse(text)`.
        text: The expression; error messages quote it.

    Raises:
        ExpressionError: the expression calls a function that does not exist.
    """
    return _Compiler(tree, text).compile(tree)


class _Compiler:
    def __init__(self, tree: Node, text: str) -> None:
        self.tree = tree
        self.text = text
        self.loop_variables: list[str] = []

    def compile(self, node: Node) -> Evaluate:
        match node:
            case Constant(value=value):
                return lambda scope: value
            case Name():
                return self.variable(node)
            case Select():
                return self.select(node)
            case Index():
                return self.index(node)
            case Call():
                return self.call(node)
            case Operation():
                return self.operation(node)
            case Comprehension():
                return self.comprehension(node)
            case ListOf(items=items):
                parts = [self.compile(item) for item in items]
                return lambda scope: [part(scope) for part in parts]
            case MapOf(items=items):
                return self.map_of(items)
        raise AssertionError(node)

    def source(self, node: Node) -> str:
        """The text of a node."""
        return self.text[node.start : node.end]

    def type_error(self, name: str, operands: tuple[Node, ...], values: tuple[Any, ...]) -> EvaluationError:
        message, fix = cannot_apply(name, zip(map(self.source, operands), map(type_name, values), strict=True))
        return EvaluationError(f"{message}; {fix or 'convert with `string(x)` or test `type(x)` first'}")

    def variable(self, node: Name) -> Evaluate:
        name = node.name
        if name in TYPE_NAMES and name not in self.loop_variables:
            constant = TypeName(name)
            return lambda scope: constant

        def read(scope: Scope) -> Any:
            try:
                return scope[name]
            except KeyError:
                raise EvaluationError(f"there is no variable `{name}`") from None

        return read

    def select(self, node: Select) -> Evaluate:
        of, field = self.compile(node.of), node.field

        def has(scope: Scope) -> bool:
            value = of(scope)
            if isinstance(value, Mapping):
                return field in value
            raise EvaluationError(f"`{self.source(node.of)}` is {type_name(value)}; it has no fields")

        def read(scope: Scope) -> Any:
            value = of(scope)
            try:
                return value[field]
            except (KeyError, TypeError):
                raise self.missing(node, value, node.of, f"has({self.source(node)})") from None

        return has if node.test else read

    def index(self, node: Index) -> Evaluate:
        of, key = self.compile(node.of), self.compile(node.key)

        def read(scope: Scope) -> Any:
            value, at = of(scope), key(scope)
            if isinstance(value, Mapping):
                if isinstance(at, str) and at in value:
                    return value[at]
            elif isinstance(value, list | tuple) and type(at) is int:
                if 0 <= at < len(value):
                    return value[at]
                message = f"`{self.source(node.of)}` has {len(value)} elements, and no element {at}"
                raise EvaluationError(f"{message}; test `size({self.source(node.of)})` first")
            raise self.missing(node, value, node.of, f"{self.source(node.key)} in {self.source(node.of)}")

        return read

    def missing(self, node: Node, value: Any, of: Node, test: str) -> EvaluationError:
        """The error for a field or key that a value does not have, with the test to write before it."""
        if not isinstance(value, Mapping):
            return EvaluationError(f"`{self.source(of)}` is {type_name(value)}; `{self.source(node)}` does not exist")
        # the largest subtree around the node that is one condition: no `&&`, `||`, `!` or `?:` stands between them
        conditions = (
            part
            for part in self.tree.walk()
            if part.start <= node.start and node.end <= part.end
            if not (isinstance(part, Operation) and part.operator in ("&&", "||", "!", "?:"))
        )
        condition = self.source(next(conditions, node))
        return EvaluationError(f"`{self.source(node)}` does not exist; write `{test} && {condition}`")

    def call(self, node: Call) -> Evaluate:
        if node.name == "type" and node.target is None and len(node.args) == 1:
            arg = self.compile(node.args[0])
            return lambda scope: TypeName({"null": "null_type"}.get(name := type_name(arg(scope)), name))
        function = FUNCTIONS.get(node.name)
        allowed = function is not None and (function.as_function if node.target is None else function.as_method)
        operands = node.args if node.target is None else (node.target, *node.args)
        if function is None or not allowed or {len(operands)} != set(map(len, function.overloads)):
            kind = "function" if node.target is None else "method"
            count = f"{len(node.args)} argument{'s' * (len(node.args) != 1)}"
            raise ExpressionError(f"there is no {kind} `{node.name}` with {count}", node.start)
        return self.apply(node.name, function, operands)

    def apply(self, name: str, function: Function, operands: tuple[Node, ...]) -> Evaluate:
        parts = [self.compile(operand) for operand in operands]
        overloads, compute = function.overloads, function.compute

        def run(*values: Any) -> Any:
            if tuple(map(type_name, values)) not in overloads:
                raise self.type_error(name, operands, values)
            try:
                return compute(*values)
            except ZeroDivisionError:
                raise EvaluationError("division by zero; test the divisor first (`x != 0 && …`)") from None
            except (ValueError, ArithmeticError) as error:
                shown = ", ".join(self.source(operand) for operand in operands)
                raise EvaluationError(f"`{name}` of `{shown}`: {error}") from error

        if len(parts) == 1:
            (only,) = parts
            return lambda scope: run(only(scope))
        left, right = parts
        if name not in ("<", "<=", ">", ">="):
            return lambda scope: run(left(scope), right(scope))

        def compare(scope: Scope) -> Any:
            a, b = left(scope), right(scope)
            return compute(a, b) if type(a) is type(b) is int else run(a, b)

        return compare

    def operation(self, node: Operation) -> Evaluate:
        if node.operator in ("&&", "||"):
            return self.junction(node, decisive=node.operator == "||")
        if len(node.args) == 2 and node.operator in OPERATORS:
            return self.apply(node.operator, OPERATORS[node.operator], node.args)
        if node.operator == "-":
            return self.apply("-", NEGATION, node.args)
        if node.operator == "!":
            inner = self.condition("!", node.args[0])
            return lambda scope: not inner(scope)
        if node.operator == "?:":
            test = self.condition("?", node.args[0])
            then, other = (self.compile(arg) for arg in node.args[1:])
            return lambda scope: then(scope) if test(scope) else other(scope)
        left, right = (self.compile(arg) for arg in node.args)
        if node.operator == "==":
            return lambda scope: equal(left(scope), right(scope))
        if node.operator == "!=":
            return lambda scope: not equal(left(scope), right(scope))

        def member(scope: Scope) -> bool:
            item, values = left(scope), right(scope)
            if not isinstance(values, Mapping | list | tuple):
                raise self.type_error("in", node.args, (item, values))
            return contains(item, values)

        return member

    def condition(self, name: str, node: Node) -> Callable[[Scope], bool]:
        """The function that evaluates an operand of `name`, which must be a bool."""
        part = self.compile(node)

        def checked(scope: Scope) -> bool:
            value = part(scope)
            if value is True or value is False:
                return bool(value)
            raise self.type_error(name, (node,), (value,))

        return checked

    def junction(self, node: Operation, *, decisive: bool) -> Evaluate:
        """`||` (an operand that is true decides) or `&&` (one that is false does)."""
        parts = [self.condition(node.operator, arg) for arg in node.args]

        def run(scope: Scope) -> bool:
            error = None
            for part in parts:
                try:
                    if part(scope) is decisive:
                        return decisive
                except EvaluationError as found:
                    error = error or found
            if error is not None:
                raise error
            return not decisive

        return run

    def comprehension(self, node: Comprehension) -> Evaluate:
        over, variable, name = self.compile(node.over), node.variable, node.name
        self.loop_variables.append(variable)
        filtered = name != "map" or len(node.bodies) == 2
        test = self.condition(name, node.bodies[0]) if filtered else None
        result = self.compile(node.bodies[-1]) if name == "map" else None
        self.loop_variables.pop()

        def scopes(scope: Scope) -> Iterator[Scope]:
            """The scope of each element: one dict, changed in place."""
            values = over(scope)
            if not isinstance(values, Mapping | list | tuple):
                raise self.type_error(name, (node.over,), (values,))
            inner = dict(scope)
            for value in values:
                inner[variable] = value
                yield inner

        if test is None or result is not None:
            assert result is not None
            return lambda scope: [result(inner) for inner in scopes(scope) if test is None or test(inner)]
        match name:
            case "all":
                return lambda scope: all(map(test, scopes(scope)))
            case "exists":
                return lambda scope: any(map(test, scopes(scope)))
            case "exists_one":
                return lambda scope: sum(map(test, scopes(scope))) == 1
        return lambda scope: [inner[variable] for inner in scopes(scope) if test(inner)]

    def map_of(self, items: tuple[Node, ...]) -> Evaluate:
        keys = [(node, self.compile(node)) for node in items[::2]]
        values = [self.compile(node) for node in items[1::2]]

        def build(scope: Scope) -> dict[str, Any]:
            built: dict[str, Any] = {}
            for (node, key), value in zip(keys, values, strict=True):
                name = key(scope)
                if not isinstance(name, str):
                    raise EvaluationError(f"`{self.source(node)}` is {type_name(name)}; keys of maps are strings")
                built[name] = value(scope)
            return built

        return build
