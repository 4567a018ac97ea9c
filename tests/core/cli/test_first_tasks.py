"""What only running the code shows: `engine run` and `engine test` say it before the first episode, or at the first object."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from engine.cli.main import app
from engine.store import list_runs

CODE = """\
from pathlib import Path


def rows():
    with Path("made").open("a") as file:
        file.write("x")
    yield {"question": "What is 2 + 2?"}
    yield {"query": "What is 3 + 3?"}


class Mute: ...


def make_user():
    return Mute()
"""
SPEC = """\
spec: episode/v1
name: demo
model: {path: PATH}
backend: {kind: scripted, replies: [yes, no]}
tasks: {source: python, use: "first_code:rows"}
prompt: [{role: user, content: "{{question}}"}]
machine: single_turn
"""


@pytest.fixture
def folder(tmp_path: Path, tiny_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "first_code.py").write_text(CODE)
    (tmp_path / "s.yaml").write_text(SPEC.replace("PATH", str(tiny_tokenizer_dir)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("first_code", None)
    return tmp_path


def engine(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "400", "TERM": "dumb"})


def test_a_run_does_not_begin_if_a_made_row_lacks_a_field_of_the_prompt(folder: Path) -> None:
    done = engine("run", "s.yaml")
    assert done.exit_code == 1
    assert "s.yaml:6:33: error[prompt.unknown-field] row 2 has no field `question`; known: query" in done.output
    assert list_runs(folder / "runs") == []
    assert (folder / "made").read_text() == "x"  # the rows were made once


def test_a_function_that_builds_no_user_is_named_at_the_first_object(folder: Path) -> None:
    text = (
        (folder / "s.yaml")
        .read_text()
        .replace("machine: single_turn", 'user: {use: "first_code:make_user"}\nmachine: retry_with_feedback')
    )
    (folder / "s.yaml").write_text(
        text.replace('{source: python, use: "first_code:rows"}', "{source: inline, rows: [{question: a}]}")
    )
    done = engine("run", "s.yaml")
    assert done.exit_code == 3
    message = "`first_code:make_user` is, or returned, an object of `Mute`, which has no method `respond`"
    assert "missing_method (spec)" in done.stderr
    assert message in done.stderr
