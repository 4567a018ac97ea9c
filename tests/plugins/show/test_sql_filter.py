"""What SQL decides about an episode is what the evaluator of guards decides: random values, random expressions."""

from __future__ import annotations

import json
import random
import sqlite3
from types import SimpleNamespace
from typing import Any

import pytest

from engine.errors import GuardError, StoreError
from engine.machine.guards import Guard
from engine.plugins.show.listing.filters import _NAMES as NAMES
from engine.plugins.show.listing.filters import _ROW as ROW
from engine.plugins.show.listing.filters import LISTING_VARIABLES, SqlFilter, _context, tables_of
from engine.store import database, summaries
from engine.store.codec import json_of
from engine.store.episode_filter import compile_filter

LIMITS = {"assistant_turns": 3, "turn_tokens": 9007199254740991, "time": 2.5}
NUMBERS: list[Any] = [0, 1, -1, 2, 3, 2**53, 2**53 + 1, 2**63 - 1, -(2**63), 0.0, -0.0, 0.1, 0.3, 0.1 + 0.2, 1.0, 1e300, 5e-324,
                      1 / 3, 2.5, 1e16, 123456789.123456789]  # fmt: skip
TEXTS = ["", "a", "b", "ab", "é", "Ä", "\U0001f600", "z\u0000z", "q\"'\\", "line\nline", "NaN", "null", "1"]
OTHERS: list[Any] = [
    None,
    True,
    False,
    [],
    [1],
    {},
    {"x": 1, "y": "b"},
    2**70,
    -(2**70),
    float("nan"),
    float("inf"),
    -float("inf"),
]
KEYS = ["x", "y", "é", "a b", "q'", "x.y"]
FIELDS = [
    f"{name}.{field}"
    for name, field in (
        ("outcome", "reward"), ("outcome", "solved_turn"), ("episode", "sample"), ("episode", "attempt"), ("episode", "seconds"), ("episode", "branches"),
        ("episode", "trained"), ("episode", "version"), ("limits", "assistant_turns"), ("limits", "time"), ("run", "step"),
    )
]  # fmt: skip
WORDS = ["outcome.limit", "outcome.failure", "outcome.event", "episode.id", "episode.task", "episode.status", "run.id"]


def value(rng: random.Random) -> Any:
    return rng.choice((*NUMBERS, *TEXTS, *OTHERS, rng.random(), rng.randrange(5), round(rng.random(), 2)))


