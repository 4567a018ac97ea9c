"""A tool's signature and docstring -> its name, schema and the model that checks its arguments; its answer -> a reply.

Imports little, because worker processes import it too.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Literal, Union, get_type_hints

import msgspec
import orjson
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    create_model,
    model_validator,
)

from engine.schemas.base import Struct
from engine.schemas.environment import EpisodeView, ToolReply
from engine.terminal import brief

_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$")
_PARAMETER = re.compile(r"^(\s+)(\w+)\s*(?:\([^)]*\))?:\s*(.+)$")


class ToolShape(Struct, frozen=True, kw_only=True):
    """What can be read off a tool's function: once for each function, not for each episode."""

    name: str
    schema: dict[str, Any]
    """OpenAI's form: `{"type": "function", "function": {name, description, parameters}}`."""
    arguments: type[BaseModel] | None
    """Checks a call's arguments: `vars(arguments.model_validate(…))` are those that the function takes. None where the
    tool lives in a worker process, which checks them."""
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

    A `DescribedTool` has a schema of its own, which is used as it is.

    Raises:
        TypeError: a parameter without a type, a positional-only or variadic one.
    """
    if isinstance(function, DescribedTool):
        return function.shape(name)
    target = function if inspect.isroutine(function) else type(function).__call__
    return _shape_of(
        getattr(target, "__func__", target), name or getattr(function, "__name__", type(function).__name__)
    )


class DescribedTool:
    """A tool with a JSON schema of its own, as other libraries describe theirs, instead of a signature.

        DescribedTool("add", "Add two numbers.", {"type": "object", "properties": …}, call, takes_view=True)

    Args:
        name: The tool's name for the model.
        description: The tool's description for the model.
        parameters: JSON schema of its arguments: an object. Checked are names, required ones and the types at the top
            level.
        call: Called with the arguments by name; may be async.
        takes_view: `call` has a parameter `view`, which the engine fills in.
    """

    def __init__(
        self,
        name: str,
        description: str,
        parameters: Mapping[str, Any],
        call: Callable[..., Any],
        *,
        takes_view: bool = False,
    ) -> None:
        self.name = name
        self._schema = {"name": name, "description": description, "parameters": dict(parameters)}
        self._call = call
        self._view = "view" if takes_view else None

    def shape(self, name: str | None = None) -> ToolShape:
        """Its name, schema and the model that checks its arguments."""
        parameters = self._schema["parameters"]
        schema = {"type": "function", "function": {**self._schema, "name": name or self.name}}
        return ToolShape(
            name=name or self.name,
            schema=schema,
            arguments=_arguments_of(orjson.dumps(parameters).decode()),
            view=self._view,
        )

    def __call__(self, **arguments: Any) -> Any:
        return self._call(**arguments)


_JSON_TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list[Any],
    "object": dict[str, Any],
    "null": None,
}


class _Given(BaseModel):
    """Arguments of a described tool: only those that the model gave, by the tool's own names."""

    @model_validator(mode="wrap")
    @classmethod
    def _as_given(cls, value: Any, check: ModelWrapValidatorHandler[BaseModel]) -> Any:
        checked = check(value)
        fields = {
            field.alias or name: getattr(checked, name)
            for name, field in cls.model_fields.items()
            if name in checked.model_fields_set
        }
        return SimpleNamespace(**{**fields, **(checked.model_extra or {})})


@lru_cache(maxsize=512)
def _arguments_of(parameters: str) -> type[BaseModel]:
    """The model that checks arguments against a JSON schema, at the top level."""
    schema = orjson.loads(parameters)
    required = set(schema.get("required") or ())
    fields: dict[str, Any] = {}
    for index, (name, about) in enumerate((schema.get("properties") or {}).items()):
        fields[f"field_{index}"] = (_type_of(about), Field(default=... if name in required else None, alias=name))
    extra: Any = "allow" if schema.get("additionalProperties") else "forbid"
    return create_model("arguments", __base__=_Given, __config__=None, __cls_kwargs__={"extra": extra}, **fields)


def _type_of(about: Any) -> Any:
    """The Python type of a property; Any where the schema says more than one plain type."""
    if not isinstance(about, dict):
        return Any
    if isinstance(about.get("enum"), list) and about["enum"] and all(isinstance(item, str) for item in about["enum"]):
        return Literal[tuple(about["enum"])]
    named = about.get("type")
    kinds = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    if not kinds or any(kind not in _JSON_TYPES for kind in kinds):
        return Any
    types = [_JSON_TYPES[kind] for kind in kinds]
    return types[0] if len(types) == 1 else Union[tuple(types)]  # noqa: UP007  (built from a list)


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
    return ToolShape(name=name, schema=schema, arguments=model, view=view)


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
    return brief("; ".join(parts))


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
    options = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
    return ToolReply(content=orjson.dumps(value, default=msgspec.structs.asdict, option=options).decode())
