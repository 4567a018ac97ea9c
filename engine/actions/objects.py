"""Builds the objects of an episode from entry points, and closes them in every case."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from engine import plugin
from engine.actions.action import EpisodeObjects
from engine.actions.calling.code_call import call_spec_code
from engine.actions.calling.host import CodeOrigin, HostedObject, SpecCode
from engine.actions.services import EpisodeService
from engine.actions.spec_code import CallToolsAction
from engine.actions.toolbox import BoundTool, Toolbox, bind_tool
from engine.errors import EngineError, SpecCodeError
from engine.spec.added import added_tools, no_player, played_parts
from engine.spec.code.entry import load_entry
from engine.spec.conversation import tools_of

if TYPE_CHECKING:
    from engine.actions.calling.workers import Workers
    from engine.backends.backend import Sampler
    from engine.machine.machine import Machine
    from engine.schemas.entry import Effects, Entry, IsolationSpec, ToolSpec
    from engine.schemas.environment import Task
    from engine.schemas.role import UserSpec
    from engine.schemas.trajectory import Blame
    from engine.spec.load import LoadedSpec


log = structlog.get_logger(__name__)

CLOSE_SECONDS = 10.0
"""Deadline of one `close`; an object that exceeds it is abandoned."""


class ObjectBuilder:
    """Builds and closes the objects of a run's episodes. `sampler`: see `EpisodeObjects`; `services` are asked to open
    each episode.

    Raises:
        EngineError: the spec's code cannot be imported.
        SpecCodeError: no plugin lets a model play a user or the scorer (kind `plugin_missing`).
    """

    def __init__(
        self,
        loaded: LoadedSpec,
        machine: Machine,
        code: Workers,
        *,
        sampler: Sampler | None = None,
        services: Sequence[EpisodeService] = (),
    ) -> None:
        spec = loaded.spec
        self._loaded, self._code = loaded, code
        for path, part in played_parts(spec).items():
            if (why := no_player(part)) is not None:
                what = f"`{'.'.join(map(str, path))}`: {why}"
                raise SpecCodeError(what, blame="spec", kind="plugin_missing")
        self._opening = [service for service in services if type(service).open is not EpisodeService.open]
        self.bare = partial(EpisodeObjects, sampler=sampler)
        """Makes the objects of an episode whose own could not be built."""
        self._environment: SpecCode | None = None
        if (environment := spec.environment) is not None:
            loads = environment.facts.loads if environment.facts else None
            entry = environment.entry_in(loaded.base)
            self._environment = self._load(entry, "environment", spec.environment_isolation, loads)
        self._users = {
            name: None if code is None else self._load(code, "user", spec.isolation_of(user.isolation))
            for name, user in spec.users_by_name.items()
            for code in [user.grader if user.model_played else user]
        }
        """The code of each user, by name; for a model-played user, that of its grader."""
        self._calls_tools = any(state.action == CallToolsAction.name for state in machine.states.values())
        tools = [
            (self._load(tool, "tool", spec.isolation_of(tool.isolation)), tool)
            for tool in spec.tools
            if tool.facts is None
        ]
        self._servers = [tool for tool in spec.tools if tool.facts is not None]
        self._served: asyncio.Task[list[BoundTool]] | None = None
        """The tools of all servers, the same for each episode: opened when the first begins, closed with the run."""
        self._functions = [(item, tool) for item, tool in tools if not item.is_class]
        self._classes = [(item, tool) for item, tool in tools if item.is_class]
        self._static: list[BoundTool] = [
            BoundTool(*item.tool(), self._seconds(tool), tool.effects) for item, tool in self._functions
        ]
        """Tools that are plain functions: the same object for every episode."""
        self._added: list[BoundTool] = [plugin.load(tool.make)() for tool in added_tools(spec)]
        """Tools of plugins."""
        self.shared_toolbox = (
            Toolbox([*self._static, *self._added], code)
            if not self._classes and self._environment is None and not self._servers
            else None
        )

    def _load(self, entry: Entry | UserSpec, role: str, isolation: IsolationSpec, loads: str | None = None) -> SpecCode:
        origin = CodeOrigin(
            use=str(entry.use),
            base=self._loaded.base,
            role=role,
            with_=entry.with_,
            name=getattr(entry, "name", None),
            loads=loads,
        )
        return self._code.load(origin, isolation)

    def _seconds(self, tool: ToolSpec) -> float:
        return tool.timeout or self._loaded.spec.limits.tool_seconds

    async def _open_servers(self) -> list[BoundTool]:
        """Open the tool servers, whose classes have `open() -> list of tools`, which is async, and `close()`. Each tool
        says with `reads_only` whether its calls change nothing. Raises: SpecCodeError; it is not tried again."""
        tools: list[BoundTool] = []
        for spec in self._servers:
            where = f"tools: `{spec.use}`"
            try:
                server = load_entry(spec.entry.use, None)(**{**spec.entry.with_, "base": str(self._loaded.base)})
                self._code.at_close.append(server.close)
                offered = await server.open()
            except (EngineError, TypeError, ValueError) as error:
                raise SpecCodeError(f"{where}: {error}", blame="tool", kind="tool_server") from error
            for tool in offered:
                declared: Effects = "pure" if tool.reads_only else "external"
                effects = spec.effects if "effects" in spec.model_fields_set else declared
                tools.append(bind_tool(tool, name=None, seconds=self._seconds(spec), effects=effects, where=where))
        return tools

    async def _build(self, objects: EpisodeObjects, task: Task | None) -> None:
        if self._environment is not None:
            effects = self._loaded.spec.environment.effects if self._loaded.spec.environment else "pure"
            objects.environment = await self._construct(self._environment, "environment", effects, objects)
            _must_have(objects.environment, "reset", self._environment.origin.use)
        if self._users:
            name = "" if "" in self._users or task is None else task.user
            if name not in self._users:
                who = f"task `{task.id}` names the user `{name}`" if name and task else "the task names no user"
                words = f"{who}; the spec's `users` are {', '.join(self._users)}"
                raise SpecCodeError(words, blame="spec", kind="unknown_user")
            objects.user_name = name
            if (code := self._users[name]) is not None:
                effects = self._loaded.spec.users_by_name[name].effects
                objects.user = await self._construct(code, "user", effects, objects)
                _must_have(objects.user, "respond", code.origin.use)
        shared = self.shared_toolbox if objects.host is None else None
        objects.toolbox = self._for_task(shared or await self._toolbox(objects), task)

    def _for_task(self, toolbox: Toolbox, task: Task | None) -> Toolbox:
        """The tools that the task's row names; all of them if it names none.

        Raises:
            SpecCodeError: the row names a tool that the spec does not have, and the machine calls tools.
        """
        source = self._loaded.spec.conversation
        schemas = tools_of(task.fields, source) if source is not None and task is not None else None
        if schemas is None:
            return toolbox
        names = [schema["function"]["name"] for schema in schemas]
        missing = [name for name in names if name not in toolbox.tools]
        if missing and self._calls_tools:
            offered_names = ", ".join(f"`{name}`" for name in toolbox.tools) or "none"
            raise SpecCodeError(
                f"the row of task `{task.id if task else ''}` has the tool `{missing[0]}`, which the spec does not "
                f"have (tools: {offered_names}); add it under `tools`, or set `prompt.tools: null`",
                blame="spec",
                kind="unknown_tool",
            )
        return Toolbox([toolbox.tools[name] for name in names if name not in missing], self._code, schemas)

    async def _construct(self, code: SpecCode, blame: Blame, effects: Effects, objects: EpisodeObjects) -> Any:
        """Build an object in the episode's own host, or in that of its code."""
        if objects.host is not None:
            code = objects.host.load(code)
        made = await code.build(blame, effects, self._open_seconds())
        if callable(getattr(made, "close", None)):
            objects.opened.append(made)
        return made

    async def _toolbox(self, objects: EpisodeObjects) -> Toolbox:
        tools = list(self._static)
        if (host := objects.host) is not None:
            tools = [
                BoundTool(*host.load(code).tool(), self._seconds(tool), tool.effects) for code, tool in self._functions
            ]
        if self._servers:
            self._served = self._served or asyncio.create_task(self._open_servers())
            tools += await asyncio.shield(self._served)
        for code, tool in self._classes:
            made = await self._construct(code, "tool", tool.effects, objects)
            if isinstance(made, HostedObject):
                tools += _offered(made, self._seconds(tool), tool.effects)
            else:
                where = f"tools: `{tool.use}`"
                tools.append(
                    bind_tool(made, name=tool.name, seconds=self._seconds(tool), effects=tool.effects, where=where)
                )
        limits = self._loaded.spec.limits
        environment = self._loaded.spec.environment
        effects = environment.effects if environment else "pure"
        offered = getattr(objects.environment, "tools", None)
        if isinstance(objects.environment, HostedObject):
            tools += _offered(objects.environment, limits.tool_seconds, effects)
        elif callable(offered):
            functions = await call_spec_code(
                self._code,
                lambda: list(offered()),
                seconds=self._open_seconds(),
                blame="environment",
                what=f"`{environment.use}`.tools" if environment else "the environment's tools",
            )
            tools += [
                bind_tool(function, name=None, seconds=limits.tool_seconds, effects=effects, where="environment tools")
                for function in functions
            ]
        tools += self._added
        names = [tool.shape.name for tool in tools]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise SpecCodeError(
                f"two tools are called `{twice[0]}`; give one of them another `name`", blame="spec", kind="tool_name"
            )
        return Toolbox(tools, self._code)

    async def open(self, task: Task | None = None, *, alone: bool = False) -> EpisodeObjects:
        """Build one episode's objects. If that fails, the objects that were built are closed.

        `alone`: build everything in a host of its own, whatever the spec's `isolation`: for an episode during which the
        engine died. Where no plugin has such a host, it is built as usual.
        """
        host = self._code.apart(self._loaded.base) if alone else None
        bare = host is None and not (self._environment or self._users or self._opening)
        if bare and self.shared_toolbox is not None:
            return self.bare(toolbox=self._for_task(self.shared_toolbox, task))
        objects = self.bare(host=host)
        try:
            await self._build(objects, task)
            for service in self._opening:
                await service.open(task, objects)
        except BaseException:
            await self.close(objects)
            raise
        return objects

    def _open_seconds(self) -> float:
        spec = self._loaded.spec
        allowed = [user.seconds for user in spec.users_by_name.values()]
        if spec.environment is not None:
            allowed.append(spec.environment.timeout)
        return max(allowed, default=spec.limits.tool_seconds)

    async def close(self, objects: EpisodeObjects) -> None:
        """Close all objects with a `close`, in reverse order. A failing `close` is only logged."""
        for thing in reversed(objects.opened):
            try:
                await call_spec_code(
                    self._code,
                    thing.close,
                    seconds=CLOSE_SECONDS,
                    blame="environment",
                    what=f"{type(thing).__name__}.close",
                    bound=False,  # it is closed on any loop
                )
            except SpecCodeError as error:
                log.warning("close failed", object=type(thing).__name__, error=str(error))
        objects.opened.clear()
        if objects.host is not None:
            objects.host.close()


def _must_have(thing: Any, method: str, use: str) -> None:
    """Raise: SpecCodeError if an object lacks the method that the engine calls; a function may have built it."""
    if not callable(getattr(thing, method, None)):
        words = f"`{use}` is, or returned, an object of `{type(thing).__name__}`, which has no method `{method}`"
        raise SpecCodeError(words, blame="spec", kind="missing_method")


def _offered(owner: HostedObject, seconds: float, effects: Effects) -> list[BoundTool]:
    """Return the tools of an object that a host holds: itself, or those that an environment offers."""
    return [BoundTool(function, shape, seconds, effects) for function, shape in owner.offered()]
