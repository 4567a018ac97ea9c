"""The warnings of a training, from what it wrote; and what its metrics mean."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from listing_kit import TRAINING
from store_kit import make_header
from trainings import begin_training

from engine.errors import TrainError
from engine.plugins.show.listing.training import Training
from engine.plugins.view.training_notes import TrainingNotes, banners, explained, status_of
from engine.spec.load import load_spec
from engine.store.lock import RunLock
from engine.store.training import begin
from engine.train import learner
from engine.train.metrics import MetricsLog

SIGNAL = {"groups/sampled": 4.0, "groups/equal": 1.0, "step_seconds": 10.0}
NONE = SIGNAL | {"groups/equal": 3.0, "groups/small": 1.0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A training of ten steps, without any."""
    return begin(tmp_path, make_header(TRAINING, spec={"train": {"steps": 10}}))


def write(folder: Path, *lines: dict[str, float]) -> None:
    """Write the metrics of the next steps."""
    log = MetricsLog(folder)
    for step, line in enumerate(lines, start=len(Training(folder).lines) + 1):
        log.write(step, line)


def notes_of(folder: Path) -> TrainingNotes:
    """What the trainer tells."""
    return TrainingNotes(load_spec(Path("specs/quickstart.yaml")), folder)


def shown(folder: Path, after: float = 0.0) -> list[tuple[str, str]]:
    """Kind and title of each banner, some seconds from now."""
    return [(banner["kind"], banner["title"]) for banner in banners(Training(folder), time.time() + after)]


async def test_a_missing_signal_is_shown_until_a_step_has_one(folder: Path) -> None:
    lock = RunLock(folder)
    write(folder, SIGNAL, NONE, NONE, NONE)
    await notes_of(folder).lacks_signal(
        4, "3 steps in a row had no learning signal: all rewards are equal; let them differ"
    )
    write(folder, NONE)
    (banner,) = banners(Training(folder), time.time())
    assert banner == {
        "kind": "no_signal", "title": "No learning signal since step 2", "text": "all rewards are equal; let them differ"
    }  # fmt: skip
    write(folder, SIGNAL)
    assert shown(folder) == []
    lock.release()


async def test_an_error_is_shown_until_the_training_goes_on(folder: Path) -> None:
    await notes_of(folder).failed(TrainError("no model", kind="train_setup"), 0)
    assert not (folder / "notes.jsonl").exists(), "the command removes the folder of a training that never began"
    write(folder, SIGNAL)
    assert shown(folder) == [("stopped", "It does not run: it stopped after step 1 of 10")]
    await notes_of(folder).failed(TrainError("the loss is nan", kind="diverged"), 1)
    assert shown(folder) == [("diverged", "It diverged after step 1")]
    lock = RunLock(folder)
    assert (status_of(Training(folder)), shown(folder)) == ("running", [])
    write(folder, SIGNAL)
    lock.release()
    assert shown(folder) == [("stopped", "It does not run: it stopped after step 2 of 10")]
    await notes_of(folder).failed(OSError("no space"), 2)
    assert shown(folder) == [("failed", "It failed after step 2")]
    write(folder, *[SIGNAL] * 8)
    assert (status_of(Training(folder)), shown(folder)) == ("done", [])


async def test_a_real_training_notes_that_it_lacks_a_signal_and_that_it_diverges(
    train_spec: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = train_spec(
        train={"steps": 4, "tasks_per_step": 1, "dynamic_sampling": False},
        user={"use": "code_for_training:Bored"},
        limits={"turn_tokens": 1, "assistant_turns": 1},
        rollout={"samples_per_task": 2, "seed": 3},
    )
    trainer = begin_training(spec, tmp_path / "runs")
    objective = learner.objective

    def spoilt(spec: Any, tokens: Any) -> Any:
        loss, metrics = objective(spec, tokens)
        return loss * float("nan") if trainer.state.step == 3 else loss, metrics

    monkeypatch.setattr(learner, "objective", spoilt)
    with pytest.raises(TrainError, match="the loss is nan"):
        await trainer.run()
    diverged, signal = banners(Training(trainer.folder), time.time())
    assert (diverged["kind"], diverged["title"]) == ("diverged", "It diverged after step 3")
    assert diverged["text"].startswith("the loss is nan")
    assert (signal["kind"], signal["title"]) == ("no_signal", "No learning signal since step 1")
    assert signal["text"].startswith("every episode has the reward 1.000, and 2 of 2 replies were cut by a limit")


def test_a_training_that_writes_nothing_for_long_is_stale(folder: Path) -> None:
    lock = RunLock(folder)
    write(folder, *[SIGNAL | {"step_seconds": 60.0}] * 3)
    assert shown(folder, 170.0) == []
    (banner,) = banners(Training(folder), time.time() + 600.0)
    assert (banner["kind"], banner["text"].partition(". ")[0]) == (
        "stale",
        "Nothing was written for 10 min, and a step takes 60 s",
    )
    (folder / "rollouts").mkdir()
    (folder / "rollouts" / "run.db-wal").touch()
    os.utime(folder / "rollouts" / "run.db-wal", (time.time() + 590.0,) * 2)
    assert shown(folder, 600.0) == [], "its episodes go on"
    lock.release()


@pytest.mark.parametrize(
    ("values", "diverges"), [((1.0, 30.0, 40.0, 50.0), True), ((1.0, 1.0, 40.0, 50.0), False), ((0.01,) * 4, False)]
)
def test_a_gradient_that_grows_for_three_steps_diverges(
    folder: Path, values: tuple[float, ...], diverges: bool
) -> None:
    lock = RunLock(folder)
    write(folder, *({"grad_norm": value} for value in (*[1.0] * 4, *values)))
    assert shown(folder) == [("diverged", "It diverges")] * diverges
    lock.release()


def test_the_table_of_the_docs_explains_metrics() -> None:
    assert explained("staleness/mean") == [
        "Updates between the weights of a token and those that train on it.",
        "It is never above train.asynchrony.max_staleness; a large mean slows learning.",
    ]
    assert explained("reward/turn/3") != explained("reward/correct") != explained("reward/mean")
    assert (explained("eval/hard/solved") or [""])[0].startswith("A measure of the evaluation")
    assert (explained("sampler/diff_max") or ["", ""])[1] == "It grows: see log-probs."
    assert explained("lr") is not None
    assert (explained("lr") or ["", ""])[1] == ""
    assert explained("nothing/like/it") is None
