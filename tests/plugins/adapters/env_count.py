"""An environment in the form of slime's `env_*.py`: the model counts up to a number. Nothing in here knows of this engine."""

from __future__ import annotations

import re
import time
from typing import Any


class CountEnv:
    def __init__(self, *, goal: int, max_turns: int, fault: str | None) -> None:
        self.goal, self.max_turns, self.fault = goal, max_turns, fault
        self.turn = 0

    def reset(self):
        self.turn = 0
        return {}, {"goal_known": self.goal is not None}

    def close(self):
        self.goal = None

    def step(self, response_text: str):
        self.turn += 1
        if self.fault == "raise":
            raise RuntimeError("the grader is broken")
        if self.fault == "hang":
            time.sleep(3600)
        if self.fault == "shape":
            return {"obs_str": "too few"}, True
        if self.fault == "reward":
            return {"obs_str": "?", "tool_score": float("nan")}, False, {}
        found = re.search(r"<tool_call>(\d+)</tool_call>", response_text)
        said = int(found[1]) if found else None
        done = said == self.goal or self.turn >= self.max_turns
        words = "right" if said == self.goal else "more" if said is not None and said < self.goal else "less"
        observation: dict[str, Any] = {"obs_str": f"{said}: {words}", "role": "tool"}
        if said is not None:
            observation["tool_score"] = 1.0 if said == self.goal else said / 100
        if "picture" in response_text:
            from PIL import Image

            observation["multi_modal_data"] = {"images": [Image.new("RGB", (32, 32), (self.turn, 0, 0))]}
        return observation, done, {"said": said, "object": object()}

    def format_observation(self, observation: dict) -> dict:
        content = []
        for images in (observation.get("multi_modal_data") or {}).values():
            content += [{"type": "image", "image": image} for image in images]
        return {"role": "user", "content": [*content, {"type": "text", "text": observation.get("obs_str", "")}]}


def build_env(sample: Any = None, args: Any = None, **_: Any) -> CountEnv:
    return CountEnv(goal=int(sample.label), max_turns=args.max_turns, fault=sample.metadata.get("fault"))
