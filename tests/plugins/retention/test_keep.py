"""`rollout.keep`: which episodes a training drops, and that a resume finds each one that it needs."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from installed_commands import installed
from msgspec.structs import force_setattr
from trainings import begin_training, metric_lines, policy_weights
from typer.testing import CliRunner

from engine.cli.main import app
from engine.errors import StoreError
from engine.plugins.retention.compact import in_sample, plan
from engine.plugins.retention.spec import KeepSpec
from engine.spec.load import load_spec
from engine.store import RunStore
from engine.store import training as folders
from engine.store.header import RunHeader
from engine.train.batch_log import BatchLog, BatchRecord
from engine.train.checkpoint import checkpoints_of
from engine.train.trainer import Trainer
from engine.validate import check_spec

HERE = Path(__file__).parent
UNCORRECTED = {
    "rollout_correction": {"kind": "none"}
}  # else the last digits depend on who shares a batch of the sampler
EVERY_STEP = {"steps": 6, "checkpoints": {"every": 1, "keep": 2}} | UNCORRECTED


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in metric_lines(folder)]


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return set(one) == set(other) and all(bool((one[name] == other[name]).all()) for name in one)


def dropped_steps(folder: Path) -> dict[int, set[bool]]:
    """Per step: whether episodes of its groups were dropped."""
    found: dict[int, set[bool]] = {}
    with RunStore.open(folder / "rollouts", readonly=True) as store:
        gone = store.dropped_ids()
        for record in BatchLog(folder).read():
            for task in record.tasks.values():
                found.setdefault(record.step, set()).update(row.id in gone for row in store.samples(task))
    return found


# --- which groups -------------------------------------------------------------------------------------------


@st.composite
def logs(draw: Any) -> list[BatchRecord]:
    """Batch logs: steps with groups that trained, were left out, or dropped, and records without a step."""
    records, number, step = [], 0, 0
    for _ in range(draw(st.integers(0, 12))):
        made = draw(st.booleans()) or step == 0
        step += made
        parts = [draw(st.integers(0, 3)) for _ in range(3)]
        used, left_out, dropped = (
            list(range(number + sum(parts[:at]), number + sum(parts[: at + 1]))) for at in range(3)
        )
        number += sum(parts)
        tasks = {str(each): f"t{each}" for part in (used, left_out, dropped) for each in part}
        records.append(BatchRecord(step, step, used, left_out, dropped, tasks, step_made=made))
    return records


@seed(3)
@settings(max_examples=150, deadline=None)
@given(
    logs(),
    st.builds(KeepSpec, steps=st.integers(0, 6), sample=st.sampled_from([0.0, 0.3, 1.0]), trained=st.booleans()),
    st.integers(0, 12),
)
def test_each_group_stays_for_a_reason_or_goes(records: list[BatchRecord], keep: KeepSpec, repeated: int) -> None:
    found = plan(records, keep, repeated=repeated, samples=2)
    newest = max((record.step for record in records), default=0)
    gone = {ids[0].removesuffix("/0") for ids in found.groups}
    for record in records:
        for number, task in record.tasks.items():
            stays = (
                record.step > repeated
                or record.step > newest - keep.steps
                or (keep.trained and int(number) in record.used)
                or in_sample(task, keep.sample)
            )
            assert (task in gone) == (not stays)
    assert len(gone) + sum(found.stay.values()) == sum(len(record.tasks) for record in records)
    assert all(ids == [f"{ids[0][:-2]}/0", f"{ids[0][:-2]}/1"] for ids in found.groups)
    # compacting at each step in turn drops what one compaction at the end drops
    one_by_one: set[str] = set()
    after = None
    for step in range(newest + 1):
        part = plan(
            [each for each in records if each.step <= step], keep, repeated=min(repeated, step), samples=2, after=after
        )
        one_by_one |= {ids[0].removesuffix("/0") for ids in part.groups}
        after = part.until
    assert one_by_one == gone


def test_the_sample_is_the_fraction_that_was_asked_for() -> None:
    count = sum(in_sample(f"task-{number}", 0.25) for number in range(4000))
    assert 900 < count < 1100


def test_trainings_with_several_drivers_keep_all(train_spec: Any) -> None:
    servers = ["backend={kind: sglang, urls: ['http://127.0.0.1:9']}", "rollout.drivers=2", "rollout.keep={steps: 2}"]
    found = [item.message for item in check_spec(load_spec(train_spec(), servers)) if item.rule == "rollout.drivers"]
    assert found == ["`keep` is not supported in a training with several drivers: their stores are not compacted"]


# --- trainings ----------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_it_drops_while_it_trains_and_trains_as_without_it(train_spec: Any, tmp_path: Path) -> None:
    keep = {"samples_per_task": 4, "seed": 3, "keep": {"steps": 1}}
    kept = begin_training(train_spec("keep", train=EVERY_STEP | {"steps": 3}, rollout=keep), tmp_path / "a")
    await kept.run()
    plain = begin_training(train_spec("plain", train=EVERY_STEP | {"steps": 3}), tmp_path / "b")
    await plain.run()
    assert same(policy_weights(kept.folder), policy_weights(plain.folder))
    assert losses(kept.folder) == losses(plain.folder)
    # two checkpoints are kept, of steps 2 and 3: a resume from the first repeats step 3
    assert dropped_steps(kept.folder) == {1: {True}, 2: {True}, 3: {False}}
    lines = metric_lines(kept.folder)
    counts = [line["store/dropped_episodes"] for line in lines]
    assert 0 < sum(counts) <= 2 * 8
    assert f"Dropped since the training began: {2 * 8} episodes" in "\n".join(kept.last_lines)
    assert lines[-1]["store/bytes"] < lines[-1]["store/bytes_before"]
    assert (kept.folder / "rollouts/run.db").stat().st_size < (plain.folder / "rollouts/run.db").stat().st_size
    assert "store/bytes" not in (plain.folder / "metrics.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("removed", [0, 1, 2])
async def test_a_resume_from_each_kept_checkpoint_trains_the_same(
    removed: int, train_spec: Any, tmp_path: Path
) -> None:
    """With 2 removed, older than those that count: what was dropped is sampled again."""
    long = train_spec("long", train=EVERY_STEP)
    plain = begin_training(long, tmp_path / "plain")
    await plain.run()
    rollout = {"samples_per_task": 4, "seed": 3, "keep": {"steps": 0}}
    train = EVERY_STEP | {"steps": 4, "checkpoints": {"every": 1, "keep": 2}}
    first = begin_training(train_spec("keep", train=train, rollout=rollout), tmp_path / "keep")
    await first.run()
    for checkpoint in checkpoints_of(first.folder)[::-1][:removed]:
        shutil.rmtree(checkpoint)
    loaded = folders.read_header(first.folder).loaded_spec()
    assert loaded.spec.train is not None
    more = loaded.spec.model_copy(update={"train": loaded.spec.train.model_copy(update={"steps": 6})})
    force_setattr(loaded, "spec", more)
    second = Trainer(loaded, first.folder)
    result = await second.run()
    assert result.steps == 6
    if removed < 2:
        assert result.repeated_steps == removed
        assert same(policy_weights(first.folder), policy_weights(plain.folder))
        assert losses(first.folder) == losses(plain.folder)


class Killer:
    """Launches trainings that are killed while they drop episodes; see `keep_killer.py`."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (HERE, HERE.parents[1] / "core/train", HERE.parents[2]))),
            "OMP_NUM_THREADS": "1",
        }
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        command = [sys.executable, str(HERE / "keep_killer.py")]
        self._process: Any = subprocess.Popen(command, text=True, env=environment, **pipes)

    def launch(self, folder: Path, point: int = 0) -> dict[str, int]:
        self._process.stdin.write(f"{folder}\t{point}\n")
        self._process.stdin.flush()
        told: dict[str, int] = json.loads(self._process.stdout.readline())
        return told

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=20)


