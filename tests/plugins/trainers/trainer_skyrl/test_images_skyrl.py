"""Images through SkyRL's own trainer, model wrapper and policy worker; the reference is the rows of the run store and the engine's own pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import vision_kit
from pixel_kit import own_checksums, own_logprobs, rows_and_vision, write_spec
from trainer_python import run_script


@pytest.mark.slow
@pytest.mark.trainers
def test_images_reach_the_update_of_skyrl(tmp_path: Path) -> None:
    """Requests, tensors and log-probs, an update, and images that were exchanged on the way; the episodes of one task cannot be trained on."""
    folder = vision_kit.build_qwen25(tmp_path / "model")
    spec = write_spec(tmp_path, folder, broken=("t2",))
    told = run_script("SKYRL_PYTHON", Path(__file__).parent / "images_step.py", str(spec), str(tmp_path / "out"))
    rows, vision = rows_and_vision(tmp_path / "out" / "rollouts", folder)
    found = {tuple(each["ids"]): each for each in told["rows"] if each["trained"]}
    assert len(rows) == len(found) == 4
    for row in rows:
        each = found[tuple(row["input_ids"].tolist())]
        assert np.abs(np.array(each["logprobs"]) - own_logprobs(folder, row, vision)).max() < 1e-5
        assert each["checksums"] == own_checksums(row, vision)
        assert len(each["checksums"]) == 4
    empty = [each for each in told["rows"] if not each["trained"]]
    assert len(empty) == 2
    assert all(tuple(each["ids"]) in found and len(each["checksums"]) == 4 for each in empty)
    assert set(told["right"]) == {True}
    assert told["rendered"] == len({image for each in told["rows"] for image in each["checksums"]})
    assert told["experts"] == ["torch.uint8", [[[[0, 1]], [[2, 3]], [[4, 5]], [[0, 0]]], [[[0, 0]]] * 4]]
    refused, *lost = told["said"]
    for named in (
        "trainer.remove_microbatch_padding: set it to false",
        "enable_return_routed_experts: its endpoint drops images",
        "enable_return_routed_experts: set `backend.routed_experts: true`",
        "sequence_parallel_size=2: set it to 1",
        "language_model_only: the model would have no vision tower",
    ):
        assert named in refused
    assert len(lost) == 2
    assert all("images: lost, changed, or in another order or row" in said for said in lost)
    assert all(np.isfinite(told["losses"]))
    assert 0 < told["visual"] < told["changed"]
