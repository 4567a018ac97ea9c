"""What plugins add to a spec: keys (sections), members of unions, and names.

    class WeatherSpec(SpecSection): ...     # named by the face: Section(keys=("weather",), use="…:WeatherSpec")
    WeatherSpec.section_of(spec)            # WeatherSpec | None
    WeatherSpec.or_default(spec)            # WeatherSpec

The class of the part that has the keys, a `SectionOwner`, does not name them: a section is validated by its own class
at its own place, and given to its owner.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, Self, TypeVar, get_args, get_origin

from msgspec.structs import replace
from pydantic import BaseModel, GetCoreSchemaHandler, PrivateAttr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, PydanticCustomError, core_schema

from engine import plugin
from engine.schemas.base import Contract, Struct

if TYPE_CHECKING:
    from pydantic_core import CoreSchema

DataPath = tuple[str | int, ...]
Owner = TypeVar("Owner", bound="SectionOwner")


class SectionOwner(Contract):
    """Base of the parts of a spec to which plugins add keys."""

    OWNER: ClassVar[str] = ""
    """Its path in the spec, one of `engine.plugin.OWNERS`."""
    _sections: dict[type[SpecSection], SpecSection] = PrivateAttr(default_factory=dict)
    _unread: dict[str, Any] = PrivateAttr(default_factory=dict)
    """Keys of a stored run whose plugins are not installed, as they were stored."""

    @property
    def sections(self) -> Mapping[type[SpecSection], SpecSection]:
        """The sections that it has, by their classes."""
        return self._sections

    def with_sections(self, sections: Mapping[type[SpecSection], SpecSection]) -> Self:
        """A copy with these sections besides its others."""
        copy = self.model_copy()
        copy._sections = self._sections | dict(sections)
        return copy

    def value_of(self, key: str) -> Any:
        """The value of a key: of its class, or of an inline section; None of a plugin that was left out.

        Raises:
            KeyError: no such key.
        """
        if key in type(self).model_fields:
            return getattr(self, key)
        try:
            model = _inline(type(self), key)
        except KeyError:
            sections = (section for face in plugin.installed().left_out.values() for section in face.sections)
            if any(section.owner == self.OWNER and key in section.keys for section in sections):
                return None  # its row is in a table that was made before
            raise
        return getattr(model.or_default(self), key)

    def with_value(self, key: str, value: Any) -> Self:
        """A copy in which a key has another value, which is not validated. Raises: KeyError: no such key."""
        if key in type(self).model_fields:
            return self.model_copy(update={key: value})
        model = _inline(type(self), key)
        return self.with_sections({model: model.or_default(self).model_copy(update={key: value})})


class SpecSection(Contract):
    """Base of the sections that plugins add."""

    NULLABLE: ClassVar[bool] = False
    """Whether it may be null, its default then. Otherwise a section that was left out has the defaults of its keys."""
    RENAMED: ClassVar[Mapping[str, str]] = {}
    """Old key -> new key."""

    @classmethod
    def section_of(cls, owner: SectionOwner) -> Self | None:
        """The section of this class; None if it was left out."""
        section = owner._sections.get(cls)
        return section if isinstance(section, cls) else None

    @classmethod
    def or_default(cls, owner: SectionOwner) -> Self:
        """The section of this class, or its defaults."""
        return cls.section_of(owner) or cls()

    @classmethod
    def adapt_json_schema(cls, definitions: dict[str, Any]) -> None:
        """Add to the JSON Schema what Pydantic does not know, such as a name in place of a mapping."""


class SectionPart(Struct, frozen=True, kw_only=True):
    """The data of one section, taken out of a document."""

    owner: DataPath
    """Where its owner is."""
    path: DataPath
    """Where the data of its class is."""
    model: type[SpecSection]
    body: Any
    """The data of its class."""


def sections_of(
    owner: type[BaseModel], keys: Collection[str] | None = None
) -> list[tuple[plugin.Section, type[SpecSection]]]:
    """The sections that plugins add to a class. Their classes are imported; a plugin whose class cannot be used is left
    out.

    Args:
        owner: The class.
        keys: Only sections with one of these keys.
    """
    sections: list[tuple[plugin.Section, type[SpecSection]]] = []
    if not issubclass(owner, SectionOwner):
        return sections
    for face in list(plugin.installed().plugins.values()):
        with plugin.guarded(face):
            sections += [
                (section, _class_of(section, owner))
                for section in face.sections
                if section.owner == owner.OWNER and (keys is None or any(key in keys for key in section.keys))
            ]
    return sections


def _inline(owner: type[SectionOwner], key: str) -> type[SpecSection]:
    """The class of the inline section that has a key. Raises: KeyError."""
    for section, model in sections_of(owner, (key,)):
        if section.inline:
            return model
    raise KeyError(key)


def _class_of(section: plugin.Section, owner: type[SectionOwner]) -> type[SpecSection]:
    """The class of a section. Raises: PluginError, what the import raises."""
    model = plugin.load(section.use)
    if not (isinstance(model, type) and issubclass(model, SpecSection)):
        raise plugin.PluginError(f"`{section.use}` is not a SpecSection")
    if not section.inline and len(section.keys) != 1:
        raise plugin.PluginError(f"the section `{section.use}` is not inline, so it has one key")
    if section.inline and sorted(model.model_fields) != sorted(section.keys):
        raise plugin.PluginError(f"the keys of its inline section are not the fields of `{section.use}`")
    if section.inline and model.NULLABLE:
        raise plugin.PluginError(f"`{section.use}` is inline, so it cannot be null")
    core = {info.alias or name for name, info in owner.model_fields.items()}
    if twice := sorted(core & set(section.keys)):
        raise plugin.PluginError(f"`{section.path(twice[0])}` is a key of the engine's own")
    return model


def section_fields(owner: type[BaseModel]) -> Iterator[tuple[str, FieldInfo, type[SpecSection]]]:
    """The keys that plugins add to a class: key, field, and the class of the section."""
    for section, model in sections_of(owner):
        if section.inline:
            yield from ((name, info, model) for name, info in model.model_fields.items())
        elif model.NULLABLE:
            annotation: Any = model | None
            yield section.keys[0], FieldInfo(annotation=annotation, default=None), model
        else:
            yield section.keys[0], FieldInfo(annotation=model, default_factory=model), model


def split(document: Any, model: type[BaseModel]) -> tuple[Any, list[SectionPart]]:
    """The document without the keys of sections, and what those keys hold, without sections that are null."""
    if not isinstance(document, dict) or not issubclass(model, SectionOwner):
        return document, []
    rest, parts = dict(document), []
    for section, inner in sections_of(model, rest):
        keys = {key: rest.pop(key) for key in section.keys if key in rest}
        path, body = ((), keys) if section.inline else (section.keys, keys[section.keys[0]])
        if body is not None or not inner.NULLABLE:
            parts.append(SectionPart(owner=(), path=path, model=inner, body=body))
    for key, owner in _inner_owners(model):
        if isinstance(rest.get(key), dict):
            rest[key], deeper = split(rest[key], owner)
            parts += [replace(part, owner=(key, *part.owner), path=(key, *part.path)) for part in deeper]
    return rest, parts


def _inner_owners(model: type[BaseModel]) -> Iterator[tuple[str, type[SectionOwner]]]:
    """The keys of a class whose values are owners, and their classes."""
    for name, info in model.model_fields.items():
        is_union = typing.get_origin(info.annotation) in (typing.Union, types.UnionType)
        for member in typing.get_args(info.annotation) if is_union else (info.annotation,):
            if isinstance(member, type) and issubclass(member, SectionOwner):
                yield info.alias or name, member


def owner_classes(model: type[SectionOwner]) -> Iterator[tuple[str, type[SectionOwner]]]:
    """A class to which plugins add keys and those of its keys, by their paths."""
    yield model.OWNER, model
    for _, inner in _inner_owners(model):
        yield from owner_classes(inner)


def owners_in(owner: SectionOwner, path: DataPath = ()) -> Iterator[tuple[DataPath, SectionOwner]]:
    """An owner and those in it, with their paths."""
    yield path, owner
    for name, info in type(owner).model_fields.items():
        if isinstance(inner := getattr(owner, name), SectionOwner):
            yield from owners_in(inner, (*path, info.alias or name))


def attach(model: BaseModel, sections: Iterable[tuple[DataPath, SpecSection]]) -> None:
    """Give sections to their owners, which are at the paths."""
    owners = dict(owners_in(model)) if isinstance(model, SectionOwner) else {}
    for path, section in sections:
        if section.NULLABLE or section != type(section)():  # one that has its defaults is as one that was left out
            owners[path]._sections[type(section)] = section


def dump(spec: SectionOwner) -> dict[str, Any]:
    """A spec with its sections and all defaults, as JSON values."""
    document: dict[str, Any] = spec.model_dump(mode="json", by_alias=True)
    for path, owner in owners_in(spec):
        at: Any = document
        for key in path:
            at = at[key]
        for section, model in sections_of(type(owner)):
            present = model.section_of(owner) if model.NULLABLE else model.or_default(owner)
            values = present and present.model_dump(mode="json", by_alias=True)
            at |= (values or {}) if section.inline else {section.keys[0]: values}
        at |= owner._unread
    return document


def read_stored(
    document: Mapping[str, Any], model: type[Owner], at: tuple[str, ...] = (), gone: Collection[str] = ()
) -> Owner:
    """The spec of a stored run, or a part of it. Keys of plugins that are not installed are kept as they are.

    Args:
        document: Its JSON values.
        model: Its class.
        at: Where the part is in the spec.
        gone: Paths of keys that other packages had added, which are not installed.

    Raises:
        ValidationError: with the errors of all sections.
    """
    rest, parts = split(document, model)
    unread = _take_unread(rest, model, at, gone)
    errors: list[InitErrorDetails] = []
    spec = _read(rest, model, (), errors)
    sections: list[tuple[DataPath, SpecSection]] = []
    for part in parts:
        if (section := _read(part.body, part.model, part.path, errors)) is not None:
            sections.append((part.owner, section))
    if spec is None or errors:
        raise ValidationError.from_exception_data(model.__name__, errors)
    attach(spec, sections)
    for path, owner in owners_in(spec):
        owner._unread.update(unread.get(path, {}))
    return spec


Model = TypeVar("Model", bound=BaseModel)


def _read(document: Any, model: type[Model], at: DataPath, errors: list[InitErrorDetails]) -> Model | None:
    """Validate a part; its errors are added to `errors`."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            kind: Any = PydanticCustomError(detail["type"], detail["msg"], detail.get("ctx"))
            errors.append(InitErrorDetails(type=kind, loc=(*at, *detail["loc"]), input=detail["input"]))
        return None


