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


gymnasium.register("Cellar-v0", Cellar, max_episode_steps=4)
