"""Builds the objects of an episode from entry points, and closes them in every case."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from engine import plugin
from engine.actions.action import EpisodeObjects
from engine.actions.calling.workers import call_spec_code
from engine.actions.llm_user import ModelUser
from engine.actions.spec_code import CallToolsAction
from engine.actions.tool_servers import ToolServers
from engine.actions.toolbox import BoundTool, Toolbox, bind_tool
from engine.errors import EngineError, SpecCodeError
from engine.isolation.pool import FunctionTool, HeldObject, Pool, RemoteFunction
from engine.isolation.remote import Cell, Origin, RemoteObject, RemoteTool
from engine.schemas.entry import IsolationSpec
from engine.spec.added import added_tools
from engine.spec.code.entry import load_entry
from engine.spec.code.signature import waits
from engine.spec.conversation import tools_of
from engine.storable import words_of

if TYPE_CHECKING:
    from engine.actions.calling.workers import Workers
    from engine.actions.role_models import RoleModels
    from engine.agents.program import ProgramBodies
    from engine.backends.backend import Sampler
    from engine.machine.machine import Machine
    from engine.schemas.entry import Effects, Entry
    from engine.schemas.environment import Task
    from engine.schemas.environment_spec import ToolSpec
    from engine.schemas.role import UserSpec
    from engine.schemas.trajectory import Blame
    from engine.spec.code.signature import ToolShape
    from engine.spec.load import LoadedSpec

log = structlog.get_logger(__name__)

CLOSE_SECONDS = 10.0
"""Deadline of one `close`; an object that exceeds it is abandoned."""


class Factory:
    """Builds the objects of one entry point, which is resolved once per run.

    An isolated entry point is imported and built only in worker processes.
    """

    def __init__(
        self,
        entry: Entry | UserSpec,
        base: Path,
        isolation: IsolationSpec,
        workers: Workers,
        role: str,
        loads: str | None = None,
    ) -> None:
        self.use = str(entry.use)
        self.origin = Origin(self.use, base, dict(entry.with_), role, getattr(entry, "name", None), loads)
        self.target: Callable[..., Any] | None = None
        self.shape: ToolShape | None = None
        """The shape of an isolated function that is a tool."""
        self.pool: Pool | None = None
        """Its worker processes, if it is isolated."""
        self.on_loop = False
        """Some of its methods are `async`: it is built on the loop that they run on, so that it may open sessions there."""
        if isolation.mode != "process":
            self.target = load_entry(self.use, base)
            self.is_class = inspect.isclass(self.target)
            self.on_loop = waits(self.target)
            return
        described = workers.isolation.describe(self.use, base, isolation, self.origin.name)
        self.is_class = described.is_class
        self.pool = workers.isolation.pool(isolation, functions=role == "tool" and not self.is_class)
        if role == "tool" and not self.is_class:
            if described.shape is None:
                fault = EngineError(f"tools: `{self.use}`: {described.problem or 'it cannot be called'}")
                fault.kind, fault.blame = "bad_tool", "spec"
                raise fault
            self.shape = described.shape

    def build(self, blame: Blame) -> Any:
        """Build a new object.

        Raises:
            SpecCodeError: its constructor raised.
        """
        assert self.target is not None  # isolated objects are in a pool
        try:
            return self.target(**self.origin.with_)
        except Exception as error:
            raise SpecCodeError(
                f"`{self.use}` could not be built: {words_of(error)}",
                blame=blame,
                kind=f"{blame}_error",
            ) from error

    async def build_on_loop(self, blame: Blame) -> Any:
        """Call `build` on the running loop."""
        return self.build(blame)


class ObjectBuilder:
    """Builds and closes the objects of a run's episodes.

    Args:
        loaded: The spec.
        machine: Its machine.
        code: Runs the spec's code.
        sampler: Samples the policy's replies; None where nothing is sampled.
        roles: The models of users and judges; None where no role is played.
        programs: Agent programs that run elsewhere, instead of the spec's.

    Raises:
        EngineError: the spec's code cannot be imported.
    """

    def __init__(
        self,
        loaded: LoadedSpec,
        machine: Machine,
        code: Workers,
        *,
        sampler: Sampler | None = None,
        roles: RoleModels | None = None,
        programs: ProgramBodies | None = None,
    ) -> None:
        spec, base = loaded.spec, loaded.base
        self._loaded, self._code = loaded, code
        self._bare = partial(EpisodeObjects, sampler=sampler, roles=roles, programs=programs)

        def factory(entry: Any, role: str, isolation: IsolationSpec | None) -> Factory:
            return Factory(entry, base, spec.isolation_of(isolation), code, role)

        self._environment = (
            Factory(
                spec.environment.entry_in(base),
                base,
                spec.environment_isolation,
                code,
                "environment",
                spec.environment.facts.loads if spec.environment.facts else None,
            )
            if spec.environment
            else None
        )
        self._people = {
            name: factory(entry, "user", user.isolation)
            if (entry := user.grader if user.model_played else user)
            else None
            for name, user in spec.users_by_name.items()
        }
        """The factory of each user, by name; for a model-played user, the factory of its grader."""
        self._calls_tools = any(state.action == CallToolsAction.name for state in machine.states.values())
        tools = [(factory(tool, "tool", tool.isolation), tool) for tool in spec.tools if tool.facts is None]
        self._servers = ToolServers([tool for tool in spec.tools if tool.facts is not None], loaded, code)
        self._functions = [(item, tool) for item, tool in tools if not item.is_class]
        self._classes = [(item, tool) for item, tool in tools if item.is_class]
        self._static: list[BoundTool] = [self._bind_function(item, tool) for item, tool in self._functions]
        """Tools that are plain functions: the same object for every episode."""
        self._added: list[BoundTool] = [plugin.load(tool.make)() for tool in added_tools(spec)]
        """Tools of plugins."""
        self.shared_toolbox = (
            Toolbox([*self._static, *self._added], code)
            if not self._classes and self._environment is None and not self._servers
            else None
        )

    def _bind(self, function: Any, tool: ToolSpec) -> BoundTool:
        return bind_tool(
            function, name=tool.name, seconds=self._seconds(tool), effects=tool.effects, where=f"tools: `{tool.use}`"
        )

    def _bind_function(self, factory: Factory, tool: ToolSpec) -> BoundTool:
        """Make a tool from a plain function, in this process or in workers."""
        if factory.pool is None or factory.shape is None:
            return self._bind(factory.target, tool)
        function = FunctionTool(RemoteFunction(factory.origin, factory.pool, "tool"), factory.shape.name)
        return BoundTool(function, factory.shape, self._seconds(tool), tool.effects)

    def _bind_in(self, cell: Cell, factory: Factory, tool: BoundTool) -> BoundTool:
        """Make a tool from a plain function, in a given worker."""
        owner = RemoteObject(factory.origin, cell, pure=True, blame="tool")
        shape = replace(tool.shape, arguments=None)
        return BoundTool(RemoteTool(owner, shape.name), shape, tool.seconds, tool.effects)

    def _seconds(self, tool: ToolSpec) -> float:
        return tool.timeout or self._loaded.spec.limits.tool_seconds

    async def _build(self, objects: EpisodeObjects, task: Task | None) -> None:
        if self._environment is not None:
            effects = self._loaded.spec.environment.effects if self._loaded.spec.environment else "pure"
            objects.environment = await self._construct(self._environment, "environment", effects, objects)
            _must_have(objects.environment, "reset", self._environment.use)
        if self._people:
            objects.user_name = self._chosen(task)
            objects.user = await self._build_user(objects.user_name, objects)
        shared = self.shared_toolbox if objects.cell is None else None
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
        missing = [name for schema in schemas if (name := schema["function"]["name"]) not in toolbox.tools]
        if missing and self._calls_tools:
            known = ", ".join(f"`{name}`" for name in toolbox.tools) or "none"
            raise SpecCodeError(
                f"the row of task `{task.id if task else ''}` has the tool `{missing[0]}`, which the spec does not have "
                f"(tools: {known}); add it under `tools`, or set `prompt.tools: null`",
                blame="spec",
                kind="unknown_tool",
            )
        return toolbox.showing(schemas)

    async def _construct(self, factory: Factory, blame: Blame, effects: Effects, objects: EpisodeObjects) -> Any:
        """Build an object where its methods will run: in the episode's only worker, in one of its own, or in this process."""
        if objects.cell is not None or factory.pool is not None:
            pure = effects == "pure"
            if objects.cell is not None:
                held = HeldObject(factory.origin, objects.cell, None, pure=pure, blame=blame)
            else:
                assert factory.pool is not None
                held = await factory.pool.hold(factory.origin, pure=pure, blame=blame)
            objects.opened.append(held)
            return await held.open(self._open_seconds())
        thing = await call_spec_code(
            self._code,
            factory.build_on_loop if factory.on_loop else factory.build,
            blame,
            seconds=self._open_seconds(),
            blame=blame,
            what=f"`{factory.use}`",
        )
        if callable(getattr(thing, "close", None)):
            objects.opened.append(thing)
        return thing

    def _chosen(self, task: Task | None) -> str:
        """Return the name of the task's user."""
        if "" in self._people:
            return ""
        name = task.user if task is not None else None
        if name not in self._people:
            who = f"task `{task.id}` names the user `{name}`" if name and task else "the task names no user"
            known = ", ".join(self._people)
            raise SpecCodeError(f"{who}; the spec's `users` are {known}", blame="spec", kind="unknown_user")
        return name

    async def _build_user(self, name: str, objects: EpisodeObjects) -> Any:
        spec = self._loaded.spec.users_by_name[name]
        factory = self._people[name]
        built = await self._construct(factory, "user", spec.effects, objects) if factory is not None else None
        if factory is not None:
            _must_have(built, "respond", factory.use)
        if not spec.model_played:
            return built
        path = ("users", name) if name else ("user",)
        return ModelUser(spec, lambda: objects.model(*path), built, self._code)

    async def _toolbox(self, objects: EpisodeObjects) -> Toolbox:
        tools = list(self._static)
        if (cell := objects.cell) is not None:
            tools = [self._bind_in(cell, item, tool) for tool, (item, _) in zip(tools, self._functions, strict=True)]
        tools += await self._servers.tools()
        for factory, tool in self._classes:
            made = await self._construct(factory, "tool", tool.effects, objects)
            if isinstance(made, RemoteObject):
                tools += _offered(made, self._seconds(tool), tool.effects)
            else:
                tools.append(self._bind(made, tool))
        limits = self._loaded.spec.limits
        environment = self._loaded.spec.environment
        effects = environment.effects if environment else "pure"
        offered = getattr(objects.environment, "tools", None)
        if isinstance(objects.environment, RemoteObject):
            tools += _offered(objects.environment, limits.tool_seconds, effects)
        elif callable(offered):
            functions = await call_spec_code(
                self._code,
                lambda: list(offered()),
                seconds=self._open_seconds(),
                blame="environment",
                what=f"`{environment.use}`.tools" if environment else "the environment's tools",
            )
            for function in functions:
                tools.append(
                    bind_tool(
                        function, name=None, seconds=limits.tool_seconds, effects=effects, where="environment tools"
                    )
                )
        tools += self._added
        names = [tool.shape.name for tool in tools]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise SpecCodeError(
                f"two tools are called `{twice[0]}`; give one of them another `name`", blame="spec", kind="tool_name"
            )
        return Toolbox(tools, self._code)

    def none(self) -> EpisodeObjects:
        """The objects of an episode whose own could not be built."""
        return self._bare()

    async def open(self, task: Task | None = None, *, alone: bool = False) -> EpisodeObjects:
        """Build one episode's objects. If that fails, the objects that were built are closed.

        Args:
            task: The episode's task, which selects one of several users.
            alone: Build everything in one worker process, whatever the spec's `isolation`: for an episode during which the
                engine died.
        """
        if not alone and self._environment is None and not self._people and self.shared_toolbox is not None:
            return self._bare(toolbox=self._for_task(self.shared_toolbox, task))
        objects = self._bare()
        if alone:
            own = IsolationSpec(mode="process", user="engine")
            objects.cell = self._code.isolation.cell(own, self._loaded.base)
        try:
            await self._build(objects, task)
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
                if isinstance(thing, HeldObject):
                    await thing.release(CLOSE_SECONDS)
                    continue
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
        if objects.cell is not None:
            objects.cell.kill()


def _must_have(thing: Any, method: str, use: str) -> None:
    """Raise: SpecCodeError if an object lacks the method that the engine calls; a function may have built it."""
    if not callable(getattr(thing, method, None)):
        words = f"`{use}` is, or returned, an object of `{type(thing).__name__}`, which has no method `{method}`"
        raise SpecCodeError(words, blame="spec", kind="missing_method")


def _offered(owner: RemoteObject, seconds: float, effects: Effects) -> list[BoundTool]:
    """Return the tools of an object in a worker: itself, or those that an environment offers."""
    return [BoundTool(RemoteTool(owner, shape.name), shape, seconds, effects) for shape in owner.shapes]
