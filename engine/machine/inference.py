"""An expression -> the types of its parts, and the mistakes that can be found without evaluating it.

Every reported problem is an error on all contexts that the variables allow. What is known only during a run (facts,
fields of the task, what a user adds to `feedback`) has the type `dyn` and is never reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Literal

from engine.machine.expression import (
    MACROS,
    Call,
    Comprehension,
    Constant,
    Index,
    ListOf,
    MapOf,
    Name,
    Node,
    Operation,
    Select,
)
from engine.machine.operators import FUNCTIONS, NEGATION, NUMBERS, OPERATORS, TYPE_NAMES, Overloads, cannot_apply
from engine.machine.variables import BOOL, DYN, STRING, VARIABLES, Types, Variable
from engine.schemas.base import Struct

MAP: Types = frozenset({"map"})
LIST: Types = frozenset({"list"})
TYPE: Types = frozenset({"type"})

_PYTHON = {"True": "true", "False": "false", "None": "null", "len": "size", "str": "string", "float": "double"}
"""What Python calls something, and what CEL calls it."""

_FUNCTION_NAMES = ["has", "type", *MACROS, *FUNCTIONS]

Kind = Literal["parse", "unknown-name", "wrong-type", "not-boolean", "too-costly"]
"""The class of a mistake; each has a rule of `validate` with this name behind `guard.`."""


class GuardProblem(Struct, frozen=True, kw_only=True):
    """A mistake in an expression."""

    message: str
    column: int
    """In the expression, from 1."""
    fix: str | None
    kind: Kind


def describe(types: Types) -> str:
    """`{"int"}` to `an int`."""
    return " or ".join(f"{'an' if name[0] in 'aeio' else 'a'} {name}" for name in sorted(types))


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return a fix that names the most similar of the known names, or all of them if none is similar."""
    options = list(known)
    if name in _PYTHON and _PYTHON[name] in (*options, "true", "false", "null"):
        return f"CEL writes it `{_PYTHON[name]}`"
    near = get_close_matches(name, options, n=1, cutoff=0.6)
    if near:
        return f"did you mean `{near[0]}`?"
    return f"known names: {', '.join(f'`{option}`' for option in options)}" if options else None


