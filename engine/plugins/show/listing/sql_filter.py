"""An expression of a filter -> a condition of SQL that says, for one episode: it holds (1), it does not (0), or ask the
evaluator (NULL).

Invariant: a condition that is not NULL is what the evaluator returns. So everything that SQL cannot decide exactly (an
error, a float that SQLite may have read from JSON with another last bit, a part that has no SQL) is NULL. As in CEL,
`AND` and `OR` ignore a NULL in one operand if the other decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.machine.expression import Call, Constant, Index, ListOf, Name, Node, Operation, Select, parse
from engine.schemas.base import Struct

_DONE = "CASE WHEN e.status = 'done' THEN {} ELSE {} END"
FIELDS: Mapping[tuple[str, str], tuple[str, str]] = {
    ("turns", "assistant"): ("int", "e.turns"),
    ("turns", "user"): ("int", "s.user_turns"),
    ("tools", "calls"): ("int", "s.tool_calls"),
    ("tools", "errors"): ("int", "s.tool_errors"),
    ("tokens", "sampled"): ("int", "s.sampled"),
    ("tokens", "context"): ("int", "s.context"),
    ("rewards", "total"): ("double", "e.reward"),
    ("outcome", "state"): ("string", "e.state"),
    ("outcome", "event"): ("string", "e.event"),
    ("outcome", "limit"): ("string", "coalesce(e.\"limit\", '')"),
    ("outcome", "failure"): ("string", "coalesce(e.failure, '')"),
    ("outcome", "blame"): ("string", "coalesce(e.blame, '')"),
    ("outcome", "solved"): ("bool", "e.solved"),
    ("outcome", "solved_turn"): ("int", "CASE WHEN s.episode IS NOT NULL THEN coalesce(s.solved_turn, -1) END"),
    ("outcome", "reward"): ("double", "e.reward"),
    ("episode", "id"): ("string", "e.id"),
    ("episode", "task"): ("string", "e.task_id"),
    ("episode", "sample"): ("int", "e.sample_index"),
    ("episode", "status"): ("string", "e.status"),
    ("episode", "attempt"): ("int", "e.attempt"),
    ("episode", "seconds"): ("double", "CASE WHEN e.ended AND e.started THEN e.ended - e.started ELSE 0.0 END"),
    ("episode", "trainable"): ("bool", "coalesce(e.trainable, 0)"),
    ("episode", "branches"): ("int", _DONE.format("s.branches", "0")),
    ("episode", "images"): ("int", _DONE.format("s.images", "0")),
    ("episode", "trained"): ("int", _DONE.format("s.trained", "0")),
    ("episode", "version"): (
        "int",
        _DONE.format("CASE WHEN s.episode IS NOT NULL THEN coalesce(s.version, -1) END", "-1"),
    ),
    ("episode", "oldest_version"): (
        "int",
        _DONE.format("CASE WHEN s.episode IS NOT NULL THEN coalesce(s.oldest_version, -1) END", "-1"),
    ),
    ("run", "step"): ("int", "coalesce(:step, p.step, -1)"),
}
"""The type and the SQL of fields of variables, over the tables of `Listing`."""
_JSON = {("facts",): "s.facts", ("outcome", "rewards"): "s.rewards", ("task",): "t.fields"}
"""Columns with JSON, by the path of the map that they hold."""
_COMPARED = {"==": "=", "!=": "<>", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_NUMBERS = ("int", "double")
_TYPES = {bool: "bool", int: "int", float: "double", str: "string"}
_METHODS = {
    "contains": "instr({v}, {c}) > 0",
    "startsWith": "substr({v}, 1, {n}) = {c}",
    "endsWith": "substr({v}, -{n}) = {c}",
}


class _Value(Struct, frozen=True, kw_only=True):
    """An operand: its CEL type, and the SQL of its value. Of type `dyn`: the column with JSON and the path in it."""

    type: str
    sql: str
    path: str = ""


class SqlFilter:
    """The condition of an expression for the episodes of one store.

    Args:
        expression: In CEL, valid.
        constants: The values of `limits` and `run` that are equal for all episodes of the store.
    """

    def __init__(self, expression: str, constants: Mapping[str, Mapping[str, Any]]) -> None:
        self._constants = constants
        self.parameters: dict[str, Any] = {}
        self.sql = self._condition(parse(expression))

    def _condition(self, node: Node) -> str:
        match node:
            case Operation(operator="&&" | "||" as operator, args=args):
                word = " AND " if operator == "&&" else " OR "
                return f"({word.join(map(self._condition, args))})"
            case Operation(operator="!", args=(arg,)):
                return f"(NOT {self._condition(arg)})"
            case Operation(operator="in", args=(item, ListOf(items=items))) if items:
                return f"({' OR '.join(self._comparison('==', item, other) for other in items)})"
            case Operation(operator=operator, args=(left, right)) if operator in _COMPARED:
                return self._comparison(operator, left, right)
            case Call(name=name, target=Node() as target, args=(Constant(type="string", value=value),)):
                return self._method(name, target, value)
            case Select(of=of, field=field, test=True):
                return self._has(of, field)
        value = self._value(node)
        if value is not None and value.type == "bool":
            return f"({value.sql})"
        if value is not None and value.type == "dyn":
            return self._by_type(value, {"true": "1", "false": "0"})
        return "NULL"

    def _comparison(self, operator: str, left: Node, right: Node) -> str:
        a, b = self._value(left), self._value(right)
        if a is None or b is None or (a.type == b.type == "dyn"):
            return "NULL"
        if a.type == "dyn" or b.type == "dyn":
            if b.type == "dyn":
                a, b, operator = b, a, _MIRRORED.get(operator, operator)
            return self._json_comparison(operator, a, b)
        if a.type == b.type or (a.type in _NUMBERS and b.type in _NUMBERS):
            return f"({a.sql} {_COMPARED[operator]} {b.sql})"
        return "NULL"

    def _json_comparison(self, operator: str, a: _Value, b: _Value) -> str:
        """Compare a value in JSON with a constant or a column."""
        sign = _COMPARED[operator]
        value = f"json_extract({a.sql}, {a.path})"
        plain = f"{value} {sign} {b.sql}"
        cases: dict[str, str] = {}
        if operator in ("==", "!="):  # of values of different types
            unequal = "0" if operator == "==" else "1"
            cases = dict.fromkeys(("null", "true", "false", "integer", "real", "text", "object", "array"), unequal)
        if b.type in _NUMBERS:
            # SQLite reads the last bit of a long number differently on some machines
            text = f"({a.sql} -> {a.path})"
            apart = f"abs({value} - {b.sql}) > 1e-9 * (abs({value}) + abs({b.sql})) + 1e-300"
            exact = f"(length({text}) < 16 AND {text} NOT GLOB '*[eE]*')"
            doubtful = f"CASE WHEN {exact} OR {apart} THEN {plain} END"
            cases |= {"integer": f"CASE WHEN typeof({value}) = 'integer' THEN {plain} ELSE {doubtful} END"}
            cases |= {"real": doubtful}
        elif b.type == "string":
            cases |= {"text": plain}
        elif b.type == "bool":
            cases |= {"true": f"1 {sign} {b.sql}", "false": f"0 {sign} {b.sql}"}
        return self._by_type(a, cases)

    def _method(self, name: str, target: Node, text: str) -> str:
        value = self._value(target)
        if name not in _METHODS or value is None or value.type not in ("string", "dyn") or not text or "\0" in text:
            return "NULL"
        read = value.sql if value.type == "string" else f"json_extract({value.sql}, {value.path})"
        sql = _METHODS[name].format(v=read, c=self._parameter(text), n=len(text))
        return f"({sql})" if value.type == "string" else self._by_type(value, {"text": sql})

    def _has(self, of: Node, field: str) -> str:
        whole = self._value(of)
        if whole is None or whole.type != "dyn" or (path := self._step(whole.path, field)) is None:
            return "NULL"
        return self._by_type(whole, {"object": f"json_type({whole.sql}, {path}) IS NOT NULL"})

    @staticmethod
    def _by_type(value: _Value, cases: Mapping[str, str]) -> str:
        """The SQL for each type of JSON that a value has; NULL for others. JSON that SQLite does not read (NaN), or
        that has escaped characters, is left to the evaluator."""
        listed = " ".join(f"WHEN '{kind}' THEN {sql}" for kind, sql in cases.items())
        readable = f"json_valid({value.sql}) AND instr({value.sql}, '\\u') = 0"
        if not listed:
            return "NULL"
        return f"CASE WHEN {readable} THEN CASE json_type({value.sql}, {value.path}) {listed} END END"

    def _value(self, node: Node) -> _Value | None:
        match node:
            case Constant(type=kind, value=value):
                return self._constant(kind, value)
            case Operation(operator="-", args=(Constant(type="int" | "double" as kind, value=value),)):
                return self._constant(kind, -value)
            case Name(name=name):
                return self._json((name,))
            case (
                Select(of=Name(name=name), field=field, test=False)
                | Index(of=Name(name=name), key=Constant(type="string", value=field))
            ):
                if (name, field) in FIELDS:
                    kind, sql = FIELDS[name, field]
                    return _Value(type=kind, sql=sql)
                if field in self._constants.get(name, ()):
                    value = self._constants[name][field]
                    return self._constant(_TYPES[type(value)], value)
                if (name, field) in _JSON:
                    return self._json((name, field))
        match node:
            case Select(of=whole, field=key, test=False) | Index(of=whole, key=Constant(type="string", value=key)):
                of = self._value(whole)
                if of is not None and of.type == "dyn" and (path := self._step(of.path, key)) is not None:
                    return _Value(type="dyn", sql=of.sql, path=path)
        return None

    @staticmethod
    def _json(path: tuple[str, ...]) -> _Value | None:
        return _Value(type="dyn", sql=_JSON[path], path="'$'") if path in _JSON else None

    def _constant(self, kind: str, value: Any) -> _Value | None:
        return None if value is None else _Value(type=kind, sql=self._parameter(value))

    def _parameter(self, value: Any) -> str:
        name = f"c{len(self.parameters)}"
        self.parameters[name] = value
        return f":{name}"

    @staticmethod
    def _step(path: str, key: str) -> str | None:
        """The path of a key below a path; None for a key that a path cannot hold."""
        if not key or not key.isprintable() or set(key) & set("\"\\'"):
            return None
        return f'{path[:-1]}."{key}"\''
