"""The tape: one door, typed spans, everything else derived."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.schemas.generation import FinishReason, Generation, VersionSpan
from engine.schemas.trajectory import Span
from engine.tokens.tape import Tape


def sampled(ids: list[int], logprobs: list[float], versions: Sequence[tuple[int, int, int]] = ()) -> Generation:
    return Generation(
        output_ids=np.array(ids, np.int32),
        logprobs=np.array(logprobs, np.float32),
        finish=FinishReason(type="stop"),
        versions=[VersionSpan(version=version, start=start, end=end) for version, start, end in versions],
    )


def test_everything_is_derived_from_spans() -> None:
    tape = Tape(vocab_size=100, reason="why")
    tape.append("prompt", [1, 2, 3])
    assert tape.append_reply(sampled([4, 5, 6], [-0.5, -0.25, -1.0], [(7, 0, 2), (8, 2, 3)]), 0) == (3, 6)
    tape.append("closing", [9])
    tape.append("bridge", [10, 11])
    tape.append_reply(sampled([12], [-2.0]), 3)
    row = tape.branch(2)
    assert (row.index, row.reason) == (2, "why")
    assert row.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 9, 10, 11, 12]
    assert row.loss_mask.tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0, 1]
    assert row.logprobs.tolist() == [0, 0, 0, -0.5, -0.25, -1.0, 0, 0, 0, -2.0]
    assert row.weight_versions.tolist() == [-1, -1, -1, 7, 7, 8, -1, -1, -1, 0]
    assert row.turn_ids.tolist() == [-1, -1, -1, 0, 0, 0, -1, -1, -1, 3]
    assert row.spans == [
        Span(kind="prompt", start=0, end=3),
        Span(kind="generated", start=3, end=6, turn=0),
        Span(kind="closing", start=6, end=7),
        Span(kind="bridge", start=7, end=9),
        Span(kind="generated", start=9, end=10, turn=3),
    ]
    assert (row.input_ids.dtype, row.logprobs.dtype) == (np.int32, np.float32)
    assert (len(tape), tape.sampled) == (10, 4)


def begun() -> Tape:
    tape = Tape(vocab_size=100)
    tape.append("prompt", [1, 2, 3])
    return tape


@pytest.mark.parametrize(
    ("append", "problem"),
    [
        (lambda tape: tape.append("prompt", [1]), "one prompt"),
        (lambda tape: tape.append("closing", [1]), "a closing span follows a turn"),
        (lambda tape: tape.append("bridge", [100]), r"\[0, 100\); found 100 to 100"),
        (lambda tape: tape.append("bridge", [4, -1]), "found -1 to 4"),
        (lambda tape: tape.append("bridge", [[1]]), "flat list"),
        (lambda tape: tape.append_reply(sampled([1], []), 0), "1 sampled ids need as many log-probs, not 0"),
        (lambda tape: tape.append_reply(sampled([1, 2], [0.0]), 0), "not 1"),
        (lambda tape: tape.append_reply(sampled([1], [0.0]), -1), "turn -1 does not follow"),
        (lambda tape: tape.append_reply(sampled([1], [0.0], [(1, 0, 2)]), 0), "versions cover 2 of 1 tokens"),
        (lambda tape: tape.append_reply(sampled([1, 2], [0.0, 0.0], [(1, 0, 1)]), 0), "versions cover 1 of 2 tokens"),
        (lambda tape: tape.append_reply(sampled([1, 2], [0.0, 0.0], [(1, 0, 1), (2, 0, 2)]), 0), "overlap at token 1"),
        (lambda tape: tape.append_reply(sampled([1, 2], [0.0, 0.0], [(1, 1, 2)]), 0), "gap or overlap at token 0"),
    ],
)
def test_what_would_break_an_invariant_is_not_written(append: Callable[[Tape], object], problem: str) -> None:
    tape = begun()
    with pytest.raises(ValueError, match=problem):
        append(tape)
    assert tape.ids.tolist() == [1, 2, 3]
    assert tape.spans == [Span(kind="prompt", start=0, end=3)]
    assert not tape.has_turns


def test_a_tape_begins_with_a_prompt_that_is_not_empty() -> None:
    with pytest.raises(ValueError, match="begins with its one prompt"):
        Tape().append("bridge", [1])
    with pytest.raises(ValueError, match="prompt is empty"):
        Tape().append("prompt", [])


def test_turns_grow_and_are_apart() -> None:
    tape = begun()
    tape.append_reply(sampled([5], [0.0]), 1)
    with pytest.raises(ValueError, match="must be a bridge between two turns"):
        tape.append_reply(sampled([5], [0.0]), 2)
    tape.append("bridge", [6])
    with pytest.raises(ValueError, match="turn 1 does not follow turn 1"):
        tape.append_reply(sampled([5], [0.0]), 1)


def test_an_empty_reply_leaves_its_place_and_an_empty_bridge_nothing() -> None:
    tape = begun()
    assert tape.append_reply(sampled([], []), 0) == (3, 3)
    tape.append("bridge", [])
    assert tape.spans == [Span(kind="prompt", start=0, end=3), Span(kind="generated", start=3, end=3, turn=0)]
    assert tape.has_turns


@given(st.lists(st.lists(st.integers(0, 99), max_size=40), min_size=1, max_size=30))
def test_views_stay_right_however_the_tape_grows(pieces: list[list[int]]) -> None:
    tape = Tape(100)
    tape.append("prompt", [1])
    views, wanted = [tape.ids], [[1]]
    for piece in pieces:
        tape.append("bridge", piece)
        views.append(tape.ids)
        wanted.append([*wanted[-1], *piece])
    assert [view.tolist() for view in views] == wanted
    assert not any(view.flags.writeable for view in views)


def test_a_row_is_a_copy() -> None:
    tape = begun()
    row = tape.branch(0)
    row.input_ids[0] = 99
    assert tape.ids.tolist() == [1, 2, 3]


def test_a_row_as_seen_ends_with_its_last_sampled_token() -> None:
    tape = begun()
    assert tape.branch(0, as_seen=True).input_ids.tolist() == [1, 2, 3]
    tape.append_reply(sampled([4], [-1.0]), 0)
    tape.append("closing", [5])
    tape.append("bridge", [6])
    row = tape.branch(0, as_seen=True)
    assert row.input_ids.tolist() == [1, 2, 3, 4]
    assert row.turn_ids.tolist() == [-1, -1, -1, 0]
    assert [span.kind for span in row.spans] == ["prompt", "generated"]


def test_a_tape_of_sixteen_turns_takes_a_few_bytes_a_token() -> None:
    tape = begun()
    for turn in range(16):
        tape.append_reply(sampled([0] * 128, [0.0] * 128), turn)
        tape.append("bridge", np.zeros(45, np.int32))
    buffers = tape._ids.nbytes + tape._logprobs.nbytes + sys.getsizeof(tape._spans)
    assert len(tape) == 3 + 16 * 173
    assert buffers <= 1.25 * (4 * len(tape) + 4 * tape.sampled) + 2048
