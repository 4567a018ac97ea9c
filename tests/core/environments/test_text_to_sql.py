"""Text to SQL: queries read and nothing else, are bounded, and answers are graded by their rows in more than one database."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from engine.environments.text_to_sql import Rows, TextToSql, problems, run_query, same_rows, shop
from engine.schemas.environment import Environment, EpisodeView, Step, Task
from engine.schemas.reward import RewardEvent

View = Callable[..., EpisodeView]
LEEDS = "SELECT COUNT(*) FROM customers WHERE city = 'Leeds'"
TASK = Task(id="t", index=0, fields={"question": "How many customers live in Leeds?", "sql": LEEDS, "shop": 1})


def opened(seed: int = 1) -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:")
    connection.deserialize(shop(seed))
    return connection


def ran(sql: str, rows: int = 5, steps: int = 200_000) -> Rows:
    return run_query(opened, sql, rows=rows, steps=steps, seconds=60)


def test_problems_and_databases_are_the_same_for_the_same_arguments() -> None:
    first = next(problems(1))
    assert first == {
        "id": "sql-0-0000",
        "question": "What is the value (price times quantity, summed) of order 11?",
        "sql": "SELECT SUM(price * quantity) FROM items JOIN products ON products.id = product_id WHERE order_id = 11",
        "ordered": False,
        "shop": 479186,
    }
    assert ran("SELECT * FROM customers", rows=1) == Rows(["id", "name", "city"], [(1, "Eli Berg", "Aarhus")], True)
    assert shop(1) != shop(-2)


def test_every_question_is_answered_by_its_own_query() -> None:
    asked = set()
    for held_out in (False, True):
        rows = list(problems(60, held_out=held_out))
        for row in rows[:8]:
            TextToSql().reset(Task(id=row["id"], index=0, fields=row), 0)
        asked |= {(row["question"], held_out) for row in rows}
    assert len({question for question, _ in asked}) == len(asked)  # none is both trained on and held out


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM customers",
        "UPDATE customers SET name = ''",
        "INSERT INTO customers VALUES (99, 'a', 'b')",
        "DROP TABLE items",
        "CREATE TEMP TABLE x (y)",
        "CREATE VIEW x AS SELECT 1",
        "ATTACH '/tmp/other.db' AS other",
        "VACUUM INTO '/tmp/other.db'",
        "PRAGMA writable_schema = 1",
        "SELECT name FROM pragma_table_info('items')",
        "BEGIN",
    ],
)
def test_nothing_but_reading_is_allowed(sql: str) -> None:
    with pytest.raises(ValueError, match=r"^Only reading is allowed: write one SELECT\.$"):
        ran(sql)


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("SELECT 1; DELETE FROM items", "one statement at a time"),
        ("SELECT load_extension('x')", "The function load_extension is not allowed."),
        ("SELECT random()", "The function random is not allowed."),
        ("SELECT printf('%.*c', 900000000, 'x')", "The function printf is not allowed."),
        ("SELECT readfile('/etc/passwd')", "no such function: readfile"),
        ("SELECT zeroblob(1000000000)", "string or blob too big"),
        ("SELECT group_concat(a.name) FROM customers a, customers b, customers c", "string or blob too big"),
        ("", "gives no rows"),
        ("SELEC", "syntax error"),
        ("SELECT '\ud800'", "surrogates not allowed"),
        ("SELECT '\x00'", "null character"),
        ("SELECT CAST(x'ff' AS TEXT)", "Could not decode"),
        (
            "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT COUNT(*) FROM c",
            "more than 200000 steps",
        ),
        ("SELECT * FROM items a, items b, items c ORDER BY a.quantity", "more than 200000 steps"),
    ],
)
def test_what_is_wrong_with_a_query_is_said(sql: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the message is compared)
        ran(sql)
    assert words in str(caught.value)


def test_wild_cards_cannot_hang_a_query() -> None:
    assert ran("SELECT hex(zeroblob(9900)) LIKE '%0%0%0%0%0%0%1'").rows == [(0,)]


PAIRS = "FROM items a, items b WHERE"
TEXT, OTHER = "hex(zeroblob(9900)) || a.quantity", "hex(zeroblob(4900)) || b.quantity || 'x'"
CHARACTERS = "replace(hex(zeroblob(700)), '0', 'x') || '0' || b.quantity"
BIG = "SELECT 1, hex(zeroblob(9900))"
SLOW_STEPS = {
    "like": f"SELECT COUNT(*) {PAIRS} {TEXT} LIKE '%' || hex(zeroblob(120)) || '1' || b.quantity || '%'",
    "glob": f"SELECT COUNT(*) {PAIRS} {TEXT} GLOB '*' || hex(zeroblob(120)) || '[1-9]' || b.quantity || '*'",
    "replace": f"SELECT COUNT(*) {PAIRS} replace({TEXT}, {OTHER}, '') = 'q'",
    "instr": f"SELECT COUNT(*) FROM items c, items d, items a, items b WHERE instr({TEXT}, {OTHER}) = 7",
    "trim": f"SELECT COUNT(*) {PAIRS} trim({TEXT}, {CHARACTERS}) = 'q'",
    "endless": f"WITH RECURSIVE c(i, x) AS ({BIG} UNION ALL SELECT i + 1, x || '' FROM c) SELECT COUNT(*) FROM c",
    "distinct": f"WITH RECURSIVE c(i, x) AS ({BIG} UNION SELECT i + 1, x FROM c) SELECT COUNT(*) FROM c",
    "sort": f"WITH RECURSIVE c(i, x) AS ({BIG} UNION ALL SELECT i + 1, x FROM c LIMIT 400000) SELECT x || i FROM c ORDER BY 1",
}
"""Queries whose single steps take long, or move much."""


@pytest.mark.parametrize("name", [*SLOW_STEPS])
def test_a_query_of_slow_steps_is_ended_by_its_time(name: str) -> None:
    with pytest.raises(ValueError, match=r"^The query takes more than 0\.05 s\.$"):
        run_query(opened, SLOW_STEPS[name], rows=5, steps=10**9, seconds=0.05)


def _doubled(count: int, first: str = "a0", second: str = "a1") -> str:
    """Tables of WITH, each of which uses the one before it twice."""
    names = [first, second, *(f"a{at}" for at in range(2, count))]
    bodies = [f"{new} AS (SELECT x FROM {old} UNION ALL SELECT x FROM {old})" for old, new in pairwise(names)]
    return f"WITH {first} AS (SELECT 1 AS x), {', '.join(bodies)} SELECT COUNT(*) FROM {names[-1]}"


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("SELECT hex(zeroblob(9900)) LIKE '%' || hex(zeroblob(9000)) || '1'", "LIKE or GLOB pattern too complex"),
        ("SELECT 1 GLOB '*' || hex(zeroblob(9000))", "LIKE or GLOB pattern too complex"),
        (f"SELECT {', '.join(['hex(zeroblob(9900))'] * 400)} FROM items", "larger than 8,000,000 characters"),
        (f"SELECT {', '.join(['1'] * 501)}", "too many columns in result set"),
        (f"SELECT 1 {' ' * 50_000}", "query string is too large"),
        (f"SELECT {'(' * 20_000}1{')' * 20_000}", "parser stack overflow"),
        (_doubled(40), "more than 1000 copies"),
        (_doubled(40, "'a b'", '"c ""d"'), "more than 1000 copies"),
        (_doubled(40).replace(" AS (", "(x) AS /* as ( */ NOT MATERIALIZED ("), "more than 1000 copies"),
        (", ".join(reversed(_doubled(40).removeprefix("WITH ").partition(" SELECT COUNT")[0].split(", "))).join(["WITH ", " SELECT x FROM a39"]), "more than 1000 copies"),
        ("SELECT 1 " + "/*'" * 12_000, "too big"),
    ],
)  # fmt: skip
def test_what_would_take_much_memory_is_refused(sql: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the message is compared)
        run_query(opened, sql, rows=1_000, steps=10**7, seconds=60)
    assert words in str(caught.value)


def test_usual_tables_of_with_are_allowed() -> None:
    assert ran(_doubled(6)).rows == [(32,)]
    tables = "a AS (SELECT city FROM customers), b AS (SELECT city, COUNT(*) AS n FROM a GROUP BY city)"
    assert len(ran(f"WITH {tables} SELECT * FROM b WHERE n = (SELECT MAX(n) FROM b)").rows) >= 1
    counted = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < 9) SELECT MAX(x) FROM c"
    assert ran(counted).rows == [(9,)]


MEMORY = """
import resource, sqlite3, sys
from engine.environments.text_to_sql import shop
from engine.environments.text_to_sql import run_query

