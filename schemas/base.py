"""The two base classes of all data classes: a `Contract` validates when it is built, a `Struct` when it is read.

There are two kinds, and each class is one of them:

- A `Contract` is what people write: specs, scripts, the answers of environments, tools and users. It is a Pydantic
  model, so it is validated where it is built.
- A `Struct` is what the engine makes: messages, requests, generations, spans, turns, journal records. It is a frozen
  msgspec struct. Building one validates nothing; `read` validates data from outside or from a file over the same class.

Both refuse unknown keys and never change once they are built.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
import threading
from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Self, TypeVar

import msgspec
import numpy as np
from msgspec.structs import asdict as as_dict
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    TypeAdapter,
    WithJsonSchema,
)
from pydantic_core import CoreConfig, CoreSchema, SchemaValidator, core_schema

_CONFIG = ConfigDict(
    extra="forbid",
    arbitrary_types_allowed=True,
    allow_inf_nan=False,
    ser_json_inf_nan="constants",  # NaN inside free-form facts stays NaN; null would be another value
    protected_namespaces=(),
)
_BUILDING = threading.RLock()
"""Pydantic has a lock of its own since 2.14."""


def description_of(model: type, key: str) -> str | None:
    """The description of a field: of `Field(description=…)`, or the string below the attribute; None without one.

    Args:
        model: A Pydantic model or a dataclass.
        key: The field's key in a document: its alias, if it has one.
    """
    field = key
    for name, info in getattr(model, "model_fields", {}).items():
        if key == (info.alias or name):
            if info.description is not None:
                return str(info.description)
            field = name
    for base in model.__mro__:
        if field in vars(base).get("__annotations__", {}):
            return _descriptions(base).get(field)
    return None


def add_descriptions(schema: dict[str, Any], model: type) -> None:
    """Write the descriptions of fields into the properties of a class's JSON Schema, which is changed in place."""
    for key, described in schema.get("properties", {}).items():
        if (text := description_of(model, key)) is not None:
            described["description"] = text


@cache
def _descriptions(model: type) -> dict[str, str]:
    """The string below each attribute in the body of a class; none where its source is not there.

    Pydantic's `use_attribute_docstrings` reads them when a class is made, so every process that imports the schemas
    would pay for descriptions that only JSON Schemas, docs and a few messages use. Here they are read when they are
    asked for.
    """
    try:
        body: Any = ast.parse(textwrap.dedent(inspect.getsource(model))).body[0]
    except (OSError, TypeError, SyntaxError):
        return {}
    return {
        node.target.id: inspect.cleandoc(below.value.value)
        for node, below in pairwise(body.body)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }


class Contract(BaseModel):
    """Base of what people write: validated when it is built, unknown keys refused, frozen."""

    model_config = _CONFIG | ConfigDict(frozen=True, populate_by_name=True, defer_build=True)
    """`defer_build`: a validator is built when its class is first used. A spec uses few of them."""
    PLUGIN_NAMES: ClassVar[Mapping[str, str]] = {}
    """Field or property -> the point of `engine.plugin` whose names it holds."""

    @classmethod
    def model_rebuild(
        cls,
        *,
        force: bool = False,
        raise_errors: bool = True,
        _parent_namespace_depth: int = 2,
        _types_namespace: Any = None,
    ) -> bool | None:
        """Build the validator, if it is not there. Threads that first use a class at one time wait for each other."""
        with _BUILDING:
            if cls.__pydantic_complete__ and not force:
                return None
            return super().model_rebuild(
                force=force,
                raise_errors=raise_errors,
                _parent_namespace_depth=_parent_namespace_depth + 1,
                _types_namespace=_types_namespace,
            )

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The JSON Schema, with the descriptions of the fields."""
        schema = handler(core_schema)
        add_descriptions(handler.resolve_ref_schema(schema), cls)
        return schema


@cache
def _dataclass_of(struct: type[Struct]) -> Any:
    """A struct's twin: a dataclass with its fields and no methods, made when it is asked for first."""
    hints: dict[str, Any] = {}
    for base in reversed(struct.__mro__):
        hints |= vars(base).get("__annotations__", {})
    names, defaults = struct.__struct_fields__, struct.__struct_defaults__
    values = (msgspec.NODEFAULT,) * (len(names) - len(defaults)) + defaults
    fields: list[Any] = []
    for name, value in zip(names, values, strict=True):
        field: Any = dataclasses.field() if value is msgspec.NODEFAULT else dataclasses.field(default=value)
        if type(value).__name__ == "Factory":  # msgspec's own, which it does not export
            field = dataclasses.field(default_factory=value.factory)
        fields.append((name, hints[name], field))
    return dataclasses.make_dataclass(struct.__name__, fields, init=False, repr=False, eq=False, kw_only=True)


class _FieldsOfTwin:
    """The fields of a struct's twin, as an attribute of its class."""

    def __get__(self, instance: Any, owner: type[Struct]) -> Any:
        return _dataclass_of(owner).__dataclass_fields__


