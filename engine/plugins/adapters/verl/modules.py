"""The modules of verl that interactions and tools import, for machines where verl cannot be imported.

Written from verl's documented interfaces ("Interaction System", "Multi-turn Rollout Support",
https://verl.readthedocs.io). If verl can be imported, its own modules are used. If its files are there and a package
that it needs is not (such as ray), the modules below stand in, and all other modules of verl are loaded from its files.
"""

from __future__ import annotations

import importlib
import sys
import threading
import types
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, field_validator

_import_lock = threading.Lock()


class BaseInteraction:
    """What `from verl.interactions.base import BaseInteraction` gives."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str | None:
        """Begin an episode."""
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Return (whether to end, the user's text, the turn's score, anything else)."""
        raise NotImplementedError(f"{type(self).__name__} has no generate_response")

    async def calculate_score(self, *args: Any, **kwargs: Any) -> float:
        """Return the turn's score."""
        return 0.0

    async def finalize_interaction(self, *args: Any, **kwargs: Any) -> None:
        """End the episode."""


class OpenAIFunctionPropertySchema(BaseModel):
    """One parameter of a tool."""

    type: str | list[str]
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    """The parameters of a tool."""

    type: str
    properties: dict[str, OpenAIFunctionPropertySchema]
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(BaseModel):
    """A tool as a function. Keys that verl does not know are dropped, as verl does, before the model sees the
    schema."""

    name: str
    description: str
    parameters: OpenAIFunctionParametersSchema = Field(
        default_factory=lambda: OpenAIFunctionParametersSchema(type="object", properties={})
    )
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    """A tool in OpenAI's form."""

    type: str
    function: OpenAIFunctionSchema


class ToolResponse(BaseModel):
    """The answer of a tool."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    @field_validator("image", "video", mode="before")
    @classmethod
    def _is_list(cls, value: Any) -> Any:
        if value is not None and not isinstance(value, list):
            raise ValueError(f"must be a list, not {type(value).__name__}; write [image]")
        return value

    def is_empty(self) -> bool:
        """Whether it has nothing to show."""
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        """Whether it has text and nothing else."""
        return bool(self.text) and not self.image and not self.video


class BaseTool:
    """What `from verl.tools.base_tool import BaseTool` gives."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        self.config = config
        self.tool_schema: OpenAIFunctionToolSchema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the tool's schema, which the YAML has or a subclass makes."""
        if not hasattr(self, "tool_schema"):
            raise ValueError(
                f"{type(self).__name__} needs `tool_schema` in the YAML, or a method get_openai_tool_schema"
            )
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Create an instance."""
        return instance_id or str(uuid.uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Return (answer, reward, metrics)."""
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the reward of an instance."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Delete an instance."""


_SCHEMAS = {
    item.__name__: item
    for item in (
        OpenAIFunctionPropertySchema,
        OpenAIFunctionParametersSchema,
        OpenAIFunctionSchema,
        OpenAIFunctionToolSchema,
        ToolResponse,
    )
}
MODULES: Mapping[str, Mapping[str, Any]] = {
    "verl": {},
    "verl.interactions": {},
    "verl.interactions.base": {"BaseInteraction": BaseInteraction},
    "verl.tools": {},
    "verl.tools.base_tool": {"BaseTool": BaseTool, **_SCHEMAS},
    "verl.tools.schemas": _SCHEMAS,
    "verl.utils": {},
    "verl.utils.rollout_trace": {"rollout_trace_op": lambda function: function},
}
"""The modules that stand in, and what they have; those without anything are packages."""


@contextmanager
def verl_importable() -> Iterator[None]:
    """A context in which code that was written for verl can be imported. One thread at a time."""
    with _import_lock:
        if _real():
            yield
            return
        before = {name for name in sys.modules if _of_verl(name)}
        package = find_spec("verl") if "verl" not in sys.modules else None
        places = [Path(place) for place in (package.submodule_search_locations or [])] if package is not None else []
        for name, content in MODULES.items():
            module = types.ModuleType(name)
            vars(module).update(content)
            if not content:
                module.__path__ = [str(place.joinpath(*name.split(".")[1:])) for place in places]
            sys.modules[name] = module
        try:
            yield
        finally:
            for name in [name for name in sys.modules if _of_verl(name) and name not in before]:
                del sys.modules[name]


def schema_class() -> Any:
    """The class of tool schemas: verl's own, or the one that stands in."""
    return importlib.import_module("verl.tools.schemas").OpenAIFunctionToolSchema


def _of_verl(name: str) -> bool:
    return name == "verl" or name.startswith("verl.")


def _real() -> bool:
    """Whether verl itself can be imported."""
    if "verl" not in sys.modules and find_spec("verl") is None:
        return False
    try:
        importlib.import_module("verl.tools.base_tool")
    except ModuleNotFoundError as error:
        for name in [name for name in sys.modules if _of_verl(name)]:
            del sys.modules[name]
        if _of_verl(error.name or ""):
            raise
        return False
    return True
