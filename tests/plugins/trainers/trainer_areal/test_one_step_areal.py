"""Episodes over AReaL's inference engine, to the advantages of AReaL's own actor; the reference is the rows of the run store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from trainer_kit import FORGETFUL, TASKS, rows_to_train, write_spec
from trainer_python import run_script

from engine.store.store import RunStore


@pytest.mark.slow
@pytest.mark.trainers
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.exhaustive
def test_episodes_reach_the_advantages_of_areal(tmp_path: Path, tiny_model_dir: Path, several: bool) -> None:
    """Three groups of four: WorkflowExecutor.rollout_batch, concat and PPOActor.compute_advantages; with two rows for each episode too."""
    template = tmp_path / "forgetful.jinja"
    template.write_text(FORGETFUL)
    spec = write_spec(tmp_path, tiny_model_dir, template=template if several else None)
    told = run_script("AREAL_PYTHON", Path(__file__).parent / "one_step.py", str(spec), str(tmp_path / "out"))
    store = RunStore.open(tmp_path / "out" / "process-0" / "rollouts", readonly=True)
    rows = rows_to_train(store)
    assert len(store.statuses()) == 12
    counts = {(row["task_id"], row["sample_index"]) for row in rows}
    assert len(rows) == (2 if several else 1) * len(counts)
    assert len(counts) < 12  # the users of some episodes have failed

    def key(ids: list[int], logprobs: np.ndarray, advantages: np.ndarray) -> tuple[object, ...]:
        return (*ids, *np.round(logprobs, 6).tolist(), *np.round(advantages, 3).tolist())

    expected = []
    for row in rows:
        mask = row["loss_mask"] == 1
        arrays = [row[name][mask] for name in ("input_ids", "logprobs", "advantages", "weight_versions")]
        expected.append((key(arrays[0].tolist(), arrays[1], arrays[2]), arrays))
    found = sorted(
        ((key(each["ids"], np.array(each["logprobs"]), np.array(each["advantages"])), each) for each in told["rows"]),
        key=lambda pair: pair[0],
    )
    expected.sort(key=lambda pair: pair[0])
    assert len(found) == len(expected)
    for (_, each), (_, (ids, logprobs, advantages, versions)) in zip(found, expected, strict=True):
        assert each["ids"] == ids.tolist()
        assert np.array_equal(np.array(each["logprobs"], np.float32), logprobs)
        assert np.abs(np.array(each["advantages"]) - advantages).max() <= 1e-6
        assert each["versions"] == versions.tolist()
        assert set(each["versions"]) == {4, 5}
    assert "AReaL's batch is not what the engine handed over" in told["said"][0]
    assert "AReaL's batch has no column engine_trained" in told["said"][1]
    assert told["gconfig"] == [1.0, 24, 1, False]
    assert told["tasks"] == [f"t{n}" for n in range(TASKS)]