def _take_unread(
    rest: dict[str, Any], model: type[BaseModel], at: tuple[str, ...], gone: Collection[str], path: DataPath = ()
) -> dict[DataPath, dict[str, Any]]:
    """Take the keys of plugins that are not installed out of a document, in place: path of the owner -> its keys."""
    places = {key: ".".join([*at, *map(str, path), key]) for key in rest}
    names = [key for key, place in places.items() if place in gone or plugin.missing("sections", place)]
    unread: dict[DataPath, dict[str, Any]] = {path: {key: rest.pop(key) for key in names}} if names else {}
    for key, inner in _inner_owners(model):
        if isinstance(rest.get(key), dict):
            unread |= _take_unread(rest[key], inner, at, gone, (*path, key))
    return unread


def written(spec: SectionOwner) -> frozenset[str]:
    """Names of the plugins whose sections a spec has."""
    uses = {_use(section) for _, owner in owners_in(spec) for section in owner._sections}
    plugins = plugin.installed().plugins.values()
    return frozenset(face.name for face in plugins if any(section.use in uses for section in face.sections))


def written_actions(spec: SectionOwner) -> list[Any]:
    """The actions of the plugins whose sections a spec has, in the order of the plugins."""
    names, plugins = written(spec), plugin.installed().plugins.values()
    return [plugin.load(use) for face in plugins if face.name in names for use in face.actions.values()]


