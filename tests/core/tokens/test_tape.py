"""The tape: one door, typed spans, everything else derived."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.schemas.generation import VersionSpan
from engine.schemas.trajectory import Span
from engine.tokens.tape import Tape, as_seen


def test_everything_is_derived_from_spans() -> None:
    tape = Tape(vocab_size=100, reason="why")
    assert tape.append("prompt", [1, 2, 3]) == (0, 3)
    assert tape.append(
        "generated",
        [4, 5, 6],
        turn=0,
        logprobs=[-0.5, -0.25, -1.0],
        versions=[VersionSpan(version=7, start=0, end=2), VersionSpan(version=8, start=2, end=3)],
    ) == (3, 6)
    tape.append("closing", [9])
    tape.append("bridge", [10, 11])
    tape.append("generated", [12], turn=3, logprobs=np.array([-2.0], np.float32))
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
    ("kind", "ids", "given_", "problem"),
    [
        ("prompt", [1], {}, "one prompt"),
        ("closing", [1], {}, "a closing span follows a turn"),
        ("bridge", [1], {"turn": 0}, "belongs to no turn"),
        ("bridge", [100], {}, r"\[0, 100\); found 100 to 100"),
        ("bridge", [4, -1], {}, "found -1 to 4"),
        ("bridge", [[1]], {}, "flat list"),
        ("generated", [1], {"turn": 0}, "1 sampled ids need as many log-probs, not none"),
        ("generated", [1, 2], {"turn": 0, "logprobs": [0.0]}, "not 1"),
        ("generated", [1], {"turn": -1, "logprobs": [0.0]}, "turn -1 does not follow"),
        (
            "generated",
            [1],
            {"turn": 0, "logprobs": [0.0], "versions": [VersionSpan(version=1, start=0, end=2)]},
            "cover",
        ),
    ],
)
def test_what_would_break_an_invariant_is_not_written(kind: str, ids: list, given_: dict, problem: str) -> None:
    tape = begun()
    with pytest.raises(ValueError, match=problem):
        tape.append(kind, ids, **given_)  # type: ignore[arg-type]
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
    tape.append("generated", [5], turn=1, logprobs=[0.0])
    with pytest.raises(ValueError, match="must be a bridge between two turns"):
        tape.append("generated", [5], turn=2, logprobs=[0.0])
    tape.append("bridge", [6])
    with pytest.raises(ValueError, match="turn 1 does not follow turn 1"):
        tape.append("generated", [5], turn=1, logprobs=[0.0])


def test_an_empty_reply_leaves_its_place_and_an_empty_bridge_nothing() -> None:
    tape = begun()
    assert tape.append("generated", [], turn=0, logprobs=[]) == (3, 3)
    assert tape.append("bridge", []) == (3, 3)
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
    assert as_seen(tape.branch(0)).input_ids.tolist() == [1, 2, 3]
    tape.append("generated", [4], turn=0, logprobs=[-1.0])
    tape.append("closing", [5])
    tape.append("bridge", [6])
    row = as_seen(tape.branch(0))
    assert row.input_ids.tolist() == [1, 2, 3, 4]
    assert row.turn_ids.tolist() == [-1, -1, -1, 0]
    assert [span.kind for span in row.spans] == ["prompt", "generated"]


def test_a_tape_of_sixteen_turns_takes_a_few_bytes_a_token() -> None:
    tape = begun()
    for turn in range(16):
        tape.append("generated", np.zeros(128, np.int32), turn=turn, logprobs=np.zeros(128, np.float32))
        tape.append("bridge", np.zeros(45, np.int32))
    buffers = tape._ids.nbytes + tape._logprobs.nbytes + sys.getsizeof(tape._spans)
    assert len(tape) == 3 + 16 * 173
    assert buffers <= 1.25 * (4 * len(tape) + 4 * tape.sampled) + 2048
