"""Episodes over SkyRL's inference engine client, to the advantages of SkyRL's own trainer; the reference is the rows of the run store."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from trainer_kit import rows_to_train, write_spec
from trainer_python import run_script

from engine.store.store import RunStore

SAMPLES = 4


@pytest.mark.slow
@pytest.mark.trainers
def test_episodes_reach_the_advantages_of_skyrl(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Three groups of four: BasePPOExp, StatefulDataLoader, prepare_generator_input, RayPPOTrainer.generate, and the rest up to the advantages."""
    spec, folder = write_spec(tmp_path, tiny_model_dir), tmp_path / "out"
    told = run_script("SKYRL_PYTHON", Path(__file__).parent / "one_step.py", str(spec), str(folder))
    store = RunStore.open(folder / "rollouts", readonly=True)
    rows = {(row["task_id"], row["sample_index"]): row for row in rows_to_train(store)}
    episodes = store.statuses()
    assert len(told["rows"]) == len(episodes) == 12
    assert len({task for task, _ in rows}) == 2
    trained = 0
    for each in told["rows"]:
        row = rows.pop(tuple(each["slot"]), None)
        if row is None:  # its user has failed, or those of all others of its group
            assert each["ids"] == []
            continue
        mask = row["loss_mask"] == 1
        assert each["ids"] == row["input_ids"][mask].tolist()
        assert np.abs(np.array(each["advantages"]) - row["advantages"][mask]).max() <= 1e-6
        assert np.array_equal(np.array(each["logprobs"], np.float32), row["logprobs"][mask])
        assert set(row["weight_versions"][mask].tolist()) == {2}  # the third step samples after two updates
        trained += 1
    assert not rows
    assert 0 < trained < 12
    sampled = {(episode, tuple(ids)) for episode, ids, _ in told["sampled"]}
    assert {episode for episode, _ in sampled} == set(episodes) == set(told["ended"])
    engine = told["engine"]
    assert engine["engine/episodes/count"] == 12
    assert engine["engine/groups/small"] == 1  # one of its episodes could be trained on
    assert engine["engine/skyrl/empty_rows"] == 12 - trained == engine["engine/episodes/masked"] + 1
    assert told["rewards"] == {"reward/avg_raw_reward": engine["engine/reward/mean"]}
    assert "SkyRL's batch is not what the engine handed over" in told["lost"]
    assert fmean(abs(value) for each in told["rows"] for value in each["advantages"]) > 0.1
