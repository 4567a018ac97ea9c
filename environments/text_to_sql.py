"""Text to SQL on SQLite: the model may try queries with a tool, and answers with one in `<sql>` tags.

`TextToSql` shows the question and the tables, offers the tool `query`, and grades the answer: it is right if its rows
equal those of the task's own query, in the shown database and in further databases that the model does not see.
`problems` makes tasks about a small shop, whose database, `shop`, is a pure function of its seed. Each question has
exactly one answer in every database: prices are whole numbers, and ties are broken by the question.

Invariants: a query can only read (SQLite's authorizer refuses everything else); each query has its own connection. The
main limit is a number of steps of SQLite's virtual machine, so whether a query is stopped does not depend on the
machine's speed. Steps that take long are short enough (`_LIMITS`) that a second limit, of CPU time, ends a query at
most half a second late.
"""

from __future__ import annotations

import random
import re
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from engine.schemas.environment import EpisodeView, Reset, Step, Task
from engine.schemas.message import Message
from engine.schemas.reward import RewardEvent

HELD_OUT = 5
"""One question in this many is held out."""

SCHEMA = """
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT NOT NULL, city TEXT NOT NULL);
CREATE TABLE products (id INTEGER PRIMARY KEY, name TEXT NOT NULL, category TEXT NOT NULL, price INTEGER NOT NULL);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER NOT NULL REFERENCES customers (id), day TEXT NOT NULL);
CREATE TABLE items (order_id INTEGER NOT NULL REFERENCES orders (id),
product_id INTEGER NOT NULL REFERENCES products (id), quantity INTEGER NOT NULL);
"""
"""`day` is written as 2024-05-31."""

_CITIES = ("Aarhus", "Bergen", "Ghent", "Leeds", "Porto", "Split", "Tartu", "Vigo")
_FIRST = ("Ada", "Bo", "Cleo", "Dora", "Eli", "Fay", "Gus", "Hana", "Ivo", "June", "Kai", "Lena")
_LAST = ("Berg", "Costa", "Dahl", "Evans", "Fischer", "Grant", "Horvat", "Jansen")
_PRODUCTS = {
    "garden": ("hose", "rake", "spade", "trowel", "watering can"),
    "kitchen": ("kettle", "ladle", "pan", "sieve", "whisk"),
    "office": ("desk lamp", "folder", "pen", "ruler", "stapler"),
    "sports": ("ball", "helmet", "racket", "rope", "whistle"),
}
_YEARS = (2022, 2023, 2024)


@lru_cache(maxsize=64)
def shop(seed: int) -> bytes:
    """The shop's database as a SQLite file: 40 customers, 20 products, 120 orders with 1 to 4 items each."""
    rng = random.Random(f"shop/{seed}")
    names = rng.sample([f"{first} {last}" for first in _FIRST for last in _LAST], 40)
    customers = [(number, name, rng.choice(_CITIES)) for number, name in enumerate(names, 1)]
    kinds = [(name, category) for category, group in _PRODUCTS.items() for name in group]
    products = [(number, name, category, rng.randint(2, 90)) for number, (name, category) in enumerate(kinds, 1)]
    buyers = rng.sample(range(1, 41), 34)  # six customers have no order
    orders, items = [], []
    for number in range(1, 121):
        day = f"{rng.choice(_YEARS)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
        orders.append((number, rng.choice(buyers), day))
        for product in rng.sample(range(1, 21), rng.randint(1, 4)):
            items.append((number, product, rng.randint(1, 5)))
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SCHEMA)
        connection.executemany("INSERT INTO customers VALUES (?, ?, ?)", customers)
        connection.executemany("INSERT INTO products VALUES (?, ?, ?, ?)", products)
        connection.executemany("INSERT INTO orders VALUES (?, ?, ?)", orders)
        connection.executemany("INSERT INTO items VALUES (?, ?, ?)", items)
        connection.commit()
        return connection.serialize()


