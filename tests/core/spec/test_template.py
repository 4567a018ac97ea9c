"""Templates fill every field or say which is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import EngineError
from engine.schemas.message import ImagePart, TextPart
from engine.spec.rows.row import find
from engine.spec.template import fields_of, fill, fill_words, texts_of


def test_strings_go_in_as_they_are_and_the_rest_as_json() -> None:
    fields = {"q": "2 + 2", "n": 4, "tags": ["a", "é"], "none": None, "yes": True}
    assert fill("{{q}} = {{ n }} {{tags}} {{none}} {{yes}}", fields) == '2 + 2 = 4 ["a", "é"] null true'


def test_a_dotted_field_reaches_into_mappings() -> None:
    assert fill("{{meta.level}}", {"meta": {"level": 3}}) == "3"
    assert fill("{{a.b}}", {"a.b": "own", "a": {"b": "inner"}}) == "own"
    assert find("meta.level", {"meta": {"level": 3}})[0]
    assert not find("meta.levels", {"meta": {"level": 3}})[0]


def test_an_unknown_field_names_the_nearest() -> None:
    with pytest.raises(EngineError) as caught:
        fill("{{qestion}}", {"question": "?", "answer": "!"})
    assert str(caught.value) == "the template names `{{qestion}}`, which is no field here; did you mean `question`?"


def test_a_backslash_keeps_braces() -> None:
    assert fill(r"\{{q}} {{q}}", {"q": "x"}) == "{{q}} x"
    assert fields_of(r"\{{a}} {{b}} {{ c }} {{b}}") == ["b", "c"]


def test_filled_values_are_not_filled_again() -> None:
    assert fill("{{a}}", {"a": "{{b}}"}) == "{{b}}"


@given(st.text(max_size=40).filter(lambda text: "{{" not in text))
def test_text_without_fields_is_unchanged(text: str) -> None:
    assert fill(text, {}) == text
    assert fields_of(text) == []


def test_words_become_parts_and_images_are_found_beside_the_spec() -> None:
    words = [TextPart(text="no: {{a}}"), ImagePart(image="{{name}}.png", mime="image/png"), ImagePart(image="data:x")]
    assert texts_of(words) == [((0, "text"), "no: {{a}}"), ((1, "image"), "{{name}}.png"), ((2, "image"), "data:x")]
    assert fill_words(words, {"a": 1, "name": "../seen"}, Path("/specs")) == [
        TextPart(text="no: 1"),
        ImagePart(image="/specs/../seen.png", mime="image/png"),
        ImagePart(image="data:x"),
    ]
    assert fill_words([ImagePart(image="/abs/a.png")], {}, Path("/specs")) == [ImagePart(image="/abs/a.png")]


def test_a_text_is_one_part_never_a_bare_string() -> None:
    assert fill_words("no: {{a}}", {"a": "x"}, Path("/specs")) == [TextPart(text="no: x")]
    assert texts_of("no: {{a}}") == [((), "no: {{a}}")]
