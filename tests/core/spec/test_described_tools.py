"""Tools that bring a JSON schema of their own: shown as it is, and their arguments checked by it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from engine.schemas.environment import EpisodeView
from engine.spec.code.signature import DescribedTool, ToolShape, explain, shape_of

SCHEMA = {
    "type": "object",
    "properties": {
        "class": {"type": "string", "description": "A name that Python keeps for itself."},
        "count": {"type": "integer"},
        "unit": {"type": "string", "enum": ["km", "miles"]},
        "limit": {"type": ["number", "null"]},
        "any": {"anyOf": [{"type": "string"}, {"type": "array"}]},
    },
    "required": ["class"],
}


def tool(schema: dict[str, Any] = SCHEMA) -> DescribedTool:
    return DescribedTool("look", "Look.", schema, lambda **given: given)


def arguments_of(shape: ToolShape, given: dict[str, Any]) -> dict[str, Any]:
    assert shape.arguments is not None
    return vars(shape.arguments.model_validate(given))


def test_the_model_is_shown_its_own_schema() -> None:
    function = {"name": "look", "description": "Look.", "parameters": SCHEMA}
    assert shape_of(tool()).schema == {"type": "function", "function": function}
    assert shape_of(tool(), "see").schema["function"]["name"] == "see"


@pytest.mark.parametrize(
    "given",
    [
        {"class": "a"},
        {"class": "a", "count": 3, "unit": "km"},
        {"class": "a", "limit": None},
        {"class": "a", "any": ["x"]},
    ],
)
def test_it_gets_the_arguments_that_the_model_gave(given: dict[str, Any]) -> None:
    assert tool()(**arguments_of(shape_of(tool()), given)) == given


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "`class` is missing"),
        ({"class": "a", "count": "many"}, "`count`: input should be a valid integer"),
        ({"class": "a", "unit": "yards"}, "`unit`: input should be 'km' or 'miles'"),
        ({"class": "a", "field_0": "b"}, "`field_0` is not a parameter"),
    ],
)
def test_arguments_that_do_not_fit_are_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        arguments_of(shape_of(tool()), given)
    assert words in explain(caught.value)


def test_further_arguments_pass_where_the_schema_allows_them() -> None:
    open_schema = {**SCHEMA, "additionalProperties": True}
    assert arguments_of(shape_of(tool(open_schema)), {"class": "a", "more": 1}) == {"class": "a", "more": 1}


def test_a_tool_without_parameters() -> None:
    assert arguments_of(shape_of(tool({})), {}) == {}


def test_it_may_ask_for_the_view() -> None:
    def call(view: EpisodeView) -> int:
        return view.turn

    assert shape_of(DescribedTool("turn", "", {}, call, takes_view=True)).view == "view"
