"""A source of tasks that a package in another folder adds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from layers import engine, write_plugin
from written_specs import save_spec, scripted_spec

FACE = """
PLUGIN = Plugin(
    name="letters",
    about="Letters as tasks",
    install="pip install stranger_letters",
    sources={"letters": "letters_source:LETTERS"},
)
"""
CODE = """
from engine.schemas.tasks import SourceFacts
from engine.spec.rows.row import ListRows

LETTERS = SourceFacts(keys=("with",), opens="letters_source:task_rows")


def task_rows(loaded, limit):
    return ListRows([{"id": letter} for letter in loaded.spec.tasks.with_["letters"]])
"""


def found(site: Path, folder: Path, spec: dict[str, Any]) -> list[str]:
    """What `engine validate` says of a spec, notes left out."""
    answer = engine(site, "validate", save_spec(folder / "spec.yaml", spec), "--format", "json", cwd=folder)
    diagnostics = json.loads(answer.stdout)["specs"][0]["diagnostics"]
    return [f"{each['rule']} {each['message']}; {each['fix']}" for each in diagnostics if each["severity"] != "info"]


@pytest.mark.slow
def test_its_tasks_run_and_it_is_told_where_it_is_missing(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    write_plugin(site, "letters", FACE)
    (site / "letters_source.py").write_text(CODE)
    letters = {"source": "letters", "with": {"letters": "xyz"}}
    mixed = {"source": "mix", "mix": {"a": letters, "b": {"source": "inline", "rows": [{"id": "one"}]}}, "id": "id"}
    spec = scripted_spec("letters", tiny_tokenizer_dir, ["Yes."], tool_calls=None) | {"machine": "single_turn"}
    tasks = {"plain": letters | {"id": "id"}, "mixed": mixed}
    for name, ids in {"plain": ["x", "y", "z"], "mixed": ["a:x", "a:y", "a:z", "b:one"]}.items():
        assert found(site, tmp_path, spec | {"tasks": tasks[name]}) == []
        out = tmp_path / name
        ran = engine(site, "run", tmp_path / "spec.yaml", "--quiet", "--out", out, cwd=tmp_path)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        (run,) = out.iterdir()
        rows = tmp_path / f"{name}.jsonl"
        exported = engine(empty, "export", run, "--format", "jsonl", "--out", rows, cwd=tmp_path)
        assert exported.returncode == 0, exported.stdout + exported.stderr
        assert sorted(json.loads(line)["task_id"] for line in rows.read_text().splitlines()) == ids
        replayed = engine(empty, "replay", run, cwd=tmp_path)
        assert "uses the plugin `letters`, which is not installed: pip install stranger_letters" in replayed.stderr

    unknown = "spec.bad-value `tasks.source` must be one of inline, jsonl, csv, parquet, hub, python, mix, harbor; it is `letters`; None"
    assert found(empty, tmp_path, spec | {"tasks": letters}) == [unknown]
    (site / "letters_source.py").write_text("LETTERS = 'letters_source:task_rows'\n")
    cause = "cannot be used (`letters` in `sources` names 'letters_source:task_rows', not SourceFacts): pip install stranger_letters"
    (broken,) = found(site, tmp_path, spec | {"tasks": letters})
    assert broken == (
        "spec.bad-value `tasks`: `source: letters` cannot be read; it belongs to the plugin `letters`, which " + cause
    )
