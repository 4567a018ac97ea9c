"""A tool's signature and docstring -> its name, its schema and the model that checks its arguments; its answer -> a reply.

Imports little, because worker processes import it too.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, get_type_hints

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from engine.schemas.environment import EpisodeView, ToolReply

_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$")
_PARAMETER = re.compile(r"^(\s+)(\w+)\s*(?:\([^)]*\))?:\s*(.+)$")


@dataclass(frozen=True, slots=True)
class ToolShape:
    """What can be read off a tool's function: once for each function, not for each episode."""

    name: str
    schema: dict[str, Any]
    """OpenAI's form: `{"type": "function", "function": {name, description, parameters}}`."""
    arguments: type[BaseModel] | None
    """Checks a call's arguments; None where the tool lives in a worker process, which checks them."""
    view: str | None
    """The parameter that takes the `EpisodeView`, if there is one."""


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


def explain(error: ValidationError) -> str:
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


def waits(target: Any) -> bool:
    """Whether a class has `async` methods, so that its objects may open sessions on the loop that these run on."""
    return inspect.isclass(target) and any(
        inspect.iscoroutinefunction(member)
        for name, member in inspect.getmembers_static(target)
        if not name.startswith("_") or name == "__call__"
    )


def reply_of(value: Any) -> ToolReply:
    """What a tool returned, as a reply: a string, image and text parts, or anything that JSON can hold.

    Raises:
        TypeError: JSON cannot hold it.
        ValidationError: a list of parts that are none.
    """
    if isinstance(value, ToolReply):
        return value
    if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], BaseModel)):
        return ToolReply(content=value)
    return ToolReply(content=orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY).decode())
