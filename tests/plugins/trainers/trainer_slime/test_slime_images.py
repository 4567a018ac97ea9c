"""Images of all turns over slime's router, to the columns that slime trains on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vision_kit
import yaml
from pixel_kit import FOUR_TURNS
from slime_kit import Sample, assert_same, document, slime_args, start_router, stored
from vision_code import MACHINE

from engine.plugins.trainers.slime import convert, generate
from engine.plugins.trainers.slime.rollouts import SlimeEpisodes
from engine.plugins.trainers.slime.rows import origin_of


@pytest.mark.slow
@pytest.mark.trainers
@pytest.mark.parametrize(("window", "shown"), [({}, [4]), (FOUR_TURNS, [2, 2])], ids=["all", "a_window"])
def test_images_of_all_turns_are_columns(tmp_path: Path, window: dict[str, Any], shown: list[int]) -> None:
    """A gallery of four images in three turns: each sample's tensors are those of its row's images, in order."""
    model = vision_kit.build_qwen25(tmp_path / "vlm")
    changes = {
        "tasks": {"source": "inline", "rows": [{"id": "a"}], "id": "id"},
        "environment": {"use": "vision_code:Gallery"},
        "machine": MACHINE,
        "limits": {"turn_tokens": 6},
    } | window
    spec = {key: value for key, value in (document(model) | changes).items() if key not in ("prompt", "user")}
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(spec))
    router, stop = start_router(model, vision=True)
    rows = "several" if window else "one"
    args = slime_args(router.url, path, rollout_function_path="theirs", global_batch_size=2, engine_rows=rows)

    async def run() -> list[Sample]:
        made = [await generate(args, Sample("a", at, 0), {}) for at in range(2)]
        return [each for several in made for each in several] if window else made

    try:
        samples = asyncio.run(run())
        vision = SlimeEpisodes.of(args).format.vision
        data = convert(args, samples)
        SlimeEpisodes.of(args).stop()
    finally:
        stop()
    assert_same(samples, data, stored(args))
    assert vision is not None
    assert len(samples) == 2 * len(shown)
    for sample, tensors, count in zip(samples, data["multimodal_train_inputs"], shown * 2, strict=True):
        origin = origin_of(sample)
        assert origin is not None
        assert origin.trajectory is not None
        assert len(origin.trajectory.branches) == len(shown)
        branch = origin.trajectory.branches[origin.branch]
        assert len(branch.images) == count
        expected = vision.tensors([[image.image for image in branch.images]])
        assert set(tensors) == set(expected) == {"pixel_values", "image_grid_thw"}
        for name, value in expected.items():
            assert np.array_equal(tensors[name].numpy(), value)
    last = json.loads(router.calls[-1])
    assert len(last["image_data"]) == shown[-1]
