"""Which actions may start before the previous record is durable, and which wait: all that anything outside could see."""

from __future__ import annotations

import sqlite3
import time
from typing import Any

import code_for_tests as spec_code
import pytest
from slow_cases import slow_but

from engine.errors import StoreError
from engine.store.writer import Lane, Write, Writer

ADD = {"tool_calls": [{"name": "add", "arguments": {"a": 17, "b": 25}}]}


class SlowJournal:
    """A journal that takes its time: how many entries are durable, and how many were when each was handed over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fails_at: int | None = None) -> None:
        self.durable = 0
        self.handed: list[tuple[str, int, int]] = []
        """(kind, seq, entries that were durable by then)"""
        commit, put = Writer._commit, Lane.put

        def slow(writer: Writer, writes: Any) -> None:
            rows = [write.row for write in writes if write.row is not None]
            if rows:
                time.sleep(0.03)
                if fails_at is not None and any(row[2] >= fails_at for row in rows):
                    raise sqlite3.OperationalError("disk I/O error")
            commit(writer, writes)
            self.durable += len(rows)

        def noted(lane: Lane, write: Write, *, at_once: bool = False) -> Write:
            if write.row is not None:
                self.handed.append((write.row[6], write.row[2], self.durable))
            return put(lane, write, at_once=at_once)

        monkeypatch.setattr(Writer, "_commit", slow)
        monkeypatch.setattr(Lane, "put", noted)


@pytest.mark.parametrize(("effects", "before_the_tool"), [("pure", 1), ("replayable", 2), ("external", 2)])
async def test_a_pure_tool_is_called_at_once_and_others_and_users_when_all_is_durable(
    make_spec, run_spec, monkeypatch, effects, before_the_tool
) -> None:
    journal = SlowJournal(monkeypatch)
    seen: list[int] = []
    spec_code.ON_CALL.append(lambda: seen.append(journal.durable))
    tools = [{"use": "code_for_tests:add", "effects": effects}]
    ran = await run_spec(make_spec([ADD, "It is 41.", "It is 42."], tools=tools))
    assert ran.only.outcome.solved
    # reset and reply, [tool], results and reply, [user], feedback and reply, [user]
    assert seen == [before_the_tool, 4, 6]


async def test_a_reply_is_written_down_only_behind_what_is_durable(make_spec, run_spec, monkeypatch) -> None:
    journal = SlowJournal(monkeypatch)
    await run_spec(make_spec([ADD, ADD, ADD, "It is 42."]))
    replies = [(seq, durable) for kind, seq, durable in journal.handed if kind == "generation"]
    assert [seq for seq, _ in replies] == [1, 3, 5, 7]
    assert all(durable == seq for seq, durable in replies)
    assert [seq for _, seq, _ in journal.handed] == list(range(9))  # the last entry is written with the end


@pytest.mark.parametrize("seq", slow_but(range(6), 0, 3, 5))
async def test_what_cannot_be_written_down_ends_the_run_within_a_turn(make_spec, run_spec, monkeypatch, seq) -> None:
    journal = SlowJournal(monkeypatch, fails_at=seq)
    path = make_spec([ADD] * 20, limits={"assistant_turns": 20, "tool_calls": 20})
    with pytest.raises(StoreError, match="disk I/O error"):
        await run_spec(path)
    assert journal.durable <= seq
    assert max(handed for _, handed, _ in journal.handed) <= seq + 1
    assert spec_code.CALLS["add"] <= seq // 2 + 1


async def test_limits_hold_where_an_episode_has_all_the_time_there_is(make_spec, run_spec) -> None:
    ran = await run_spec(make_spec([ADD] * 9, limits={"episode_seconds": None, "assistant_turns": 2}))
    assert ran.only.outcome.limit == "assistant_turns"
    assert len(ran.only.turns) == 2
