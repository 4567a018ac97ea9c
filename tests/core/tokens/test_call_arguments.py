"""The arguments of a call are those that were sampled, whatever they hold, or the call is malformed."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from chat_kit import make_tokenizer
from exactness import cases, load_case
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.schemas.message import MalformedCall, ToolCall
from engine.tokens.choosing import TOOL, written
from engine.tokens.reply_readers import restored
from engine.tokens.template import ChatTemplate
from engine.tokens.toolcalls import PythonicFormat, UnreadableCall

READ = ("qwen3_5_think", "glm4moe", "llama3_2", "lfm2_v2", "lfm2_2_5")

_text = st.text("a1 \n\t\\'\"<>{}[],:=é🙂", max_size=8) | st.sampled_from(
    ["None", "null", "True", "1e5", "", " ", "\n", "a\n"]
)
_leaf = (
    _text | st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.sampled_from([1.5, 1e5, 1e-7, 1e22, -0.5])
)
_json = st.recursive(
    _leaf, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_text, inner, max_size=2), max_leaves=4
)
_arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": _text,
        "count": st.integers(-(10**12), 10**12),
        "ratio": st.sampled_from([1.5, 1e5, 1e-7, 1e22, 3]),
        "flag": st.booleans(),
        "nothing": st.none(),
        "items": st.lists(_json, max_size=2),
        "options": st.dictionaries(_text.filter(str.strip), _json, max_size=2),
    },
)


@pytest.fixture(scope="module")
def formats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTemplate]:
    return {name: load_case(cases()[name], tmp_path_factory.mktemp("case"), make_tokenizer) for name in READ}


@pytest.mark.parametrize("name", READ)
@settings(max_examples=examples(15), deadline=None)
@given(arguments=_arguments)
def test_what_the_template_writes_is_read_back_or_malformed(
    formats: dict[str, ChatTemplate], name: str, arguments: dict[str, Any]
) -> None:
    form = formats[name]
    call = {"type": "function", "id": "call_0_0", "function": {"name": "probe_tool", "arguments": arguments}}
    shown = written(form, {"role": "assistant", "content": "", "tool_calls": [call]})
    if shown is None:
        return
    before, text = shown
    ids = np.array([*form.encode(text), form.stop_token_ids[0]], np.int32)
    found = form.replies.parse(ids, before=np.array(form.encode(before), np.int32), turn=0, tools=[TOOL]).attempts
    if MalformedCall not in map(type, found):
        read = [(call.name, call.arguments) for call in found if isinstance(call, ToolCall)]
        assert json.dumps(read, sort_keys=True) == json.dumps([("probe_tool", arguments)], sort_keys=True), text


@pytest.mark.parametrize(
    ("types", "text", "value"),
    [
        ({"type": "string"}, " a\n", " a\n"),
        ({"type": "string"}, "None", "None"),
        ({"type": ["string", "null"]}, "Paris", "Paris"),
        ({"type": ["string", "null"]}, "None", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "a ", "a "),
        ({"type": "boolean"}, "False", False),
        ({"enum": ["a", "b"]}, "a", "a"),
        ({"description": "anything"}, "a b", "a b"),
        ({}, "True", True),
    ],
)
@pytest.mark.parametrize("form", ["<parameter=x>\n{}\n</parameter>", "<arg_key>x</arg_key>\n<arg_value>{}</arg_value>"])
def test_text_between_tags_is_read_by_the_tools_schema(types: dict[str, Any], text: str, value: Any, form: str) -> None:
    tool = {"type": "function", "function": {"name": "t", "parameters": {"properties": {"x": types}}}}
    assert restored("t", {"x": text.strip()}, form.format(text), [tool]) == ({"x": value}, True)


def test_text_that_the_schema_does_not_permit_is_reported() -> None:
    tool = {"type": "function", "function": {"name": "t", "parameters": {"properties": {"x": {"type": "integer"}}}}}
    assert restored("t", {"x": "a"}, "<parameter=x>\na\n</parameter>", [tool]) == ({"x": "a"}, False)


def test_none_without_quotes_is_no_value() -> None:
    """One version of Gemma 4's template writes None for null inside of objects; its strings are in quotes."""
    read = {"a": {"k": "None"}, "b": ["None", 1], "c": "x"}
    raw = 'call:t{a:{k:None},b:[None,1],c:<|"|>x<|"|>}'
    assert restored("t", read, raw, []) == ({"a": {"k": None}, "b": [None, 1], "c": "x"}, True)
    quoted = 'call:t{a:<|"|>None<|"|>}'
    assert restored("t", {"a": "None"}, quoted, []) == ({"a": "None"}, True)
    with pytest.raises(UnreadableCall, match="None both as a text and as no value"):
        restored("t", {"a": "None", "b": "None"}, 'call:t{a:<|"|>None<|"|>,b:None}', [])


def test_a_backslash_is_malformed_where_the_template_escapes_nothing() -> None:
    text = "<|tool_call_start|>[t(x='a\\n')]<|tool_call_end|>"
    [read] = PythonicFormat().parse(text, [], "call").attempts
    assert isinstance(read, ToolCall)
    assert read.arguments == {"x": "a\n"}
    [refused] = PythonicFormat(escapes=False).parse(text, [], "call").attempts
    assert isinstance(refused, MalformedCall)


@pytest.mark.parametrize(("name", "escapes"), [("lfm2_v2", True), ("lfm2_2_5", False)])
def test_auto_knows_whether_the_template_escapes_text(
    formats: dict[str, ChatTemplate], name: str, escapes: bool
) -> None:
    parser = formats[name].call_format
    assert isinstance(parser, PythonicFormat)
    assert parser._escapes is escapes