_TEMPLATES: tuple[tuple[str, str, bool], ...] = (
    ("How many customers live in {city}?", "SELECT COUNT(*) FROM customers WHERE city = '{city}'", False),
    (
        "How many orders were placed in {year}?",
        "SELECT COUNT(*) FROM orders WHERE day LIKE '{year}-%'",
        False,
    ),
    (
        "Which products cost more than {price}? Give name and price, the most expensive first, equal prices by name.",
        "SELECT name, price FROM products WHERE price > {price} ORDER BY price DESC, name",
        True,
    ),
    (
        "What is the revenue (price times quantity, summed) of the category {category}?",
        "SELECT SUM(price * quantity) FROM items JOIN products ON products.id = product_id WHERE category = "
        "'{category}'",
        False,
    ),
    (
        "Which customers from {city} have never placed an order? Give their names.",
        "SELECT name FROM customers WHERE city = '{city}' AND id NOT IN (SELECT customer_id FROM orders)",
        False,
    ),
    (
        "For each category, how many pieces were ordered in {year}? Give category and number of pieces.",
        "SELECT category, SUM(quantity) FROM items JOIN products ON products.id = product_id "
        "JOIN orders ON orders.id = order_id WHERE day LIKE '{year}-%' GROUP BY category",
        False,
    ),
    (
        "Which customers have ordered the product {product}? Give each name once.",
        "SELECT DISTINCT customers.name FROM customers JOIN orders ON customer_id = customers.id "
        "JOIN items ON order_id = orders.id JOIN products ON products.id = product_id WHERE products.name = "
        "'{product}'",
        False,
    ),
    (
        "Which customer has placed the most orders in {year}? If several have, take the first by name. Give the name.",
        "SELECT name FROM customers JOIN orders ON customer_id = customers.id WHERE day LIKE '{year}-%' "
        "GROUP BY customers.id ORDER BY COUNT(*) DESC, name LIMIT 1",
        False,
    ),
    (
        "Which cities have at least {count} customers? Give city and number of customers.",
        "SELECT city, COUNT(*) FROM customers GROUP BY city HAVING COUNT(*) >= {count}",
        False,
    ),
    (
        "What is the value (price times quantity, summed) of order {order}?",
        "SELECT SUM(price * quantity) FROM items JOIN products ON products.id = product_id WHERE order_id = {order}",
        False,
    ),
)
"""Question, query, and whether the order of the rows is part of the answer."""


def problems(count: int = 64, seed: int = 0, held_out: bool = False) -> Iterator[dict[str, Any]]:
    """Rows with `id`, `question`, `sql`, `ordered` and `shop` (the database's seed), the same for the same arguments.

    Args:
        count: How many.
        seed: Seeds the questions and databases.
        held_out: Make questions that are kept from training, instead of the others.
    """
    rng = random.Random(f"shop/problems/{seed}")
    for index in range(count):
        while True:
            template, sql, ordered = rng.choice(_TEMPLATES)
            category = rng.choice(list(_PRODUCTS))
            values = {
                "city": rng.choice(_CITIES),
                "year": rng.choice(_YEARS),
                "price": rng.randint(10, 70),
                "category": category,
                "product": rng.choice(_PRODUCTS[category]),
                "count": rng.randint(3, 6),
                "order": rng.randint(1, 120),
            }
            question = template.format(**values)
            if (random.Random(question).randrange(HELD_OUT) == 0) is held_out:
                break
        yield {
            "id": f"{'held-out' if held_out else 'sql'}-{seed}-{index:04d}",
            "question": question,
            "sql": sql.format(**values),
            "ordered": ordered,
            "shop": rng.randrange(10**6),
        }


STEPS_PER_CHECK = 1000
"""Steps of SQLite's virtual machine between two checks of the limits."""
LONGEST_VALUE = 20_000
"""Maximum bytes of one text or blob, so that no function call takes long: `trim` compares all characters."""
LONGEST_QUERY = 50_000
"""Maximum bytes of a query."""
LARGEST_RESULT = 8_000_000
"""Maximum characters and bytes of all rows of a result."""
MOST_ROWS = 100_000
"""Maximum number of rows of a right answer."""
MAX_COPIES = 1_000
"""How often SQLite may copy the tables of `WITH`, one for each use: tables that use each other twice double it."""
CELL_CHARACTERS = 200
"""Maximum number of characters shown of one value."""

