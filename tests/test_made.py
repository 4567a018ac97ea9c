"""Contracts that the engine makes are those that validation would make."""

from __future__ import annotations

import numpy as np
import pytest

from engine.made import checked, maker, row_maker
from engine.schemas.generation import FinishReason, Generation, VersionSpan
from engine.schemas.journal import ScoreRecord
from engine.schemas.message import Message
from engine.schemas.trajectory import Span

IDS, LOGPROBS = np.array([1, 2], np.int32), np.array([-0.5, -1.0], np.float32)


def test_what_is_made_is_what_validation_makes() -> None:
    values = {"role": "user", "content": "Hello", "name": None}
    made, valid = maker(Message)(**values), Message(**values)
    assert made == valid
    assert made.model_dump_json() == valid.model_dump_json()
    assert made.model_copy(update={"content": "?"}).content == "?"
    assert maker(Message)(role="user").tool_calls is not maker(Message)(role="user").tool_calls
    assert maker(ScoreRecord)(rewards=[]) == ScoreRecord(rewards=[])


def test_rows_are_made_as_validation_makes_them_and_checked_alike() -> None:
    rows = [
        {"kind": "prompt", "start": 0, "end": 3, "turn": -1},
        {"kind": "generated", "start": 3, "end": 5, "turn": 0},
    ]
    with checked():
        assert row_maker(Span)(iter(rows)) == [Span(**row) for row in rows]
        with pytest.raises(ValueError, match="kind"):
            row_maker(Span)([{"kind": "answer", "start": 0, "end": 1, "turn": 0}])


def test_what_is_made_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        maker(Span)(kind="prompt", start=0, end=1).start = 3  # type: ignore[misc]


def test_tests_are_told_what_validation_would_refuse_or_change() -> None:
    make = maker(Generation)
    finish = FinishReason(type="stop")
    with checked():
        make(output_ids=IDS, logprobs=LOGPROBS, finish=finish, versions=[VersionSpan(version=0, start=0, end=2)])
        with pytest.raises(AssertionError, match="changes \\['output_ids'\\]"):
            make(output_ids=IDS.astype(np.int64), logprobs=LOGPROBS, finish=finish)
        with pytest.raises(AssertionError, match="not in the order"):
            make(logprobs=LOGPROBS, output_ids=IDS, finish=finish)
        with pytest.raises(ValueError, match="cover 1 of 2 tokens"):
            make(output_ids=IDS, logprobs=LOGPROBS, finish=finish, versions=[VersionSpan(version=0, start=0, end=1)])
        with pytest.raises(ValueError, match="kind"):
            maker(Span)(kind="answer", start=0, end=1)
    make(logprobs=LOGPROBS, output_ids=IDS, finish=finish)
