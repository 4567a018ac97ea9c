"""YAML text becomes a tree with positions; what is wrong becomes a diagnostic with a position."""

from __future__ import annotations

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.spec.document import Document, flatten
from engine.spec.text.diagnostic import Diagnostic, Origin
from engine.spec.text.tree import MAX_DEPTH, Place, parse


def read(text: str) -> tuple[Document, list[Diagnostic]]:
    tree, problems = parse(text, Place("a.yaml"))
    assert tree is not None
    return flatten(tree), problems


def only(text: str) -> str:
    _, problems = parse(text, Place("a.yaml"))
    assert len(problems) == 1, problems
    return str(problems[0])


def test_every_key_and_value_knows_its_line_and_column() -> None:
    document, problems = read('a: 1\nb:\n  - x\n  - {c: "y", é: z}\n')
    assert problems == []
    assert document.data == {"a": 1, "b": ["x", {"c": "y", "é": "z"}]}
    places = {path: (origin.line, origin.column) for path, origin in document.origins.items()}
    assert places == {
        (): (1, 1),
        ("a",): (1, 4),
        ("b",): (3, 3),
        ("b", 0): (3, 5),
        ("b", 1): (4, 5),
        ("b", 1, "c"): (4, 9),
        ("b", 1, "é"): (4, 17),
    }
    keys = {path: (origin.line, origin.column) for path, origin in document.key_origins.items()}
    assert keys == {("a",): (1, 1), ("b",): (2, 1), ("b", 1, "c"): (4, 6), ("b", 1, "é"): (4, 14)}


def test_an_aliased_value_is_its_anchors_and_the_copies_are_separate() -> None:
    document, problems = read("a: &x [1, 2]\nb: *x\n")
    assert problems == []
    assert document.data == {"a": [1, 2], "b": [1, 2]}
    assert document.data["a"] is not document.data["b"]
    assert document.origins[("b", 1)] == Origin("a.yaml", 1, 11)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "a: 1\nb: 2\na: 3\n",
            "a.yaml:3:1: error[yaml.duplicate-key] the key `a` is written twice, first in line 1; remove one of them",
        ),
        ("50256: -1\n", 'a.yaml:1:1: error[yaml.key] the key `50256` is no string; quote it: "50256"'),
        ("~: 1\n", 'a.yaml:1:1: error[yaml.key] the key `~` is no string; quote it: "~"'),
        ("[a]: 1\n", "a.yaml:1:1: error[yaml.key] a list cannot be a key; write a name"),
        (
            "a: *b\n",
            "a.yaml:1:4: error[yaml.alias] the alias `*b` names nothing above it; mark a value with `&b` first",
        ),
        (
            "a: &a [*a]\n",
            "a.yaml:1:8: error[yaml.alias] the alias `*a` stands inside what it names; write the value out",
        ),
        ("a: !foo 1\n", "a.yaml:1:4: error[yaml.tag] the tag `!foo` is not known; remove the tag"),
        (
            "a: !!python/name:os.system x\n",
            "a.yaml:1:4: error[yaml.tag] the tag `!!python/name:os.system` is not known; remove the tag",
        ),
        ("a: !!set {x}\n", "a.yaml:1:4: error[yaml.tag] the tag `!!set` is not known on a mapping; remove the tag"),
        ("a: !!int x\n", "a.yaml:1:4: error[yaml.tag] `x` is no !!int; correct the value or remove the tag"),
        (
            "a: 1\n---\nb: 1\n",
            "a.yaml:2:1: error[yaml.documents] a second document begins here; keep one document in a file",
        ),
        (
            "a: {b: ${X}}\n",
            "a.yaml:1:9: error[yaml.syntax] while parsing a flow mapping: did not find expected ',' or '}'; "
            'inside {…} or […] quote it: "${NAME:default}"',
        ),
        (
            "a: b: c\n",
            'a.yaml:1:4: error[yaml.syntax] the value contains `: `, so it needs quotes; write "b: c"',
        ),
        (
            "é: x\x07\n",
            'a.yaml:1:5: error[yaml.syntax] the character U+0007 may not stand in YAML; remove it, or write it as "\\u…"',
        ),
    ],
)
def test_what_is_refused(text: str, line: str) -> None:
    assert only(text) == line