_SQL = re.compile(r"<sql>(.*?)</sql>", re.DOTALL)
_READS = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE)
_NOT_CALLED = {"fts3_tokenizer", "load_extension", "random", "randomblob", "format", "printf"}
"""Functions that are refused: unsafe, not deterministic, or (`printf`) slow within one step."""

_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: LONGEST_VALUE,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 500,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: LONGEST_QUERY,
    sqlite3.SQLITE_LIMIT_COLUMN: 500,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 200_000,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
}
"""SQLite's own limits: bytes of a value, a pattern and the query, columns, compiled steps, other databases."""
_TOKEN = re.compile(
    r"'[^']*(?:'|\Z)|--[^\n]*|/\*.*?(?:\*/|\Z)|\"[^\"]*(?:\"|\Z)|`[^`]*(?:`|\Z)|\[[^\]]*(?:\]|\Z)|\w+|[()]", re.DOTALL
)

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
        seconds: Maximum CPU time of the thread.

    Raises:
        ValueError: The query is invalid, writes, or exceeds a limit; the message says which.
    """
    over = refused = ""
    left = steps // STEPS_PER_CHECK
    if len(sql) <= LONGEST_QUERY and _copies(sql) > MAX_COPIES:
        raise ValueError(
            f"The tables of WITH use each other too often: more than {MAX_COPIES} copies. Name fewer of them."
        )

    def check() -> int:
        nonlocal left, over
        left -= 1
        if left < 0:
            over = f"The query takes more than {steps} steps. Read fewer rows, or join on keys."
        return 1 if over else 0

    def stop() -> None:
        nonlocal over
        over = f"The query takes more than {seconds:g} s."
        connection.interrupt()

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
        for limit, most in _LIMITS.items():
            connection.setlimit(limit, most)
        connection.set_authorizer(allow)
        connection.set_progress_handler(check, STEPS_PER_CHECK)
        try:
            with _stopped_after(seconds, stop):
                cursor = connection.execute(sql)
                fetched = _fetched(cursor, rows + 1)
        except (sqlite3.Error, sqlite3.Warning, OverflowError, UnicodeError, MemoryError) as problem:
            raise ValueError(over or refused or str(problem) or "The query is too large.") from None
        if cursor.description is None:
            raise ValueError("The query gives no rows: write one SELECT.")
        return Rows([column[0] for column in cursor.description], fetched[:rows], len(fetched) > rows)


def _fetched(cursor: sqlite3.Cursor, most: int) -> list[tuple[Any, ...]]:
    """The first rows of a result.

    Raises:
        ValueError: They are larger than `LARGEST_RESULT`.
    """
    rows: list[tuple[Any, ...]] = []
    size = 0
    for row in islice(cursor, most):
        rows.append(row)
        size += sum(len(value) for value in row if isinstance(value, str | bytes))
        if size > LARGEST_RESULT:
            raise ValueError(f"The result is larger than {LARGEST_RESULT:,} characters. Select less.")
    return rows


@contextmanager
def _stopped_after(seconds: float, stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` in another thread once this one has taken so much CPU time (macOS and Windows: so much time)."""
    ended = threading.Event()
    clock = getattr(time, "pthread_getcpuclockid", None)
    used = partial(time.clock_gettime, clock(threading.get_ident())) if clock is not None else time.monotonic
    deadline = used() + seconds

    def watch() -> None:
        while not ended.wait(max(deadline - used(), 0)):
            if used() >= deadline:
                stop()
                break

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _copies(sql: str) -> int:
    """At least as many copies of the tables of `WITH` as SQLite makes; more than `MAX_COPIES` if there are many."""
    words = [word.strip("'\"`[]").lower() for word in _TOKEN.findall(sql) if not word.startswith(("--", "/*"))]
    if "with" not in words:
        return 0
    uses: dict[str, Counter[str]] = {"": Counter()}
    inside, depth = [("", 0)], 0
    for at, word in enumerate(words):
        if word == "(" and (name := _defined(words, at)):
            uses.setdefault(name, Counter())
            inside.append((name, depth))
        depth += {"(": 1, ")": -1}.get(word, 0)
        if len(inside) > 1 and word == ")" and depth == inside[-1][1]:
            inside.pop()
        uses[inside[-1][0]][word] += 1
    copies_of: dict[str, int] = {}

    def copies(name: str, above: tuple[str, ...]) -> int:
        if name in above:
            return 0
        if name not in copies_of:
            copied = sum(n * copies(used, (*above, name)) for used, n in uses[name].items() if used in uses)
            copies_of[name] = min(1 + copied, MAX_COPIES + 1)
        return copies_of[name]

    try:
        return copies("", ())
    except RecursionError:
        return MAX_COPIES + 1


