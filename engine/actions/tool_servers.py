"""Servers of tools that all episodes of a run share: opened when the first episode begins, closed with the run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine.actions.toolbox import BoundTool, bind_tool
from engine.errors import EngineError, SpecCodeError
from engine.spec.code.entry import load_entry

if TYPE_CHECKING:
    from engine.actions.calling.workers import Workers
    from engine.schemas.entry import ToolSpec
    from engine.spec.load import LoadedSpec


class ToolServers:
    """The servers of one run, and the tools that they offered when they were opened.

    The class of a tool adapter (`ToolAdapterFacts.runs`) has `open() -> list of tools`, which is async, and `close()`. Each tool says with `reads_only`
    whether its calls change nothing.

    Args:
        specs: The spec's tools that have an adapter.
        loaded: The spec.
        code: Closes the servers.
    """

    def __init__(self, specs: Sequence[ToolSpec], loaded: LoadedSpec, code: Workers) -> None:
        self._specs, self._loaded, self._code = specs, loaded, code
        self._opening: asyncio.Task[list[BoundTool]] | None = None

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._specs)

    async def tools(self) -> list[BoundTool]:
        """All tools of all servers; the same list for each episode.

        Raises:
            SpecCodeError: a server could not be opened. It is not tried again in this run.
        """
        if not self._specs:
            return []
        if self._opening is None:
            self._opening = asyncio.create_task(self._open_all())
        return await asyncio.shield(self._opening)

    async def _open_all(self) -> list[BoundTool]:
        return [tool for spec in self._specs for tool in await self._open(spec)]

    async def _open(self, spec: ToolSpec) -> list[BoundTool]:
        where = f"tools: `{spec.use}`"
        try:
            server = load_entry(spec.entry.use, None)(**{**spec.entry.with_, "base": str(self._loaded.base)})
            self._code.at_close.append(server.close)
            found = await server.open()
        except (EngineError, TypeError, ValueError) as error:
            raise SpecCodeError(f"{where}: {error}", blame="tool", kind="tool_server") from error
        seconds = spec.timeout or self._loaded.spec.limits.tool_seconds
        return [self._bound(tool, spec, seconds, where) for tool in found]

    @staticmethod
    def _bound(tool: Any, spec: ToolSpec, seconds: float, where: str) -> BoundTool:
        own = "pure" if tool.reads_only else "external"
        effects = spec.effects if "effects" in spec.model_fields_set else own
        return bind_tool(tool, name=None, seconds=seconds, effects=effects, where=where)  # type: ignore[arg-type]
