"""Tools: typed Python functions, their schemas, and calls that are validated and bounded.

Invariant: every attempt that the model makes gets exactly one result, in the order of the attempts. A call
that cannot be carried out has an error result which says what to write instead.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from engine.actions.calling.code_call import CodePlace, LoopReplacedError, call_spec_code, place_of
from engine.actions.calling.host import HostedTool, InvalidArguments, shape_or_fault
from engine.actions.calling.workers import Workers
from engine.errors import SpecCodeError
from engine.schemas.journal import ToolsRecord
from engine.schemas.message import MalformedCall, ToolCall, ToolResult
from engine.spec.code.signature import ToolShape, explain, reply_of
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
    place: CodePlace | None = None
    """Where its function runs; None until it is called in this process."""


class Toolbox:
    """The tools of one episode; `shown` are schemas that the model is shown instead of the tools' own."""

    def __init__(
        self, tools: Sequence[BoundTool], workers: Workers, shown: Sequence[dict[str, Any]] | None = None
    ) -> None:
        self.tools = {tool.shape.name: tool for tool in tools}
        self._workers = workers
        self._shown = shown

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Return the tool schemas that the model sees, in OpenAI's form."""
        return list(self._shown) if self._shown is not None else [tool.shape.schema for tool in self.tools.values()]

    def call_all(
        self,
        attempts: Sequence[ToolCall | MalformedCall],
        turn: int,
        view: Callable[[], EpisodeView],
        *,
        budget: int,
    ) -> Awaitable[ToolsRecord]:
        """Execute the attempted calls of one turn in parallel; their results are in order.

        `view` gives the episode's view, for tools with a parameter for it; `budget` calls are left of the limit
        `tool_calls`.
        """
        if len(attempts) == 1 and budget > 0 and isinstance(attempts[0], ToolCall):
            return self._call(attempts[0], view)
        return self._call_several(attempts, turn, lru_cache(1)(view), budget)  # one view for all calls of a turn

    async def _call_several(
        self, attempts: Sequence[ToolCall | MalformedCall], turn: int, view: Callable[[], EpisodeView], budget: int
    ) -> ToolsRecord:
        results: dict[int, ToolResult] = {}
        jobs: dict[int, Awaitable[ToolsRecord]] = {}
        for index, attempt in enumerate(attempts):
            if isinstance(attempt, MalformedCall):
                results[index] = _answer(f"call_{turn}_{index}", "", "malformed", attempt.problem)
            elif budget <= 0:
                words = "You have no tool calls left. Answer without tools."
                results[index] = _answer(attempt.id, attempt.name, "limit", words)
            else:
                budget -= 1
                jobs[index] = self._call(attempt, view)
        records = await asyncio.gather(*jobs.values())
        results |= {index: record.results[0] for index, record in zip(jobs, records, strict=True)}
        return ToolsRecord(results=[results[index] for index in range(len(attempts))])

    async def _call(self, call: ToolCall, view: Callable[[], EpisodeView]) -> ToolsRecord:
        """Execute one call. An exception of the tool becomes an error result."""
        tool = self.tools.get(call.name)
        if tool is None:
            near = get_close_matches(call.name, self.tools, n=1)
            names = ", ".join(f"`{name}`" for name in self.tools)
            hint = f" Did you mean `{near[0]}`?" if near else ""
            words = f"There is no tool `{call.name}`.{hint} Tools: {names}."
            return ToolsRecord(results=[_answer(call.id, call.name, "unknown_tool", words)])
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
                assert tool.shape.arguments is not None
                arguments = vars(tool.shape.arguments.model_validate(call.arguments))
                if tool.shape.view:
                    arguments[tool.shape.view] = view()
                if tool.place is None:
                    tool.place = place_of(tool.function)
                value = await call_spec_code(
                    self._workers,
                    partial(tool.function, **arguments),
                    seconds=tool.seconds,
                    blame="tool",
                    what=f"tool `{call.name}`",
                    effects=tool.effects,
                    place=tool.place,
                )
        except (InvalidArguments, ValidationError) as error:
            problem = error if isinstance(error, InvalidArguments) else explain(error)
            words = f"Wrong arguments for `{call.name}`: {problem}."
            return ToolsRecord(results=[_answer(call.id, call.name, "invalid_arguments", words)])
        except SpecCodeError as error:
            return ToolsRecord(results=[_failed(call, tool, error, time.perf_counter() - began)])
        return ToolsRecord(results=[_result(call, value, time.perf_counter() - began)])


def _answer(call_id: str, name: str, error: Any, words: str) -> ToolResult:
    return ToolResult(call_id=call_id, name=name, content=words, error=error)


def _failed(call: ToolCall, tool: BoundTool, error: SpecCodeError, seconds: float) -> ToolResult:
    """The result of a tool that raised or took too long. Raises the error where the policy must not see it."""
    lost = isinstance(tool.function, HostedTool) and tool.function.lost  # its state is, so the episode cannot continue
    # A replaced loop is not caused by the tool. A bad result of a worker process fails as in `_result`.
    if lost or isinstance(error, LoopReplacedError) or error.kind == "tool_bad_result":
        raise error
    late = error.kind == "tool_timeout"
    words = (
        f"`{call.name}` did not answer within {tool.seconds:g} s."
        if late
        else f"`{call.name}` failed: {message_of(error.__cause__ or error)}"
    )
    return ToolResult(
        call_id=call.id, name=call.name, content=words, error="timeout" if late else "raised", seconds=seconds
    )


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
