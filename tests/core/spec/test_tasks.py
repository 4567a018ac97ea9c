"""Rows become tasks, or the first bad one is named by number."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.errors import SpecError
from engine.schemas.environment import Task
from engine.spec.load import load_spec
from engine.spec.tasks import load_tasks

HEAD = "spec: episode/v1\nname: demo\nmodel: {path: org/m}\n"


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def tasks(source: str, *overrides: str) -> list[Task]:
    Path("s.yaml").write_text(HEAD + source)
    return load_tasks(load_spec("s.yaml", overrides))


def failure(source: str, *overrides: str) -> str:
    with pytest.raises(SpecError) as caught:
        tasks(source, *overrides)
    return str(caught.value)


def jsonl(rows: list[Any], name: str = "rows.jsonl") -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


ROWS = [{"q": "1+1", "a": 2, "key": "x"}, {"q": "2+2", "a": 4, "key": "y"}, {"q": "3+3", "a": 6, "key": "z"}]
EXPECTED = [
    Task(id="x", index=0, fields={"question": "1+1", "answer": 2}),
    Task(id="y", index=1, fields={"question": "2+2", "answer": 4}),
]
MAP = "map: {question: q, answer: a}, id: key, limit: 2"


def test_inline_rows() -> None:
    assert tasks(f"tasks: {{source: inline, rows: {json.dumps(ROWS)}, {MAP}}}\n") == EXPECTED


def test_rows_without_map_keep_every_field_and_are_numbered() -> None:
    assert tasks("tasks: {source: inline, rows: [{q: a}, {q: b}]}\n") == [
        Task(id="0", index=0, fields={"q": "a"}),
        Task(id="1", index=1, fields={"q": "b"}),
    ]


def test_jsonl_rows() -> None:
    jsonl(ROWS)
    assert tasks(f"tasks: {{source: jsonl, path: rows.jsonl, {MAP}}}\n") == EXPECTED


def test_jsonl_is_read_no_further_than_the_limit() -> None:
    Path("rows.jsonl").write_text('{"q": 1}\n\n{"q": 2}\nthis is no JSON\n')
    assert [task.fields["q"] for task in tasks("tasks: {source: jsonl, path: rows.jsonl, limit: 2}\n")] == [1, 2]


def test_parquet_rows_of_a_file_and_of_a_folder() -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(ROWS), "rows.parquet")
    assert tasks(f"tasks: {{source: parquet, path: rows.parquet, {MAP}}}\n") == EXPECTED
    Path("shards").mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS[:1]), "shards/0.parquet")
    pq.write_table(pa.Table.from_pylist(ROWS[1:]), "shards/1.parquet")
    assert tasks(f"tasks: {{source: parquet, path: shards, {MAP}}}\n") == EXPECTED


def test_python_rows() -> None:
    Path("row_source.py").write_text("def rows(n):\n    for i in range(n):\n        yield {'i': i}\n")
    found = tasks("tasks: {source: python, use: 'row_source:rows', with: {n: 3}, limit: 2}\n")
    assert [task.fields for task in found] == [{"i": 0}, {"i": 1}]


@pytest.mark.slow
def test_hub_rows_of_a_local_folder() -> None:
    pytest.importorskip("datasets")
    Path("set").mkdir()
    jsonl(ROWS, "set/train.jsonl")
    assert tasks(f"tasks: {{source: hub, path: set, {MAP}}}\n") == EXPECTED
    assert len(tasks("tasks: {source: hub, path: set}\n")) == 3


def test_the_hub_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert failure("tasks: {source: hub, path: org/set}\n") == (
        "s.yaml:4:28: error[tasks.hub] `source: hub` needs the package `datasets`; pip install 'episode-engine[hub]'"
    )


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (
            ['{"q": 1}', "{", '{"q": 2}'],
            "rows.jsonl:2:2: error[tasks.bad-row] row 2 is no JSON: Expecting property name enclosed in double quotes",
        ),
        (
            ['{"q": 1}', "", "[1]"],
            "rows.jsonl:3:1: error[tasks.bad-row] row 2 is no mapping of names to values, but list",
        ),
        (
            ['{"q": 1}', '{"qq": 1}'],
            "rows.jsonl:2:1: error[tasks.missing-field] row 2 has no field `q`; did you mean `qq`?",
        ),
        (['{"q": 1}', '{"x": 1}'], "rows.jsonl:2:1: error[tasks.missing-field] row 2 has no field `q`; its fields: x"),
    ],
)
def test_the_first_bad_row_is_named_by_number_and_line(lines: list[str], error: str) -> None:
    Path("rows.jsonl").write_text("\n".join(lines))
    assert failure("tasks: {source: jsonl, path: rows.jsonl, map: {question: q}}\n") == f"{Path.cwd()}/{error}"


def test_a_row_that_is_not_utf8() -> None:
    Path("rows.jsonl").write_bytes(b'{"q": 1}\n{"q": "\xff"}\n')
    assert failure("tasks: {source: jsonl, path: rows.jsonl}\n") == (
        f"{Path.cwd()}/rows.jsonl:2:1: error[tasks.bad-row] row 2 is not UTF-8 (byte 7)"
    )


def test_ids_must_differ() -> None:
    assert failure("tasks: {source: inline, id: k, rows: [{k: 1}, {k: 2}, {k: '1'}]}\n") == (
        "s.yaml:4:55: error[tasks.duplicate-id] rows 1 and 3 share the id `1`; "
        "name a field of unique values under `tasks.id`, or leave it out"
    )


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{q: 1}", "error[tasks.missing-field] row 1 has no field `k`, which `tasks.id` names; its fields: q"),
        ("{k: [1]}", "error[tasks.bad-row] row 1: the id `k` must be text or a whole number; it is [1]"),
        ("{k: ''}", "error[tasks.bad-row] row 1: the id `k` must be text or a whole number; it is ''"),
        ("{k: true}", "error[tasks.bad-row] row 1: the id `k` must be text or a whole number; it is True"),
    ],
)
def test_ids_that_are_none(row: str, words: str) -> None:
    assert failure(f"tasks: {{source: inline, id: k, rows: [{row}]}}\n") == f"s.yaml:4:39: {words}"


def test_a_missing_file_names_the_nearest() -> None:
    Path("data").mkdir()
    jsonl(ROWS, "data/rows.jsonl")
    assert failure("tasks: {source: jsonl, path: data/row.jsonl}\n") == (
        "s.yaml:4:30: error[tasks.no-file] the task file `data/row.jsonl` does not exist; did you mean `data/rows.jsonl`?"
    )


def test_a_file_that_is_no_parquet() -> None:
    Path("x.parquet").write_text("no")
    assert failure("tasks: {source: parquet, path: x.parquet}\n").startswith(
        f"s.yaml:4:32: error[tasks.bad-file] `{Path.cwd()}/x.parquet` cannot be read as Parquet: "
    )


def test_a_source_that_raises_is_named_with_its_row() -> None:
    Path("bad_source.py").write_text("def rows():\n    yield {'a': 1}\n    raise KeyError('gone')\n")
    assert failure("tasks: {source: python, use: 'bad_source:rows'}\n") == (
        "s.yaml:4:30: error[tasks.python] `bad_source:rows` failed at row 2: KeyError: 'gone'"
    )
    assert failure("tasks: {source: python, use: 'bad_source:row'}\n") == (
        "s.yaml:4:30: error[code.import] `bad_source` has no `row`; did you mean `rows`?"
    )


def test_no_rows_is_an_error() -> None:
    assert (
        failure("tasks: {source: inline, rows: []}\n") == "s.yaml:4:1: error[tasks.empty] the task source has no rows"
    )


def test_an_overridden_path_is_relative_to_the_current_folder() -> None:
    Path("specs").mkdir()
    jsonl(ROWS, "specs/a.jsonl")
    jsonl(ROWS[:1], "b.jsonl")
    Path("specs/s.yaml").write_text(HEAD + "tasks: {source: jsonl, path: a.jsonl}\n")
    assert len(load_tasks(load_spec("specs/s.yaml"))) == 3
    assert len(load_tasks(load_spec("specs/s.yaml", ["tasks.path=b.jsonl"]))) == 1