def test_tabs_get_a_fix() -> None:
    assert only("a:\n\tb: 1\n").endswith("; indent with spaces, not tabs")


def test_a_merge_key_is_refused_with_the_way_out() -> None:
    assert only("a: &a {x: 1}\nb: {<<: *a}\n") == (
        "a.yaml:2:5: error[yaml.merge-key] merge keys (`<<`) are not supported; "
        "write the keys out, or put them in a file of their own and name it under `extends:`"
    )


def test_a_quoted_merge_key_is_a_name() -> None:
    assert read('"<<": 1\n')[0].data == {"<<": 1}


def test_several_problems_come_in_one_go() -> None:
    document, problems = read("a: 1\na: 2\n3: x\nb: !x 1\nc: 1\n")
    assert [problem.rule for problem in problems] == ["yaml.duplicate-key", "yaml.key", "yaml.tag"]
    assert document.data == {"a": 1, "b": "1", "c": 1}


def test_explicit_tags_convert() -> None:
    assert read('[!!str 5, !!int "5", !!float 5, !!null "", !!bool "true", ! 7]')[0].data == [
        "5",
        5,
        5.0,
        None,
        True,
        "7",
    ]


def test_depth_is_bounded() -> None:
    assert read("[" * MAX_DEPTH + "]" * MAX_DEPTH)[1] == []
    _, problems = parse("[" * 100_000, Place("a.yaml"))
    assert [str(problem) for problem in problems] == [
        f"a.yaml:1:{MAX_DEPTH + 1}: error[yaml.depth] nested more than {MAX_DEPTH} deep; flatten it"
    ]


def test_depth_through_aliases_is_bounded() -> None:
    half = MAX_DEPTH // 2
    text = f"a: &a {'[' * half}{']' * half}\nb: {'[' * half}*a{']' * half}\n"
    _, problems = parse(text, Place("a.yaml"))
    assert [problem.rule for problem in problems] == ["yaml.depth"]
    assert problems[0].origin == Origin("a.yaml", 2, 4 + half)


def test_an_alias_bomb_is_refused_before_it_goes_off() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    _, problems = parse("\n".join(lines), Place("a.yaml"))
    assert [problem.rule for problem in problems] == ["yaml.size"]
    assert problems[0].origin is not None
    assert problems[0].origin.line == 6


def test_a_lone_surrogate_is_a_diagnostic() -> None:
    assert only("a: \ud800").startswith("a.yaml:1:1: error[yaml.syntax] this is no text:")


alphabet = st.sampled_from(
    [
        *"ab:-[]{}&*!|>'\"#%@`?,\n\t \\0123.<~$",
        "- ",
        ": ",
        "\n  ",
        "&a ",
        "*a",
        "<<: ",
        "!!str ",
        "---\n",
        "é",
        "\x00",
        "\ufeff",
    ]
)


@settings(max_examples=examples(400), deadline=None)
@given(st.one_of(st.text(max_size=80), st.lists(alphabet, max_size=60).map("".join)))
def test_no_text_raises(text: str) -> None:
    tree, problems = parse(text, Place("a.yaml"))
    for problem in problems:
        assert problem.origin is not None
        assert problem.origin.line >= 1
        assert problem.origin.column >= 1
    if tree is not None:
        document = flatten(tree)
        assert () in document.origins


@settings(max_examples=examples(150), deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(alphabet="abcxyz 019:#-", max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.text(alphabet="abc", min_size=1, max_size=3), inner, max_size=3)
        ),
        max_leaves=12,
    )
)
def test_json_is_read_as_json_reads_it(value: object) -> None:
    import json

    document, problems = read(json.dumps(value))
    assert problems == []
    assert document.data == value
