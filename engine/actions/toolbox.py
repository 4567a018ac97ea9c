"""Tools: typed Python functions, their schemas, and calls that are validated and bounded.

Invariant: every attempt that the model makes gets exactly one result, in the order of the attempts. A call
that cannot be carried out has an error result which says what to write instead.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, get_type_hints

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from engine.actions.calls import LoopReplacedError
from engine.actions.workers import Workers, call_world
from engine.errors import EngineError, WorldError
from engine.made import maker
from schemas.environment import EpisodeView, ToolReply
from schemas.message import MalformedCall, ToolCall, ToolResult
from schemas.reward import RewardEvent

if TYPE_CHECKING:
    from schemas.episode import Effects

_make_result = maker(ToolResult)

_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$")
_PARAMETER = re.compile(r"^(\s+)(\w+)\s*(?:\([^)]*\))?:\s*(.+)$")


@dataclass(frozen=True, slots=True)
class ToolShape:
    """What can be read off a tool's function: once for each function, not for each episode."""

    name: str
    schema: dict[str, Any]
    """OpenAI's form: `{"type": "function", "function": {name, description, parameters}}`."""
    arguments: type[BaseModel]
    view: str | None
    """The parameter that takes the `EpisodeView`, if there is one."""


@dataclass(slots=True)
class BoundTool:
    """One tool of one episode."""

    function: Callable[..., Any]
    shape: ToolShape
    seconds: float
    effects: Effects


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """A Google-style docstring -> (description, parameter -> its words)."""
    description: list[str] = []
    parameters: dict[str, str] = {}
    section = ""
    current = ""
    indent = 0
    for line in inspect.cleandoc(text).splitlines():
        heading = _SECTION.match(line)
        if heading:
            section, current = heading.group(1), ""
        elif not section:
            description.append(line)
        elif section in ("Args", "Arguments", "Parameters"):
            match = _PARAMETER.match(line)
            if match and (not current or len(match.group(1)) <= indent):
                indent, current = len(match.group(1)), match.group(2)
                parameters[current] = match.group(3).strip()
            elif current and line.strip():
                parameters[current] += " " + line.strip()
    return " ".join(" ".join(description).split()), parameters


def _plain(schema: Any) -> Any:
    """A JSON schema without the `title`s that Pydantic adds: they cost tokens and say nothing."""
    if isinstance(schema, dict):
        return {
            key: {name: _plain(field) for name, field in value.items()} if key == "properties" else _plain(value)
            for key, value in schema.items()
            if not (key == "title" and isinstance(value, str))
        }
    if isinstance(schema, list):
        return [_plain(item) for item in schema]
    return schema


def shape_of(function: Callable[..., Any], name: str | None = None) -> ToolShape:
    """Read a tool's name, schema and argument model off its signature and docstring.

    Raises:
        TypeError: a parameter without a type, a positional-only or variadic one.
    """
    target = function if inspect.isroutine(function) else type(function).__call__
    return _shape_of(
        getattr(target, "__func__", target), name or getattr(function, "__name__", type(function).__name__)
    )