def used_plugins(spec: SectionOwner) -> frozenset[str]:
    """Names of the plugins of which a spec has a section, a class in one of its unions, or a name."""
    uses: set[str] = set()
    for part in _parts(spec):
        uses.add(_use(type(part)))
        for key, point in getattr(part, "PLUGIN_NAMES", {}).items():
            names, entries = getattr(part, key), plugin.entries(point)
            uses |= {entries[name] for name in (names if isinstance(names, list) else [names]) if name in entries}
    points = {
        face.name: {use for point in plugin.POINTS for use in getattr(face, point).values()}
        for face in plugin.installed().plugins.values()
    }
    return written(spec) | frozenset(name for name, named in points.items() if not uses.isdisjoint(named))


def _use(model: type[BaseModel]) -> str:
    return f"{model.__module__}:{model.__qualname__}"


def _parts(part: Any) -> Iterator[BaseModel]:
    """All parts of a spec that are objects of a class."""
    if isinstance(part, list | tuple):
        for inner in part:
            yield from _parts(inner)
    elif isinstance(part, Mapping):
        yield from _parts([*part.values()])
    elif isinstance(part, BaseModel):
        yield part
        if isinstance(part, SectionOwner):
            yield from _parts([*part.sections.values()])
        yield from _parts([getattr(part, name) for name in type(part).model_fields])


