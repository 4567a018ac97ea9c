"""An open union of msgspec structs: the engine's records may become such structs, with a twin dataclass for Pydantic."""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import Annotated, Any, Literal, Self

import msgspec
import pytest
from pydantic import Field, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, core_schema

from engine import plugin
from engine.schemas.sections import OneOf


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the structs of the union."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        twin = dataclasses.make_dataclass(
            cls.__name__,
            [(name, hint) for name, hint in typing.get_type_hints(cls, include_extras=True).items()],
            kw_only=True,
        )
        twin.__pydantic_config__ = {"extra": "forbid"}  # type: ignore[attr-defined]
        return core_schema.no_info_after_validator_function(
            cls.of_twin,
            handler.generate_schema(twin),
            serialization=core_schema.plain_serializer_function_ser_schema(msgspec.to_builtins),
        )

    @classmethod
    def of_twin(cls, twin: Any) -> Self:
        return cls(**{field.name: getattr(twin, field.name) for field in dataclasses.fields(twin)})


class Asked(Kind, frozen=True, kw_only=True):
    kind: Literal["asked"]
    turn: Annotated[int, Field(ge=0)]


class Answered(Kind, frozen=True, kw_only=True):
    kind: Literal["answered"]
    words: list[str]


class Drawn(Kind, frozen=True, kw_only=True):
    """Of a plugin."""

    kind: Literal["drawn"]
    card: str


@pytest.fixture
def union(monkeypatch: pytest.MonkeyPatch) -> TypeAdapter[Any]:
    def loaded(point: str, core: Any, check: Any) -> dict[str, Any]:
        assert (point, core, check("drawn", Drawn)) == ("records", ["asked", "answered"], None)
        assert (check("drawn", dict), check("seen", Drawn)) == ("not a subclass of Kind", "whose `kind` is drawn")
        return {"drawn": Drawn}

    monkeypatch.setattr(plugin, "loaded", loaded)
    mark: OneOf[Kind] = OneOf(point="records", core=(Asked, Answered))
    assert mark.tags() == {"asked", "answered", "drawn"}
    return TypeAdapter(Annotated[Kind, mark])


@pytest.mark.parametrize(
    "made", [Asked(kind="asked", turn=3), Answered(kind="answered", words=["a"]), Drawn(kind="drawn", card="ace")]
)
def test_each_struct_is_read_by_its_kind_and_written_again(union: TypeAdapter[Any], made: Kind) -> None:
    text = msgspec.json.encode(made)
    read = union.validate_json(text)
    assert (type(read), read) == (type(made), made)
    assert json.loads(union.dump_json(read)) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "place", "error"),
    [
        ('{"kind": "asked", "turn": -1}', ("asked", "turn"), "greater_than_equal"),
        ('{"kind": "asked"}', ("asked", "turn"), "missing"),
        ('{"kind": "asked", "turn": 1, "x": 2}', ("asked", "x"), "unexpected_keyword_argument"),
        ('{"kind": "drwan"}', (), "union_tag_invalid"),
        ("{}", (), "union_tag_not_found"),
    ],
)
def test_what_is_wrong_has_its_place(union: TypeAdapter[Any], text: str, place: tuple[str, ...], error: str) -> None:
    with pytest.raises(ValidationError) as caught:
        union.validate_json(text)
    (found,) = caught.value.errors()
    assert (found["loc"], found["type"]) == (place, error)


def test_the_json_schema_has_each_kind(union: TypeAdapter[Any]) -> None:
    assert set(union.json_schema()["discriminator"]["mapping"]) == {"asked", "answered", "drawn"}
