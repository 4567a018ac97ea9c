"""`engine eval`, `engine compare` and `engine rescore` as a user meets them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from command_line import trajectories_of
from installed_commands import needs_command
from typer.testing import CliRunner, Result
from written_specs import save_spec, scripted_spec

from engine.cli.export import export
from engine.cli.main import app
from engine.plugins.evaluation.command import evaluate
from engine.plugins.replay.command import rescore
from engine.store import RunStore, list_runs

SPEC_CODE = Path(__file__).parents[2] / "core" / "runner"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(SPEC_CODE))
    monkeypatch.setenv("COLUMNS", "200")
    assert os.environ["COLUMNS"] == "200"


@pytest.fixture
def spec(tmp_path: Path, tiny_tokenizer_dir: Path) -> Path:
    """Three tasks, two episodes each; the first answer is wrong, the second right."""
    document: dict[str, Any] = {
        **scripted_spec("demo", tiny_tokenizer_dir, ["It is 41.", "It is 42."], 3),
        "user": {"use": "code_for_tests:Critic"},
        "rollout": {"samples_per_task": 2},
    }
    return save_spec(tmp_path / "demo.yaml", document)


def call(command: Any, *words: str | Path) -> Result:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [str(word) for word in words])


def command(*words: str | Path) -> Result:
    """Run a command by its name: it may be a plugin's."""
    return CliRunner().invoke(app, [str(word) for word in words])


def runs() -> list[Path]:
    return list_runs("runs")


def test_an_evaluation_measures_and_trains_nothing(spec: Path) -> None:
    result = call(evaluate, spec, "--json")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    (folder,) = runs()
    assert (told["tasks"], told["episodes"], told["masked"], Path(told["run"]).name) == (3, 6, {}, folder.name)
    values = {name: estimate["value"] for name, estimate in told["estimates"].items()}
    assert values == {
        "success": 1.0,
        "reward": pytest.approx(0.9),
        "reward:correct": 1.0,
        "reward:reward": pytest.approx(-0.1),
        "turns": 2.0,
        "tokens": values["tokens"],
        "success@turn:0": 0.0,
        "success@turn:1": 1.0,
        "pass@1": 1.0,
        "pass@2": 1.0,
    }
    exported = call(export, "latest", "--out", "rows.jsonl")
    assert exported.output.splitlines()[1] == "none of them is trainable: this run is an evaluation"
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    assert [(row["trainable"], row["advantages"]) for row in rows] == [(False, None)] * len(rows)
    assert call(export, "latest", "--out", "none.jsonl", "--trainable-only").output.startswith("0 rows: ")


def test_samples_model_and_limit_are_the_command_lines(spec: Path, tiny_tokenizer_dir: Path) -> None:
    words = ["--samples", "3", "--limit", "1", "--model", str(tiny_tokenizer_dir), "--quiet"]
    result = call(evaluate, spec, *words)
    assert result.exit_code == 0, result.output
    assert "3 episodes of 1 tasks" in result.output.splitlines()
    assert "success by turn 1" in result.output
    with RunStore.open(runs()[0], readonly=True) as store:
        assert store.header.evaluation
        assert store.header.loaded_spec().spec.model.path == str(tiny_tokenizer_dir.absolute())
        assert [row.id for row in store.episodes()] == ["t0/0", "t0/1", "t0/2"]


@needs_command("compare")
def test_two_runs_are_held_against_each_other(spec: Path) -> None:
    assert call(evaluate, spec, "-q").exit_code == 0
    assert call(evaluate, spec, "-q", "--set", "backend.replies=[It is 42.]", "--limit", "2").exit_code == 0
    first, second = sorted(runs(), key=lambda folder: RunStore.open(folder, readonly=True).header.created)
    told = json.loads(command("compare", first, second, "--json").stdout)
    assert (told["first"], told["second"]) == (first.name, second.name)
    assert (told["tasks"], told["only_first"], told["only_second"], told["masked"]) == (2, 1, 0, [0, 0])
    assert told["differences"]["turns"] == {"first": 2.0, "second": 1.0, "difference": -1.0, "low": None, "high": None}
    assert told["differences"]["reward"]["difference"] == pytest.approx(0.1)
    text = command("compare", first, second).output
    assert "2 tasks, paired: 2 better, 0 worse, 0 same; left out: 1 tasks only in the first" in text.splitlines()
    assert "better: t1 +0.100, t0 +0.100" in text.splitlines()
    assert [line.split()[1:6:2] for line in text.splitlines() if "backend.replies" in line] != []
    assert told["spec"][0]["path"] == "backend.replies"
    assert told["verdicts"] == {"better": 2, "worse": 0, "same": 0}
    assert [pair["task"] for pair in told["by_task"]] == ["t0", "t1"]
    assert text.splitlines()[-1].startswith("warning: only 2 tasks: intervals are wide")
    assert command("compare", first, "nothing").exit_code == 2