@lru_cache(maxsize=512)
def _shape_of(function: Callable[..., Any], name: str) -> ToolShape:
    hints = get_type_hints(function, include_extras=True)
    description, words = read_docstring(function.__doc__ or "")
    fields: dict[str, Any] = {}
    view: str | None = None
    for position, parameter in enumerate(inspect.signature(function).parameters.values()):
        if position == 0 and parameter.name == "self":
            continue
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(f"tool `{name}`: parameter `{parameter.name}` must be one that can be given by name")
        if parameter.name not in hints:
            raise TypeError(f"tool `{name}`: give parameter `{parameter.name}` a type; the model is shown it")
        if hints[parameter.name] is EpisodeView:
            view = parameter.name
            continue
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (
            hints[parameter.name],
            Field(default=default, description=words.get(parameter.name)),
        )
    model = create_model(f"{name}_arguments", __config__=ConfigDict(extra="forbid"), **fields)
    parameters = _plain(model.model_json_schema())
    parameters.setdefault("properties", {})
    parameters.pop("additionalProperties", None)
    schema = {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
    return ToolShape(name, schema, model, view)


def _explain(error: ValidationError) -> str:
    """Pydantic's errors in words that a model can act on."""
    parts = []
    for item in error.errors(include_url=False, include_input=False):
        where = ".".join(str(step) for step in item["loc"]) or "arguments"
        if item["type"] == "extra_forbidden":
            parts.append(f"`{where}` is not a parameter")
        elif item["type"] == "missing":
            parts.append(f"`{where}` is missing")
        else:
            parts.append(f"`{where}`: {item['msg'][0].lower()}{item['msg'][1:]}")
    return "; ".join(parts)


class Toolbox:
    """The tools of one episode."""

    def __init__(self, tools: Sequence[BoundTool], workers: Workers) -> None:
        self.tools = {tool.shape.name: tool for tool in tools}
        self._workers = workers

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """What the model is shown of them, in OpenAI's form."""
        return [tool.shape.schema for tool in self.tools.values()]

    def effects(self, name: str) -> Effects:
        """What a crash may do with a call of this tool; an unknown one was never called."""
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
        """Carry out the attempts of one turn in parallel; results in their order.

        Args:
            attempts: What the model wrote.
            turn: The newest assistant turn, from 0.
            view: Gives what tools may see, for those that ask for it.
            budget: How many calls the limit `tool_calls` leaves.
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
        """Carry out one call. What the tool raises is a result, not an exception."""
        tool = self.tools.get(call.name)
        if tool is None:
            near = get_close_matches(call.name, self.tools, n=1)
            known = ", ".join(f"`{name}`" for name in self.tools)
            hint = f" Did you mean `{near[0]}`?" if near else ""
            return await _answer(
                call.id, call.name, "unknown_tool", f"There is no tool `{call.name}`.{hint} Tools: {known}."
            )
        try:
            checked = tool.shape.arguments.model_validate(call.arguments)
        except ValidationError as error:
            return await _answer(
                call.id, call.name, "invalid_arguments", f"Wrong arguments for `{call.name}`: {_explain(error)}."
            )
        arguments = dict(checked.__dict__)
        if tool.shape.view:
            arguments[tool.shape.view] = view()
        began = time.perf_counter()
        try:
            value = await call_world(
                self._workers,
                partial(tool.function, **arguments),
                seconds=tool.seconds,
                blame="tool",
                what=f"tool `{call.name}`",
                effects=tool.effects,
            )
        except LoopReplacedError:  # not the tool's doing: the policy is not shown it
            raise
        except WorldError as error:
            late = error.kind == "tool_timeout"
            words = (
                f"`{call.name}` did not answer within {tool.seconds:g} s."
                if late
                else f"`{call.name}` failed: {error.__cause__ or error}"
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
        return _make_result(
            call_id=call.id, name=call.name, content=value, error=None, rewards=[], facts={}, seconds=seconds
        )
    rewards: list[RewardEvent] = []
    facts: dict[str, Any] = {}
    if isinstance(value, ToolReply):
        rewards, facts = list(value.rewards), dict(value.facts)
        value = value.content
    if not isinstance(value, str) and not (isinstance(value, list) and value and isinstance(value[0], BaseModel)):
        try:
            value = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY).decode()
        except TypeError as error:
            raise WorldError(
                f"tool `{call.name}` returned {type(value).__name__}, which JSON cannot hold; "
                "return a string, JSON values, or a ToolReply",
                blame="tool",
                kind="tool_bad_result",
            ) from error
    try:
        return ToolResult(call_id=call.id, name=call.name, content=value, rewards=rewards, facts=facts, seconds=seconds)
    except ValidationError as error:
        raise WorldError(
            f"tool `{call.name}` returned a reply that cannot be shown: {error}", blame="tool", kind="tool_bad_result"
        ) from error


def bind_tool(function: Any, *, name: str | None, seconds: float, effects: Effects, where: str) -> BoundTool:
    """Make a tool of a function (or an object with `__call__`).

    Raises:
        EngineError: it is not one; the message says what to change.
    """
    try:
        shape = shape_of(function, name)
    except (TypeError, NameError, AttributeError, ValueError) as error:
        fault = EngineError(f"{where}: {error}")
        fault.kind, fault.blame = "bad_tool", "spec"
        raise fault from error
    return BoundTool(function, shape, seconds, effects)