class Struct(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what the engine makes: `class X(Struct, frozen=True, kw_only=True)`. Building one validates nothing.

    VersionSpan(version=0, start=0, end=4)                   # as it is
    VersionSpan.read({"version": 0, "start": 0, "end": 4})   # validated
    VersionSpan(version=0, start=0, end=4).plain()           # {"version": 0, "start": 0, "end": 4}
    """

    __dataclass_fields__: ClassVar = _FieldsOfTwin()
    """By which `dataclasses.replace`, `fields`, `asdict` and Pydantic take structs."""
    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG | ConfigDict(revalidate_instances="always")

    def _checked(self) -> Self:
        """Raise ValueError where values do not fit together. `read` calls it, `__init__` does not."""
        return self

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Pydantic's schema of a dataclass with these fields, which validates into the twin, from which the struct is
        built.

        Pydantic cannot fill a struct itself: it fills objects that `object.__new__` has made. It does write one:
        `serialization` is its schema unchanged.
        """
        reference = handler(source)
        definition: Any = handler.resolve_ref_schema(reference)
        if definition["type"] != "dataclass":  # changed already: the class occurs twice
            return reference
        ref: str = definition.pop("ref")
        written = dict(definition)
        read = written | {"ref": f"{ref}:twin", "cls": _dataclass_of(cls), "slots": False, "post_init": False}
        twin = core_schema.definition_reference_schema(read["ref"])
        validator: Any = core_schema.json_or_python_schema(
            core_schema.no_info_after_validator_function(cls._of_twin, twin),
            core_schema.no_info_wrap_validator_function(cls._of_value, twin),
            ref=ref,
            serialization=written,
        )
        definition.clear()
        definition.update(validator)
        return core_schema.definitions_schema(reference, [read])

    @classmethod
    def _of_value(cls, value: Any, validate: Callable[[Any], Any]) -> Self:
        return cls(**vars(validate(as_dict(value) if isinstance(value, cls) else value)))._checked()

    @classmethod
    def _of_twin(cls, twin: Any) -> Self:
        return cls(**vars(twin))._checked()

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The JSON Schema, with the descriptions of the fields."""
        schema = handler(core_schema["serialization"])
        add_descriptions(handler.resolve_ref_schema(schema), cls)
        return schema

    @classmethod
    def read(cls, data: Any) -> Self:
        """Validate data from outside: a mapping, or an instance that nobody has validated.

        Raises:
            ValidationError: it is not of this class's form.
        """
        return adapter(cls).validate_python(data)

    @classmethod
    def read_json(cls, text: str | bytes) -> Self:
        """`read` from JSON text. Raises: ValidationError."""
        return adapter(cls).validate_json(text)

    def plain(self) -> dict[str, Any]:
        """The fields as JSON values, arrays as lists."""
        values: dict[str, Any] = adapter(type(self)).dump_python(self, mode="json")
        return values

    def json(self) -> str:
        """The fields as JSON text, arrays as lists."""
        return adapter(type(self)).dump_json(self).decode()


T = TypeVar("T")
_ADAPTERS: dict[type, TypeAdapter[Any]] = {}


def adapter(type_: type[T]) -> TypeAdapter[T]:
    """Pydantic's validator and serializer of a class, built when it is asked for first."""
    built = _ADAPTERS.get(type_)
    if built is None:
        built = _ADAPTERS[type_] = TypeAdapter(type_)
        if isinstance(type_, type) and issubclass(type_, Struct):  # errors name the class, not the validator
            built.validator = SchemaValidator(built.core_schema, CoreConfig(title=type_.__name__))
    return built


_UNIT = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_BYTES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def _quantity(value: Any, kind: type[float], units: Mapping[str, float], what: str) -> Any:
    """Convert a number with one of the units, as `"1.5 GiB"`; what is no text stays as it is."""
    if isinstance(value, str):
        match = re.match(rf"^\s*(\d+(?:\.\d+)?)\s*({'|'.join(units)})\s*$", value)
        if match is None:
            raise ValueError(f"{value!r} is not {what}")
        return kind(float(match[1]) * units[match[2]])
    return value


parse_seconds = partial(_quantity, kind=float, units=_UNIT, what="a duration; write 500ms, 5s, 2m, 1h or seconds")
"""Convert `"500ms"`, `"5s"`, `"2m"`, `"1h"` or a plain number of seconds to seconds."""
parse_bytes = partial(_quantity, kind=int, units=_BYTES, what="a size; write 64kB, 512MB, 1GB, 1GiB or bytes")
"""Convert `"64kB"`, `"512MB"`, `"1.5GiB"` or a plain number of bytes to bytes."""
Seconds = Annotated[
    float,
    BeforeValidator(parse_seconds),
    Field(gt=0),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0},
                {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*(ms|s|m|h)\s*$"},
            ],
            "description": "A duration: a number of seconds, or 500ms, 5s, 2m, 1h.",
        }
    ),
]
"""A duration in seconds; `5s`, `500ms`, `2m` and `1h` are accepted too."""


Bytes = Annotated[
    int,
    BeforeValidator(parse_bytes),
    Field(gt=0),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "exclusiveMinimum": 0},
                {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*(B|kB|MB|GB|KiB|MiB|GiB)\s*$"},
            ],
            "description": "A size: a number of bytes, or 64kB, 512MB, 1GB, 1GiB.",
        }
    ),
]
"""A size in bytes; `64kB`, `512MB`, `1GB` and `1GiB` are accepted too."""


def _flat(value: Any, what: str, dtype: type[np.generic]) -> Any:
    array = np.ascontiguousarray(value, dtype=dtype)
    if array.ndim != 1:
        raise ValueError(f"{what} are a flat list, not of shape {array.shape}")
    return array


_AS_LIST = PlainSerializer(lambda array: array.tolist(), when_used="json")

IntArray = Annotated[
    np.ndarray,
    BeforeValidator(partial(_flat, what="token ids", dtype=np.int32)),
    _AS_LIST,
    WithJsonSchema({"type": "array", "items": {"type": "integer"}}),
]
"""int32 array of shape [tokens]."""

FloatArray = Annotated[
    np.ndarray,
    BeforeValidator(partial(_flat, what="log-probs", dtype=np.float32)),
    _AS_LIST,
    WithJsonSchema({"type": "array", "items": {"type": "number"}}),
]
"""float32 array of shape [tokens]."""

Json = Any
"""A JSON value: null, bool, int, float, str, list or dict of these."""
