"""What the adapters of all trainers share: groups of episodes, sums of a hand-over, a loop in a thread."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest
import yaml
from written_specs import TALKS_ON_WHEN_CUT, save_spec

from engine.backends.registry import open_backend
from engine.errors import TrainError, first_of
from engine.plugins.trainers.handover import BatchSums, HandedRow
from engine.plugins.trainers.process import LoopThread
from engine.plugins.trainers.rollouts import TrainerRollouts


def spec_of(folder: Path, model: Path) -> Path:
    """Two tasks of one turn."""
    spec = {
        "spec": "episode/v1",
        "name": "shared",
        "model": {"path": str(model)},
        "backend": {"kind": "local", "max_batch": 8},
        "tasks": {"source": "inline", "rows": [{"id": "a"}, {"id": "b"}], "id": "id"},
        "prompt": [{"role": "user", "content": "Say a word."}],
        "machine": "single_turn",
        "limits": {"turn_tokens": 4},
        "rollout": {"samples_per_task": 2, "seed": 1},
    }
    return save_spec(folder / "spec.yaml", spec)


def test_a_loop_has_one_thread_and_gives_the_errors_of_its_coroutines() -> None:
    async def thread() -> str:
        return threading.current_thread().name

    async def fail() -> None:
        raise KeyError("x")

    loop = LoopThread()
    loop.close()  # before a call: nothing to end
    assert not loop.running
    assert loop.call(thread()) == loop.call(thread()) == "engine-episodes"
    with pytest.raises(KeyError, match="x"):
        loop.call(fail())
    loop.close()
    loop.close()
    assert not loop.running


def test_sums_are_those_of_the_trained_tokens() -> None:
    row = HandedRow([1, 2], [3, 4, 5], [1, 0, 1], [-1.0, 0.0, -2.0], np.array([0.5, 0.0, -0.25], np.float32))
    assert BatchSums.of_rows([row, HandedRow.empty(7)]) == BatchSums(7, 2, 0.75)


@pytest.mark.parametrize("theirs", [BatchSums(6, 2, 0.75), BatchSums(7, 1, 0.75), BatchSums(7, 2, 0.75001)])
def test_another_sum_names_both_and_the_trainer(theirs: BatchSums) -> None:
    with pytest.raises(TrainError, match=r"verl's batch .*Tokens: 7 handed over.*Remove .*\(a filter\)") as caught:
        BatchSums(7, 2, 0.75).check(theirs, "verl", "a filter")
    assert caught.value.kind == "handover"


def test_the_first_error_is_found_in_nested_groups() -> None:
    error = ValueError("first")
    nested = BaseExceptionGroup("", [BaseExceptionGroup("", [error, KeyError()]), TypeError()])
    assert first_of(nested) is error


def test_a_group_of_one_episode_is_not_handed_over(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Of two episodes of t0 the simulator of one fails: what is left has no baseline. A batch of such groups is an error."""
    path = spec_of(tmp_path, tiny_model_dir)
    spec = yaml.safe_load(path.read_text()) | {
        "machine": TALKS_ON_WHEN_CUT,
        "user": {"use": "code_for_training:Fading"},
        "limits": {"turn_tokens": 4, "assistant_turns": 2},
    }
    spec["tasks"] = {"source": "inline", "rows": [{"id": "t0"}, {"id": "t1"}], "id": "id"}
    path.write_text(yaml.safe_dump(spec))

    async def launch() -> None:
        rollouts = TrainerRollouts(path, tmp_path / "out", "verl")
        await rollouts.start(open_backend(rollouts.loaded, rollouts.format))
        try:
            batch = await rollouts.batch(["t0", "t1"], 2, 0)
            assert [(group.task_id, len(group.trajectories)) for group in batch.left_out] == [("t0", 2)]
            assert {row.episode.task_id for row in batch.rows} == {"t1"}
            assert batch.left_out[0].why_no_rows == "the group has fewer trainable episodes than `train.min_group`"
            (alone,) = [each for each in batch.left_out[0].trajectories if each.outcome.trainable]
            assert alone.episode_id == "t0/0"
        finally:
            await rollouts.close()

    asyncio.run(launch())


@pytest.mark.slow
def test_groups_are_whole_and_a_second_launch_gives_other_ids(tmp_path: Path, tiny_model_dir: Path) -> None:
    path = spec_of(tmp_path, tiny_model_dir)

    async def launch() -> list[list[str]]:
        rollouts = TrainerRollouts(path, tmp_path / "out", "verl")
        await rollouts.start(open_backend(rollouts.loaded, rollouts.format))
        try:
            assert rollouts.tasks == ["a", "b"]
            with pytest.raises(TrainError, match="'c' is not a task"):
                await rollouts.group("c", 2, 0)
            batch = await rollouts.batch(["b", "b"], 2, 0)
            assert [len(row.advantages) for _, row in rollouts.final_rows(batch)] == [
                len(row.places) for row in batch.rows
            ]
            return [[each.episode_id for each in group.trajectories] for group in batch.used]
        finally:
            await rollouts.close()

    assert asyncio.run(launch()) == [["b/0", "b/1"], ["b~1/0", "b~1/1"]]
    assert asyncio.run(launch()) == [["b~2/0", "b~2/1"], ["b~3/0", "b~3/1"]]
