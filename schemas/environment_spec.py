"""What people write under `environment` and `tools`, validated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import model_validator

from engine.schemas.adapters import AdapterFacts, ToolAdapterFacts, adapter_facts, tool_adapter_facts
from engine.schemas.base import Seconds
from engine.schemas.entry import Effects, Entry, IsolationSpec


class EnvironmentSpec(Entry):
    """The environment of each episode."""

    PLUGIN_NAMES: ClassVar[Mapping[str, str]] = {"adapter": "adapters"}

    adapter: str | None = None
    """The library that `use` belongs to, such as `slime`; left out, `use` is a class of the engine's own form."""
    effects: Effects = "replayable"
    timeout: Seconds = 60.0
    """Deadline for each of its calls."""
    isolation: IsolationSpec | None = None
    """Where it runs; the spec's `isolation` when left out."""

    @property
    def facts(self) -> AdapterFacts | None:
        """What holds for its adapter; None: it has none."""
        return None if self.adapter is None else adapter_facts(self.adapter)

    @property
    def entry(self) -> Entry:
        """The class that runs and its keyword arguments: the adapter's, where there is one."""
        if self.facts is None:
            return self
        return Entry(use=self.facts.runs, with_={"use": self.use, **self.with_})

    def entry_in(self, base: Path) -> Entry:
        """The same for a spec in the folder `base`, which an adapter is given because `use` may be a path."""
        entry = self.entry
        return entry if self.facts is None else Entry(use=entry.use, with_={**entry.with_, "base": str(base)})

    @property
    def default_mode(self) -> str:
        """Where it runs if neither its own `isolation` nor the spec's says it."""
        return "thread" if self.facts is None or self.facts.thread_safe else "process"

    @model_validator(mode="before")
    @classmethod
    def _effects_of_adapter(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("adapter"), str) and "effects" not in value:
            return {**value, "effects": adapter_facts(value["adapter"]).effects}
        return value


class ToolSpec(Entry):
    """One tool: a typed function, or a class that is built with `with` and then called. With `adapter`, all tools of a server."""

    PLUGIN_NAMES: ClassVar[Mapping[str, str]] = {"adapter": "tool_adapters"}

    adapter: str | None = None
    """The kind of server that `use` names, such as `mcp`; left out, `use` is a function or class."""
    name: str | None = None
    """Its name for the model. Default: the function's name. Not with `adapter`."""
    timeout: Seconds | None = None
    """Deadline for one call. Default: `limits.tool_seconds`."""
    effects: Effects = "pure"
    """With `adapter`, where it is left out: `pure` for tools that their server calls read-only, `external` for others."""
    isolation: IsolationSpec | None = None
    """Where it runs; the spec's `isolation` when left out. Not with `adapter`."""

    @property
    def facts(self) -> ToolAdapterFacts | None:
        """What holds for its adapter; None: it has none."""
        return None if self.adapter is None else tool_adapter_facts(self.adapter)

    @property
    def entry(self) -> Entry:
        """The class or function that runs and its keyword arguments: the adapter's, where there is one."""
        if self.facts is None:
            return self
        return Entry(use=self.facts.runs, with_={"use": self.use, **self.with_})

    @model_validator(mode="after")
    def _server(self) -> ToolSpec:
        if self.facts is not None and self.name is not None:
            raise ValueError("`name` is for one tool, and a server has several; write `with: {prefix: …}`")
        if self.facts is not None and self.isolation is not None:
            raise ValueError("`isolation` has no effect on a server of tools, which runs outside of the engine")
        return self
