"""Filters over the episodes of a store: the same expressions as `--filter` of `engine export`, decided by SQL where it
can, else by the evaluator of guards, one episode at a time.

Invariant: a condition of SQL that is not NULL is what the evaluator returns. So everything that SQL cannot decide
exactly (an error, a float that SQLite may have read from JSON with another last bit, a part that has no SQL) is NULL.
As in CEL, `AND` and `OR` ignore a NULL in one operand if the other decides.

An expression that reads only `task`, `limits`, `run` and `episode` is evaluated for all episodes; any other one holds
only for finished episodes. An episode for which the expression has no value (it has no such fact, for example) is not
chosen, and counted.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any
from urllib.parse import quote

from pydantic_core import from_json

from engine.errors import GuardError, StoreError
from engine.machine.expression import Call, Constant, Index, ListOf, Name, Node, Operation, Select, parse
from engine.machine.guards import Guard
from engine.machine.variables import BOOL, INT, STRING, Variable, VariableField
from engine.plugins.show.listing.heads import Contents, read_head
from engine.plugins.show.listing.sources import Source
from engine.schemas.base import Struct
from engine.store import summaries
from engine.store.codec import damaged
from engine.store.episode_filter import END_VALUES, EPISODE_VARIABLES, stored_limits
from engine.store.reader import RunReader
from engine.store.reviews import FACT

RUN = Variable(
    doc="The run that an episode belongs to.",
    fields={
        "id": VariableField(types=STRING, doc="Its name in the list."),
        "evaluation": VariableField(types=BOOL, doc="Whether it is an evaluation."),
        "step": VariableField(
            types=INT, doc="The step of the training that used the episode, or whose weights it measured; -1 without."
        ),
    },
)
LISTING_VARIABLES: Mapping[str, Variable] = {**EPISODE_VARIABLES, "run": RUN}
"""Variables of filters over a list of episodes."""
_JOINS = {
    "s": "summaries s ON s.episode = e.number AND s.attempt = e.attempt",
    "t": "tasks t ON t.id = e.task_id",
    "p": "side.steps p ON p.source = :source AND p.task = e.task_id",
}


def tables_of(first: str, *texts: str) -> str:
    """The `FROM` of a query over the episodes of a store: `first` (`episodes e`), and the tables that `texts`, the rest
    of the query, name. SQLite itself reads those that a count does not need too."""
    return f"FROM {first}" + "".join(
        f" LEFT JOIN {join}" for name, join in _JOINS.items() if any(re.search(rf"\b{name}\.", text) for text in texts)
    )


_ROW = (
    "e.id, e.task_id, e.sample_index, e.status, e.attempt, e.started, e.ended, e.trainable, e.state, e.event, "
    'e."limit", '
    "e.failure, e.blame, e.solved, e.reward, s.solved_turn, s.rewards, s.facts, s.branches, s.images, s.trained, "
    "s.version, s.oldest_version, t.fields, coalesce(:step, p.step, -1)"
)
_NAMES = [name.split(".")[-1].strip('"') for name in _ROW.split(", ")[:-3]] + ["step"]
_STORED = ("outcome", "facts")
"""Variables whose values a summary has."""


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


class SqlValue(Struct, frozen=True, kw_only=True):
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

    def _json_comparison(self, operator: str, a: SqlValue, b: SqlValue) -> str:
        """Compare a value in JSON with a constant or a column."""
        sign = _COMPARED[operator]
        value = f"json_extract({a.sql}, {a.path})"
        plain = f"{value} {sign} {b.sql}"
        cases: dict[str, str] = {}
        if operator in ("==", "!="):  # of values of different types
            cases = dict.fromkeys(
                ("null", "true", "false", "integer", "real", "text", "object", "array"),
                "0" if operator == "==" else "1",
            )
        if b.type in _NUMBERS:
            # SQLite reads the last bit of a long number differently on some machines
            text = f"({a.sql} -> {a.path})"
            apart = f"abs({value} - {b.sql}) > 3e-9 * abs({b.sql}) + 1e-300"  # reads the value once
            exact = f"(length({text}) < 16 AND {text} NOT GLOB '*[eE]*')"
            doubtful = f"CASE WHEN {apart} OR {exact} THEN {plain} END"
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
        value = None if _is_review(of, field) else self._value(of)
        if value is None or value.type != "dyn" or (path := self._step(value.path, field)) is None:
            return "NULL"
        return self._by_type(value, {"object": f"json_type({value.sql}, {path}) IS NOT NULL"})

    @staticmethod
    def _by_type(value: SqlValue, cases: Mapping[str, str]) -> str:
        """The SQL for each type of JSON that a value has; NULL for others. JSON that SQLite does not read (NaN), or
        that has escaped characters, is left to the evaluator."""
        listed = " ".join(f"WHEN '{kind}' THEN {sql}" for kind, sql in cases.items())
        readable = f"json_valid({value.sql}) AND instr({value.sql}, '\\u') = 0"
        if not listed:
            return "NULL"
        return f"CASE WHEN {readable} THEN CASE json_type({value.sql}, {value.path}) {listed} END END"

    def _value(self, node: Node) -> SqlValue | None:
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
                    return SqlValue(type=kind, sql=sql)
                if field in self._constants.get(name, ()):
                    value = self._constants[name][field]
                    return self._constant(_TYPES[type(value)], value)
                if (name, field) in _JSON:
                    return self._json((name, field))
        match node:
            case Select(of=of, field=key, test=False) | Index(of=of, key=Constant(type="string", value=key)):
                of_value = None if _is_review(of, key) else self._value(of)
                if of_value is not None and of_value.type == "dyn" and (path := self._step(of_value.path, key)):
                    return SqlValue(type="dyn", sql=of_value.sql, path=path)
        return None

    @staticmethod
    def _json(path: tuple[str, ...]) -> SqlValue | None:
        return SqlValue(type="dyn", sql=_JSON[path], path="'$'") if path in _JSON else None

    def _constant(self, kind: str, value: Any) -> SqlValue | None:
        return None if value is None else SqlValue(type=kind, sql=self._parameter(value))

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


def _is_review(of: Node, key: str) -> bool:
    """Whether a key is that of the fact that reviews add, which no table has."""
    return isinstance(of, Name) and (of.name, key) == ("facts", FACT)


@dataclass(slots=True)
class Matching:
    """How a filter chose episodes."""

    evaluated: int = 0
    """Number of episodes for which the filter was evaluated."""
    skipped: int = 0
    """Number of those for which it has no value."""
    because: str | None = None
    """The message for the first of them."""
    error: BaseException | None = field(default=None)
    """What stopped a function that SQLite called."""
    conditions: dict[int, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    """By store: the condition that says what is chosen, and its parameters, where the table `chosen` is not needed."""


@contextmanager
def listed(
    number: int, source: Source, store: RunReader, side: str
) -> Iterator[tuple[sqlite3.Connection, dict[str, Any], Contents]]:
    """Open a store for queries over `tables_of`: the connection, the parameters of its tables, and the content of its
    episodes.

    Args:
        number: The number of the store in the list.
        source: The store's place.
        store: The store.
        side: The SQLite file of the list, attached as `side`.
    """
    with store.snapshot() as connection, closing(Contents(store)) as contents:
        connection.execute("COMMIT")  # nothing was read yet, and the modes of a file are set outside of a transaction
        connection.execute("ATTACH ? AS side", (f"file:{quote(side)}?mode=rw",))
        connection.execute("PRAGMA side.journal_mode = OFF")
        connection.execute("PRAGMA side.synchronous = OFF")
        connection.execute("BEGIN")
        if connection.execute("SELECT 1 FROM main.sqlite_master WHERE name = 'summaries'").fetchone() is None:
            connection.execute(summaries.TABLE.replace("CREATE TABLE", "CREATE TEMP TABLE"))
        connection.create_function("made", 2, lambda episode, column: contents.summary(episode)[column])
        yield connection, {"source": number, "step": source.step}, contents


def _filter_of(about: tuple[Source, RunReader], guard: Guard) -> tuple[SqlFilter, dict[str, dict[str, Any]]]:
    """The condition of a filter in a store, and the values that are equal for all of its episodes."""
    source, store = about
    constants: dict[str, dict[str, Any]] = {"run": {"id": source.key, "evaluation": source.evaluation}}
    if "limits" in guard.names:
        constants["limits"] = dict(stored_limits(store))
    return SqlFilter(guard.expression, constants), constants


def _evaluated(names: frozenset[str]) -> str:
    """The condition for the episodes for which a filter that reads these variables is evaluated."""
    return "TRUE" if names <= {"task", "limits", "run", "episode"} else "e.status = 'done'"


def condition_of(about: tuple[Source, RunReader], guard: Guard) -> tuple[str, dict[str, Any]] | None:
    """The condition of a filter that reads columns alone, which is evaluated faster than what it chose is written down,
    and its parameters. NULL: SQL cannot decide."""
    in_sql, _ = _filter_of(about, guard)
    if "json_" in in_sql.sql:
        return None
    return f"CASE WHEN {_evaluated(guard.names)} THEN {in_sql.sql} ELSE FALSE END", in_sql.parameters


def choose(
    connection: sqlite3.Connection,
    parameters: Mapping[str, Any],
    contents: Contents,
    matching: Matching,
    about: tuple[Source, RunReader],
    guard: Guard | None,
    text: str,
) -> None:
    """Write the numbers of the chosen episodes of one store to the table `chosen`.

    Args:
        connection: From `listed`, as `parameters` and `contents`.
        matching: Counts the episodes for which the filter has no value.
        about: The store.
        guard: A filter over `LISTING_VARIABLES`; None chooses all.
        text: Only finished episodes in which this was said, with any case; empty chooses all.

    Raises:
        StoreError: the content of an episode cannot be read.
    """
    done = "e.status = 'done'" if text or guard is None else _evaluated(guard.names)
    condition = "TRUE"
    values = dict(parameters)
    if guard is not None:
        in_sql, constants = _filter_of(about, guard)
        values |= in_sql.parameters
        condition = f"coalesce({in_sql.sql}, ask(e.number))"
        connection.create_function(
            "ask", 1, _noting(matching, _evaluator(connection, parameters, contents, matching, guard, constants))
        )
    if text:
        connection.create_function(
            "said", 2, _noting(matching, lambda number, attempt: contents.said(number, attempt, text.casefold()))
        )
        condition += " AND said(e.number, e.attempt)"
    query = (
        f"INSERT INTO side.chosen SELECT :source, e.number {tables_of('episodes e', condition)} WHERE {done} AND "
        f"{condition} ORDER BY e.number"
    )
    try:
        connection.execute(query, values)
    except sqlite3.OperationalError:
        if matching.error is not None:
            raise matching.error from None
        raise
    if matching.skipped:
        matching.evaluated += connection.execute(f"SELECT count(*) FROM episodes e WHERE {done}").fetchone()[0]
    connection.execute("COMMIT")


def _evaluator(
    connection: sqlite3.Connection,
    parameters: Mapping[str, Any],
    contents: Contents,
    matching: Matching,
    guard: Guard,
    constants: Mapping[str, Any],
) -> Callable[[int], bool]:
    """Whether a guard holds for an episode, by its number. One without a value is counted."""

    def ask(number: int) -> bool:
        row = connection.execute(
            f"SELECT {_ROW} {tables_of('episodes e', _ROW)} WHERE e.number = :number", {**parameters, "number": number}
        )
        scope = dict(zip(_NAMES, row.fetchone(), strict=True))
        if scope["branches"] is None and scope["status"] == "done":
            made = dict(zip(summaries.COLUMNS, contents.summary(number), strict=True))
            scope |= {name: made[name] for name in _NAMES if name in made}
        try:
            context = _context(guard.names, number, scope, contents, constants)
            return guard.evaluate(context)
        except GuardError as error:
            problem = f"{error}{_nearest(context, error)}"
        except StoreError as error:
            problem = str(error)
        matching.skipped += 1
        matching.because = matching.because or f"{scope['id']}: {problem}"
        return False

    return ask


def _noting(matching: Matching, function: Any) -> Any:
    """A function for SQLite, which replaces an exception by one of its own: the exception is kept in `matching`."""

    def called(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except BaseException as error:
            matching.error = error
            raise

    return called


def _context(
    names: frozenset[str], number: int, row: Mapping[str, Any], contents: Contents, constants: Mapping[str, Any]
) -> dict[str, Any]:
    """The values of the variables `names` for one episode.

    Raises:
        StoreError: its content is damaged or was dropped.
    """
    context: dict[str, Any] = {}
    ends = names & END_VALUES.keys()
    if ends and (not ends <= set(_STORED) or row["facts"] is None):
        head = read_head(contents.text(number))
        context |= {name: END_VALUES[name](head) for name in ends}
    else:
        if "facts" in names:
            context["facts"] = from_json(row["facts"])
        if "outcome" in names:
            context["outcome"] = {
                **{name: row[name] or "" for name in ("state", "event", "limit", "failure", "blame")},
                "solved": bool(row["solved"]),
                "solved_turn": -1 if row["solved_turn"] is None else row["solved_turn"],
                "reward": float("nan") if row["reward"] is None else row["reward"],
                "rewards": from_json(row["rewards"]),
            }
    if "facts" in names:
        context["facts"] = {**context["facts"], **contents.review_facts(row["id"])}
    if "limits" in names:
        context["limits"] = constants["limits"]
    if "task" in names:
        with damaged("its task"):
            context["task"] = from_json(row["fields"])
    if "feedback" in names:
        context["feedback"] = contents.feedback(number, row["attempt"])
    if "episode" in names:
        context["episode"] = _episode(number, row, contents)
    if "run" in names:
        context["run"] = {**constants["run"], "step": row["step"]}
    return context


def _episode(number: int, row: Mapping[str, Any], contents: Contents) -> dict[str, Any]:
    ended, started = row["ended"], row["started"]
    if row["status"] == "done" and row["branches"] is None:
        raise StoreError(contents.summary(number)[0])
    return {
        "id": row["id"],
        "task": row["task_id"],
        "sample": row["sample_index"],
        "status": row["status"],
        "attempt": row["attempt"],
        "seconds": ended - started if ended and started else 0.0,
        "trainable": bool(row["trainable"]),
        **{name: row[name] or 0 for name in ("branches", "images", "trained")},
        **{name: -1 if row[name] is None else row[name] for name in ("version", "oldest_version")},
    }


def _nearest(scope: Mapping[str, Any], error: GuardError) -> str:
    """The nearest name that a task or the facts have, for a name that they do not have."""
    for name in ("task", "facts"):
        missing = re.search(rf"`{name}\.(\w+)` does not exist", str(error))
        if missing is not None and name in scope:
            near = get_close_matches(missing[1], list(scope[name]), 1)
            fields = ", ".join(f"`{field}`" for field in list(scope[name])[:8]) or "no fields"
            return f". Did you mean `{name}.{near[0]}`?" if near else f". `{name}` has {fields}"
    return ""
