"""Trainings that tell: divergence, the end, no signal."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import code_for_training
import pytest
from command_line import engine_here
from trainings import begin_training

from engine.errors import TrainError
from engine.store import RunStore


async def test_divergence_is_told(train_spec: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "told.jsonl"
    command = [sys.executable, "-c", f"import sys; open({str(told)!r}, 'a').write(sys.stdin.read() + '\\n')"]
    trainer = begin_training(train_spec(train={"steps": 2}, notify={"command": command}), tmp_path / "runs")
    from engine.train import learner

    true = learner.objective

    def spoilt(spec: Any, tokens: Any) -> Any:
        loss, metrics = true(spec, tokens)
        return loss * float("nan"), metrics

    monkeypatch.setattr(learner, "objective", spoilt)
    with pytest.raises(TrainError, match=r"the loss is nan .* the update was not applied"):
        await trainer.run()
    (event,) = [json.loads(line) for line in told.read_text().splitlines() if line]
    assert (event["kind"], event["step"]) == ("diverged", 0)


async def test_a_training_traces_its_episodes_and_tells_that_it_is_finished(train_spec: Any, tmp_path: Path) -> None:
    told = tmp_path / "told.jsonl"
    command = [sys.executable, "-c", f"import sys; open({str(told)!r}, 'a').write(sys.stdin.read() + '\\n')"]
    notify = {"command": command, "budget": {"tokens": 1}}
    spec = train_spec(train={"steps": 2}, notify=notify, traces={"episodes": True})
    trainer = begin_training(spec, tmp_path / "runs")
    result = await trainer.run()
    assert result.steps == 2
    lines = (trainer.folder / "rollouts" / "traces" / "finished.jsonl").read_text().splitlines()
    with RunStore.open(trainer.folder / "rollouts", readonly=True) as store:
        assert sorted(json.loads(line)["episode_id"] for line in lines) == sorted(store.finished())
    events = [json.loads(line) for line in told.read_text().splitlines() if line]
    assert [event["kind"] for event in events] == ["budget", "finished"]
    assert events[1]["text"] == f"{trainer.folder.name}: training finished at step 2"


CODE = Path(code_for_training.__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_training_without_a_signal_warns_tells_and_repeats_it_at_its_end(
    train_spec: Any, tmp_path: Path, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told.jsonl"
    command = [sys.executable, "-c", f"import sys; open({str(told)!r}, 'a').write(sys.stdin.read() + '\\n')"]
    steps = {"steps": 4, "tasks_per_step": 1, "dynamic_sampling": dynamic, "max_sampling_rounds": 1}
    spec = train_spec(
        train=steps,
        user={"use": "code_for_training:Bored"},
        limits={"turn_tokens": 1, "assistant_turns": 1},
        rollout={"samples_per_task": 2, "seed": 3},
        notify={"command": command, "on": ["no_signal"]},
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(CODE), str(CODE.parents[2])]))
    status, out, err = engine_here("train", spec, "-q", cwd=tmp_path)
    assert status == 0, err
    assert "3 steps in a row had no learning signal: every episode has the reward 1.000" in err
    (event,) = [json.loads(line) for line in told.read_text().splitlines() if line]
    assert (event["kind"], event["step"]) == ("no_signal", 3)
    assert "had no learning signal: every episode has the reward 1.000" in event["text"]
    assert "\n4 of 4 steps had no learning signal: every episode has the reward 1.000" in out
