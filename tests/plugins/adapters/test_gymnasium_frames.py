"""Frames of a Gymnasium environment in whole episodes of vision models: on the tape, in the store, in rows, after a resume."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ended_runs import run_to_end
from PIL import Image
from vision_kit import BUILDERS
from written_specs import save_spec

from engine.runner.replay import Replayer
from engine.spec.tasks import load_tasks
from engine.store.rows.export import export_rows
from engine.tokens.images import digest_of
from engine.tokens.loading import load_format

gymnasium = pytest.importorskip("gymnasium", reason="needs the extra `gymnasium`")
pytest.importorskip("pygame", reason="FrozenLake draws its pictures with pygame")
pytestmark = pytest.mark.adapters

ACTIONS = ["left", "down", "right", "up"]
MOVES = ["down", "<answer>down</answer>", "jump", "right"]
LAKE = {
    "environment": {
        "adapter": "gymnasium",
        "use": "FrozenLake-v1",
        "with": {
            "show": ["rgb_array", "observation"],
            "actions": ACTIONS,
            "prompt": "",
            "kwargs": {"is_slippery": False},
        },
    },
    "tasks": {"source": "inline", "rows": [{"id": "a", "seed": 5}], "id": "id"},
    "prompt": [{"role": "user", "content": "Cross the lake."}],
    "machine": "step",
    "limits": {"assistant_turns": 4, "turn_tokens": 40},
}


def write_spec(folder: Path, family: str, **changes: Any) -> Path:
    """A spec of a tiny vision-language model that crosses the lake."""
    spec = {
        "spec": "episode/v1",
        "name": "lake",
        "model": {"path": str(BUILDERS[family](folder / "model"))},
        "backend": {"kind": "local", "device": "cpu", "dtype": "float32"},
        "rollout": {"seed": 7},
        **LAKE,
    }
    return save_spec(folder / "lake.yaml", spec | changes)


def frames(moves: list[str]) -> list[Any]:
    """The frames that the environment renders by hand; None for a turn without a frame."""
    env = gymnasium.make("FrozenLake-v1", is_slippery=False, render_mode="rgb_array")
    env.reset(seed=5)
    found = [env.render()]
    for move in moves:
        name = move.removeprefix("<answer>").removesuffix("</answer>")
        if name not in ACTIONS:
            found.append(None)
            continue
        env.step(ACTIONS.index(name))
        found.append(env.render())
    env.close()
    return found


def pixels(data: bytes) -> Any:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
async def test_the_model_sees_the_frames_that_the_environment_renders(tmp_path: Path, family: str) -> None:
    spec = write_spec(tmp_path, family, backend={"kind": "scripted", "replies": MOVES})
    ran = await run_to_end(spec, tmp_path / "runs")
    trajectory = ran.only
    assert trajectory.outcome.failure is None
    (branch,) = trajectory.branches
    # the frame after the last reply is shown to nobody
    by_hand = [frame for frame in frames(MOVES[:-1]) if frame is not None]
    seen = [pixels(ran.store.image(image.image).data) for image in branch.images]
    assert len(seen) == len(by_hand) == 3
    for one, other in zip(seen, by_hand, strict=True):
        assert one.shape == other.shape
        assert (one == other).all()
    assert trajectory.messages[1].text == "0"
    assert len({digest_of(ran.store.image(image.image).data) for image in branch.images}) == 3
    pads = branch.input_ids == ran.vision.placeholder_id
    inside = np.zeros(len(pads), bool)
    for image in branch.images:
        inside[image.start : image.end] = True
    assert (pads == inside).all()
    assert not (branch.loss_mask[inside] == 1).any()
    assert trajectory.facts["invalid_actions"] == 1
    (row,) = export_rows(ran.store, vision=ran.vision)
    assert len(row["images"]) == 3


async def test_a_tiny_vision_model_plays_and_a_replay_gives_the_same(tmp_path: Path) -> None:
    """The model samples its own replies and reads each frame; the journal alone gives the same episode."""
    ran = await run_to_end(write_spec(tmp_path, "qwen2_5_vl"), tmp_path / "runs")
    trajectory = ran.only
    assert trajectory.outcome.failure is None
    assert len(trajectory.turns) == 4
    assert trajectory.counts["images"] >= 1
    form = load_format(ran.loaded.spec.model, ran.loaded.base)
    replayer = Replayer(ran.loaded, form, ran.store)
    found = await replayer.check(trajectory, load_tasks(ran.loaded)[0])
    replayer.close()
    assert found.difference is None
