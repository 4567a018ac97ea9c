"""What type an expression has, and what in it cannot be right, without running it.

Invariant: what is reported is wrong on every context that `VARIABLES` allows. What is known only when the guard runs
(facts, the task's fields, a user's own feedback) has the type `dyn`, about which nothing is ever reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from itertools import product
from typing import Literal, NamedTuple

from engine.machine.expression import Call, Comprehension, Constant, Index, ListOf, MapOf, Name, Node, Operation, Select
from engine.machine.variables import BOOL, DYN, STRING, VARIABLES, Types

NUMBERS = frozenset({"int", "uint", "double"})
ORDERED = frozenset({"string", "bytes", "bool", "timestamp", "duration"})
MAP: Types = frozenset({"map"})
LIST: Types = frozenset({"list"})
TYPE: Types = frozenset({"type"})
KEYS: Types = frozenset({"bool", "int", "string", "uint"})
"""What a map may have as keys."""

TYPE_NAMES = frozenset({"bool", "bytes", "double", "int", "list", "map", "null_type", "string", "type", "uint"})

_PYTHON = {"True": "true", "False": "false", "None": "null", "len": "size", "str": "string", "float": "double"}
"""What somebody used to Python writes, and what CEL says instead."""

_CALENDAR = ["getFullYear", "getMonth", "getDayOfYear", "getDayOfMonth", "getDate", "getDayOfWeek"]
_CLOCK = ["getHours", "getMinutes", "getSeconds", "getMilliseconds"]

Overloads = Mapping[tuple[str, ...], str]
"""Types of the arguments (a method's target first) -> type of the result."""


class _Function(NamedTuple):
    overloads: Overloads
    as_method: bool
    as_function: bool


def _each(names: Iterable[str], result: str) -> Overloads:
    """One argument, of any of these types."""
    return {(name,): result for name in names}


_SIZED = _Function(_each(["string", "bytes", "list", "map"], "int"), as_method=True, as_function=True)
_TEST = _Function({("string", "string"): "bool"}, as_method=True, as_function=False)
_READABLE = [*NUMBERS, "string"]
_WRITABLE = [*_READABLE, "bytes", "timestamp", "duration"]


def _conversion(names: Iterable[str], result: str) -> _Function:
    return _Function(_each(names, result), as_method=False, as_function=True)


def _part(names: Iterable[str]) -> _Function:
    return _Function(_each(names, "int"), as_method=True, as_function=False)


FUNCTIONS: Mapping[str, _Function] = {
    "size": _SIZED,
    **dict.fromkeys(["contains", "startsWith", "endsWith", "matches"], _TEST),
    **{number: _conversion(_READABLE, number) for number in ("int", "uint", "double")},
    "string": _conversion(_WRITABLE, "string"),
    **{name: _conversion(["string"], name) for name in ("bytes", "timestamp", "duration")},
    **dict.fromkeys(_CALENDAR, _part(["timestamp"])),
    **dict.fromkeys(_CLOCK, _part(["timestamp", "duration"])),
}
"""Functions that guards know, beside `has`, `type`, `dyn` and the macros `all`, `exists`, `exists_one`, `filter`, `map`."""

_KNOWN = ["has", "type", "dyn", "all", "exists", "exists_one", "filter", "map", *FUNCTIONS]

_MOMENTS: Mapping[str, Overloads] = {
    "+": {
        ("timestamp", "duration"): "timestamp",
        ("duration", "timestamp"): "timestamp",
        ("duration", "duration"): "duration",
    },
    "-": {
        ("timestamp", "timestamp"): "duration",
        ("timestamp", "duration"): "timestamp",
        ("duration", "duration"): "duration",
    },
}


def _same(types: Iterable[str]) -> dict[tuple[str, ...], str]:
    return {(each, each): each for each in types}


_ARITHMETIC: Mapping[str, Overloads] = {
    "+": {**_same([*NUMBERS, "string", "bytes", "list"]), **_MOMENTS["+"]},
    "-": {**_same(NUMBERS), **_MOMENTS["-"]},
    "*": _same(NUMBERS),
    "/": _same(NUMBERS),
    "%": _same(["int", "uint"]),
}

_COMPARED: Overloads = dict.fromkeys([*product(NUMBERS, NUMBERS), *((each, each) for each in ORDERED)], "bool")


Kind = Literal["parse", "unknown-name", "wrong-type", "not-boolean", "too-costly"]
"""Which sort of mistake: what a check is called after."""


class Finding(NamedTuple):
    """Something that cannot be right."""

    message: str
    offset: int
    fix: str | None = None
    kind: Kind = "wrong-type"


def describe(types: Types) -> str:
    """`{"int"}` -> `an int`."""
    names = sorted(types)
    return " or ".join(f"{'an' if name[0] in 'aeio' else 'a'} {name}" for name in names)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """A fix that names the nearest of the known names, or all of them where there are few."""
    options = list(known)
    if name in _PYTHON and _PYTHON[name] in (*options, "true", "false", "null"):
        return f"CEL writes it `{_PYTHON[name]}`"
    near = get_close_matches(name, options, n=1, cutoff=0.6)
    if near:
        return f"did you mean `{near[0]}`?"
    return f"known are {', '.join(f'`{option}`' for option in options)}" if options else None


class Inference:
    """The types of an expression's parts. `findings` fills as `types` walks them.

    inference = Inference("turns.usr < 3")
    inference.types(parse("turns.usr < 3"))     # {"bool"}
    inference.findings                          # [Finding("`turns` has no field `usr`", 6, "did you mean `user`?")]
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.findings: list[Finding] = []
        self._bound: list[str] = []

    def types(self, node: Node) -> Types:
        """The types that a node may have."""
        rule: Callable[..., Types] = _RULES[type(node)]
        return rule(self, node)

    def report(self, message: str, offset: int, fix: str | None = None) -> Types:
        """Note a finding. The part counts as `dyn` from then on, so that one mistake is told once."""
        self.findings.append(Finding(message, offset, fix))
        return DYN

    def unknown(self, message: str, offset: int, name: str, known: Iterable[str]) -> Types:
        """Note a name that is not there."""
        self.findings.append(Finding(message, offset, nearest(name, known), "unknown-name"))
        return DYN

    def said(self, node: Node) -> str:
        """A node as it is written."""
        return self.text[node.start : node.end]

    def name(self, node: Name) -> Types:
        if node.name in self._bound:
            return DYN
        if node.name in VARIABLES:
            return MAP
        if node.name in TYPE_NAMES:
            return TYPE
        return self.unknown(f"there is no variable `{node.name}`", node.start, node.name, VARIABLES)

    def constant(self, node: Constant) -> Types:
        return frozenset({node.type})

    def select(self, node: Select) -> Types:
        found = self._field(node.of, node.field, node.end - len(node.field))
        return BOOL if node.test else found

    def index(self, node: Index) -> Types:
        if isinstance(node.key, Constant) and node.key.type == "string" and _plain(node.key.text):
            return self._field(node.of, node.key.text[1:-1], node.key.start)
        keys = self.types(node.key)
        of = self.types(node.of)
        if isinstance(node.of, Name) and node.of.name in VARIABLES and keys.isdisjoint(STRING | DYN):
            return self.report(f"`{node.of.name}` has names as keys, not {describe(keys)}", node.key.start)
        if of.isdisjoint(MAP | LIST | DYN):
            return self.report(
                f"`{self.said(node.of)}` is {describe(of)}; only a list or a map has parts", node.of.start
            )
        if of == MAP and keys.isdisjoint(KEYS | DYN):
            return self.report(f"`{self.said(node.key)}` is {describe(keys)}; no map has such a key", node.key.start)
        return DYN

    def _field(self, of: Node, field: str, offset: int) -> Types:
        """The type of a field, by name."""
        types = self.types(of)
        if isinstance(of, Name) and of.name in VARIABLES and of.name not in self._bound:
            variable = VARIABLES[of.name]
            if field in variable.fields:
                return variable.fields[field].types
            if not variable.open:
                return self.unknown(f"`{of.name}` has no field `{field}`", offset, field, variable.fields)
            return DYN
        if types.isdisjoint(MAP | DYN):
            return self.report(f"`{self.said(of)}` is {describe(types)}; it has no field `{field}`", offset)
        return DYN

    def call(self, node: Call) -> Types:
        args = [*([] if node.target is None else [node.target]), *node.args]
        if node.name in ("type", "dyn") and node.target is None and len(args) == 1:
            self.types(args[0])
            return TYPE if node.name == "type" else DYN
        place = node.start if node.target is None else node.target.end + self.text[node.target.end :].find(node.name)
        function = FUNCTIONS.get(node.name)
        if function is None:
            for arg in args:
                if not (isinstance(arg, Name) and arg is node.target):
                    self.types(arg)  # of `math.max(1)`, `math` is no variable to look for
            return self._unknown_function(node, place)
        types = [self.types(arg) for arg in args]
        method = node.target is not None
        if not (function.as_method if method else function.as_function):
            how = f"`{node.name}(x)`" if method else f"`x.{node.name}(…)`"
            return self.report(f"`{node.name}` is not called like this", place, f"write {how}")
        wanted = {len(key) for key in function.overloads}
        if len(args) not in wanted:
            count = wanted.pop() - method
            return self.report(f"`{node.name}` takes {count} argument{'s' * (count != 1)}, not {len(node.args)}", place)
        return self._overload(node.name, function.overloads, args, types, place)

    def _unknown_function(self, node: Call, place: int) -> Types:
        if node.name in ("all", "exists", "exists_one", "filter", "map", "has"):
            usage = "has(a.b)" if node.name == "has" else f"list.{node.name}(x, …)"
            return self.report(f"`{node.name}` is not used like this", place, f"write `{usage}`")
        return self.unknown(f"there is no function `{node.name}`", place, node.name, _KNOWN)

    def operation(self, node: Operation) -> Types:
        types = [self.types(arg) for arg in node.args]
        operator = node.operator
        if operator in ("&&", "||", "!", "?:"):
            for arg, found in zip(node.args[: 1 if operator == "?:" else None], types, strict=False):
                if found.isdisjoint(BOOL | DYN):
                    shown = "?" if operator == "?:" else operator
                    self.report(f"`{shown}` needs true or false; `{self.said(arg)}` is {describe(found)}", arg.start)
            return self._either(node, types[1], types[2]) if operator == "?:" else BOOL
        place = node.args[0].end + len(self.text[node.args[0].end : node.args[-1].start].split(operator)[0])
        if len(node.args) == 1:
            return self._overload("-", {("int",): "int", ("double",): "double"}, node.args, types, node.start)
        if operator in ("==", "!="):
            return self._equal(node, types, place)
        if operator == "in":
            if types[1].isdisjoint(MAP | LIST | DYN):
                message = f"`in` looks into a list or a map; `{self.said(node.args[1])}` is {describe(types[1])}"
                self.report(message, node.args[1].start, "`text.contains(part)` looks into a string")
            elif types[1] == MAP and types[0].isdisjoint(KEYS | DYN):
                self.report(f"`{self.said(node.args[0])}` is {describe(types[0])}; no map has such a key", place)
            return BOOL
        return self._overload(operator, _ARITHMETIC.get(operator, _COMPARED), node.args, types, place)

    def _either(self, node: Operation, then: Types, other: Types) -> Types:
        """Both answers of a conditional are of one type."""
        if then.isdisjoint(other) and not (then | other) & DYN:
            shown = f"`{self.said(node.args[1])}` is {describe(then)}, `{self.said(node.args[2])}` {describe(other)}"
            return self.report(f"`? :` must answer with one type: {shown}", node.args[1].start)
        return then | other

    def _equal(self, node: Operation, types: list[Types], place: int) -> Types:
        """Any two values compare; of two types that never are equal, the answer is known beforehand."""
        left, right = (found | NUMBERS if found & NUMBERS else found for found in types)
        if left.isdisjoint(right) and not (left | right) & (DYN | {"null"}):
            answer = "false" if node.operator == "==" else "true"
            what = (
                f"`{self.said(node.args[0])}` is {describe(types[0])}, `{self.said(node.args[1])}` {describe(types[1])}"
            )
            self.report(f"`{node.operator}` is always {answer} here: {what}", place)
        return BOOL

    def _overload(self, name: str, overloads: Overloads, args: Iterable[Node], types: list[Types], place: int) -> Types:
        """The result of those overloads that the arguments' types allow; at least one must."""
        fits = {
            result
            for wanted, result in overloads.items()
            if len(wanted) == len(types)
            and all(want in found or found & DYN for want, found in zip(wanted, types, strict=True))
        }
        if fits:
            return frozenset(fits)
        shown = ", ".join(f"`{self.said(arg)}` is {describe(found)}" for arg, found in zip(args, types, strict=True))
        mixed = len(types) == 2 and all(found & NUMBERS for found in types)
        fix = "convert one of them: `int(x)`, `double(x)`" if mixed else None
        return self.report(f"`{name}` does not fit: {shown}", place, fix)

    def comprehension(self, node: Comprehension) -> Types:
        over = self.types(node.over)
        if over.isdisjoint(MAP | LIST | DYN):
            message = f"`{node.name}` goes through a list or a map; `{self.said(node.over)}` is {describe(over)}"
            self.report(message, node.over.start)
        self._bound.append(node.variable)
        bodies = [self.types(body) for body in node.bodies]
        self._bound.pop()
        conditions = node.bodies[:-1] if node.name == "map" else node.bodies
        for body, found in zip(conditions, bodies, strict=False):
            if found.isdisjoint(BOOL | DYN):
                message = f"`{node.name}` needs true or false; `{self.said(body)}` is {describe(found)}"
                self.report(message, body.start)
        return LIST if node.name in ("map", "filter") else BOOL

    def list_of(self, node: ListOf) -> Types:
        for item in node.items:
            self.types(item)
        return LIST

    def map_of(self, node: MapOf) -> Types:
        for item in node.items:
            self.types(item)
        return MAP


def _plain(literal: str) -> bool:
    """A string literal in one pair of quotes, without escapes: its value is what is between them."""
    return literal[0] in "'\"" and "\\" not in literal and not literal.startswith(("'''", '"""'))


_RULES: Mapping[type[Node], Callable[..., Types]] = {
    Name: Inference.name,
    Constant: Inference.constant,
    Select: Inference.select,
    Index: Inference.index,
    Call: Inference.call,
    Operation: Inference.operation,
    Comprehension: Inference.comprehension,
    ListOf: Inference.list_of,
    MapOf: Inference.map_of,
}
