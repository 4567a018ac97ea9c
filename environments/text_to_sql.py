"""Text to SQL on SQLite: the model may try queries with a tool, and answers with one in `<sql>` tags.

`TextToSql` shows the question and the tables, offers the tool `query`, and grades the answer: it is right if its rows equal those of the
task's own query, in the shown database and in further databases that the model does not see.

Invariants: a query can only read (SQLite's authorizer refuses everything else); each query has its own connection. The main
limit is a number of steps of SQLite's virtual machine, so whether a query is stopped does not depend on the machine's speed.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from engine.environments.shop_database import problems, shop
from engine.schemas.environment import EpisodeView, Reset, Step, Task
from engine.schemas.message import Message
from engine.schemas.reward import RewardEvent

__all__ = ["Rows", "TextToSql", "problems", "run_query", "same_rows"]

STEPS_PER_CHECK = 1000
"""Steps of SQLite's virtual machine between two checks of the limits."""
LONGEST_VALUE = 100_000
"""Maximum bytes of one text or blob, so that one function call cannot take long or use much memory."""
CELL_CHARACTERS = 200
"""Maximum number of characters shown of one value."""

_SQL = re.compile(r"<sql>(.*?)</sql>", re.DOTALL)
_READS = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE)
_NOT_CALLED = {"fts3_tokenizer", "load_extension", "random", "randomblob", "format", "printf"}
"""Functions that are refused: unsafe, not deterministic, or (`printf`) slow within one step."""

Open = Callable[[], sqlite3.Connection]


class Rows(NamedTuple):
    """The result of a query."""

    names: list[str]
    rows: list[tuple[Any, ...]]
    more: bool
    """There are more rows than the limit."""

    def shown(self) -> str:
        """The result as text: a line of names, then a line for each row."""
        lines = [" | ".join(self.names), *(" | ".join(map(_cell, row)) for row in self.rows)]
        if not self.rows:
            lines.append("(no rows)")
        if self.more:
            lines.append(f"(more rows; only the first {len(self.rows)} are shown)")
        return "\n".join(lines)


def _cell(value: Any) -> str:
    text = "NULL" if value is None else f"x'{value.hex()}'" if isinstance(value, bytes) else str(value)
    return text if len(text) <= CELL_CHARACTERS else text[:CELL_CHARACTERS] + "…"


def run_query(opened: Open, sql: str, *, rows: int, steps: int, seconds: float) -> Rows:
    """Run one query that only reads.

    Args:
        opened: Opens the database; the connection is closed here.
        sql: One statement.
        rows: Maximum number of rows of the result.
        steps: Maximum number of steps of SQLite's virtual machine.
        seconds: Maximum CPU time of the thread, checked every `STEPS_PER_CHECK` steps.

    Raises:
        ValueError: The query is invalid, writes, or exceeds a limit; the message says which.
    """
    over = refused = ""
    left = steps // STEPS_PER_CHECK
    deadline = time.thread_time() + seconds

    def check() -> int:
        nonlocal left, over
        left -= 1
        if left < 0:
            over = f"The query takes more than {steps} steps. Read fewer rows, or join on keys."
        elif time.thread_time() > deadline:
            over = f"The query takes more than {seconds:g} s."
        return 1 if over else 0

    def allow(action: int, first: str | None, second: str | None, *_: object) -> int:
        nonlocal refused
        if action in _READS:
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_FUNCTION:
            if (second or "").lower() not in _NOT_CALLED:
                return sqlite3.SQLITE_OK
            refused = f"The function {second} is not allowed."
        refused = refused or "Only reading is allowed: write one SELECT."
        return sqlite3.SQLITE_DENY

    with closing(opened()) as connection:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.set_authorizer(allow)
        connection.set_progress_handler(check, STEPS_PER_CHECK)
        try:
            cursor = connection.execute(sql)
            found = cursor.fetchmany(rows + 1)
        except (sqlite3.Error, sqlite3.Warning, OverflowError, UnicodeError) as problem:
            raise ValueError(over or refused or str(problem)) from None
        if cursor.description is None:
            raise ValueError("The query gives no rows: write one SELECT.")
        return Rows([column[0] for column in cursor.description], found[:rows], len(found) > rows)


