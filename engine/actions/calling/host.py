"""Hosts of a spec's code. An entry point is loaded once per run, by the host of its `isolation.mode`; a host that runs
code outside of this process applies the deadlines of its calls itself.

    environment = workers.load(CodeOrigin(use="game:Chess", base=folder, role="environment"), isolation)
    board = await environment.build("environment", "replayable", seconds=60.0)   # for one episode
    await call_spec_code(workers, board.reset, task, seed, seconds=60.0, blame="environment", what="`game:Chess`.reset")

The core has the mode `thread` (`CodeHere`); a plugin adds others by the point `isolation_modes` of its face.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from engine.errors import EngineError, SpecCodeError
from engine.schemas.base import Struct
from engine.spec.code.entry import load_entry
from engine.spec.code.signature import ToolShape, shape_of, waits
from engine.storable import words_of

if TYPE_CHECKING:
    from engine.actions.action import EpisodeObjects
    from engine.actions.calling.workers import Workers
    from engine.schemas.entry import Effects, IsolationSpec
    from engine.schemas.environment import EpisodeView
    from engine.schemas.trajectory import Blame
    from engine.spec.code.signature import ToolShape
    from engine.spec.load import LoadedSpec


class CodeOrigin(Struct, frozen=True, kw_only=True):
    """Where code comes from: an entry point, its arguments, and what it is for."""

    use: str
    base: Path
    """The spec's folder."""
    role: str
    """`environment`, `user`, `tool` or `function`."""
    with_: Mapping[str, Any] = msgspec.field(default_factory=dict)
    name: str | None = None
    """A tool's name, if the spec gives one."""
    loads: str | None = None
    """Entry point of a function with the same arguments, which a new process calls before it builds the first
    object."""


class InvalidArguments(Exception):
    """Arguments that do not match a tool's signature; the message is for the model."""


@dataclass(eq=False)
class HostedCallable:
    """A callable that a host runs: it applies its deadline itself, from the time when it can begin."""

    call: Callable[..., Awaitable[Any]]
    """Calls it with a list of arguments, and `seconds`, `blame` and `what` by name. Raises as
    `engine.actions.calling.code_call.call_spec_code`."""

    async def __call__(self, *arguments: Any) -> Any:
        """Call it without a deadline."""
        return await self.call(arguments, seconds=None, blame="environment", what="a call")


class HostedTool:
    """A tool that a host runs and whose arguments it checks.

    No ABC, nor is the class below: `isinstance`, which each call asks, would call Python code.
    """

    @property
    def lost(self) -> bool:
        """Whether it had state that is lost."""
        raise NotImplementedError

    async def check(self, arguments: Mapping[str, Any], *, seconds: float, what: str) -> None:
        """Raise `InvalidArguments` if they do not match the signature."""
        raise NotImplementedError

    async def call(self, arguments: Mapping[str, Any], view: EpisodeView | None, *, seconds: float, what: str) -> Any:
        """Check the arguments, call it and return its ToolReply."""
        raise NotImplementedError


class HostedObject:
    """An object that a host holds. Its methods are attributes, like those of the object itself, and are
    `HostedCallable`s."""

    def offered(self) -> list[tuple[HostedTool, ToolShape]]:
        """The tool that it is, or the tools that it offers."""
        raise NotImplementedError


class SpecCode(ABC):
    """An entry point of a spec, loaded once per run."""

    def __init__(self, origin: CodeOrigin) -> None:
        self.origin = origin
        self.is_class = False
        self.events: Sequence[str] = ()
        """The events that it declares."""
        self.effects: Effects = "pure"
        """The effects that it declares."""

    @abstractmethod
    def function(self, answer: str) -> Callable[..., Any]:
        """Return what `call_spec_code` calls, of a function that returns `rewards`, a `step` or a `text`."""

    def of(self, objects: EpisodeObjects, answer: str) -> Callable[..., Any]:
        """Return what is called for an episode: `function`, or the same in the episode's own host."""
        code = self if objects.host is None else objects.host.load(self)
        return code.function(answer)

    @abstractmethod
    def tool(self) -> tuple[Callable[..., Any] | HostedTool, ToolShape]:
        """Return a function as a tool, and its shape. Raises: EngineError: it is no valid tool."""

    @abstractmethod
    async def build(self, blame: Blame, effects: Effects, seconds: float) -> Any:
        """Build an object for one episode. It has a method `close` if it is to be closed.

        Raises:
            SpecCodeError: its constructor raised or took too long.
        """


