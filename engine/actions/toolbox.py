"""Tools: typed Python functions, their schemas, and calls that are validated and bounded.

Invariant: every attempt that the model makes gets exactly one result, in the order of the attempts. A call
that cannot be carried out has an error result which says what to write instead.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from engine.actions.calling.code_call import LoopReplacedError
from engine.actions.calling.host import HostedTool, InvalidArguments
from engine.actions.calling.this_process import shape_or_fault
from engine.actions.calling.workers import Workers, call_spec_code
from engine.errors import SpecCodeError
from engine.schemas.message import MalformedCall, ToolCall, ToolResult
from engine.spec.code.signature import ToolShape, checked_arguments, explain, reply_of
from engine.storable import message_of

if TYPE_CHECKING:
    from engine.schemas.entry import Effects
    from engine.schemas.environment import EpisodeView


@dataclass(slots=True)
class BoundTool:
    """A tool of one episode."""

    function: Callable[..., Any] | HostedTool
    shape: ToolShape
    seconds: float
    effects: Effects

    def checked(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return a call's arguments, validated and converted for the function.

        Raises:
            InvalidArguments: they do not fit its signature.
        """
        try:
            return checked_arguments(self.shape, arguments)
        except ValidationError as error:
            raise InvalidArguments(explain(error)) from None


class Toolbox:
    """The tools of one episode.

    Args:
        tools: What can be called.
        workers: Where it runs.
        shown: Schemas that the model is shown instead of the tools' own.
    """

    def __init__(
        self, tools: Sequence[BoundTool], workers: Workers, shown: Sequence[dict[str, Any]] | None = None
    ) -> None:
        self.tools = {tool.shape.name: tool for tool in tools}
        self._workers = workers
        self._shown = shown

    def showing(self, schemas: Sequence[dict[str, Any]]) -> Toolbox:
        """The tools that a task's own schemas name; the model is shown these schemas."""
        names = [schema["function"]["name"] for schema in schemas]
        return Toolbox([self.tools[name] for name in names if name in self.tools], self._workers, schemas)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Return the tool schemas that the model sees, in OpenAI's form."""
        return list(self._shown) if self._shown is not None else [tool.shape.schema for tool in self.tools.values()]

    def effects(self, name: str) -> Effects:
        """Return the effects of this tool; `pure` for an unknown tool, which is never called."""
        tool = self.tools.get(name)
        return tool.effects if tool else "pure"

    async def call_all(
        self,
        attempts: Sequence[ToolCall | MalformedCall],
        turn: int,
        view: Callable[[], EpisodeView],
        *,
        budget: int,
    ) -> list[ToolResult]:
        """Execute the attempted calls of one turn in parallel, and return their results in order.

        Args:
            attempts: The calls that the model wrote.
            turn: The newest assistant turn, from 0.
            view: Gives the episode's view, for tools with a parameter for it.
            budget: Number of calls that the limit `tool_calls` leaves.
        """
        if len(attempts) == 1 and budget > 0 and isinstance(attempts[0], ToolCall):
            return [await self.call(attempts[0], view)]
        seen = lru_cache(1)(view)  # one view for all calls of a turn
        jobs = []
        for index, attempt in enumerate(attempts):
            if isinstance(attempt, MalformedCall):
                jobs.append(_answer(f"call_{turn}_{index}", "", "malformed", attempt.problem))
            elif budget <= 0:
                jobs.append(
                    _answer(attempt.id, attempt.name, "limit", "You have no tool calls left. Answer without tools.")
                )
            else:
                budget -= 1
                jobs.append(self.call(attempt, seen))
        return list(await asyncio.gather(*jobs))

    async def call(self, call: ToolCall, view: Callable[[], EpisodeView]) -> ToolResult:
        """Execute one call. An exception of the tool becomes an error result."""
        tool = self.tools.get(call.name)
        if tool is None:
            near = get_close_matches(call.name, self.tools, n=1)
            known = ", ".join(f"`{name}`" for name in self.tools)
            hint = f" Did you mean `{near[0]}`?" if near else ""
            return await _answer(
                call.id, call.name, "unknown_tool", f"There is no tool `{call.name}`.{hint} Tools: {known}."
            )
        began = time.perf_counter()
        try:
            if isinstance(tool.function, HostedTool):
                value = await tool.function.call(
                    call.arguments,
                    view() if tool.shape.view else None,
                    seconds=tool.seconds,
                    what=f"tool `{call.name}`",
                )
            else:
                arguments = tool.checked(call.arguments)
                if tool.shape.view:
                    arguments[tool.shape.view] = view()
                value = await call_spec_code(
                    self._workers,
                    partial(tool.function, **arguments),
                    seconds=tool.seconds,
                    blame="tool",
                    what=f"tool `{call.name}`",
                    effects=tool.effects,
                )
        except InvalidArguments as problem:
            return await _answer(
                call.id, call.name, "invalid_arguments", f"Wrong arguments for `{call.name}`: {problem}."
            )
        except LoopReplacedError:  # not caused by the tool, so the policy does not see it
            raise
        except SpecCodeError as error:
            if isinstance(tool.function, HostedTool) and tool.function.lost:
                raise  # the tool's state is lost, so the episode cannot continue
            if error.kind == "tool_bad_result":
                raise  # of a worker process; the same as below, where the tool runs in this one
            late = error.kind == "tool_timeout"
            words = (
                f"`{call.name}` did not answer within {tool.seconds:g} s."
                if late
                else f"`{call.name}` failed: {message_of(error.__cause__ or error)}"
            )
            return ToolResult(
                call_id=call.id,
                name=call.name,
                content=words,
                error="timeout" if late else "raised",
                seconds=time.perf_counter() - began,
            )
        return _result(call, value, time.perf_counter() - began)


async def _answer(call_id: str, name: str, error: Any, words: str) -> ToolResult:
    return ToolResult(call_id=call_id, name=name, content=words, error=error)


def _result(call: ToolCall, value: Any, seconds: float) -> ToolResult:
    if type(value) is str and value.isascii():
        return ToolResult(call_id=call.id, name=call.name, content=value, seconds=seconds)
    try:
        reply = reply_of(value)
        shown = {"content": reply.content, "rewards": reply.rewards, "facts": reply.facts}
        return ToolResult.read({"call_id": call.id, "name": call.name, "seconds": seconds} | shown)
    except TypeError as error:
        raise SpecCodeError(
            f"tool `{call.name}` returned {type(value).__name__}, which JSON cannot hold; "
            "return a string, JSON values, or a ToolReply",
            blame="tool",
            kind="tool_bad_result",
        ) from error
    except ValidationError as error:
        raise SpecCodeError(
            f"tool `{call.name}` returned a reply that cannot be shown: {error}", blame="tool", kind="tool_bad_result"
        ) from error


def bind_tool(function: Any, *, name: str | None, seconds: float, effects: Effects, where: str) -> BoundTool:
    """Make a tool from a function (or an object with `__call__`).

    Raises:
        EngineError: the function is not a valid tool; the message says what to change.
    """
    return BoundTool(function, shape_or_fault(function, name, where), seconds, effects)
