"""`engine train --resume` from the command line: what may change, `auto`, and signals."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_line import engine_apart, engine_process
from typer.testing import CliRunner
from written_specs import save_spec

from engine.cli.main import app
from engine.spec.load import load_spec
from engine.store import training as folders
from engine.train.checkpoint import checkpoints_of
from engine.train.metrics import read_metrics
from engine.train.setup import check_changes

HERE = Path(__file__).parent

SPEC_CODE = """
import time
from pathlib import Path
from engine.schemas.environment import UserTurn
from engine.schemas.reward import RewardEvent

class Listener:
    def respond(self, view):
        hold = Path("hold")
        if hold.exists():
            Path("held").touch()
            time.sleep(600)
        value = sum(letter in "aeiou" for letter in view.reply) / (len(view.reply) or 1)
        return UserTurn(satisfied=True, rewards=[RewardEvent(name="vowels", value=value, turn="last")])
"""


@pytest.fixture
def spec(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A training of a tiny model, one turn an episode."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "resumed_code.py").write_text(SPEC_CODE)
    document: dict[str, Any] = {
        "spec": "episode/v1",
        "name": "vowels",
        "model": {"path": str(tiny_model_dir)},
        "backend": {"kind": "local", "dtype": "float32", "max_batch": 16},
        "tasks": {"source": "inline", "rows": [{"id": f"t{number}", "say": str(number)} for number in range(4)], "id": "id"},
        "prompt": [{"role": "user", "content": "Say {{say}}."}],
        "user": {"use": "resumed_code:Listener"},
        "machine": {"preset": "retry_with_feedback", "transitions": [
            {"trigger": "truncated", "source": "GENERATING", "dest": "AWAITING_USER_FEEDBACK"}]},
        "limits": {"turn_tokens": 6, "assistant_turns": 2, "episode_tokens": 64},
        "rollout": {"samples_per_task": 4},
        "train": {"steps": 2, "tasks_per_step": 1, "optimizer": {"lr": 0.003}, "dynamic_sampling": False},
    }  # fmt: skip
    return save_spec(tmp_path / "spec.yaml", document)


def train(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["train", *arguments, "--quiet"])


@pytest.mark.slow
def test_a_requeued_job_repeats_its_command(spec: Path) -> None:
    command = [str(spec), "--out", "runs", "--run-name", "job-7", "--resume", "auto"]
    for steps in (2, 3, 3):
        found = train(*command, "--set", f"train.steps={steps}")
        assert found.exit_code == 0, found.output
        assert [line["step"] for line in read_metrics(Path("runs/job-7"))] == list(range(1, steps + 1))
    assert [path.name for path in Path("runs").iterdir()] == ["job-7"]
    header = folders.read_header(Path("runs/job-7"))
    assert header.spec["train"]["steps"] == 3
    refused = train(str(spec), "--out", "runs", "--run-name", "job-7")
    assert (refused.exit_code, "exists: `--resume auto`" in refused.output) == (1, True)
    other = train(*command, "--set", "limits.turn_tokens=9", "--set", "train.seed=4")
    assert other.exit_code == 1
    assert "cannot change `limits.turn_tokens`, `train.seed`: its episodes and updates depend on them" in other.output
    # killed while it made the folder
    Path("runs/job-8").mkdir()
    Path("runs/job-8/.train.json").write_text("{")
    assert train(str(spec), "--out", "runs", "--run-name", "job-8", "--resume", "auto").exit_code == 0


@pytest.mark.slow
def test_what_may_change_is_set_at_a_resume_and_stays(spec: Path) -> None:
    assert train(str(spec), "--out", "runs").exit_code == 0
    (folder,) = folders.trainings(Path("runs"))
    changes = [
        "train.steps=4",
        "train.optimizer.lr=0.5",
        "train.eval={every: 4, limit: 1}",
        "limits.episode_seconds=60",
    ]
    found = train("--resume", str(folder), *(word for change in changes for word in ("--set", change)))
    assert found.exit_code == 0, found.output
    assert "Changed: limits.episode_seconds, train.eval, train.optimizer.lr, train.steps" in found.output
    lines = read_metrics(folder)
    assert [(line["step"], line["lr"]) for line in lines] == [(1, 0.003), (2, 0.003), (3, 0.5), (4, 0.5)]
    assert "eval/reward" in lines[-1]
    assert train("--resume", str(folder)).exit_code == 0  # 4 steps, as changed
    assert len(read_metrics(folder)) == 4
    for change, named in (
        ("train.tasks_per_step=2", "`train.tasks_per_step`"),
        ("train.loss.kind=gspo", "`train.loss.kind`"),
        ("rollout.samples_per_task=2", "`rollout.samples_per_task`"),
        ("tasks.limit=2", "`tasks.limit`"),
    ):
        refused = train("--resume", str(folder), "--set", change)
        assert refused.exit_code == 1
        assert named in refused.output
        assert "What may change: train.steps" in refused.output
    wrong = train("--resume", str(folder), "--set", "train.steps=many")
    assert (wrong.exit_code, "train.steps" in wrong.output) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--resume", "auto"], "--resume auto takes SPEC and --run-name"),
        (["spec.yaml", "--resume", "auto"], "--resume auto takes SPEC and --run-name"),
        (["spec.yaml", "--resume", "latest"], "leave out SPEC and --run-name"),
    ],
)
def test_commands_that_mean_nothing_are_refused(arguments: list[str], words: str, spec: Path) -> None:
    found = train(*arguments)
    assert (found.exit_code, words in found.output) == (2, True), found.output


def test_a_name_is_that_of_a_folder(spec: Path) -> None:
    found = train(str(spec), "--run-name", "../x")
    assert (found.exit_code, "use letters, digits" in found.output) == (1, True), found.output


def test_every_value_of_an_episode_is_refused(spec: Path) -> None:
    before = load_spec(spec).spec
    assert check_changes(before, before) == []
    after = load_spec(spec, ["train.checkpoints.every=3", "rollout.concurrency=2", "description=x"]).spec
    assert check_changes(before, after) == ["description", "rollout.concurrency", "train.checkpoints.every"]


@pytest.mark.slow
def test_an_error_prints_where_the_last_state_is(spec: Path) -> None:
    document = yaml.safe_load(spec.read_text())
    document["train"] |= {"steps": 9, "tasks_per_step": 4}
    spec.write_text(yaml.safe_dump(document))
    code = Path("resumed_code.py")
    code.write_text(
        SPEC_CODE.replace(
            "hold = Path",
            "assert len(list(Path('.').glob('runs/*/metrics.jsonl'))) == 0 or "
            "Path(next(Path('.').glob('runs/*/metrics.jsonl'))).read_text() == ''\n        hold = Path",
        )
    )
    found = train(str(spec), "--out", "runs")
    (folder,) = folders.trainings(Path("runs"))
    (kept,) = checkpoints_of(folder)
    assert found.exit_code == 1
    assert "no episode of 16 groups can be trained on: failed: user_error (user) 64" in found.output
    assert f"The last saved state is {kept}" in found.output
    assert f"engine train --resume {folder}" in found.output


@pytest.mark.slow
@pytest.mark.parametrize("hung", ["rollout", pytest.param("evaluation", marks=pytest.mark.exhaustive)])
def test_sigterm_saves_within_the_grace_and_a_resume_loses_nothing(hung: str, spec: Path, tmp_path: Path) -> None:
    changes = ["train.steps=500", "train.checkpoints.every=1000", "train.checkpoints.grace=30s"]
    if hung == "evaluation":
        changes.append("train.eval={every: 3, limit: 1}")
        changes[0] = "train.steps=3"
    begin = ["train", spec, "--out", "runs", *(word for change in changes for word in ("--set", change))]
    process = engine_process(*begin, cwd=tmp_path, modules=[tmp_path])
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 2/"):
            (tmp_path / "hold").touch()
            break
    while not (tmp_path / "held").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "the process exits in 30 s at the latest" in err
    (folder,) = folders.trainings(tmp_path / "runs")
    (kept,) = checkpoints_of(folder)
    done = json.loads((kept / "state.json").read_text())["step"]
    assert done >= 2
    (tmp_path / "hold").unlink()
    again = ["--resume", folder, "--set", f"train.steps={max(done, 3)}"]
    found = engine_apart("train", *again, cwd=tmp_path, modules=[tmp_path])
    assert found.returncode == 0, found.stdout + found.stderr
    lines = read_metrics(folder)
    assert [line["step"] for line in lines if line["step"]] == list(range(1, max(done, 3) + 1))
    assert ("eval/reward" in lines[-1]) == (hung == "evaluation")


@pytest.mark.slow
def test_a_training_keeps_the_precision_of_the_device_that_it_began_on(
    spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU that is float32, also where the same spec is resumed on a GPU; a training that began on one stays mixed."""
    from engine.train import setup

    command = ["train", str(spec), "--run-name", "kept", "--quiet"]
    assert CliRunner().invoke(app, command).exit_code == 0
    folder = Path("runs/kept")

    def header() -> dict[str, Any]:
        found: dict[str, Any] = json.loads((folder / "train.json").read_text())
        return found

    assert header()["spec"]["train"]["precision"] == "float32"
    began = folders.read_header(folder).loaded_spec().spec
    assert began.train is not None
    mixed = began.model_copy(update={"train": began.train.model_copy(update={"precision": "mixed"})})
    loaded = load_spec(spec)
    with monkeypatch.context() as patched:
        patched.setattr(setup, "pick_device", lambda name, key: torch.device("cuda"))
        found = [setup.with_precision(loaded, each).spec.train for each in (None, began, mixed)]
    assert [each.precision for each in found if each is not None] == ["mixed", "float32", "mixed"]
    # the header of an older engine has the key without that the spec has it; other values may change
    for more in (["--resume", "kept"], [str(spec), "--run-name", "kept", "--resume", "auto"]):
        told = CliRunner().invoke(app, ["train", *more, "--quiet", "--set", "train.checkpoints.keep=3"])
        assert told.exit_code == 0, told.output
        assert header()["spec"]["train"]["precision"] == "float32"
