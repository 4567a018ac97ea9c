"""Tools as their authors write them for verl: nothing in here knows of this engine."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op


class GraderTool(BaseTool):
    """Says whether an answer is right. A call that improves nothing costs a little."""

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._instances: dict[str, dict[str, Any]] = {}

    def _log(self, *words: Any) -> None:
        if "log" in self.config:
            with Path(self.config["log"]).open("a") as stream:
                print(os.getpid(), *words, file=stream)

    async def create(self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs):
        instance_id = instance_id or str(uuid4())
        truth = ground_truth or kwargs.get("create_kwargs", {}).get("ground_truth")
        self._instances[instance_id] = {"truth": truth, "best": 0.0, "answer": ""}
        self._log("create", truth, len(self._instances))
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
        instance = self._instances[instance_id]
        answer = parameters.get("answer", "")
        if answer == "raise":
            raise LookupError("no such answer")
        if answer == "shape":
            return "only text"
        if answer == "reward":
            return ToolResponse(text="x"), "much", {}
        if answer == "exit":
            os._exit(3)
        if answer == "image":
            from PIL import Image

            picture = Image.new("RGB", (32, 32), self.config.get("color", "red"))
            return ToolResponse(text="a square", image=[picture]), None, {"shown": True}
        instance["answer"] = answer
        reward = await self.calc_reward(instance_id)
        improved = reward > instance["best"]
        instance["best"] = reward
        self._log("execute", answer, sorted(kwargs))
        return ToolResponse(text=f"Current parsed {answer=} {reward=}"), 0.0 if improved else -0.05, {"tried": answer}

    async def calc_reward(self, instance_id: str, scale: float = 1.0, **kwargs) -> float:
        instance = self._instances[instance_id]
        numbers = re.findall(r"-?\d+", instance["answer"])
        return scale if numbers and numbers[-1] == instance["truth"] else 0.0

    async def release(self, instance_id: str, **kwargs) -> None:
        self._log("release", sorted(kwargs))
        del self._instances[instance_id]


class HistoryTool(BaseTool):
    """Has its schema in its class, and reads what verl's loop knows of the episode."""

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return OpenAIFunctionToolSchema.model_validate(
            {"type": "function", "function": {"name": "history", "description": "How often it was called."}}
        )

    async def execute(self, instance_id, parameters, agent_data=None, **kwargs):
        calls = agent_data.extra_fields["calls"] = agent_data.extra_fields.get("calls", 0) + 1
        roles = "".join(message["role"][0] for message in agent_data.messages)
        return ToolResponse(text=f"{calls} {roles} {agent_data.tool_rewards}"), 0.0, {}


class InsideTool(HistoryTool):
    """Reads what exists only inside of verl."""

    async def execute(self, instance_id, parameters, agent_data=None, **kwargs):
        return ToolResponse(text=str(agent_data.response_ids)), 0.0, {}


class OldTool(HistoryTool):
    """Takes nothing but what verl before 0.6 gave it."""

    async def execute(self, instance_id, parameters):
        return "heard", 0.5, {}


class NoTool:
    """Is no tool."""

    def __init__(self, config, tool_schema):
        self.name = "none"
