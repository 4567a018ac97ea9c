"""Interactions as their authors write them for verl: nothing in here knows of this engine."""

from __future__ import annotations

import re
from typing import Any
from uuid import uuid4

from verl.interactions.base import BaseInteraction

LOG: list[tuple[Any, ...]] = []
"""(method, instance, …) of every call."""


class Gsm8kInteraction(BaseInteraction):
    """Grades the newest answer, and asks for another until it is right."""

    def __init__(self, config: dict):
        super().__init__(config)
        self._instances: dict[str, dict[str, Any]] = {}
        LOG.append(("made", config))

    async def start_interaction(self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs) -> str:
        instance_id = instance_id or str(uuid4())
        self._instances[instance_id] = {"response": "", "ground_truth": ground_truth}
        LOG.append(("start", instance_id, ground_truth, kwargs))
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs
    ) -> tuple[bool, str, float, dict]:
        content = next((item["content"] for item in reversed(messages) if item["role"] == "assistant"), "")
        self._instances[instance_id]["response"] = content
        LOG.append(("respond", instance_id, [item["role"] for item in messages]))
        reward = await self.calculate_score(instance_id)
        if reward == 1.0:
            return True, "Your response is correct!", reward, {}
        return False, "Your response is incorrect! You need to reflect on your answer and try again.", reward, {}

    async def calculate_score(self, instance_id: str, **kwargs) -> float:
        instance = self._instances[instance_id]
        numbers = re.findall(r"-?\d+(?:\.\d+)?", instance["response"])
        return 1.0 if numbers and numbers[-1] == instance["ground_truth"] else 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs) -> None:
        LOG.append(("finalize", instance_id))
        del self._instances[instance_id]


class Bare(BaseInteraction):
    """Leaves to its base what it can: one that scores nothing itself, and is told of no end."""

    async def generate_response(self, instance_id, messages, **kwargs):
        return False, f"{self.config['word']} {len(messages)}", None, {"seen": len(messages)}


class Broken(BaseInteraction):
    """Fails where it is told to."""

    async def start_interaction(self, instance_id=None, at="", **kwargs):
        self.at = at
        LOG.append(("start", instance_id))
        if at == "start":
            raise LookupError("no such customer")
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        if self.at == "respond":
            raise LookupError("lost the thread")
        return "not a tuple"

    async def finalize_interaction(self, instance_id, **kwargs):
        LOG.append(("finalize", instance_id))