def store(rng: random.Random, rows: int) -> sqlite3.Connection:
    """Tables of a run with random episodes."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.executescript(database._TABLES + summaries.TABLE)
    connection.execute("ATTACH ':memory:' AS side")
    connection.execute("CREATE TABLE side.steps (source, task, step, PRIMARY KEY (source, task))")
    for number in range(1, rows + 1):
        fields = {key: value(rng) for key in KEYS if rng.random() < 0.7}
        facts, rewards = ({key: value(rng) for key in KEYS if rng.random() < 0.7} for _ in range(2))
        rewards = {key: number for key, number in rewards.items() if type(number) in (int, float)}
        task = f"t{number}-{rng.choice(TEXTS)}"
        connection.execute("INSERT INTO tasks VALUES (?, ?, ?)", (task, number, json_of(fields)))
        done = rng.random() < 0.9
        failed = rng.random() < 0.5
        connection.execute(
            f"INSERT INTO episodes VALUES ({', '.join('?' * 20)})",
            (number, f"{task}/0", task, number, rng.randrange(4), 1, "done" if done else "running", rng.randrange(2), "DONE",
             rng.choice(TEXTS), rng.choice([None, *TEXTS]), "f" if failed else None, "b" if failed else None, rng.random() < 0.5,
             rng.choice([0, 1, None]), rng.choice([*NUMBERS, float("inf"), float("nan")]), rng.randrange(4), 5, rng.choice([None, 1.5]),
             rng.choice([None, 4.0])),
        )  # fmt: skip
        if rng.random() < 0.5:
            connection.execute("INSERT INTO side.steps VALUES (1, ?, ?)", (task, rng.randrange(3)))
        some = {name: rng.choice([0, 1, 2, 3]) for name in summaries.COLUMNS}
        some |= {
            "solved_turn": rng.choice([None, 0, 1]),
            "version": rng.choice([None, 0, 2]),
            "rewards": json_of(rewards),
        }
        some |= {"facts": json_of(facts), "message": None}
        connection.execute("INSERT INTO summaries SELECT ?, (SELECT attempt FROM episodes WHERE number = ?), "
                           f"{', '.join('?' * len(some))}", (number, number, *some.values()))  # fmt: skip
    return connection


def literal(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.5:
        number = rng.choice([*NUMBERS[:8], *NUMBERS[9:], rng.randrange(5), round(rng.random(), 2)])
        return repr(number) if number >= 0 else f"-{abs(number)!r}"
    if kind < 0.8:
        return json.dumps(rng.choice([*TEXTS[:7], TEXTS[8], *TEXTS[10:]]), ensure_ascii=False)
    return rng.choice(["true", "false", "null"])


def operand(rng: random.Random) -> str:
    key = rng.choice(KEYS)
    base = rng.choice(["facts", "task", "outcome.rewards", 'facts["x"]'])
    path = (
        f"{base}[{json.dumps(key, ensure_ascii=False)}]"
        if not key.isidentifier() or rng.random() < 0.3
        else f"{base}.{key}"
    )
    return rng.choice([path, path, path, rng.choice(FIELDS), rng.choice(WORDS)])


def condition(rng: random.Random, depth: int = 0) -> str:
    kind = rng.random()
    if depth < 3 and kind < 0.4:
        return f"({condition(rng, depth + 1)} {rng.choice(['&&', '||'])} {condition(rng, depth + 1)})"
    if depth < 3 and kind < 0.5:
        return f"!({condition(rng, depth + 1)})"
    if kind < 0.58:
        return f"has({rng.choice(['facts', 'task', 'outcome.rewards', 'facts.x'])}.{rng.choice(['x', 'y', 'z'])})"
    if kind < 0.66:
        return f"{operand(rng)} in [{literal(rng)}, {literal(rng)}]"
    if kind < 0.74:
        word = json.dumps(rng.choice(TEXTS[:7]), ensure_ascii=False)
        return f"{operand(rng)}.{rng.choice(['contains', 'startsWith', 'endsWith'])}({word})"
    if kind < 0.8:
        return rng.choice(["outcome.solved", "episode.trainable", "run.evaluation", operand(rng)])
    pair = [operand(rng), literal(rng)] if rng.random() < 0.85 else [operand(rng), operand(rng)]
    rng.shuffle(pair)
    return f"{pair[0]} {rng.choice(['==', '!=', '<', '<=', '>', '>='])} {pair[1]}"


@pytest.mark.parametrize("seed", range(4))
def test_sql_and_the_evaluator_agree(seed: int) -> None:
    rng = random.Random(seed)
    connection = store(rng, 60)
    constants = {"run": {"id": "r", "evaluation": False}, "limits": LIMITS}
    parameters = {"source": 1, "step": None}
    rows = [
        dict(zip(NAMES, row, strict=True))
        for row in connection.execute(f"SELECT {ROW} {tables_of('episodes e', ROW)} ORDER BY e.number", parameters)
    ]
    decided = valid = 0
    for _ in range(250):
        expression = condition(rng)
        try:
            guard = compile_filter(expression, "filter", LISTING_VARIABLES)
        except StoreError:  # types do not fit
            continue
        valid += 1
        in_sql = SqlFilter(expression, constants)
        query = f"SELECT {in_sql.sql} {tables_of('episodes e', in_sql.sql)} ORDER BY e.number"
        answers = [answer for (answer,) in connection.execute(query, parameters | in_sql.parameters)]
        decided += sum(answer is not None for answer in answers)
        for number, (row, answer) in enumerate(zip(rows, answers, strict=True), 1):
            if answer is not None and row["status"] == "done":
                assert bool(answer) is evaluated(guard, number, row, constants), (expression, row)
    assert decided > 0.3 * valid * len(rows)


def evaluated(guard: Guard, number: int, row: dict[str, Any], constants: dict[str, Any]) -> bool | None:
    names = guard.names & {"facts", "outcome", "task", "limits", "episode", "run"}
    contents = SimpleNamespace(review_facts=lambda _: {})  # nothing else is read of the content
    context = _context(names, number, row, contents, constants)  # type: ignore[arg-type]
    try:
        return guard.evaluate(context)
    except GuardError:
        return None
