"""The episodes that `engine train` trained on, through TransferQueue and verl's V1 trainer: the same advantages by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from verl_python import run_verl

pytestmark = [pytest.mark.slow, pytest.mark.trainers]


def test_verl(single: Any, several: Any, tmp_path: Path) -> None:
    """The rows of the engine's manager, verl's padding and `_compute_advantage` of the registered trainer; episodes of two rows too."""
    words = []
    for name, recorded in (("single", single), ("several", several)):
        words += [str(recorded.file(tmp_path / f"{name}.json")), str(recorded.spec)]
    told = run_verl(Path(__file__).parent / "verl_path.py", *words)
    for found, recorded in zip(told, (single, several), strict=True):
        assert len(found["rows"]) == len(recorded.rows)
        for each, row, reward in zip(found["rows"], recorded.rows, recorded.rewards, strict=True):
            mask = row["loss_mask"] == 1
            assert each["all_ids"] == row["input_ids"].tolist()
            assert each["ids"] == row["input_ids"][mask].tolist()
            assert np.abs(np.array(each["advantages"]) - row["advantages"][mask]).max() <= 1e-6
            assert each["elsewhere"] == 0.0
            assert np.array_equal(np.array(each["logprobs"], np.float32), row["logprobs"][mask])
            assert each["versions"] == [row["weight_versions"][mask].min(), row["weight_versions"][mask].max()]
            assert each["score"] == pytest.approx(reward)
        assert len(found["padding"]) == 3
        assert not any(any(each) for each in found["padding"])
        assert "verl's batch is not what the engine handed over" in found["lost"]
