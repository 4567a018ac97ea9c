"""Tool calls as text: every attempt is kept, and what is wrong is said so that a model can act on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import RenderError
from engine.schemas.message import MalformedCall, ToolCall
from engine.tokens.toolcalls import FORMATS, tool_call_format


def schema(name: str, **types: str) -> dict[str, Any]:
    properties = {key: {"type": type_} for key, type_ in types.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = [
    schema("calculate", expression="string"),
    schema("add", a="integer", b="number", tag="string"),
    schema("now"),
    schema("double", x="integer"),
]
PLAIN, HERMES = tool_call_format("plain"), tool_call_format("hermes")


def plain(body: str) -> Any:
    """(name, arguments) of one plain call, or the problem."""
    (attempt,) = PLAIN.parse(f"Hm. <call>{body}</call>", TOOLS, "call_3").attempts
    if isinstance(attempt, MalformedCall):
        assert attempt.raw == f"<call>{body}</call>"
        return attempt.problem
    assert attempt.id == "call_3_0"
    return attempt.name, attempt.arguments


@pytest.mark.parametrize(
    ("body", "expression"),
    [
        ("calculate(3 * (4 + 5))", "3 * (4 + 5)"),
        ('calculate("3*4")', "3*4"),
        ("calculate(expression=3*4)", "3*4"),
        ("calculate(expression='3*4')", "3*4"),
        ("calculate(42)", "42"),
        ("calculate( 1 + 1 )", "1 + 1"),
        ("calculate(3, 4)", "3, 4"),
        ("calculate(3 (4))", "3 (4)"),
        ("calculate(it's)", "it's"),
        ("calculate(3 # 4)", "3 # 4"),
        ("calculate(true)", "true"),
        ("calculate(*x)", "*x"),
        ("calculate(" + "(" * 3000 + ")" * 3000 + ")", "(" * 3000 + ")" * 3000),
        ("\n calculate (1)\n", "1"),
    ],
)
def test_a_tools_one_string_takes_what_is_in_the_parentheses(body: str, expression: str) -> None:
    assert plain(body) == ("calculate", {"expression": expression})


@pytest.mark.parametrize(
    ("body", "name", "arguments"),
    [
        ("now()", "now", {}),
        ("calculate()", "calculate", {}),
        ("double(4)", "double", {"x": 4}),
        ("double(x=-4)", "double", {"x": -4}),
        ('add(1, 2.5, tag="t")', "add", {"a": 1, "b": 2.5, "tag": "t"}),
        ("add(1, b=true, tag=hello)", "add", {"a": 1, "b": True, "tag": "hello"}),
        ("add(a=None, b=null, tag=12)", "add", {"a": None, "b": None, "tag": "12"}),
        ("calculate(x=3)", "calculate", {"x": 3}),
        ('unknown(a="x", l=(1, [2]), d={"k": None})', "unknown", {"a": "x", "l": [1, [2]], "d": {"k": None}}),
    ],
)
def test_arguments_are_literals_by_keyword_or_in_order(body: str, name: str, arguments: dict[str, Any]) -> None:
    assert plain(body) == (name, arguments)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("calculate", "'calculate' is not of the form name(...). Write name(argument=value)."),
        ("", "'' is not of the form name(...). Write name(argument=value)."),
        ("calculate(1) please", "'calculate(1) please' is not of the form name(...). Write name(argument=value)."),
        ("add(1, 2, 3, 4)", "It has 4 arguments without a name, but the tool takes a, b, tag."),
        ("add(1, a=2)", "It gives a twice."),
        ("add(x + 1)", "The value of a is not a literal: put text in quotes."),
        ("add(a={1})", "The value of a is not a literal: put text in quotes."),
        (
            "unknown(1)",
            "Its arguments have no names, and no tool that takes any is called so. Write name(argument=value).",
        ),
        ("add(1 2)", "What is in the parentheses of add(...) cannot be read. Write name(argument=value)."),
        ("double(**x)", "What is in the parentheses of double(...) cannot be read. Write name(argument=value)."),
        ("calculate(" + "1" * 20_001 + ")", "It is longer than 20000 characters."),
    ],
)
def test_what_cannot_be_read_says_why(body: str, problem: str) -> None:
    assert plain(body) == problem


def test_plain_calls_are_read_in_order_and_an_unclosed_one_is_malformed() -> None:
    found = PLAIN.parse("a <call>now()</call> b <call>now( <call>double(2)</call>\n<call>now()", TOOLS, "call_0")
    assert found.content == "a  b"
    assert found.attempts == [
        ToolCall(id="call_0_0", name="now", arguments={}),
        MalformedCall(raw="<call>now( ", problem="It begins with <call> but is never closed with </call>."),
        ToolCall(id="call_0_2", name="double", arguments={"x": 2}),
        MalformedCall(raw="<call>now()", problem="It begins with <call> but is never closed with </call>."),
    ]


def test_the_stop_string_closes_a_call_though_its_last_token_overshoots() -> None:
    assert PLAIN.parse("<call>double(2)</call>\n", TOOLS, "c").attempts == [
        ToolCall(id="c_0", name="double", arguments={"x": 2})
    ]


@given(st.text(st.characters(codec="utf-8"), max_size=60))
def test_no_reply_breaks_the_parsers_and_each_opening_is_an_attempt(text: str) -> None:
    for parser, opening in ((PLAIN, "<call>"), (HERMES, "<tool_call>")):
        whole = f"{text}{opening}{text}"
        assert len(parser.parse(whole, TOOLS, "c").attempts) == whole.count(opening)


@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "tag", "z"]), st.one_of(st.integers(-(2**63), 2**63 - 1), st.booleans(), st.none())
    )
)
def test_plain_keyword_literals_come_back(arguments: dict[str, Any]) -> None:
    arguments.pop("tag", None)
    body = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    assert plain(f"add({body})") == ("add", arguments)


def hermes(body: str) -> Any:
    (attempt,) = HERMES.parse(f"<tool_call>\n{body}\n</tool_call>", TOOLS, "call_0").attempts
    return attempt.problem if isinstance(attempt, MalformedCall) else (attempt.name, attempt.arguments)


FORM = 'Write {"name": "<tool>", "arguments": {...}}.'


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ('{"name": "now", "arguments": {}}', ("now", {})),
        ('{"name": "now"}', ("now", {})),
        ('{"name": "double", "arguments": "{\\"x\\": 2}"}', ("double", {"x": 2})),
        ('{"name": "double", "parameters": {"x": 2}}', ("double", {"x": 2})),
        (
            '{"name": "now", ',
            f"It is not valid JSON: Expecting property name enclosed in double quotes at character 15. {FORM}",
        ),
        ("[1]", f"It is not a JSON object. {FORM}"),
        ('{"arguments": {}}', f'It has no "name". {FORM}'),
        ('{"name": 3}', f'It has no "name". {FORM}'),
        ('{"name": "now", "arguments": [1]}', f'Its "arguments" are not a JSON object. {FORM}'),
        ('{"name": "now", "arguments": "x"}', f'Its "arguments" are text, not a JSON object. {FORM}'),
        ("[" * 9000 + "]" * 9000, f"Its JSON is nested too deeply. {FORM}"),
    ],
)
def test_hermes_calls_are_json(body: str, wanted: Any) -> None:
    assert hermes(body) == wanted


def test_content_is_what_stands_around_the_calls() -> None:
    found = HERMES.parse('So:\n<tool_call>\n{"name": "now"}\n</tool_call>', TOOLS, "c")
    assert found.content == "So:"
    assert HERMES.parse("nothing here ", TOOLS, "c").content == "nothing here "


def test_a_format_of_your_own_is_named_by_entry_point(tmp_path: Path) -> None:
    (tmp_path / "shouting_calls.py").write_text(
        "from engine.tokens.toolcalls import ParsedCalls, ToolCallFormat\n"
        "from engine.schemas.message import ToolCall\n"
        "class Shout(ToolCallFormat):\n"
        "    def parse(self, text, tools, prefix):\n"
        "        names = [word[:-1].lower() for word in text.split() if word.endswith('!')]\n"
        "        calls = [ToolCall(id=f'{prefix}_{i}', name=name, arguments={}) for i, name in enumerate(names)]\n"
        "        return ParsedCalls(text, calls)\n"
        "    def write(self, text, calls):\n"
        "        return ' '.join([text, *(f'{name.upper()}!' for name, _ in calls)])\n"
        "class Mute(Shout):\n"
        "    write = ToolCallFormat.write\n"
        "class Fussy(Shout):\n"
        "    def __init__(self, volume): ...\n"
        "class Stranger:\n"
        "    parse = Shout.parse\n"
        "made = Shout()\n"
    )
    parser = tool_call_format("shouting_calls:Shout", tmp_path)
    assert parser.parse("please NOW! thanks", [], "call_1").attempts == [
        ToolCall(id="call_1_0", name="now", arguments={})
    ]
    assert parser.write("please", [("now", {})]) == "please NOW!"
    assert type(tool_call_format("shouting_calls:made", tmp_path)) is type(parser)
    for name, problem in [
        ("Mute", r"does not define write; .*define parse\(text, tools, prefix\) and write\(text, calls\)"),
        ("Fussy", r"shouting_calls:Fussy\(\) raised TypeError: .*volume"),
        ("Stranger", r"is not a ToolCallFormat; derive it from engine\.tokens\.toolcalls\.ToolCallFormat"),
    ]:
        with pytest.raises(RenderError, match=problem):
            tool_call_format(f"shouting_calls:{name}", tmp_path)


def test_an_unknown_format_names_what_there_is() -> None:
    with pytest.raises(RenderError, match="'xml' is unknown; write auto, hermes, plain"):
        tool_call_format("xml")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]), max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b c", "é"]), inner, max_size=2),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(["add", "look.up"]), st.dictionaries(st.sampled_from("xyz"), VALUES, max_size=3)),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("name", list(FORMATS))
@given(text=st.sampled_from(["", "So:", "I add.\n\nThen"]), calls=CALLS)
@settings(max_examples=examples(100), deadline=None)
def test_a_format_reads_the_calls_that_it_writes(name: str, text: str, calls: list[tuple[str, Any]]) -> None:
    form = tool_call_format(name)
    found = form.parse(form.write(text, calls), [], "call_0")
    assert (found.content, [(type(one), one.id) for one in found.attempts]) == (
        text,
        [(ToolCall, f"call_0_{number}") for number in range(len(calls))],
    )
    assert json.dumps([(one.name, one.arguments) for one in found.attempts]) == json.dumps(calls)


@pytest.mark.parametrize("name", list(FORMATS))
def test_marks_are_in_the_calls_that_a_format_writes(name: str) -> None:
    written = FORMATS[name]().write("", [("now", {})])
    assert [written.count(mark) for mark in FORMATS[name].marks] == [1, 1]
