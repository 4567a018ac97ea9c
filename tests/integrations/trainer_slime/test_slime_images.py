"""Images of all turns over slime's router, to the columns that slime trains on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import vision_kit
import yaml
from slime_kit import Sample, assert_same, document, slime_args, start_router, stored
from vision_code import MACHINE

from engine.integrations.trainers.slime import convert, generate
from engine.integrations.trainers.slime.episodes import Episodes
from engine.integrations.trainers.slime.samples import origin_of


@pytest.mark.slow
@pytest.mark.trainers
def test_images_of_all_turns_are_columns(tmp_path: Path) -> None:
    """A gallery of four images in three turns: the sample's tensors are those of the row's images, in order."""
    model = vision_kit.build_qwen25(tmp_path / "vlm")
    changes = {
        "tasks": {"source": "inline", "rows": [{"id": "a"}], "id": "id"},
        "environment": {"use": "vision_code:Gallery"},
        "machine": MACHINE,
        "limits": {"turn_tokens": 6},
    }
    spec = {key: value for key, value in (document(model) | changes).items() if key not in ("prompt", "user")}
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(spec))
    router, stop = start_router(model, vision=True)
    args = slime_args(router.url, path, rollout_function_path="theirs", global_batch_size=2)

    async def run() -> list[Sample]:
        return [await generate(args, Sample("a", at, 0), {}) for at in range(2)]

    try:
        samples = asyncio.run(run())
        vision = Episodes.of(args).format.vision
        data = convert(args, samples)
        Episodes.of(args).stop()
    finally:
        stop()
    assert_same(samples, data, stored(args))
    assert vision is not None
    for sample, tensors in zip(samples, data["multimodal_train_inputs"], strict=True):
        origin = origin_of(sample)
        assert origin is not None
        assert origin.trajectory is not None
        (branch,) = origin.trajectory.branches
        assert len(branch.images) == 4
        expected = vision.tensors([[image.image for image in branch.images]])
        assert set(tensors) == set(expected) == {"pixel_values", "image_grid_thw"}
        for name, value in expected.items():
            assert np.array_equal(tensors[name].numpy(), value)
    last = json.loads(router.calls[-1])
    assert len(last["image_data"]) == 4
