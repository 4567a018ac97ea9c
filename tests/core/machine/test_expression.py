"""The parser accepts CEL, knows the position of each part, and refuses everything else at the wrong character."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.machine.expression import (
    Call,
    Comprehension,
    Constant,
    ExpressionError,
    Index,
    ListOf,
    MapOf,
    Name,
    Operation,
    Select,
    parse,
)


def said(text: str) -> list[str]:
    """Every node as it is written, outermost first."""
    return [text[node.start : node.end] for node in parse(text).walk()]


def test_operators_bind_as_cel_says() -> None:
    assert said("a || b && !c == d + e * f") == [
        "a || b && !c == d + e * f",
        "a",
        "b && !c == d + e * f",
        "b",
        "!c == d + e * f",
        "!c",
        "c",
        "d + e * f",
        "d",
        "e * f",
        "e",
        "f",
    ]


def test_arithmetic_groups_from_the_left_and_the_conditional_from_the_right() -> None:
    assert said("a - b - c")[1] == "a - b"
    assert said("a ? b : c ? d : e")[-4:] == ["c ? d : e", "c", "d", "e"]
    assert said("(a ? b : c) ? d : e")[1] == "a ? b : c"


def test_chains_of_and_and_or_are_one_node() -> None:
    tree = parse("a && b && c && d")
    assert isinstance(tree, Operation)
    assert (tree.operator, len(tree.args)) == ("&&", 4)


def test_has_is_a_test_of_its_field() -> None:
    assert parse("has(a.b.c)") == Select(
        start=4, end=9, of=Select(start=4, end=7, of=Name(start=4, end=5, name="a"), field="b"), field="c", test=True
    )


def test_macros_bind_a_variable_and_calls_do_not() -> None:
    over = Name(start=0, end=1, name="a")
    assert parse("a.exists(x, x)") == Comprehension(
        start=0, end=14, name="exists", over=over, variable="x", bodies=(Name(start=12, end=13, name="x"),)
    )
    assert parse("a.map(x, x, 1)") == Comprehension(
        start=0,
        end=14,
        name="map",
        over=over,
        variable="x",
        bodies=(Name(start=9, end=10, name="x"), Constant(start=12, end=13, type="int", value=1)),
    )
    assert parse("a.exists(1, x)") == Call(
        start=0,
        end=14,
        name="exists",
        target=over,
        args=(Constant(start=9, end=10, type="int", value=1), Name(start=12, end=13, name="x")),
    )
    assert parse("size(a)") == Call(start=0, end=7, name="size", target=None, args=(Name(start=5, end=6, name="a"),))


def test_literals_have_types_and_values() -> None:
    tree = parse(r"""[1, 0x1F, 1.5, .5, 1e3, -4, -0x10, 'a', r'\', '''x'y''', "\x41\u0042\n\101\'\?", true, null]""")
    assert isinstance(tree, ListOf)
    assert [(item.type, item.value) for item in tree.items if isinstance(item, Constant)] == [
        ("int", 1),
        ("int", 31),
        ("double", 1.5),
        ("double", 0.5),
        ("double", 1000.0),
        ("int", -4),
        ("int", -16),
        ("string", "a"),
        ("string", "\\"),
        ("string", "x'y"),
        ("string", "AB\nA'?"),
        ("bool", True),
        ("null", None),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("9223372036854775808", "`9223372036854775808` does not fit into 64 bits"),
        ("1e400", "`1e400` does not fit into 64 bits"),
        (r"'\q'", r"unknown escape `\q` in a string"),
        (r"'\ud800'", r"unknown escape `\ud800` in a string"),
        ("2u", "`u` is not expected here"),
        ("b'a'", "`'a'` is not expected here"),
    ],
)
def test_literals_without_a_value_are_refused(text: str, message: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        parse(text)
    assert str(caught.value) == message


def test_the_least_integer_is_a_literal() -> None:
    assert parse("-9223372036854775808") == Constant(start=0, end=20, type="int", value=-(2**63))


def test_what_stands_in_strings_and_comments_is_no_member() -> None:
    assert said("a == 'b.c' // d.e\n && f['g'].h") == [
        "a == 'b.c' // d.e\n && f['g'].h",
        "a == 'b.c'",
        "a",
        "'b.c'",
        "f['g'].h",
        "f['g']",
        "f",
        "'g'",
    ]
    tree = parse("{'a': b[0], }")
    assert isinstance(tree, MapOf)
    assert isinstance(tree.items[1], Index)


@pytest.mark.parametrize(
    ("text", "offset"),
    [("1 +", 3), ("a b", 2), ("(a", 2), ("a.1", 1), ("a = b", 2), ("'a", 0), ("a.b{c: 1}", 3), ("a ? b", 5), ("", 0)],
)
def test_what_cannot_be_read_is_told_with_its_place(text: str, offset: int) -> None:
    with pytest.raises(ExpressionError) as caught:
        parse(text)
    assert caught.value.offset == offset


@pytest.mark.parametrize("text", ["(" * 60 + "1" + ")" * 60, "!" * 60 + "a", "[" * 60 + "]" * 60, "a" + ".b" * 60])
def test_deep_nesting_is_refused(text: str) -> None:
    with pytest.raises(ExpressionError, match="nested more than 50 levels deep"):
        parse(text)


def test_a_long_chain_is_no_deep_nesting() -> None:
    assert len(list(parse(" || ".join(["a.b"] * 400)).walk())) == 801


SIGNS = ["[", "]", "(", ")", "{", "}", ",", ".", ":", "?", "!", "-", "+", "*", "/", "%", "<", "==", "in", "&&", "||"]
WORDS = ["a", "b.c", "x", "1", "1.5", "'x'", '"y"', r"r'\d'", "true", "null", "has(", "size(", "//", "\n"]
MACROS = [".exists(x,", ".map(x,"]
pieces = st.sampled_from([*SIGNS, *WORDS, *MACROS])


@given(st.lists(pieces, max_size=12).map(" ".join))
def test_each_part_lies_inside_the_part_around_it(text: str) -> None:
    try:
        tree = parse(text)
    except ExpressionError:
        return
    for node in tree.walk():
        assert 0 <= node.start < node.end <= len(text)
        for child in node.children():
            assert node.start <= child.start <= child.end <= node.end


@given(st.text(max_size=30))
def test_no_text_does_anything_but_parse_or_be_refused(text: str) -> None:
    offset = 0
    try:
        parse(text)
    except ExpressionError as error:
        offset = error.offset
    assert 0 <= offset <= len(text)
