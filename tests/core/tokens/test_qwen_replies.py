"""Replies read off their ids are what the library reads, and bytes joined are what the tokenizer decodes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conversation_kit import TOOLS
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple

from engine.tokens.reply_readers import QwenReply
from engine.tokens.template import ChatTemplate
from engine.tokens.tokenizer import FastTokenizer

Formats = Callable[..., Any]
_SETTINGS = settings(
    max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

_PIECES = [
    "Let me see. ",
    " \n\n",
    '{"name": "f", "arguments": {"x": 1}}',
    '{"name": "", "arguments": {}}',
    '{"arguments": "x"}',
    "[1, 2]",
    '{"name": 3}',
    "{'name': 1",
    "<tool_call>",
    "</tool_call>",
    "<tool_call>",
    "</tool_call>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|im_start|>",
    "ünïcödé 語 🙂",
]
_THOUGHTS = ["<think>", "</think>"]


def _library(form: ChatTemplate, ids: list[int], before: list[int]) -> tuple[Any, ...]:
    found = form.reader._library.parse_response(ids, tools=None, prompt_ids=before)
    calls = [(call.raw, call.name, call.arguments, call.token_span, str(call.status)) for call in found.tool_calls]
    return found.content, found.reasoning_content, found.reasoning_complete is False, calls


def _ours(found: QwenReply) -> tuple[Any, ...]:
    calls = [astuple(call) for call in found.tool_calls]
    return found.content, found.reasoning_content, found.reasoning_complete is False, calls


@given(st.lists(st.sampled_from(_PIECES), max_size=9))
@_SETTINGS
def test_a_reply_without_reasoning_is_read_as_the_library_reads_it(formats: Formats, pieces: list[str]) -> None:
    form = formats("thinking")
    ids = form.encode("".join(pieces))
    before = form.render([{"role": "user", "content": "What is it?"}])[-64:]
    found = form.reader._qwen.read(np.array(ids, np.int32), np.array(before, np.int32))
    ended = any(id_ in form.reader._qwen._ends for id_ in ids[:-1])
    assert (found is None) == ended  # what follows the end is left to the library
    assert found is None or _ours(found) == _library(form, ids, before)


@given(st.lists(st.integers(0, 447), max_size=40))
@_SETTINGS
def test_any_ids_are_read_as_the_library_reads_them(formats: Formats, ids: list[int]) -> None:
    form = formats("thinking")
    before = form.render([{"role": "user", "content": "What is it?"}])[-64:]
    found = form.reader._qwen.read(np.array(ids, np.int32), np.array(before, np.int32))
    assert found is None or _ours(found) == _library(form, ids, before)


_SAID = [
    "Let me see. ",
    " \n\n",
    "ünïcödé 語 🙂",
    "\ufdd0",
    "<",
    "<|im_end|>",
    "<b>",
    "\\u003c|im_end|>",
    "<tool_response>",
]
_CALLS = st.tuples(
    st.lists(st.sampled_from(_SAID), max_size=3).map("".join),
    st.sampled_from(["f", "f\\u0041", "<f>", 3]) | st.text(max_size=3),
    st.dictionaries(
        st.text(max_size=3), st.lists(st.sampled_from(_SAID), max_size=3).map("".join) | st.none(), max_size=2
    ),
    st.sampled_from(["", " ", "\n\n", "x", "</tool_call>"]),
)


@given(_CALLS, st.booleans())
@_SETTINGS
def test_a_reply_that_is_decoded_at_once_is_read_as_any_other(
    formats: Formats, call: tuple[str, Any, dict[str, Any], str], ascii_only: bool
) -> None:
    content, name, arguments, after = call
    form = formats("thinking")
    written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=ascii_only)
    ids = np.array(form.encode(f"{content}<tool_call>\n{written}\n</tool_call>{after}<|im_end|>"), np.int32)
    at_once = form.replies.parse(ids, before=ids[:0], turn=0, tools=TOOLS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(form.reader._qwen, "_tagged", False)
        parsed = form.replies.parse(ids, before=ids[:0], turn=0, tools=TOOLS)
    assert parsed.sampled is None
    assert not parsed.bare
    assert astuple(at_once)[:7] == astuple(parsed)[:7]
    assert form.views.of_reply(at_once, ids) == form.views.of_reply(parsed, ids)
    assert at_once.sampled in (None, form.decode(ids))
    if at_once.bare:
        assert parsed.as_calls
        assert not form.views.spells_tokens(form.views.of_reply(parsed, ids))
        assert form.inspected is None or form.inspected.search(at_once.sampled.partition("<tool_call>")[0]) is None


def test_a_usual_reply_is_decoded_at_once(formats: Formats) -> None:
    form = formats("thinking")
    call = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "1 + 1"}}\n</tool_call>'
    for reply in (f"{call}<|im_end|>", f"Let me see.\n\n{call}<|im_end|>", f"So: \n{call} <|im_end|>"):
        parsed = form.replies.parse(np.array(form.encode(reply), np.int32), before=np.zeros(0, np.int32), turn=0)
        assert (parsed.bare, parsed.sampled) == (True, reply)


@pytest.mark.parametrize(
    ("reply", "opened"), [("<think>\nWhy\n</think>\n\nSo.", ""), ("</think>So.", ""), ("So.", "<think>\n"), ("So.", "")]
)
def test_reasoning_is_left_to_the_library(formats: Formats, reply: str, opened: str) -> None:
    form = formats("thinking")
    prompt = [*form.render([{"role": "user", "content": "What is it?"}]), *form.encode(opened)]
    before = np.array(prompt[-64:], np.int32)
    reasons = any(mark in reply + opened for mark in _THOUGHTS)
    assert (form.reader._qwen.read(np.array(form.encode(reply), np.int32), before) is None) == reasons


_AROUND = st.sampled_from(
    ["", " ", "\n\n", "Why not? ", "é \n", "a \\ b", "<b>", "語 <tool_call", "\ufdd0", "<think", "[1]"]
)
_INSIDE = st.sampled_from(
    [
        '{"name": "f", "arguments": {"x": 1}}',
        '{"name": "f", "arguments": {"x": "<b>"}}',
        '{"name": "g\\u003c", "arguments": {}}',
        "{",
        "[]",
        "",
    ]
)


@given(
    thought=st.none() | _AROUND,
    texts=st.tuples(_AROUND, _AROUND, _AROUND, _AROUND, _AROUND),
    inside=_INSIDE,
    tokens=st.booleans(),
)
@_SETTINGS
def test_a_reply_that_ends_with_one_call_is_cut_as_the_library_cuts_it(
    formats: Formats, thought: str | None, texts: tuple[str, ...], inside: str, tokens: bool
) -> None:
    form, reader = formats("thinking"), formats("thinking").reader
    reasoning = "" if thought is None else f"<think>{thought}{texts[0]}</think>"
    reply = f"{reasoning}{texts[1]}<tool_call>{texts[2]}{inside}{texts[3]}</tool_call>{' ' if tokens else ''}<|im_end|>"
    ids = np.array(form.encode(reply), np.int32)
    before = np.array(form.render([{"role": "user", "content": "What is it?"}])[-64:], np.int32)
    at_once = reader._qwen.read(ids, before)
    if at_once is not None:
        assert _ours(at_once) == _library(form, ids.tolist(), before.tolist())
    for reasons in (True, False):
        found = reader.read(ids, before, "call_0", [], reasons)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reader, "_qwen", None)
            wanted = reader.read(ids, before, "call_0", [], reasons)
        if found.sampled is not None:
            assert found.sampled == form.decode(ids)
        assert _fields(found) == _fields(wanted)


def _fields(parse: Any) -> tuple[Any, ...]:
    return (
        parse.content,
        parse.reasoning,
        parse.attempts,
        parse.thinking,
        parse.only_content,
        parse.calls_end_it,
        parse.after,
    )


def test_a_name_that_is_no_text_is_no_name(formats: Formats) -> None:
    form = formats("thinking")
    ids = np.array(form.encode('<tool_call>{"name": 3, "arguments": {}}</tool_call><|im_end|>'), np.int32)
    parsed = form.replies.parse(ids, before=np.zeros(0, np.int32), turn=0)
    assert [attempt.plain() for attempt in parsed.attempts] == [
        {"raw": '{"name": 3, "arguments": {}}', "problem": "It does not say which tool to call."}
    ]


@given(st.lists(st.integers(0, 460), max_size=30))
@_SETTINGS
def test_joined_bytes_are_what_the_tokenizer_decodes(formats: Formats, ids: list[int]) -> None:
    fast: FastTokenizer = formats("thinking").fast
    assert fast._bytes is not None
    assert fast.decode(ids) == fast.real.backend_tokenizer.decode(ids, skip_special_tokens=False)


@given(st.text(max_size=40), st.integers(0, 40), st.integers(0, 40))
@_SETTINGS
def test_characters_cut_in_their_middle_decode_as_the_tokenizer_decodes_them(
    formats: Formats, text: str, start: int, end: int
) -> None:
    fast: FastTokenizer = formats("thinking").fast
    ids = fast.encode(text)[start:end]
    assert fast.decode(ids) == fast.real.backend_tokenizer.decode(ids, skip_special_tokens=False)
