"""Images through AReaL's own workflow executor, actor and FSDP engine; the reference is the rows of the run store and the engine's own pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vision_kit
from pixel_kit import WINDOW, images_of, own_checksums, own_logprobs, rows_and_vision, write_spec
from trainer_python import run_script

from engine.plugins.trainers.pixels import Pixels

AREAL = pytest.mark.timeout(1200)
"""AReaL's imports and its start take half a minute on quiet cores, and minutes on busy ones."""


def with_frames_of_a_second(folder: Path) -> Path:
    """Set what transformers 5.3, which AReaL requires, multiplies the time of images by; later ones use it for videos only."""
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["tokens_per_second"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
@pytest.mark.trainers
@AREAL
@pytest.mark.parametrize(
    ("tasks", "blind", "changes", "rows_of_group", "images"),
    [
        ("t0,t1,t2", ("t1",), {}, 2, {0, 4}),
        ("t0", ("t0",), {}, 2, {0}),
        ("t0", (), WINDOW, 4, {2}),
    ],
    ids=["some_rows_without_images", "a_batch_without_images", "a_window_of_images"],
)
def test_images_reach_the_update_of_areal(
    tmp_path: Path, tasks: str, blind: tuple[str, ...], changes: dict[str, Any], rows_of_group: int, images: set[int]
) -> None:
    """Log-probs, tensors and positions of AReaL's passes, an update, and images that were swapped, moved and lost on the way."""
    folder = with_frames_of_a_second(vision_kit.build_qwen25(tmp_path / "model"))
    spec = write_spec(tmp_path, folder, blind=blind, **changes)
    told = run_script("AREAL_PYTHON", Path(__file__).parent / "images_step.py", str(spec), str(tmp_path / "out"), tasks)
    rows, vision = rows_and_vision(tmp_path / "out" / "process-0" / "rollouts", folder)
    pixels = Pixels(vision, folder)
    found = {tuple(each["ids"]): each for each in told["rows"]}
    assert len(rows) == len(told["rows"]) == rows_of_group * len(tasks.split(","))
    shown = []
    for row in rows:
        each = found[tuple(row["input_ids"].tolist())]
        assert np.abs(np.array(each["logprobs"]) - own_logprobs(folder, row, vision)).max() < 1e-5
        assert each["checksums"] == own_checksums(row, vision)
        positions = pixels.positions(row["input_ids"], images_of(row))
        assert positions is not None
        assert each["positions"] == positions[1:].tolist()
        shown.append(len(images_of(row)))
    assert set(shown) == images
    assert all(markers == images for markers, images, _ in told["asked"])
    assert {room for *_, room in told["asked"]} == {24}
    assert told["pngs"] > 2 if any(images) else told["pngs"] == 0
    assert told["lists"] == [[rows_of_group] * 2] * len(tasks.split(","))
    assert told["changed"] > 0
    if any(images):
        assert told["visual"] > 0
        assert len(told["said"]) == 3
        for said in told["said"]:
            assert "images: lost, changed, or in another order or row" in said


@pytest.mark.slow
@pytest.mark.trainers
@AREAL
def test_other_positions_than_the_servers_are_refused(tmp_path: Path) -> None:
    """The model as it comes, with the transformers that AReaL requires; settings that would lose images are named too."""
    spec = write_spec(tmp_path, vision_kit.build_qwen25(tmp_path / "model"))
    told = run_script("AREAL_PYTHON", Path(__file__).parent / "images_step.py", str(spec), str(tmp_path / "out"), "t0")
    assert told["refused"].startswith("transformers 5.3.0 multiplies the time of this model's images")
    for named in (
        "rollout.backend: vllm takes images with messages only",
        "rollout.check_trajectory_format: rows without an image",
        "rollout.return_routed_experts: no trainer of AReaL reads them",
        "actor.enable_tree_training: its positions do not know images",
    ):
        assert named in told["named"]