def same_rows(one: list[tuple[Any, ...]], other: list[tuple[Any, ...]], ordered: bool) -> bool:
    """Whether two results are equal: names of columns do not matter, numbers are compared to six decimals."""

    def key(row: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(round(value, 6) if isinstance(value, float) else value for value in row)

    ours, theirs = list(map(key, one)), list(map(key, other))
    return ours == theirs if ordered else Counter(ours) == Counter(theirs)


class TextToSql:
    """Asks a question about a database and grades the answer.

    A task has `question` and `sql` (a right query), and may have `ordered` (the order of the rows matters; default false).

    Args:
        database: Path of a SQLite file, relative to the current folder. `{name}` is replaced by the task's field: a data set
            with one database for each task is `database/{db_id}/{db_id}.sqlite`. Left out: the shop of the task's field `shop`.
        also: Paths of other databases with the same tables, in which an answer must be right too. Each shop has such a database.
        tries: Maximum number of graded answers.
        correct: Reward `correct` of a right answer.
        runs: Reward `runs` of the first answer that is a query without error; paid once.
        rows: Maximum number of rows that the tool shows.
        steps: Maximum steps of SQLite's virtual machine per query (10 million: under a second).
        seconds: Maximum CPU time per query.
    """

    events = ("wrong", "done")

    def __init__(
        self,
        database: str | None = None,
        also: list[str] | None = None,
        tries: int = 2,
        correct: float = 1.0,
        runs: float = 0.1,
        rows: int = 20,
        steps: int = 10_000_000,
        seconds: float = 5.0,
    ) -> None:
        if tries < 1 or rows < 1 or steps < STEPS_PER_CHECK or seconds <= 0:
            raise ValueError(
                f"tries is {tries}, rows {rows}, steps {steps}, seconds {seconds}; write at least 1, 1, {STEPS_PER_CHECK} and "
                "more than 0"
            )
        self._paths = [database, *(also or [])] if database is not None else []
        if also and database is None:
            raise ValueError("`also` names databases beside `database`; write `database` too")
        self._tries = tries
        self._correct = correct
        self._runs = runs
        self._rows = rows
        self._steps = steps
        self._seconds = seconds

    def reset(self, task: Task, seed: int) -> Reset:
        """The question and the tables, as the user's first message."""
        for name in ("question", "sql"):
            if not isinstance(task.fields.get(name), str):
                raise ValueError(f"task {task.id!r} has no text `{name}`; write `question` and `sql`")
        for opened in self._databases(task):
            self._right(opened, task.fields["sql"])  # the task's own query must run
        listed = "SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL ORDER BY rowid"
        tables = self._run(self._databases(task)[0], listed, 200)
        schema = ";\n".join(str(row[0]) for row in tables.rows)
        words = f"{task.fields['question']}\n\nThe tables:\n{schema};\n\nEnd with one query: <sql>SELECT …</sql>"
        return Reset(messages=[Message(role="user", content=words)], facts={"tries": 0, "runs": False})

    def tools(self) -> list[Callable[..., Any]]:
        """The tool `query`."""
        return [self.query]

    def query(self, sql: str, view: EpisodeView) -> str:
        """Run a query on the database and show its rows.

        Args:
            sql: One SELECT statement of SQLite.
        """
        return self._run(self._databases(view.task)[0], sql, self._rows).shown()

    def step(self, view: EpisodeView) -> Step:
        """`done` after a right answer or the last try; otherwise `wrong`, with the error or without any detail."""
        tries = int(view.facts["tries"]) + 1
        found = _SQL.findall(view.reply)
        runs, right, words = False, False, "There is no <sql>."
        if found:
            runs, right, words = self._graded(view.task, found[-1])
        rewards = []
        if runs and not view.facts["runs"]:
            rewards.append(RewardEvent(name="runs", value=self._runs, cause="a query without error"))
        if right:
            rewards.append(RewardEvent(name="correct", value=self._correct, cause=f"right at try {tries}"))
        facts = {"tries": tries, "runs": runs or bool(view.facts["runs"]), "solved": right}
        if right or tries >= self._tries:
            return Step(event="done", rewards=rewards, facts=facts)
        again = Message(role="user", content=f"{words} Answer again.")
        return Step(event="wrong", messages=[again], rewards=rewards, facts=facts)

    def _graded(self, task: Task, sql: str) -> tuple[bool, bool, str]:
        """Whether an answer runs, whether it is right, and the message about it."""
        ordered = bool(task.fields.get("ordered", False))
        for opened in self._databases(task):
            wanted = self._right(opened, task.fields["sql"])
            try:
                given = self._run(opened, sql, len(wanted) + 1)
            except ValueError as problem:
                return False, False, f"The query fails: {str(problem).rstrip('.')}."
            if not same_rows(given.rows, wanted, ordered):
                return True, False, "The query runs, but its rows are wrong."
        return True, True, ""

    def _run(self, opened: Open, sql: str, rows: int) -> Rows:
        return run_query(opened, sql, rows=rows, steps=self._steps, seconds=self._seconds)

    def _right(self, opened: Open, sql: str) -> list[tuple[Any, ...]]:
        return self._run(opened, sql, 100_000).rows

    def _databases(self, task: Task) -> list[Open]:
        """Functions that open the shown database and, after it, the databases for checking."""
        if self._paths:
            return [lambda path=path: _file(_filled(path, task)) for path in self._paths]  # type: ignore[misc]
        seed = task.fields.get("shop")
        if type(seed) is not int:
            raise ValueError(
                f"task {task.id!r}: `shop` is {seed!r}; write a whole number, as `engine.environments.text_to_sql:problems` "
                "does, or name a file: `with: {database: PATH}`"
            )
        return [lambda: _memory(shop(seed)), lambda: _memory(shop(-1 - seed))]


def _memory(data: bytes) -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:")
    connection.deserialize(data)
    return connection


def _file(path: str) -> sqlite3.Connection:
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no database {path}; `with.database` is relative to the current folder")
    return sqlite3.connect(f"{Path(path).resolve().as_uri()}?mode=ro", uri=True)


def _filled(path: str, task: Task) -> str:
    """A path with `{name}` replaced by the task's field, which must be a single name without slashes."""

    def value(match: re.Match[str]) -> str:
        field = task.fields.get(match[1])
        if not isinstance(field, str) or re.fullmatch(r"[\w-][\w.-]*", field) is None:
            raise ValueError(f"task {task.id!r}: `{match[1]}` is {field!r}; `{path}` needs a name without slashes")
        return field

    return re.sub(r"\{(\w+)\}", value, path)
