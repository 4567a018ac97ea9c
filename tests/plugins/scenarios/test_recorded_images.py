"""Images of external code in a scenario of a recorded episode."""

from __future__ import annotations

import asyncio
from pathlib import Path

import yaml
from ended_runs import run_to_end
from vision_kit import build_idefics3
from written_specs import save_spec

from engine.plugins.scenarios.recorded import recorded_scenario
from engine.plugins.scenarios.suite import Formats


def test_images_of_external_code_are_in_the_scenario(tmp_path: Path) -> None:
    spec = {
        "spec": "episode/v1",
        "name": "seen",
        "model": {"path": str(build_idefics3(tmp_path / "model"))},
        "backend": {"kind": "scripted", "replies": ["Red."]},
        "tasks": {
            "source": "python",
            "use": "engine.environments.color_square:problems",
            "with": {"count": 1, "seed": 0},
            "id": "id",
        },
        "environment": {"use": "engine.environments.color_square:ColorSquare", "effects": "external"},
        "machine": "single_turn",
    }
    ran = asyncio.run(run_to_end(save_spec(tmp_path / "seen.yaml", spec), tmp_path / "runs"))
    (trajectory,) = ran.store.trajectories()
    assert trajectory.outcome.failure is None
    made = recorded_scenario(ran.store, trajectory.episode_id, Formats())
    (scenario,) = yaml.safe_load(made.text)["scenarios"]
    (message,) = scenario["environment"]["reset"]["messages"]
    assert [part["type"] for part in message["content"]][:1] == ["image"]
    assert message["content"][0]["image"].startswith("data:image/png;base64,")
