"""Unions whose members plugins add, and names that they add."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar, get_args, get_origin

from pydantic import GetCoreSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import core_schema

from engine import plugin

if TYPE_CHECKING:
    from pydantic_core import CoreSchema

M = TypeVar("M")


class OneOf(Generic[M]):
    """Metadata of an annotation: one of the core's classes, or of those that plugins add to `point`.

    BackendSpec = Annotated[BackendBase, OneOf("backends", CORE)]

    Pydantic gets a tagged union of all classes, built when it is first used. So a class of a plugin may import the module
    in which the union is written.
    """

    __slots__ = ("base", "core", "key", "point")

    def __init__(
        self, point: str, core: tuple[type[M], ...] = (), key: str = "kind", *, base: type[M] | None = None
    ) -> None:
        self.point = point
        self.core = core
        self.base: type[M] | None = base or _common_base(core)
        """What all members must be subclasses of."""
        self.key = key
        """The key that decides."""

    def members(self) -> tuple[type[M], ...]:
        """The classes. Imports those of plugins; one that cannot be imported takes its plugin out."""
        names = [str(tag) for member in self.core for tag in _tags(member, self.key)]
        return (*self.core, *plugin.loaded(self.point, names, check=self._misfit).values())

    def _misfit(self, name: str, member: Any) -> str | None:
        """What is wrong with a class of a plugin."""
        if self.base is not None and not (isinstance(member, type) and issubclass(member, self.base)):
            return f"not a subclass of {self.base.__name__}"
        tags = [str(tag) for tag in _tags(member, self.key)]
        return None if name in tags else f"whose `{self.key}` is {', '.join(tags)}"

    def tags(self) -> frozenset[str]:
        """The values of the key that decides, one or more of each class."""
        return frozenset(str(tag) for member in self.members() for tag in _tags(member, self.key))

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        choices = {tag: handler.generate_schema(member) for member in self.members() for tag in _tags(member, self.key)}
        # a union has at least one member; where no plugin adds one, it has one that nothing is valid for
        return core_schema.tagged_union_schema(choices or {"": core_schema.literal_schema([""])}, self.key)


class NameOf:
    """Metadata of a string's annotation: one of the core's names, or of those that plugins add to `point`.

    Tracker = Annotated[str, NameOf("trackers")]
    """

    __slots__ = ("core", "point")

    def __init__(self, point: str, core: tuple[str, ...] = ()) -> None:
        self.point = point
        self.core = core

    def literal(self) -> Any:
        """The `Literal` of all names."""
        return Literal[(*self.core, *plugin.entries(self.point))]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler.generate_schema(self.literal())


def _common_base(core: tuple[type[M], ...]) -> type[M] | None:
    """The first class that all of the core's members are."""
    return (
        next((base for base in core[0].__mro__ if all(issubclass(member, base) for member in core)), None)
        if core
        else None
    )


def _tags(member: Any, key: str) -> Iterator[Any]:
    """The values of a class's key, a literal."""
    fields = getattr(member, "model_fields", None)
    yield from get_args(fields[key].annotation if fields else typing.get_type_hints(member)[key])


def open_union(annotation: Any) -> OneOf[Any] | None:
    """The open union that an annotation is, or None in addition; None if it is none."""
    if get_origin(annotation) is Annotated:
        return next((mark for mark in get_args(annotation)[1:] if isinstance(mark, OneOf)), None)
    others = [member for member in get_args(annotation) if member is not type(None)]
    return open_union(others[0]) if len(others) == 1 and len(get_args(annotation)) == 2 else None


def open_name(annotation: Any) -> NameOf | None:
    """The name of a point that an annotation is, or None in addition; None if it is none."""
    if get_origin(annotation) is Annotated:
        return next((mark for mark in get_args(annotation)[1:] if isinstance(mark, NameOf)), None)
    others = [member for member in get_args(annotation) if member is not type(None)]
    return open_name(others[0]) if len(others) == 1 and len(get_args(annotation)) == 2 else None


def annotation_of(info: FieldInfo) -> Any:
    """A field's annotation, with the mark of an open union or name, which Pydantic keeps apart."""
    mark = next((mark for mark in info.metadata if isinstance(mark, OneOf | NameOf)), None)
    return info.annotation if mark is None else Annotated[info.annotation, mark]
