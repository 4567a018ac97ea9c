"""Images and refusals of the rows for SkyRL and AReaL; neither library is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vision_kit

from engine.errors import TrainError
from engine.integrations.trainers import areal, skyrl
from engine.integrations.trainers.handover import HandedRow, Sums
from engine.schemas.model import ModelSpec
from engine.tokens.images import digest_of
from engine.tokens.loading import load_format
from engine.tokens.vision import Vision

ACTOR = SimpleNamespace(reward_bias=0.0, reward_scaling=1.0, reward_clip=20.0)


def seeing(folder: Path, family: str) -> tuple[Vision, str]:
    """The image processing of a tiny model, and the digest of an image in its bank."""
    vision = load_format(ModelSpec(path=str(vision_kit.BUILDERS[family](folder))), folder).vision
    assert vision is not None
    data = vision_kit.square("red")
    digest = digest_of(data)
    vision.bank.put(digest, data, "image/png")
    return vision, digest


def row(vision: Vision, images: list[str]) -> dict[str, Any]:
    """A row of six tokens, whose image is between two trained tokens."""
    return {
        "input_ids": np.array([5, 6, 7, vision.placeholder_id if images else 8, 9, 10], np.int32),
        "loss_mask": np.array([0, 0, 1, 0, 1, 0], np.int8),
        "logprobs": np.full(6, -0.5, np.float32),
        "weight_versions": np.array([-1, -1, 2, -1, 3, -1], np.int32),
        "images": [{"image": digest} for digest in images],
    }


GIVEN = np.array([9, 9, 1.5, 9, -2.0, 9], np.float32)


@pytest.mark.slow
def test_image_tensors_of_each_row(tmp_path: Path) -> None:
    vision, digest = seeing(tmp_path / "model", "qwen2_5_vl")
    rows = [row(vision, [digest]), row(vision, [])]
    whole = vision.tensors([[digest]])
    output = skyrl.generator_output([HandedRow.of(each, GIVEN) for each in rows], vision=vision)
    for name in ("pixel_values", "image_grid_thw"):
        first, second = output[name]
        assert torch.equal(first, torch.from_numpy(whole[name]))
        assert second.shape == (0, *first.shape[1:])
    assert output["rewards"] == [[1.5, 0.0, -2.0, 0.0]] * 2
    assert "pixel_values" not in skyrl.generator_output([HandedRow.of(rows[1], GIVEN)], vision=vision)

    made = areal.trajectory(rows, [GIVEN, GIVEN], [1.0, 0.0], actor=ACTOR, vision=vision)
    first, second = made["multi_modal_input"]
    assert {name: value.shape for name, value in first.items()} == {name: value.shape for name, value in whole.items()}
    assert second == {}
    assert made["mm_token_type_ids"].tolist() == [[0, 0, 0, 1, 0, 0], [0] * 6]


@pytest.mark.slow
def test_families_that_skyrl_does_not_take_are_refused(tmp_path: Path) -> None:
    vision, digest = seeing(tmp_path / "model", "smolvlm")
    with pytest.raises(TrainError, match="SkyRL takes image_grid_thw and pixel_values; this model has"):
        skyrl.generator_output([HandedRow.of(row(vision, [digest]), GIVEN)], vision=vision)


def test_values_are_what_areal_subtracts() -> None:
    """Position t holds the value of token t + 1; the clipped reward is added at the last but one token."""
    each = row(SimpleNamespace(placeholder_id=8), [])  # type: ignore[arg-type]
    short = {name: value[:5] for name, value in each.items()}
    made = areal.trajectory([each, short], [GIVEN, GIVEN[:5]], [30.0, 0.5], actor=ACTOR)
    assert made["values"].tolist() == [[0.0, -1.5, 0.0, 2.0, 20.0, 0.0], [0.0, -1.5, 0.0, 2.5, 0.0, 0.0]]
    assert made["rewards"].tolist() == [30.0, 0.5]
    assert made["versions"].tolist() == [[-1, -1, 2, -1, 3, -1]] * 2
    assert made["attention_mask"].sum(1).tolist() == [6, 5]
    sums = Sums.of_whole_rows([each, short], [GIVEN, GIVEN[:5]])
    assert (sums.tokens, sums.trained, sums.advantages) == (11, 4, 7.0)


def test_the_estimator_returns_the_rewards_by_token() -> None:
    rewards, mask = torch.tensor([[0.0, 1.5, -2.0]]), torch.tensor([[0, 1, 1]])
    advantages, returns = skyrl.identity_advantages(rewards, mask, index=["a"], gamma=0.5)
    assert advantages.tolist() == returns.tolist() == [[0.0, 1.5, -2.0]]


@pytest.mark.slow
def test_the_adapters_import_no_trainer() -> None:
    code = (
        "import sys; import engine.integrations.trainers.skyrl, engine.integrations.trainers.areal; "
        "sys.exit(bool({'skyrl', 'areal'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_missing_skyrl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skyrl", None)
    with pytest.raises(TrainError, match=r"SkyRL cannot be imported .*pip install 'episode-engine\[skyrl\]'"):
        skyrl.register_estimator()
