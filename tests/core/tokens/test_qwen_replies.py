"""Replies read off their ids are what the library reads, and bytes joined are what the tokenizer decodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple

from engine.tokens.format import ChatFormat
from engine.tokens.qwen_replies import QwenReply
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


def _library(form: ChatFormat, ids: list[int], before: list[int]) -> tuple[Any, ...]:
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
    found = form.reader._qwen.read(np.array(ids, np.int32), before)
    ended = any(id_ in form.reader._qwen._ends for id_ in ids[:-1])
    assert (found is None) == ended  # what follows the end is left to the library
    assert found is None or _ours(found) == _library(form, ids, before)


@given(st.lists(st.integers(0, 447), max_size=40))
@_SETTINGS
def test_any_ids_are_read_as_the_library_reads_them(formats: Formats, ids: list[int]) -> None:
    form = formats("thinking")
    before = form.render([{"role": "user", "content": "What is it?"}])[-64:]
    found = form.reader._qwen.read(np.array(ids, np.int32), before)
    assert found is None or _ours(found) == _library(form, ids, before)


@pytest.mark.parametrize(
    ("reply", "opened"), [("<think>\nWhy\n</think>\n\nSo.", ""), ("</think>So.", ""), ("So.", "<think>\n"), ("So.", "")]
)
def test_reasoning_is_left_to_the_library(formats: Formats, reply: str, opened: str) -> None:
    form = formats("thinking")
    before = [*form.render([{"role": "user", "content": "What is it?"}]), *form.encode(opened)][-64:]
    reasons = any(mark in reply + opened for mark in _THOUGHTS)
    assert (form.reader._qwen.read(np.array(form.encode(reply), np.int32), before) is None) == reasons


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
