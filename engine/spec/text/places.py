"""Where an error of Pydantic's points: from its `loc` to a path in the document and the type that is wanted there.

Pydantic's locations hold more than the document does (tags of unions, names of branches); walking the
contracts beside them tells the two apart.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from engine.schemas.base import Struct
from engine.schemas.sections import NameOf, OneOf, annotation_of, mark_of, section_fields
from engine.spec.text.diagnostic import DataPath


class Spot(Struct, frozen=True, kw_only=True):
    """One place of a document, and what a contract says of it."""

    path: DataPath
    wanted: Any
    """The annotation; None where the contract has nothing there."""
    owner: type[BaseModel] | None
    """The contract that names the last key, where one does."""
    branch: str | None = None
    """The label of the branch of a plain union, where the error is one branch's."""
    key: bool = False
    """The key itself is meant, not its value."""


def fields_by_key(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """A contract's fields by the keys that a document uses (`with`, not `with_`), with those that plugins add."""
    fields = {info.alias or name: info for name, info in model.model_fields.items()}
    return fields | {key: info for key, info, _ in section_fields(model)}


def branches(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, None left out; anything else is its own single member."""
    if typing.get_origin(annotation) is typing.Annotated:
        if (name := mark_of(annotation, NameOf)) is not None:
            return (name.literal(),)
        opened = mark_of(annotation, OneOf)
        return branches(typing.get_args(annotation)[0]) if opened is None else opened.members()
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(arg for arg in typing.get_args(annotation) if arg is not type(None))
    return (annotation,)


def is_model(annotation: Any) -> bool:
    """Whether an annotation is a contract."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def bare(annotation: Any) -> Any:
    """Without `Annotated` and `| None`."""
    members = branches(annotation)
    if len(members) != 1:
        return annotation
    member = members[0]
    return bare(member) if member is not annotation and member != annotation else member


def literals(annotation: Any) -> list[str]:
    """Every literal value that an annotation allows."""
    values: list[str] = []
    for member in branches(annotation):
        if typing.get_origin(member) is typing.Literal:
            values += [str(value) for value in typing.get_args(member)]
        elif member is not annotation and typing.get_origin(member) is typing.Annotated:
            values += literals(member)
    return values


def tagged(annotation: Any, discriminator: str) -> dict[str, type[BaseModel]]:
    """The members of a discriminated union by their tags."""
    models: dict[str, type[BaseModel]] = {}
    for member in (member for branch in branches(annotation) for member in branches(branch)):
        if is_model(member):
            for tag in literals(fields_by_key(member)[discriminator].annotation):
                models[tag] = member
    return models


def discriminator_of(annotation: Any, info: FieldInfo | None) -> str | None:
    """The key that decides between the members of a union, where one does."""
    if info is not None and isinstance(info.discriminator, str):
        return info.discriminator
    if typing.get_origin(annotation) is typing.Annotated:
        for item in typing.get_args(annotation)[1:]:
            key = item.key if isinstance(item, OneOf) else getattr(item, "discriminator", None)
            if isinstance(key, str):
                return key
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):  # a union with tags, or None
        present = [item for item in typing.get_args(annotation) if item is not type(None)]
        return discriminator_of(present[0], None) if len(present) == 1 else None
    return None


def locate(model: type[BaseModel], loc: tuple[int | str, ...]) -> Spot:
    """Follow an error's `loc` through a contract."""
    spot = Spot(path=(), wanted=model, owner=None)
    info: FieldInfo | None = None
    for segment in loc:
        spot, info = _step(spot, info, segment)
    return spot


def _step(spot: Spot, info: FieldInfo | None, segment: int | str) -> tuple[Spot, FieldInfo | None]:
    if segment == "[key]":
        return Spot(path=spot.path, wanted=str, owner=spot.owner, branch=spot.branch, key=True), None
    discriminator = discriminator_of(spot.wanted, info)
    if discriminator is not None:
        member = tagged(spot.wanted, discriminator).get(str(segment))
        return Spot(path=spot.path, wanted=member, owner=spot.owner, branch=spot.branch), None
    wanted = bare(spot.wanted)
    if is_model(wanted):
        field = fields_by_key(wanted).get(str(segment))
        annotation = annotation_of(field) if field else None
        return Spot(path=(*spot.path, segment), wanted=annotation, owner=wanted, branch=spot.branch), field
    origin, args = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is dict:
        return Spot(path=(*spot.path, segment), wanted=args[1], owner=None, branch=spot.branch), None
    if origin in (list, tuple) and isinstance(segment, int):
        return Spot(path=(*spot.path, segment), wanted=args[0] if args else None, owner=None, branch=spot.branch), None
    members = branches(wanted)
    if len(members) > 1 and isinstance(segment, str):
        label = segment.partition("[")[0]
        if label.startswith("function-"):  # a contract with a rule of its own: `function-after[_one(), TurnChoice]`
            label = segment.rpartition(", ")[2].removesuffix("]")
        chosen = next((member for member in members if _label(member) == label), wanted)
        return Spot(path=spot.path, wanted=chosen, owner=spot.owner, branch=segment), None
    return Spot(
        path=(*spot.path, segment) if isinstance(segment, int) else spot.path,
        wanted=None,
        owner=None,
        branch=spot.branch,
    ), None


def _label(member: Any) -> str:
    """How Pydantic begins the name of a union's branch."""
    origin = typing.get_origin(bare(member)) or bare(member)
    if origin is typing.Literal:
        return "literal"
    if typing.get_origin(member) is typing.Annotated:
        return f"constrained-{getattr(origin, '__name__', origin)}"
    return str(getattr(origin, "__name__", origin))


@lru_cache(maxsize=8)
def homes(model: type[BaseModel]) -> dict[str, list[str]]:
    """Key -> the dotted places in the document where it is known: for a key that strayed."""
    keys: dict[str, list[str]] = {}
    for key, place in _walk(model, (), 0):
        keys.setdefault(key, []).append(place)
    return keys


def _walk(model: type[BaseModel], path: tuple[str, ...], depth: int) -> Iterator[tuple[str, str]]:
    for key, info in fields_by_key(model).items():
        if path:
            yield key, ".".join(path)
        members = [bare(member) for member in branches(bare(annotation_of(info)))]
        for member in members:
            if is_model(member) and depth < 3:
                yield from _walk(member, (*path, key), depth + 1)
