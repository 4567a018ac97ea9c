"""An interaction of verl's form that fails as its row says."""

from __future__ import annotations

import asyncio
from typing import Any

from verl.interactions.base import BaseInteraction


class Faulty(BaseInteraction):
    """Asks for another answer until it is the right one."""

    def __init__(self, config: dict):
        super().__init__(config)
        self.rows: dict[str, dict[str, Any]] = {}

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> str:
        if kwargs.get("fault") == "start":
            raise RuntimeError("no customer today")
        self.rows[instance_id] = kwargs
        return instance_id

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        row = {"fault": None, **self.rows[instance_id]}
        if row["fault"] == "respond":
            raise RuntimeError("lost the thread")
        if row["fault"] == "shape":
            return "not a tuple"
        if row["fault"] == "score":
            return False, "Again.", float("nan"), {}
        if row["fault"] == "hang":
            await asyncio.sleep(3600)
        right = messages[-1]["content"] == row["ground_truth"]
        return right, "Right." if right else f"Not {messages[-1]['content']}.", float(right), {}

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self.rows.pop(instance_id, None)