def opened():
    connection = sqlite3.connect(":memory:")
    connection.deserialize(shop(1))
    return connection

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for sql in sys.argv[1:]:
    try:
        run_query(opened, sql, rows=1_000, steps=10_000_000, seconds=1)
    except ValueError as error:
        print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.slow
def test_no_query_takes_more_than_a_hundred_megabytes() -> None:
    queries = [*SLOW_STEPS.values(), _doubled(40), f"SELECT {', '.join(['hex(zeroblob(9900))'] * 400)} FROM items"]
    queries.append(f"SELECT group_concat(x, '') FROM ({BIG.replace('1,', 'id AS i,')} AS x FROM items)")
    ended = subprocess.run([sys.executable, "-c", MEMORY, *queries], capture_output=True, text=True, check=True)
    *words, megabytes = ended.stdout.splitlines()
    assert len(words) == len(queries)
    assert int(megabytes) < 100


def test_rows_are_shown_up_to_a_limit() -> None:
    shown = ran("SELECT 1 AS a, NULL AS b, x'0aff' AS c, 1.5 AS d UNION ALL SELECT 2, 'x', 'y', 'z'", rows=1).shown()
    assert shown == "a | b | c | d\n1 | NULL | x'0aff' | 1.5\n(more rows; only the first 1 are shown)"
    assert ran("SELECT 1 AS a WHERE 0").shown() == "a\n(no rows)"
    assert ran("SELECT hex(zeroblob(200)) AS a").shown() == "a\n" + "0" * 200 + "…"


