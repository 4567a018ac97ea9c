"""Replies that were interrupted: what is kept, and how parts become one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.plugins.servers.wire import ReplyPart, can_resume, clean_cut, cut, join
from engine.schemas.generation import FinishReason, SamplingParams, VersionSpan

STOP = FinishReason(type="stop", matched=2)


def part(ids: list[int], *versions: tuple[int, int], **changes: object) -> ReplyPart:
    spans, at = [], 0
    for version, count in versions:
        spans.append(VersionSpan(version=version, start=at, end=at + count))
        at += count
    made = ReplyPart(
        ids=np.array(ids, np.int32),
        logprobs=-np.array(ids, np.float32),
        finish=FinishReason(type="abort"),
        versions=spans,
        version=None,
        prompt_tokens=9,
        cached_tokens=4,
        queue_seconds=0.5,
        echoed=True,
    )
    return replace(made, **changes)


@pytest.mark.parametrize(
    ("sampling", "can"),
    [
        (SamplingParams(), True),
        (SamplingParams(top_p=0.5, stop=["a"], repetition_penalty=1.0, frequency_penalty=0.0, min_new_tokens=3), True),
        (SamplingParams(frequency_penalty=0.1), False),
        (SamplingParams(presence_penalty=-0.1), False),
        (SamplingParams(repetition_penalty=1.1), False),
        (SamplingParams(json_schema="{}"), False),
        (SamplingParams(regex="a"), False),
        (SamplingParams(ebnf="a"), False),
        (SamplingParams(structural_tag="a"), False),
        (SamplingParams(stop_regex=["a"]), False),
    ],
)
def test_only_what_does_not_look_back_is_resumed(sampling: SamplingParams, can: bool) -> None:
    assert can_resume(sampling) is can


def letters(ids: list[int]) -> str:
    return "".join(map(chr, ids))


@pytest.mark.parametrize(
    ("text", "stops", "kept"),
    [
        ("hello", [], 5),
        ("hello", ["xyz"], 5),
        ("so </ans", ["</answer>"], 3),
        ("so <<", ["<<<"], 3),
        ("zabab", ["abac"], 1),
        ("x", ["xy"], 0),
        ("naïve �", ["zz"], 6),
        ("", ["a"], 0),
    ],
)
def test_a_cut_leaves_no_beginning_of_a_stop_string(text: str, stops: list[str], kept: int) -> None:
    assert clean_cut([ord(c) for c in text], stops, letters) == kept


@given(
    text=st.text("ab<", max_size=30),
    rest=st.text("ab<", max_size=10),
    stops=st.lists(st.text("ab<", min_size=1, max_size=5), max_size=3),
)
def test_no_stop_string_lies_across_the_cut(text: str, rest: str, stops: list[str]) -> None:
    kept = clean_cut([ord(c) for c in text], stops, letters)
    whole = text[:kept] + rest
    for stop in stops:
        at = whole.find(stop)
        while at >= 0:
            assert not at < kept < at + len(stop)
            at = whole.find(stop, at + 1)


def test_a_cut_part_keeps_the_versions_of_what_stays() -> None:
    made = cut(part([1, 2, 3, 4], (7, 2), (8, 2)), 3)
    assert made.ids.tolist() == [1, 2, 3]
    assert made.logprobs.tolist() == [-1, -2, -3]
    assert made.versions == [VersionSpan(version=7, start=0, end=2), VersionSpan(version=8, start=2, end=3)]
    assert cut(made, 2).versions == [VersionSpan(version=7, start=0, end=2)]


def test_parts_become_one_generation() -> None:
    parts = [
        part([1, 2], (0, 2)),
        part([3], (0, 1), cached_tokens=99),
        part([]),
        part([4, 2], (1, 2), prompt_tokens=12),
    ]
    made = join(parts, STOP, 3.0)
    assert made.output_ids.tolist() == [1, 2, 3, 4, 2]
    assert made.logprobs.tolist() == [-1, -2, -3, -4, -2]
    assert made.versions == [VersionSpan(version=0, start=0, end=3), VersionSpan(version=1, start=3, end=5)]
    assert (made.prompt_tokens, made.cached_tokens, made.seconds, made.queue_seconds) == (9, 4, 3.0, 2.0)
    assert made.finish == STOP


def test_one_part_is_handed_on_as_it_is() -> None:
    only = part([1], (5, 1))
    made = join([only], STOP, 1.0)
    assert made.output_ids is only.ids
    assert made.versions == [VersionSpan(version=5, start=0, end=1)]