@pytest.fixture
def killer() -> Iterator[Killer]:
    made = Killer()
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("points", [4, pytest.param(40, marks=pytest.mark.exhaustive)])
def test_killed_at_points_of_its_compactions_it_resumes_exactly(
    points: int, killer: Killer, train_spec: Any, tmp_path: Path
) -> None:
    """Points between instructions of SQLite, at random: the resumed training is the one that was not killed."""
    train = {"steps": 3, "checkpoints": {"every": 1, "keep": 1}} | UNCORRECTED
    rollout = {"samples_per_task": 4, "seed": 3, "keep": {"steps": 0}}
    loaded = load_spec(train_spec("keep", train=train, rollout=rollout))
    whole = folders.begin(tmp_path / "whole", RunHeader.of(loaded))
    found = killer.launch(whole)
    assert found["status"] == 0
    count = found["points"]
    assert count > points
    draw = random.Random(11)
    for number in range(points):
        at = draw.randint(1 + number * count // points, max(2, (number + 1) * count // points - 1))
        folder = folders.begin(tmp_path / f"killed-{number}", RunHeader.of(loaded))
        assert killer.launch(folder, at)["status"] == -signal.SIGKILL, (at, count)
        assert killer.launch(folder)["status"] == 0
        assert same(policy_weights(folder), policy_weights(whole)), at
        assert losses(folder) == losses(whole), at
        assert dropped_steps(folder) == dropped_steps(whole), at
        with closing(sqlite3.connect(folder / "rollouts/run.db")) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        with RunStore.open(folder / "rollouts", readonly=True) as store:
            assert [row.attempt for row in store.episodes()] == [0] * 24, at  # nothing was sampled again
        shutil.rmtree(folder)


def test_the_command_says_what_would_go_and_then_drops_it(train_spec: Any, tmp_path: Path) -> None:
    trainer = begin_training(train_spec("spec", train=EVERY_STEP | {"steps": 3}), tmp_path)
    asyncio.run(trainer.run())
    told = CliRunner().invoke(app, ["compact", str(trainer.folder)])
    assert told.exit_code == 2
    assert "no `rollout.keep`: say what stays with --steps" in told.output
    file = trainer.folder / "rollouts/run.db"
    data = file.read_bytes()
    told = CliRunner().invoke(app, ["compact", str(trainer.folder), "--steps", "1", "--dry-run"])
    assert told.exit_code == 0, told.output
    assert "16 episodes of 4 groups would be dropped: " in told.output
    assert "2 groups stay: a resume repeats their step" in told.output
    assert file.read_bytes() == data
    told = CliRunner().invoke(app, ["compact", str(trainer.folder), "--steps", "1", "--json"])
    assert told.exit_code == 0, told.output
    document = json.loads(told.output)
    assert document["dropped"]["episodes"] == 16
    assert document["dropped"]["bytes"] > 0
    assert document["file_bytes"]["after"] < document["file_bytes"]["before"]
    assert document["resume_needs_steps_after"] == 2
    store_folder = str(trainer.folder / "rollouts")
    with RunStore.open(store_folder, readonly=True) as store:
        assert len(list(store.trajectories())) == 8
        gone = sorted(store.dropped_ids())[0]
        with pytest.raises(StoreError, match="was dropped"):
            store.trajectory(gone)
    # the other commands say it
    words = "16 of 24 episodes were dropped to save space"
    rows = str(tmp_path / "rows.jsonl")
    lines = (
        ["show", str(trainer.folder)],
        ["show", str(trainer.folder), "--filter", "outcome.reward > -9.0 && turns.assistant > 0"],
        ["export", store_folder, "-o", rows],
        ["replay", store_folder],
        ["rescore", store_folder, "--spec", str(tmp_path / "spec.yaml"), "--label", "same"],
    )
    for arguments in installed(lines):
        told = CliRunner().invoke(app, arguments)
        assert told.exit_code == 0, (arguments, told.output)
        assert words in " ".join(told.output.split()), (arguments, told.output)
    assert len(Path(rows).read_text().splitlines()) == 8
    for arguments in installed((["show", str(trainer.folder), gone], ["replay", store_folder, gone])):
        told = CliRunner().invoke(app, arguments)
        assert told.exit_code in (1, 2)
        assert f"the content of {gone} was dropped on" in " ".join(told.output.split()), told.output
