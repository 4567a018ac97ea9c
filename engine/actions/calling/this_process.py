"""The host of the mode `thread`: the spec's code in this process, called in threads and on code loops."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.actions.calling.host import CodeHost, HostedTool, Origin, SpecCode, bad_tool
from engine.errors import SpecCodeError
from engine.spec.code.entry import load_entry
from engine.spec.code.signature import ToolShape, shape_of, waits
from engine.storable import words_of

if TYPE_CHECKING:
    from engine.schemas.entry import Effects, IsolationSpec
    from engine.schemas.trajectory import Blame


class CodeHere(SpecCode):
    """An entry point that was imported."""

    def __init__(self, origin: Origin, call: Callable[..., Any]) -> None:
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
        """See `SpecCode.build`. With `async` methods it is built on the loop that they run on, so that it may open sessions there."""
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


class ThisProcess(CodeHost):
    """Imports code into this process.

    Args:
        call: `call_spec_code` with the workers of the run.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def load(self, origin: Origin, isolation: IsolationSpec) -> SpecCode:
        """See `CodeHost.load`."""
        return CodeHere(origin, self._call)


def shape_or_fault(function: Any, name: str | None, where: str) -> ToolShape:
    """Return the shape of a function as a tool. Raises: EngineError: it is no valid tool; the message says what to change."""
    try:
        return shape_of(function, name)
    except (TypeError, NameError, AttributeError, ValueError) as error:
        raise bad_tool(where, error) from error