class TypeInference:
    """Infers the types of an expression's parts and collects `problems`.

    inference = TypeInference("turns.usr < 3")
    inference.types(parse("turns.usr < 3"))     # {"bool"}
    inference.problems                          # [GuardProblem(message="`turns` has no field `usr`", column=7, ...)]
    """

    def __init__(self, text: str, variables: Mapping[str, Variable] = VARIABLES) -> None:
        self.text = text
        self._variables = variables
        self.problems: list[GuardProblem] = []
        self._loop_variables: list[str] = []

    def types(self, node: Node) -> Types:
        """Return the types that a node may have."""
        rule: Callable[..., Types] = _RULES[type(node)]
        return rule(self, node)

    def report(self, message: str, offset: int, fix: str | None = None) -> Types:
        """Add a problem of types. The part is `dyn` from then on, so that one mistake is reported once."""
        self.problems.append(GuardProblem(message=message, column=offset + 1, fix=fix, kind="wrong-type"))
        return DYN

    def unknown(self, message: str, offset: int, name: str, known: Iterable[str]) -> Types:
        """Add a problem of a name that does not exist."""
        self.problems.append(
            GuardProblem(message=message, column=offset + 1, fix=nearest(name, known), kind="unknown-name")
        )
        return DYN

    def source(self, node: Node) -> str:
        """The text of a node."""
        return self.text[node.start : node.end]

    def typed(self, node: Node, types: Types) -> str:
        """A node's text and its types: `` `turns.user` is an int ``."""
        return f"`{self.source(node)}` is {describe(types)}"

    def name(self, node: Name) -> Types:
        if node.name in self._loop_variables:
            return DYN
        if node.name in self._variables:
            return MAP
        if node.name in TYPE_NAMES:
            return TYPE
        return self.unknown(f"there is no variable `{node.name}`", node.start, node.name, self._variables)

    def select(self, node: Select) -> Types:
        types = self._field(node.of, node.field, node.end - len(node.field))
        return BOOL if node.test else types

    def index(self, node: Index) -> Types:
        if isinstance(node.key, Constant) and node.key.type == "string":
            return self._field(node.of, node.key.value, node.key.start)
        keys = self.types(node.key)
        of = self.types(node.of)
        if of.isdisjoint(MAP | LIST | DYN):
            return self.report(f"{self.typed(node.of, of)}; only lists and maps have elements", node.of.start)
        if of == MAP and keys.isdisjoint(STRING | DYN):
            return self.report(f"{self.typed(node.key, keys)}; keys of maps are strings", node.key.start)
        return DYN

    def _field(self, of: Node, field: str, offset: int) -> Types:
        """The types of a field."""
        types = self.types(of)
        if isinstance(of, Name) and of.name in self._variables and of.name not in self._loop_variables:
            variable = self._variables[of.name]
            if field in variable.fields:
                return variable.fields[field].types
            if not variable.open:
                return self.unknown(f"`{of.name}` has no field `{field}`", offset, field, variable.fields)
            return DYN
        if types.isdisjoint(MAP | DYN):
            return self.report(f"{self.typed(of, types)}; it has no field `{field}`", offset)
        return DYN

    def call(self, node: Call) -> Types:
        method = node.target is not None
        args = node.args if node.target is None else (node.target, *node.args)
        if node.name == "type" and node.target is None and len(args) == 1:
            self.types(args[0])
            return TYPE
        place = node.start if node.target is None else node.target.end + self.text[node.target.end :].find(node.name)
        function = FUNCTIONS.get(node.name)
        if function is None:
            for arg in args:
                if not (isinstance(arg, Name) and arg is node.target):
                    self.types(arg)  # in `math.max(1)`, `math` is not reported as an unknown variable
            if node.name in (*MACROS, "has"):
                usage = "has(a.b)" if node.name == "has" else f"list.{node.name}(x, …)"
                return self.report(f"`{node.name}` cannot be used in this way", place, f"write `{usage}`")
            return self.unknown(f"there is no function `{node.name}`", place, node.name, _FUNCTION_NAMES)
        types = [self.types(arg) for arg in args]
        if not (function.as_method if method else function.as_function):
            how = f"`{node.name}(x)`" if method else f"`x.{node.name}(…)`"
            return self.report(f"`{node.name}` cannot be called in this way", place, f"write {how}")
        wanted = {len(key) for key in function.overloads}
        if len(args) not in wanted:
            count = wanted.pop() - method
            return self.report(f"`{node.name}` takes {count} argument{'s' * (count != 1)}, not {len(node.args)}", place)
        return self._overload(node.name, function.overloads, args, types, place)

    def operation(self, node: Operation) -> Types:
        types = [self.types(arg) for arg in node.args]
        operator = node.operator
        if operator in ("&&", "||", "!", "?:"):
            for arg, arg_types in zip(node.args[:1] if operator == "?:" else node.args, types, strict=False):
                self._needs_bool("?" if operator == "?:" else operator, arg, arg_types)
            if operator != "?:":
                return BOOL
            then, other = types[1:]
            if then.isdisjoint(other) and not (then | other) & DYN:
                both = f"{self.typed(node.args[1], then)}, {self.typed(node.args[2], other)}"
                return self.report(f"both results of `? :` must have the same type: {both}", node.args[1].start)
            return then | other
        place = node.args[0].end + len(self.text[node.args[0].end : node.args[-1].start].split(operator)[0])
        if len(node.args) == 1:
            return self._overload("-", NEGATION.overloads, node.args, types, node.start)
        if operator in ("==", "!="):  # any two values can be compared
            left, right = (side | NUMBERS if side & NUMBERS else side for side in types)
            if left.isdisjoint(right) and not (left | right) & (DYN | {"null"}):
                result = "false" if operator == "==" else "true"
                both = f"{self.typed(node.args[0], types[0])}, {self.typed(node.args[1], types[1])}"
                self.report(f"`{operator}` is always {result} here: {both}", place)
            return BOOL
        if operator == "in":
            if types[1].isdisjoint(MAP | LIST | DYN):
                self.report(
                    f"`in` needs a list or a map; {self.typed(node.args[1], types[1])}",
                    node.args[1].start,
                    "`text.contains(part)` searches a string",
                )
            elif types[1] == MAP and types[0].isdisjoint(STRING | DYN):
                self.report(f"{self.typed(node.args[0], types[0])}; keys of maps are strings", place)
            return BOOL
        return self._overload(operator, OPERATORS[operator].overloads, node.args, types, place)

    def _needs_bool(self, name: str, node: Node, types: Types) -> None:
        if types.isdisjoint(BOOL | DYN):
            self.report(f"`{name}` needs true or false; {self.typed(node, types)}", node.start)

    def _overload(self, name: str, overloads: Overloads, args: Iterable[Node], types: list[Types], place: int) -> Types:
        """The result types of the overloads that fit the arguments' types."""
        fits = {
            result
            for wanted, result in overloads.items()
            if len(wanted) == len(types)
            and all(want in arg_types or arg_types & DYN for want, arg_types in zip(wanted, types, strict=True))
        }
        if fits:
            return frozenset(fits)
        kinds = (" or ".join(sorted(arg_types)) for arg_types in types)
        message, fix = cannot_apply(name, zip(map(self.source, args), kinds, strict=True))
        return self.report(message, place, fix)

    def comprehension(self, node: Comprehension) -> Types:
        over = self.types(node.over)
        if over.isdisjoint(MAP | LIST | DYN):
            self.report(f"`{node.name}` needs a list or a map; {self.typed(node.over, over)}", node.over.start)
        self._loop_variables.append(node.variable)
        bodies = [self.types(body) for body in node.bodies]
        self._loop_variables.pop()
        for body, body_types in zip(node.bodies[:-1] if node.name == "map" else node.bodies, bodies, strict=False):
            self._needs_bool(node.name, body, body_types)
        return LIST if node.name in ("map", "filter") else BOOL

    def literal(self, node: ListOf | MapOf) -> Types:
        is_map = isinstance(node, MapOf)
        for index, item in enumerate(node.items):
            types = self.types(item)
            if is_map and index % 2 == 0 and types.isdisjoint(STRING | DYN):
                self.report(f"{self.typed(item, types)}; keys of maps are strings", item.start)
        return MAP if is_map else LIST


_RULES: Mapping[type[Node], Callable[..., Types]] = {
    Name: TypeInference.name,
    Constant: lambda _, node: frozenset({node.type}),
    Select: TypeInference.select,
    Index: TypeInference.index,
    Call: TypeInference.call,
    Operation: TypeInference.operation,
    Comprehension: TypeInference.comprehension,
    ListOf: TypeInference.literal,
    MapOf: TypeInference.literal,
}