class EpisodeHost(Struct, frozen=True, kw_only=True):
    """Runs all code of one episode."""

    load: Callable[[SpecCode], SpecCode]
    """Returns the same code, run here."""
    close: Callable[[], None]
    """Ends whatever still runs."""


class CodeHost(ABC):
    """Runs the code of one `isolation.mode`, for all episodes of a run."""

    @abstractmethod
    def load(self, origin: CodeOrigin, isolation: IsolationSpec) -> SpecCode:
        """Load an entry point. It may block: it is called when a run starts. Raises: EngineError: it cannot be
        loaded."""

    def apart(self, base: Path) -> EpisodeHost | None:
        """Return a host whose code cannot end this process, for an episode during which the engine died; None: there is
        none."""
        return None

    def close(self) -> None:
        """End what it has started. A second call has no effect."""
        return


class CodeHere(SpecCode):
    """An entry point that was imported into this process, whose code is called in threads and on code loops. `call` is
    `call_spec_code` with the workers of the run."""

    def __init__(self, origin: CodeOrigin, call: Callable[..., Any]) -> None:
        super().__init__(origin)
        self._call = call
        self._target: Callable[..., Any] = load_entry(origin.use, origin.base)
        self.is_class = inspect.isclass(self._target)
        self.events = getattr(self._target, "events", None) or ()
        self.effects = getattr(self._target, "effects", "pure")
        self._on_loop = waits(self._target)

    def function(self, answer: str) -> Callable[..., Any]:
        """See `SpecCode.function`."""
        return partial(self._target, **self.origin.with_) if self.origin.with_ else self._target

    def tool(self) -> tuple[Callable[..., Any] | HostedTool, ToolShape]:
        """See `SpecCode.tool`."""
        return self._target, shape_or_fault(self._target, self.origin.name, f"tools: `{self.origin.use}`")

    async def build(self, blame: Blame, effects: Effects, seconds: float) -> Any:
        """See `SpecCode.build`. With `async` methods it is built on the loop that they run on, so that it may open
        sessions there."""
        make = self._make_on_loop if self._on_loop else self._make
        return await self._call(make, blame, seconds=seconds, blame=blame, what=f"`{self.origin.use}`")

    def _make(self, blame: Blame) -> Any:
        try:
            return self._target(**self.origin.with_)
        except Exception as error:
            raise SpecCodeError(
                f"`{self.origin.use}` could not be built: {words_of(error)}", blame=blame, kind=f"{blame}_error"
            ) from error

    async def _make_on_loop(self, blame: Blame) -> Any:
        return self._make(blame)


def load_function(
    loaded: LoadedSpec, code: Workers, use: str, with_: Mapping[str, Any], isolation: IsolationSpec | None
) -> SpecCode:
    """Load a function of the spec, such as a scorer, once per run. Raises: EngineError: it cannot be loaded."""
    origin = CodeOrigin(use=use, base=loaded.base, role="function", with_=with_)
    return code.load(origin, loaded.spec.isolation_of(isolation))


def shape_or_fault(function: Any, name: str | None, where: str) -> ToolShape:
    """Return the shape of a function as a tool. Raises: EngineError: it is no valid tool; the message says what to
    change."""
    try:
        return shape_of(function, name)
    except (TypeError, NameError, AttributeError, ValueError) as error:
        raise EngineError(f"{where}: {error}", kind="bad_tool", blame="spec") from error
