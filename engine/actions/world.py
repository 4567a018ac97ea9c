"""The objects of one episode: built from entry points, and closed whatever happens."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from engine.actions.base import Services, World
from engine.actions.llm_user import ModelUser
from engine.actions.toolbox import BoundTool, Toolbox, bind_tool
from engine.actions.workers import call_world
from engine.errors import WorldError
from engine.spec.entry import load_entry

if TYPE_CHECKING:
    from engine.actions.voice import Voice
    from schemas.environment import Task
    from schemas.episode import Entry, UserSpec
    from schemas.trajectory import Blame

log = structlog.get_logger(__name__)

CLOSE_SECONDS = 10.0
"""Deadline for one `close`: an object that hangs in it is left behind."""


class Factory:
    """Builds one kind of object: its entry point is resolved once for the whole run."""

    def __init__(self, entry: Entry | UserSpec, base: Path) -> None:
        self.use = str(entry.use)
        self.arguments = dict(entry.with_)
        self.target: Callable[..., Any] = load_entry(self.use, base)
        self.is_class = inspect.isclass(self.target)
        self.on_loop = self.is_class and any(
            inspect.iscoroutinefunction(member)
            for name, member in inspect.getmembers_static(self.target)
            if not name.startswith("_") or name == "__call__"
        )
        """Some of its methods are `async`: it is built on the loop that they run on, so that it may open sessions there."""

    def build(self, blame: Blame) -> Any:
        """A fresh object.

        Raises:
            WorldError: its constructor raised.
        """
        try:
            return self.target(**self.arguments)
        except Exception as error:
            raise WorldError(
                f"`{self.use}` could not be built: {type(error).__name__}: {error}",
                blame=blame,
                kind=f"{blame}_error",
            ) from error

    async def build_on_loop(self, blame: Blame) -> Any:
        """`build`, on the loop that runs this."""
        return self.build(blame)


class WorldBuilder:
    """Builds and closes the worlds of a run's episodes."""

    def __init__(self, services: Services, base: Path) -> None:
        spec = services.spec
        self._services = services
        self._environment = Factory(spec.environment, base) if spec.environment else None
        self._people = {name: _user_factory(user, base) for name, user in spec.people.items()}
        """By the user's name: what builds it or, where a model plays it, its grader."""
        self._tools: list[tuple[Factory, Any]] = [(Factory(tool, base), tool) for tool in spec.tools]
        self._static: list[BoundTool] = [
            self._bind(factory.target, tool) for factory, tool in self._tools if not factory.is_class
        ]
        """Plain functions are the same object for every episode."""
        self.shared_toolbox = (
            Toolbox(self._static, services.workers)
            if len(self._static) == len(self._tools) and self._environment is None
            else None
        )

    def _bind(self, function: Any, tool: Any) -> BoundTool:
        limits = self._services.spec.limits
        return bind_tool(
            function,
            name=tool.name,
            seconds=tool.timeout or limits.tool_seconds,
            effects=tool.effects,
            where=f"tools: `{tool.use}`",
        )

    async def _build(self, world: World, task: Task | None) -> None:
        if self._environment is not None:
            world.environment = await self._construct(self._environment, "environment", world)
        if self._people:
            world.user_name = self._chosen(task)
            world.user = await self._build_user(world.user_name, world)
        world.toolbox = self.shared_toolbox or await self._toolbox(world)

    async def _construct(self, factory: Factory, blame: Blame, world: World) -> Any:
        """Build an object where its methods will run."""
        thing = await call_world(
            self._services.workers,
            factory.build_on_loop if factory.on_loop else factory.build,
            blame,
            seconds=self._open_seconds(),
            blame=blame,
            what=f"`{factory.use}`",
        )
        if callable(getattr(thing, "close", None)):
            world.opened.append(thing)
        return thing

    def _chosen(self, task: Task | None) -> str:
        """The name of the task's user."""
        if "" in self._people:
            return ""
        name = task.user if task is not None else None
        if name not in self._people:
            who = f"task `{task.id}` names the user `{name}`" if name and task else "the task names no user"
            known = ", ".join(self._people)
            raise WorldError(f"{who}; the spec's `users` are {known}", blame="spec", kind="unknown_user")
        return name

    async def _build_user(self, name: str, world: World) -> Any:
        spec = self._services.spec.people[name]
        factory = self._people[name]
        built = await self._construct(factory, "user", world) if factory is not None else None
        if not spec.played:
            return built
        path = ("users", name) if name else ("user",)
        return ModelUser(spec, lambda: self._voice(*path), built, self._services.workers)

    def _voice(self, *path: str) -> Voice:
        if self._services.cast is None:
            raise WorldError("no model plays the user here", blame="user", kind="user_not_played")
        return self._services.cast.voice(*path)

    async def _toolbox(self, world: World) -> Toolbox:
        tools = list(self._static)
        for factory, tool in self._tools:
            if factory.is_class:
                tools.append(self._bind(await self._construct(factory, "tool", world), tool))
        offered = getattr(world.environment, "tools", None)
        if callable(offered):
            limits = self._services.spec.limits
            environment = self._services.spec.environment
            effects = environment.effects if environment else "pure"
            functions = await call_world(
                self._services.workers,
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
        names = [tool.shape.name for tool in tools]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise WorldError(
                f"two tools are called `{twice[0]}`; give one of them another `name`", blame="spec", kind="tool_name"
            )
        return Toolbox(tools, self._services.workers)

    async def open(self, task: Task | None = None) -> World:
        """Build one episode's objects. What had been opened is closed again when that fails.

        Args:
            task: The episode's: it says which of several users is built.
        """
        if self._environment is None and not self._people and self.shared_toolbox is not None:
            return World(toolbox=self.shared_toolbox)
        world = World()
        try:
            await self._build(world, task)
        except BaseException:
            await self.close(world)
            raise
        return world

    def _open_seconds(self) -> float:
        spec = self._services.spec
        allowed = [user.seconds for user in spec.people.values()]
        if spec.environment is not None:
            allowed.append(spec.environment.timeout)
        return max(allowed, default=spec.limits.tool_seconds)

    async def close(self, world: World) -> None:
        """Close every object that can be closed, last opened first. A failing close is logged and goes no further."""
        for thing in reversed(world.opened):
            try:
                await call_world(
                    self._services.workers,
                    thing.close,
                    seconds=CLOSE_SECONDS,
                    blame="environment",
                    what=f"{type(thing).__name__}.close",
                    bound=False,  # it is closed on whatever loop there is
                )
            except WorldError as error:
                log.warning("close failed", object=type(thing).__name__, error=str(error))
        world.opened.clear()


def _user_factory(user: UserSpec, base: Path) -> Factory | None:
    """What builds a user of one's own, or the grader of one that a model plays."""
    if not user.played:
        return Factory(user, base)
    return Factory(user.grader, base) if user.grader is not None else None