@pytest.mark.parametrize(
    ("one", "other", "ordered", "same"),
    [
        ([(1,), (2,)], [(2,), (1,)], False, True),
        ([(1,), (2,)], [(2,), (1,)], True, False),
        ([(1,)], [(1,), (1,)], False, False),
        ([(1,)], [(1.0000000001,)], False, True),
        ([("1",)], [(1,)], False, False),
        ([(None,)], [(0,)], False, False),
        ([("a", 1)], [(1, "a")], False, False),
    ],
)
def test_results_are_compared_by_rows(one: list[Any], other: list[Any], ordered: bool, same: bool) -> None:
    assert same_rows(one, other, ordered) is same


def test_an_answer_must_be_right_in_the_hidden_database_too(view: View) -> None:
    (shown,), (hidden,) = (run_query(lambda seed=seed: opened(seed), LEEDS, rows=9, steps=10**5, seconds=60).rows for seed in (1, -2))  # type: ignore[misc]  # fmt: skip
    assert shown != hidden
    env = TextToSql()
    assert isinstance(env, Environment)
    facts = env.reset(TASK, 0).facts
    step = env.step(view(TASK, f"<sql>SELECT {shown[0]}</sql>", facts=facts))
    assert step.event == "wrong"
    assert step.rewards == [RewardEvent(name="runs", value=0.1, cause="a query without error")]
    assert env.step(view(TASK, "x", f"<sql>{LEEDS};</sql>", facts=step.facts)) == Step(
        event="done",
        rewards=[RewardEvent(name="correct", value=1.0, cause="right at try 2")],
        facts={"tries": 2, "runs": True, "solved": True},
    )


def test_a_file_is_opened_for_reading_by_a_field_of_the_task(tmp_path: Path, view: View) -> None:
    (tmp_path / "birds").mkdir()
    path = tmp_path / "birds" / "birds.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("CREATE TABLE birds (name TEXT); INSERT INTO birds VALUES ('owl');")
    before = path.read_bytes()
    env = TextToSql(database=str(tmp_path / "{db_id}" / "{db_id}.sqlite"))
    task = Task(id="t", index=0, fields={"question": "Which?", "sql": "SELECT name FROM birds", "db_id": "birds"})
    assert "CREATE TABLE birds (name TEXT);" in str(env.reset(task, 0).messages[0].content)
    assert env.query("SELECT * FROM birds", view(task, "")) == "name\nowl"
    with pytest.raises(ValueError, match="Only reading"):
        env.query("DELETE FROM birds", view(task, ""))
    assert (path.read_bytes(), list(path.parent.iterdir())) == (before, [path])
    for name, problem in [("../birds", "needs a name without slashes"), ("bees", "there is no database")]:
        other = task.model_copy(update={"fields": {**task.fields, "db_id": name}})
        with pytest.raises((ValueError, FileNotFoundError), match=problem):
            env.reset(other, 0)


@pytest.mark.parametrize("changes", [{"tries": 0}, {"rows": 0}, {"steps": 10}, {"seconds": 0}])
def test_limits_without_sense_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="write at least"):
        TextToSql(**changes)
    with pytest.raises(ValueError, match="write `database` too"):
        TextToSql(also=["x.sqlite"])


@pytest.mark.parametrize("fields", [{}, {"question": "a", "sql": 1}, {"question": "a", "sql": "SELECT 1"}])
def test_a_task_that_is_not_whole_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="task 't'"):
        TextToSql().reset(Task(id="t", index=0, fields=fields), 0)
