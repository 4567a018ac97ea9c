"""Gymnasium environments as their authors write them: nothing in here knows of this engine."""

from __future__ import annotations

import os
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Cellar(gymnasium.Env):
    """Say a word; the room's colour is the number of its letters."""

    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.action_space = spaces.Text(8)
        self.observation_space = spaces.Text(40)
        self.colour = 0
        self.hint = "silence"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.fault = (options or {}).get("fault")
        self.goal = int(self.np_random.integers(3, 6))
        self.colour = 0
        return "a dark cellar", {"goal": np.int64(self.goal)}

    def step(self, action: str) -> Any:
        if self.fault == "raise":
            raise RuntimeError("no")
        if self.fault == "hang":
            time.sleep(3600)
        if self.fault == "exit":
            os._exit(3)
        if self.fault == "shape":
            return "four", 0.0, True, {}
        if self.fault == "reward":
            return "much", np.nan, False, False, {}
        self.colour = len(action)
        self.hint = "an echo" if self.colour > self.goal else "a whisper"
        right = len(action) == self.goal
        return f"you said {action}", 1.0 if right else -0.1, right, action == "night", {"letters": len(action)}

    def render(self) -> Any:
        return np.full((28, 28, 3), self.colour, np.uint8)

    def get_prompt(self) -> str:
        return "Say a word."


class Panel(gymnasium.Env):
    """Says which action it was given, for an action space of any form."""

    metadata = {"render_modes": []}

    def __init__(self, space: spaces.Space[Any], render_mode: str | None = None) -> None:
        self.action_space = space
        self.observation_space = spaces.Text(400)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return "ready", {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        return repr(action), 1.0, False, False, {}


class Screen(gymnasium.Env):
    """Its observation has the form that `form` names: a screen, a small grid, or a picture beside numbers."""

    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, form: str, render_mode: str | None = None) -> None:
        picture = spaces.Box(0, 255, (64, 64), np.uint8)
        self.action_space = spaces.Discrete(2)
        self.observation_space: Any = {
            "screen": spaces.Box(0, 255, (96, 96, 3), np.uint8),
            "grid": spaces.Box(0, 255, (7, 7, 3), np.uint8),
            "nested": spaces.Dict(
                {"see": spaces.Tuple((picture, spaces.Box(-1.0, 1.0, (4,)))), "say": spaces.Discrete(9)}
            ),
        }[form]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(0)
        return self.observation_space.sample(), {}


SPACES: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(3),
    "shifted": spaces.Discrete(3, start=-1),
    "multi": spaces.MultiDiscrete([3, 2]),
    "grid": spaces.MultiDiscrete([[3, 2], [4, 5]]),
    "binary": spaces.MultiBinary(3),
    "box": spaces.Box(-1.0, 1.0, (2,)),
    "number": spaces.Box(0.0, 1.0, ()),
    "unbounded": spaces.Box(-np.inf, np.inf, (2,)),
    "pixels": spaces.Box(0, 255, (2, 2), np.uint8),
    "text": spaces.Text(5),
    "tuple": spaces.Tuple((spaces.Discrete(2), spaces.Box(-1.0, 1.0, (2,)))),
    "dict": spaces.Dict({"move": spaces.Discrete(4), "speed": spaces.Box(0.0, 1.0, (1,)), "say": spaces.Text(5)}),
    "nested": spaces.Dict({"arm": spaces.Tuple((spaces.MultiBinary(2), spaces.Dict({"grip": spaces.Discrete(2)})))}),
    "sequence": spaces.Sequence(spaces.Discrete(3)),
    "graph": spaces.Graph(spaces.Discrete(3), None),
    "hidden": spaces.Dict(
        {"a": spaces.Tuple((spaces.Discrete(2), spaces.OneOf((spaces.Discrete(2), spaces.Discrete(3)))))}
    ),
}
for _name, _space in SPACES.items():
    gymnasium.register(f"Panel-{_name}-v0", Panel, kwargs={"space": _space})

gymnasium.register("Screen-v0", Screen, disable_env_checker=True)
gymnasium.register("Cellar-v0", Cellar, max_episode_steps=4)
