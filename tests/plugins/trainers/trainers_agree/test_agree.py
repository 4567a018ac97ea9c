"""The same recorded rows, through each trainer's own advantage computation: the advantages by token of `engine train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainer_python import run_script
from training_rows import row_of

from engine.plugins.trainers.handover import HandedRow
from engine.plugins.trainers.trl import EngineRollouts, grpo_arguments

pytestmark = [pytest.mark.slow, pytest.mark.trainers]
HERE = Path(__file__).parent


def masked(row: dict[str, Any], column: str) -> np.ndarray:
    """A column of a recorded row on its trained tokens."""
    found: np.ndarray = row[column][row["loss_mask"] == 1]
    return found


def test_trl(single: Any, tmp_path: Path) -> None:
    """EngineGRPOTrainer and TRL's own slicing, up to what its loss reads."""
    pytest.importorskip("trl")
    from trl import GRPOConfig

    from engine.plugins.trainers.trl import EngineGRPOTrainer

    rows = {(row["task_id"], row["sample_index"]): row for row in single.rows}

    class Replayed(EngineRollouts):
        def __call__(self, prompts: Any, trainer: Any) -> dict[str, Any]:
            slots = [(task, place % 4) for place, task in enumerate(prompts)]
            self.handed = [HandedRow.of(row_of(rows[slot])) if slot in rows else HandedRow.empty(1) for slot in slots]
            self.sums = type(self.sums).of_rows(self.handed)
            self.version = trainer.state.global_step
            return {
                "prompt_ids": [row.prompt_ids for row in self.handed],
                "completion_ids": [row.completion_ids for row in self.handed],
                "logprobs": [row.logprobs for row in self.handed],
                "env_mask": [row.mask for row in self.handed],
                "engine_reward": [0.0] * len(self.handed),
            }

    seen: dict[tuple[int, ...], np.ndarray] = {}
    (tmp_path / "out").mkdir()  # an episode would make it
    with Replayed(single.spec, tmp_path / "out") as rollouts:
        arguments = grpo_arguments(rollouts.loaded) | {"save_strategy": "no", "disable_tqdm": True}
        trainer = EngineGRPOTrainer(rollouts, GRPOConfig(output_dir=str(tmp_path / "model"), **arguments))
        inner = trainer._compute_loss

        def watched(model: Any, inputs: dict[str, Any]) -> Any:
            mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
            for ids, advantages, on in zip(inputs["completion_ids"], inputs["advantages"], mask, strict=True):
                if on.any():
                    seen[tuple(ids[on].tolist())] = advantages[on].numpy()
            return inner(model, inputs)

        trainer._compute_loss = watched
        trainer.train()
    expected = {tuple(masked(row, "input_ids").tolist()): masked(row, "advantages") for row in single.rows}
    assert seen.keys() == expected.keys()
    for ids, advantages in expected.items():
        assert np.abs(seen[ids] - advantages).max() <= 1e-6


def test_skyrl(single: Any, tmp_path: Path) -> None:
    """validate, postprocess_generator_output, convert_to_training_input, compute_advantages_and_returns of SkyRL."""
    told = run_script(
        "SKYRL_PYTHON", HERE / "skyrl_path.py", str(single.file(tmp_path / "rows.json")), str(single.spec)
    )
    rows = {(row["task_id"], row["sample_index"]): row for row in single.rows}
    assert len(told["rows"]) == 48
    for each in told["rows"]:
        row = rows.pop(tuple(each["slot"]), None)
        if row is None:  # an episode that is not trained on
            assert each["ids"] == []
            continue
        assert each["ids"] == masked(row, "input_ids").tolist()
        assert np.abs(np.array(each["advantages"]) - masked(row, "advantages")).max() <= 1e-6
        assert np.array_equal(np.array(each["logprobs"], np.float32), masked(row, "logprobs"))
    assert rows == {}
    assert "advantage_estimator=grpo: set it to engine" in told["refused"]
    assert {path: path in said for path, said in told["named"].items()} == dict.fromkeys(told["named"], True)
    assert "SkyRL's batch is not what the engine handed over" in told["lost"]


def test_areal(single: Any, several: Any, tmp_path: Path) -> None:
    """concat_padded_tensors and PPOActor.compute_advantages of AReaL, with a reward that is scaled; episodes of two rows too."""
    for recorded in (single, several):
        told = run_script(
            "AREAL_PYTHON", HERE / "areal_path.py", str(recorded.file(tmp_path / "rows.json")), str(recorded.spec)
        )
        assert len(told["rows"]) == len(recorded.rows)
        for each, row, reward in zip(told["rows"], recorded.rows, recorded.rewards, strict=True):
            assert each["ids"] == masked(row, "input_ids").tolist()
            assert np.abs(np.array(each["advantages"]) - masked(row, "advantages")).max() <= 1e-6
            assert np.array_equal(np.array(each["logprobs"], np.float32), masked(row, "logprobs"))
            assert each["versions"] == masked(row, "weight_versions").tolist()
            assert each["reward"] == pytest.approx(reward)
        assert {path: path in said for path, said in told["named"].items()} == dict.fromkeys(told["named"], True)
        assert "AReaL's batch is not what the engine handed over" in told["lost"]