def save_moved(spec: Path) -> None:
    """The spec, with a part of the last turn's reward moved to the first, as `moved.yaml`."""
    other = yaml.safe_load(spec.read_text()) | {
        "rewards": {
            "reassign": [
                {
                    "at": "AWAITING_USER_FEEDBACK",
                    "when": "feedback.solved",
                    "turn": "last",
                    "to": "first",
                    "share": 0.25,
                }
            ]
        }
    }
    Path("moved.yaml").write_text(yaml.safe_dump(other))


def test_a_run_is_scored_again_and_exported(spec: Path) -> None:
    assert call(evaluate, spec, "-q").exit_code == 0
    save_moved(spec)
    result = call(rescore, "latest", "--spec", "moved.yaml", "--label", "moved")
    assert result.output.splitlines()[0] == (
        "6 episodes scored as `moved`: 6 changed, 0 failed · mean reward +0.900 -> +0.900"
    )
    call(export, "latest", "--score", "moved", "--out", "rows.jsonl")
    row = json.loads(Path("rows.jsonl").read_text().splitlines()[0])
    assert row["turn_rewards"] == [pytest.approx(0.15), 0.75]
    again = call(rescore, "latest", "--spec", "moved.yaml", "--label", "moved")
    assert (again.exit_code, again.stderr) == (
        1,
        "there is a score `moved` already; give this one another --label, or --replace that one\n",
    )
    assert call(export, "latest", "--score", "moveed").stderr.endswith("has no score `moveed`: it has moved\n")


@needs_command("show")
def test_a_score_is_shown(spec: Path) -> None:
    assert call(evaluate, spec, "-q").exit_code == 0
    save_moved(spec)
    assert call(rescore, "latest", "--spec", "moved.yaml", "--label", "moved").exit_code == 0
    assert "Other scores: --score moved" in command("show", "latest").output
    assert "correct +0.250, reward -0.100" in command("show", "latest", "t0/0", "--score", "moved").output
    assert "correct +0.250" not in command("show", "latest", "t0/0").output


def test_a_critics_values_come_from_a_file(spec: Path) -> None:
    from engine.cli.run import run

    assert call(run, spec, "-q", "--limit", "1", "--set", "rollout.samples_per_task=1").exit_code == 0
    (trajectory,) = trajectories_of(runs()[0])
    sizes = [turn.end - turn.start for turn in trajectory.turns]
    words = ["latest", "--out", "rows.jsonl", "--credit", "method=turn_ppo", "--credit", "gamma=1", "--credit", "lam=1"]
    missing = call(export, *words)
    assert (missing.exit_code, missing.stderr) == (
        2,
        "`method: turn_ppo` needs a critic's value for each sampled token, and there are none\n",
    )
    line = {"episode_id": "t0/0", "values": [[0.5] * sizes[0], [0.25] * sizes[1]]}
    Path("values.jsonl").write_text(json.dumps(line) + "\n")
    assert call(export, *words, "--values", "values.jsonl").exit_code == 0
    row = json.loads(Path("rows.jsonl").read_text().splitlines()[0])
    found = {turn: value for turn, value in zip(row["turn_ids"], row["advantages"], strict=True) if turn >= 0}
    assert found == {0: pytest.approx(0.9 - 0.5), 1: pytest.approx(1.0 - 0.25)}
    Path("bad.jsonl").write_text('{"episode_id": "t0/0"}\n')
    assert call(export, *words, "--values", "bad.jsonl").stderr.startswith("bad.jsonl:1: KeyError('values'); a line is")