M = TypeVar("M")


class OneOf(Generic[M]):
    """Metadata of an annotation: one of the core's classes, or of those that plugins add to `point`.

    BackendSpec = Annotated[BackendBase, OneOf("backends", CORE)]

    Pydantic gets a tagged union of all classes, built when it is first used. So a class of a plugin may import the
    module in which the union is written.
    """

    __slots__ = ("base", "core", "key", "point")

    def __init__(
        self, point: str, core: tuple[type[M], ...] = (), key: str = "kind", *, base: type[M] | None = None
    ) -> None:
        self.point = point
        self.core = core
        bases = core[0].__mro__ if core else ()
        shared = (one for one in bases if all(issubclass(member, one) for member in core))
        self.base: type[M] | None = base or next(shared, None)
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
        if not (self.core or plugin.entries(self.point)):
            return core_schema.literal_schema([""])  # of no names at all there is no schema
        return handler.generate_schema(self.literal())


def _tags(member: Any, key: str) -> Iterator[Any]:
    """The values of a class's key, a literal."""
    fields = getattr(member, "model_fields", None)
    yield from get_args(fields[key].annotation if fields else typing.get_type_hints(member)[key])


Mark = TypeVar("Mark", OneOf[Any], NameOf)


def mark_of(annotation: Any, kind: type[Mark]) -> Mark | None:
    """The open union, or the name of a point, that an annotation is, or None in addition; None if it is none."""
    if get_origin(annotation) is Annotated:
        return next((mark for mark in get_args(annotation)[1:] if isinstance(mark, kind)), None)
    others = [member for member in get_args(annotation) if member is not type(None)]
    return mark_of(others[0], kind) if len(others) == 1 and len(get_args(annotation)) == 2 else None


def annotation_of(info: FieldInfo) -> Any:
    """A field's annotation, with the mark of an open union or name, which Pydantic keeps apart."""
    mark = next((mark for mark in info.metadata if isinstance(mark, OneOf | NameOf)), None)
    return info.annotation if mark is None else Annotated[info.annotation, mark]
