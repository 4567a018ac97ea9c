"""Prompts name fields that tasks have; files and rows are there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engine.spec.load import load_spec
from engine.validate import check_spec

pytestmark = pytest.mark.usefixtures("in_folder")


def found(tasks: str, prompt: str = "", lines: str = "", *overrides: str) -> list[str]:
    text = f"spec: episode/v1\nname: demo\nmodel: {{path: org/m}}\nmachine: single_turn\ntasks: {{{tasks}}}\n"
    text += f"prompt:\n  - role: user\n    content: {prompt}\n" if prompt else ""
    Path("s.yaml").write_text(text + lines)
    return [
        str(item).removeprefix("s.yaml:")
        for item in check_spec(load_spec("s.yaml", overrides))
        if item.severity != "info"
    ]


def test_fields_of_rows_and_of_map() -> None:
    assert found("source: inline, rows: [{q: a, meta: {level: 1}}]", '"{{q}} {{meta.level}} \\\\{{x}}"') == []
    assert found("source: inline, map: {q: question}, rows: [{question: {text: a}}]", '"{{q.text}}"') == []


@pytest.mark.parametrize(
    ("tasks", "prompt", "problem"),
    [
        (
            "source: inline, map: {question: q}, rows: [{q: a}]",
            '"ask {{q}}"',
            "8:19: error[prompt.unknown-field] tasks have no field `q`; known: question",
        ),
    ],
)
def test_fields_that_tasks_do_not_have(tasks: str, prompt: str, problem: str) -> None:
    assert found(tasks, prompt) == [problem]


def test_the_first_row_of_a_jsonl_file_is_looked_at() -> None:
    Path("rows.jsonl").write_text('{"question": "a"}\n{"qestion": "b"}\n')
    assert found("source: jsonl, path: rows.jsonl", "'{{question}}'") == []
    assert found("source: jsonl, path: rows.jsonl", "'{{qestion}}'") == [
        "8:15: error[prompt.unknown-field] row 1 has no field `qestion`; did you mean `question`?"
    ]


def test_the_words_for_a_malformed_call_have_their_own_fields() -> None:
    lines = "recover: {malformed: 'no: {{problem}} {{raw}} {{question}}'}\n"
    assert found("source: inline, rows: [{question: a}]", "hi", lines) == [
        "9:47: error[prompt.unknown-field] there is no field `question` here; known: problem, raw, task.<field>"
    ]


USER = "machine: retry_with_feedback\nuser: {use: 'picky:Picky'}\n"


@pytest.fixture
def picky(in_folder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user that says what its templates are filled with, and never uses `no_answer`."""
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.delitem(sys.modules, "picky", raising=False)
    Path("picky.py").write_text(
        "class Picky:\n    recover_fields = {'wrong': ('answer',)}\n    def respond(self, view): ...\n"
    )


def recovering(recover: str) -> list[str]:
    head = "spec: episode/v1\nname: demo\nmodel: {path: org/m}\n" + USER + "tasks: {source: inline, rows: [{q: a}]}\n"
    Path("s.yaml").write_text(head + "prompt: [{role: user, content: hi}]\nrecover:\n" + recover)
    return [str(item).removeprefix("s.yaml:") for item in check_spec(load_spec("s.yaml")) if item.severity != "info"]


@pytest.mark.usefixtures("picky")
def test_words_of_recover_name_what_the_user_and_the_task_have() -> None:
    Path("seen.png").write_bytes(b"")
    parts = "  wrong:\n    - {type: text, text: 'no {{answer}} to {{task.q}}'}\n    - {type: image, image: seen.png}\n"
    assert recovering(parts) == []
    assert recovering("  wrong: 'no {{anwser}} {{task.r}}'\n") == [
        "9:14: error[prompt.unknown-field] there is no field `anwser` here; did you mean `answer`?",
        "9:25: error[prompt.unknown-field] row 1 has no field `r`; known: q",
    ]
    assert recovering("  wrong:\n    - {type: text, text: '{{anwser}}'}\n    - {type: image, image: gone.png}\n") == [
        "10:27: error[prompt.unknown-field] there is no field `anwser` here; did you mean `answer`?",
        f"11:28: error[spec.no-file] the file `gone.png` does not exist; looked for {Path.cwd()}/gone.png",
    ]


@pytest.mark.usefixtures("picky")
def test_words_that_nobody_says_are_pointed_out() -> None:
    assert recovering("  no_answer: 'what?'\n") == [
        "9:3: warning[recover.unused] `recover.no_answer` has no effect: `picky:Picky` never says it; remove it"
    ]


@pytest.mark.parametrize(
    ("tasks", "problem"),
    [
        (
            "source: parquet, path: r.parquet",
            "5:32: error[tasks.unreadable] the task file `r.parquet` does not exist; looked for {}/r.parquet",
        ),
        (
            "source: inline, rows: [{q: a}, {x: b}], map: {p: q}",
            "5:40: error[tasks.unreadable] row 2 has no field `q`; its fields: x",
        ),
        (
            "source: inline, rows: [{q: a}], id: k",
            "5:32: error[tasks.unreadable] row 1 has no field `k`, which `tasks.id` names; its fields: q",
        ),
    ],
)
def test_tasks_that_are_not_there(tasks: str, problem: str) -> None:
    assert found(tasks, "hi") == [problem.format(Path.cwd())]


def test_a_first_row_that_is_no_json_has_its_own_place() -> None:
    Path("rows.jsonl").write_text("\nnope\n")
    assert found("source: jsonl, path: rows.jsonl", "'{{q}}'") == [
        f"{Path.cwd()}/rows.jsonl:2:1: error[tasks.unreadable] row 1 is no JSON: Expecting value"
    ]


def test_files_that_are_not_there() -> None:
    lines = "backend: {kind: scripted, replies: r.yaml}\n"
    assert found("source: inline, rows: [{q: a}]", "hi", lines, "model.chat_template=t.jinja") == [
        f"--set model.chat_template=t.jinja: error[spec.no-file] the file `t.jinja` does not exist; looked for {Path.cwd()}/t.jinja",
        f"9:36: error[spec.no-file] the file `r.yaml` does not exist; looked for {Path.cwd()}/r.yaml",
    ]
