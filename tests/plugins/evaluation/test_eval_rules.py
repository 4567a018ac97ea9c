"""The rules about `train.eval` find what an evaluation cannot use, at its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.spec.load import load_spec
from engine.validate import check_spec

pytestmark = pytest.mark.usefixtures("in_folder")

HEAD = """\
spec: episode/v1
name: demo
model: {path: org/m}
tasks: {source: inline, rows: [{q: a}]}
prompt: [{role: user, content: "{{q}}"}]
machine: single_turn
"""
GROUP = "rollout: {samples_per_task: 8}\n"


def found(lines: str) -> list[str]:
    """Findings about training, without their fixes."""
    Path("s.yaml").write_text(HEAD + lines)
    told = [str(item).removeprefix("s.yaml:") for item in check_spec(load_spec("s.yaml"))]
    told = [line for line in told if "[train.eval-on-training-tasks]" not in line]  # has a test of its own
    return [line.partition("; ")[0] for line in told if "[train." in line]


@pytest.mark.parametrize(
    ("lines", "problems"),
    [
        (
            GROUP + "train: {eval: {metric: eval/reward}}\n",
            ["8:24: error[train.metric] there is no metric `eval/reward`"],
        ),
        (
            GROUP + "train: {eval: {metric: pass@4, samples: 3}}\n",
            ["8:24: error[train.metric] `pass@4` is not measured with 3 episodes of each task"],
        ),
        (
            GROUP + "train: {eval: {metric: 'success@turn:8'}}\n",
            [
                "8:24: error[train.metric] turns are counted from 0, and `limits.assistant_turns` is 8: "
                "`success@turn:8` is never measured"
            ],
        ),
    ],
)
def test_a_metric_that_is_never_measured_is_refused(lines: str, problems: list[str]) -> None:
    assert found(lines) == problems


@pytest.mark.parametrize(
    "metric", ["reward", "success", "reward:correct", "success@turn:7", "pass@1", "pass@2", "pass@3"]
)
def test_measures_that_there_are(metric: str) -> None:
    assert found(GROUP + f"train: {{eval: {{metric: '{metric}', samples: 3}}}}\n") == []


def test_the_evaluations_tasks_are_held_to_the_rules_of_tasks() -> None:
    Path("rows.jsonl").write_text('{"q": "a"}\n{"x": 1}\n')
    lines = GROUP + "train:\n  eval:\n    tasks: {source: jsonl, path: rows.jsonl, map: {q: q}}\n"
    rows = Path("rows.jsonl").absolute()
    assert found(lines) == [f"{rows}:2:1: error[train.eval-tasks] in the evaluation: row 2 has no field `q`"]
    lines = GROUP + "train:\n  eval:\n    tasks: {source: jsonl, path: row.jsonl}\n"
    assert found(lines) == [
        "10:34: error[train.eval-tasks] in the evaluation: the task file `row.jsonl` does not exist"
    ]
    lines = GROUP + "train:\n  eval:\n    tasks: {source: inline, rows: [{question: b}]}\n"
    assert found(lines) == ["5:33: error[train.eval-tasks] in the evaluation: row 1 has no field `q`"]
    lines = GROUP + "train:\n  eval:\n    tasks: {source: python, use: 'nowhere_at_all:rows'}\n"
    assert found(lines) == ["10:34: error[train.eval-tasks] `nowhere_at_all:rows`: there is no module `nowhere_at_all`"]


def test_the_evaluations_tasks_and_sampling_have_their_form() -> None:
    lines = GROUP + "train:\n  eval:\n    tasks: {source: jsnl, path: x}\n    sampling: {temprature: 0, top_p: 2}\n"
    assert found(lines) == [
        "10:21: error[train.eval-form] `train.eval.tasks.source` must be one of inline, jsonl, csv, parquet, hub, python, mix, harbor",
        "11:16: error[train.eval-form] unknown key `temprature`",
        "11:38: error[train.eval-form] `train.eval.sampling.top_p` must be at most 1",
    ]


def test_a_path_of_the_evaluation_is_relative_to_the_file_that_says_it() -> None:
    Path("base").mkdir()
    Path("base/base.yaml").write_text("tasks: {source: jsonl, path: train.jsonl}\n")
    Path("base/train.jsonl").write_text('{"q": "a"}\n')
    Path("test.jsonl").write_text('{"q": "b"}\n')
    lines = GROUP + "train: {eval: {tasks: {source: jsonl, path: test.jsonl}}}\n"
    Path("s.yaml").write_text("extends: base/base.yaml\n" + HEAD.replace("tasks:", "#") + lines)
    assert [item for item in check_spec(load_spec("s.yaml")) if item.severity == "error"] == []


@pytest.mark.parametrize(
    ("lines", "places"),
    [
        ("train:\n  eval: {every: 5}\n", ["9:9"]),
        ("train:\n  eval: {tasks: {source: inline, rows: [{q: a}]}}\n", ["9:17"]),
        ("train:\n  eval: {tasks: {source: inline, rows: [{q: other}]}}\n", []),
        (
            "train:\n  eval:\n    sets:\n      own: {tasks: {source: inline, rows: [{q: a}], limit: 1}}\n"
            "      other: {tasks: {source: inline, rows: [{q: b}]}}\n",
            ["11:20"],
        ),
    ],
)
def test_an_evaluation_on_the_training_tasks_is_told(lines: str, places: list[str]) -> None:
    Path("s.yaml").write_text(HEAD + GROUP + lines)
    told = [str(item) for item in check_spec(load_spec("s.yaml"))]
    found_at = [line.split(" ")[0].removeprefix("s.yaml:").rstrip(":") for line in told if "eval-on-training" in line]
    assert found_at == places, told


def test_each_of_several_evaluations_is_held_to_the_rules_of_tasks() -> None:
    Path("row.jsonl").write_text("{}\n")
    lines = "train:\n  eval:\n    sets:\n      a: {tasks: {source: jsonl, path: none.jsonl}}\n      b: {tasks: {source: inlin}}\n"
    assert [line.split(" ")[1] for line in found(GROUP + lines)] == ["error[train.eval-form]"]
    lines = lines.replace("      b: {tasks: {source: inlin}}\n", "")
    (line,) = found(GROUP + lines)
    assert "in the evaluation `a`: the task file `none.jsonl` does not exist" in line