def _defined(words: list[str], at: int) -> str:
    """The table of `WITH` whose body begins with the parenthesis at `at`; empty if none does."""
    at -= 1
    while at > 0 and words[at] in ("materialized", "not"):
        at -= 1
    if at < 1 or words[at] != "as":
        return ""
    at -= 1
    if words[at] == ")":
        while at > 0 and words[at] != "(":
            at -= 1
        at -= 1
    return words[at] if at >= 0 else ""


def same_rows(one: list[tuple[Any, ...]], other: list[tuple[Any, ...]], ordered: bool) -> bool:
    """Whether two results are equal: names of columns do not matter, numbers are compared to six decimals."""

    def key(row: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(round(value, 6) if isinstance(value, float) else value for value in row)

    ours, theirs = list(map(key, one)), list(map(key, other))
    return ours == theirs if ordered else Counter(ours) == Counter(theirs)


class TextToSql:
    """Asks a question about a database and grades the answer.

    A task has `question` and `sql` (a right query), and may have `ordered` (the order of the rows matters; default
    false).

    Args:
        database: Path of a SQLite file, relative to the current folder. `{name}` is replaced by the task's field: a
            data set with one database for each task is `database/{db_id}/{db_id}.sqlite`. Left out: the shop of the
            task's field `shop`.
        also: Paths of other databases with the same tables, in which an answer must be right too. Each shop has such a
            database.
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
                f"tries is {tries}, rows {rows}, steps {steps}, seconds {seconds}; write at least 1, 1, "
                f"{STEPS_PER_CHECK} and more than 0"
            )
        self._paths = [database, *(also or [])] if database is not None else []
        if also and database is None:
            raise ValueError("`also` names databases beside `database`; write `database` too")
        self._tries = tries
        self._correct = correct
        self._runs = runs
        self._rows = rows
        self._run = partial(run_query, steps=steps, seconds=seconds)

    def reset(self, task: Task, seed: int) -> Reset:
        """The question and the tables, as the user's first message."""
        for name in ("question", "sql"):
            if not isinstance(task.fields.get(name), str):
                raise ValueError(f"task {task.id!r} has no text `{name}`; write `question` and `sql`")
        for opened in self._databases(task):
            self._run(opened, task.fields["sql"], rows=MOST_ROWS)  # the task's own query must run
        listed = "SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL ORDER BY rowid"
        tables = self._run(self._databases(task)[0], listed, rows=200)
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
        return self._run(self._databases(view.task)[0], sql, rows=self._rows).shown()

    def step(self, view: EpisodeView) -> Step:
        """`done` after a right answer or the last try; otherwise `wrong`, with the error or without any detail."""
        tries = int(view.facts["tries"]) + 1
        answers = _SQL.findall(view.reply)
        runs, right, words = False, False, "There is no <sql>."
        if answers:
            runs, right, words = self._graded(view.task, answers[-1])
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
            wanted = self._run(opened, task.fields["sql"], rows=MOST_ROWS).rows
            try:
                given = self._run(opened, sql, rows=len(wanted) + 1)
            except ValueError as problem:
                return False, False, f"The query fails: {str(problem).rstrip('.')}."
            if not same_rows(given.rows, wanted, ordered):
                return True, False, "The query runs, but its rows are wrong."
        return True, True, ""

    def _databases(self, task: Task) -> list[Open]:
        """Functions that open the shown database and, after it, the databases for checking."""
        if self._paths:
            return [lambda path=path: _file(_filled(path, task)) for path in self._paths]  # type: ignore[misc]
        seed = task.fields.get("shop")
        if type(seed) is not int:
            raise ValueError(
                f"task {task.id!r}: `shop` is {seed!r}; write a whole number, as "
                "`engine.environments.text_to_sql:problems` "
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
