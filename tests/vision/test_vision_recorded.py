"""Images of external code in a scenario of a recorded episode."""

from __future__ import annotations

import asyncio
from typing import Any

import yaml

from engine.plugins.scenarios.recorded import recorded_scenario
from engine.plugins.scenarios.suite import Formats


def test_images_of_external_code_are_in_the_scenario(make_spec: Any, run_spec: Any) -> None:
    tasks = {
        "source": "python",
        "use": "engine.environments.color_square:problems",
        "with": {"count": 1, "seed": 0},
        "id": "id",
    }
    environment = {"use": "engine.environments.color_square:ColorSquare", "effects": "external"}
    spec = make_spec("idefics3", ["Red."], tasks=tasks, environment=environment, machine="single_turn")
    ran = asyncio.run(run_spec(spec))
    (trajectory,) = ran.store.trajectories()
    assert trajectory.outcome.failure is None
    made = recorded_scenario(ran.store, trajectory.episode_id, Formats())
    (scenario,) = yaml.safe_load(made.text)["scenarios"]
    (message,) = scenario["environment"]["reset"]["messages"]
    assert [part["type"] for part in message["content"]][:1] == ["image"]
    assert message["content"][0]["image"].startswith("data:image/png;base64,")
