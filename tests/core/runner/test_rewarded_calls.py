"""A reward of one tool call or of one text changes the advantages of its own tokens only."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.runner.replay import Replayer
from engine.store.rows.export import export_rows

SPEC_CODE = '''
from engine.schemas.environment import ToolReply, UserTurn
from engine.schemas.reward import RewardEvent

def buy(value: float) -> ToolReply:
    """Buy.

    Args:
        value: What it is worth.
    """
    return ToolReply(content="bought", rewards=[RewardEvent(value=value, name="call", part={"call": "this"})])

class Reader:
    def respond(self, view):
        rewards = [RewardEvent(value=0.5, name="word", part={"text": "fine"})] if "fine" in view.reply else []
        rewards += [RewardEvent(turn=0, name="late", value=0.25, part={"call": 0})]
        return UserTurn(satisfied=True, rewards=rewards)
'''


@pytest.fixture
def spec_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rewarding_code.py").write_text(SPEC_CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("rewarding_code", None)


def calls(*values: float) -> dict[str, Any]:
    return {"text": "I buy. ", "tool_calls": [{"name": "buy", "arguments": {"value": value}} for value in values]}


def cases(*samples: list[Any]) -> list[dict[str, Any]]:
    return [{"task": "a", "sample": number, "replies": replies} for number, replies in enumerate(samples)]


BUYS: dict[str, Any] = {"tools": [{"use": "rewarding_code:buy"}], "user": {"use": "rewarding_code:Reader"}}


def rewarded(row: Any, form: Any, turn: int = 0) -> list[tuple[str, float]]:
    """The text of each run of equal advantages of a turn, with the advantage."""
    places = np.flatnonzero((row["turn_ids"] == turn) & (row["loss_mask"] == 1))
    values = row["advantages"][places]
    cuts = [0, *(np.flatnonzero(np.diff(values)) + 1), len(places)]
    return [
        (form.decode(row["input_ids"][places[start:end]]), round(float(values[start]), 6))
        for start, end in pairwise(cuts)
    ]


async def test_two_parallel_calls_of_opposite_worth(spec_code: None, make_spec: Any, run_spec: Any) -> None:
    script = cases([calls(1.0, -1.0), "ok"], [calls(0.0, 0.0), "ok"])
    credit = {"method": "outcome"}
    ran = await run_spec(
        make_spec(script, rollout={"samples_per_task": 2, "seed": 7}, rewards={"credit": credit}, **BUYS)
    )
    rows = list(export_rows(ran.store))
    one, other = '{"name": "buy", "arguments": {"value": 1.0}}', '{"name": "buy", "arguments": {"value": -1.0}}'
    # outcome: both episodes earn 0.25 from `late`. Without the parts of turn 0 every advantage is 0.
    assert rewarded(rows[0], ran.template) == [
        ("I buy. \n", 0.0),
        (f"<tool_call>\n{one}\n</tool_call>\n", 1.0),
        (f"<tool_call>\n{other}\n</tool_call>", -1.0),
        ("<|im_end|>", 0.0),
    ]
    assert [value for _, value in rewarded(rows[1], ran.template)] == [0.0, -1.0, 1.0, 0.0]
    assert rows[0]["turn_rewards"].tolist() == [0.25, 0.0]
    # token_rewards: the rewards of a call are on its last token
    assert rows[0]["token_rewards"][rows[0]["token_rewards"] != 0].tolist() == [1.25, -1.0]


async def test_parts_are_stored_and_replayed(spec_code: None, make_spec: Any, run_spec: Any) -> None:
    ran = await run_spec(make_spec([calls(1.0, -1.0), "all fine here"], **BUYS))
    postings = ran.only.postings
    assert [(one.turn, one.name, one.delta, one.call) for one in postings] == [
        (0, "call", 1.0, 0),
        (0, "call", -1.0, 1),
        (1, "word", 0.5, None),
        (0, "late", 0.25, 0),
    ]
    branch, turn = ran.only.branches[0], ran.only.turns[1]
    word = branch.input_ids[turn.start + postings[2].start : turn.start + postings[2].end]
    assert "fine" in ran.template.decode(word)
    assert len(ran.template.decode(word)) <= len(" fine") + 2
    assert ran.only.outcome.rewards == {"call": 0.0, "word": 0.5, "late": 0.25}
    replayer = Replayer(ran.loaded, ran.template, ran.store)
    try:
        assert (await replayer.check(ran.only, ran.store.task("a"))).difference is None
    finally:
        replayer.close()


@pytest.mark.parametrize("part", [{"call": 2}, {"call": "call_5_0"}, {"text": "absent"}, {"tokens": [3, 9000]}])
async def test_a_part_that_a_turn_does_not_have_is_named(
    spec_code: None, make_spec: Any, run_spec: Any, part: dict[str, Any]
) -> None:
    rules = [{"at": "AWAITING_TOOL", "op": "add", "value": 1.0, "part": part}]
    ran = await run_spec(
        make_spec([calls(1.0, -1.0), "ok"], rewards={"reassign": rules}, machine="tools_and_user", **BUYS)
    )
    failure = ran.only.outcome.failure
    assert failure is not None
    assert (failure.kind, failure.blame) == ("ledger_error", "spec")
    assert "turn 0 ha" in failure.message


async def test_rules_move_rewards_between_calls(spec_code: None, make_spec: Any, run_spec: Any) -> None:
    rules = [
        {
            "at": "AWAITING_TOOL",
            "turn": "last",
            "part": {"call": 0},
            "to": "last",
            "to_part": {"call": 1},
            "share": 0.75,
        }
    ]
    ran = await run_spec(
        make_spec([calls(1.0, -1.0), "ok"], rewards={"reassign": rules}, machine="tools_and_user", **BUYS)
    )
    moved = [(one.delta, one.call) for one in ran.only.postings if one.op == "transfer"]
    assert moved == [(-0.75, 0), (0.75, 1)]
    assert ran.only.outcome.reward == 0.25
