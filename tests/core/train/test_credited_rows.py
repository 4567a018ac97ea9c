"""From values and penalties to advantages and targets, on rows: worked out by hand, over turns, branches and cut episodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from installed_plugins import needs_plugin
from training_rows import row_of, with_credit

from engine.rewards.credit import Member
from engine.rewards.ledger import Ledger
from engine.rewards.sealed import PartReward, SealedLedger, TurnPart
from engine.schemas.credit import read_credit
from engine.schemas.reward import RewardEvent
from engine.store.rows.row import TrainingRow
from engine.train.credited_rows import credited_columns, with_last_state


def sealed(*rewards: float) -> SealedLedger:
    ledger = Ledger()
    for turn, value in enumerate(rewards):
        ledger.post(RewardEvent(turn=turn, value=value), turn)
    return ledger.seal(len(rewards))


def row(turn_ids: list[int], ledger: SealedLedger, **changes: Any) -> TrainingRow:
    """A row; -1 is a token that was not sampled."""
    turns = np.array(turn_ids, np.int32)
    made = {
        "task_id": "t", "episode_id": "t/0", "branch": 0, "cut": False,
        "input_ids": np.arange(len(turns), dtype=np.int32), "turn_ids": turns,
        "loss_mask": (turns >= 0).astype(np.int32), "advantages": np.zeros(len(turns), np.float32),
    } | changes  # fmt: skip
    return row_of({"group": {made["episode_id"]: Member(ledger=ledger)}} | made)


LEDGER = sealed(1.0, 4.0)
ONE = [-1, 0, 0, -1, 1]
"""Two sampled tokens in turn 0, one in turn 1."""
VALUES = np.array([0.5, 1.0, 2.0])


@needs_plugin("critic")
def test_token_gae_and_its_targets() -> None:
    (found,) = credited_columns(
        [row(ONE, LEDGER)], read_credit({"method": "gae", "gamma": 0.5, "lam": 0.5}), values=[VALUES], by_turn=False
    )
    # rewards on tokens: 0, 1, 4. delta: 0 + 0.5 * 1 - 0.5 = 0; 1 + 0.5 * 2 - 1 = 1; 4 - 2 = 2
    # A: 2; 1 + 0.25 * 2 = 1.5; 0 + 0.25 * 1.5 = 0.375
    assert found.row.on_tokens(found.advantages).tolist() == [0.0, 0.375, 1.5, 0.0, 2.0]
    assert found.extra["returns"].tolist() == [0.875, 2.5, 4.0]
    assert found.extra["values"].tolist() == VALUES.tolist()
    assert found.extra["has_value"].tolist() == [1.0, 1.0, 1.0]


@needs_plugin("critic")
def test_targets_may_have_a_lambda_of_their_own() -> None:
    """Advantages are those of the credit's lambda; with lambda 1 the targets are the discounted rewards, whatever the values are."""
    credit = read_credit({"method": "gae", "gamma": 0.5, "lam": 0.5})
    plain = credited_columns([row(ONE, LEDGER)], credit, values=[VALUES], by_turn=False)[0]
    for values in (VALUES, 3 * VALUES):
        (found,) = credited_columns(
            [row(ONE, LEDGER)], credit, values=[values], by_turn=False, targets=credit.model_copy(update={"lam": 1.0})
        )
        # rewards on tokens: 0, 1, 4: 4; 1 + 0.5 * 4 = 3; 0 + 0.5 * 3 = 1.5
        assert found.extra["returns"].tolist() == pytest.approx([1.5, 3.0, 4.0])
        if values is VALUES:
            assert found.row.on_tokens(found.advantages).tolist() == plain.row.on_tokens(plain.advantages).tolist()


@needs_plugin("critic")
def test_a_method_over_turns_trains_the_value_before_each_turn() -> None:
    credit = read_credit({"method": "turn_ppo", "gamma": 0.5, "lam": 1.0})
    (found,) = credited_columns([row(ONE, LEDGER)], credit, values=[VALUES], by_turn=True)
    # V: 0.5, 2. A_1 = 4 - 2 = 2; A_0 = 1 + 0.5 * 2 - 0.5 + 0.5 * 2 = 2.5
    assert found.row.on_tokens(found.advantages).tolist() == [0.0, 2.5, 2.5, 0.0, 2.0]
    assert found.extra["values"].tolist() == [0.5, 0.5, 2.0]
    assert found.extra["returns"].tolist() == [3.0, 3.0, 4.0]
    assert found.extra["has_value"].tolist() == [1.0, 0.0, 1.0]
    (finer,) = credited_columns([row(ONE, LEDGER)], credit, values=[VALUES], by_turn=False)
    assert finer.row.on_tokens(finer.advantages).tolist() == found.row.on_tokens(found.advantages).tolist()
    assert finer.extra["returns"].tolist() == [3.0, 3.0, 4.0]  # the turn's return, for every token of the turn
    assert finer.extra["has_value"].tolist() == [1.0, 1.0, 1.0]


@needs_plugin("critic")
@pytest.mark.parametrize(
    ("credit", "expected"),
    [
        # the last state is worth 8: 4 + 0.5 * 8 - 2 = 6 in each method
        ({"method": "turn_ppo", "gamma": 0.5, "lam": 0.0}, [1 + 0.5 * 2 - 0.5, 1 + 0.5 * 2 - 0.5, 6.0]),
        ({"method": "bilevel_gae", "gamma": 0.5, "lam": 0.0}, [1 - 0.5 + 1.0, 1 + 0.5 * 2 - 1.0, 6.0]),
        ({"method": "gae", "gamma": 0.5, "lam": 0.0}, [0.5 * 1 - 0.5, 1 + 0.5 * 2 - 1.0, 6.0]),
    ],
)
def test_an_episode_that_was_cut_goes_on_with_the_value_of_its_last_state(
    credit: dict[str, Any], expected: list[float]
) -> None:
    cut = row(ONE, LEDGER, cut=True)
    longer = with_last_state(cut)
    assert longer.places.tolist() == [1, 2, 4, 5]
    assert (longer.branch is cut.branch, cut.places.tolist()) == (True, [1, 2, 4])
    method = read_credit(credit)
    by_turn = method.value_level == "turn"
    (found,) = credited_columns([cut], method, values=[np.append(VALUES, 8.0)], by_turn=by_turn)
    assert found.row.on_tokens(found.advantages)[[1, 2, 4]].tolist() == expected
    assert found.extra["returns"][-1] == 8.0
    (ended,) = credited_columns([row(ONE, LEDGER)], method, values=[VALUES], by_turn=by_turn)
    assert ended.row.on_tokens(ended.advantages)[-1] == 2.0
    assert with_last_state(row(ONE, LEDGER)).places.tolist() == [1, 2, 4]


@needs_plugin("critic")
def test_the_turns_of_an_episode_are_in_several_branches_and_rows_keep_their_order() -> None:
    """Turn 1 is in the first row and turn 0 in the second; rows of another episode lie between."""
    credit = read_credit({"method": "gae"})
    rows = [
        row([-1, 1], LEDGER, branch=1),
        row([-1, 0], sealed(7.0), episode_id="t/1"),
        row([-1, -1, 0, 0], LEDGER, branch=0),
        row([-1, 0], sealed(3.0), task_id="u", episode_id="u/0"),
    ]
    values = [np.array([2.0]), np.array([1.0]), np.array([0.5, 1.0]), np.array([0.0])]
    found = credited_columns(rows, credit, values=values, by_turn=False)
    assert [(each.row.episode.episode_id, each.row.branch.index) for each in found] == [
        ("t/0", 1),
        ("t/1", 0),
        ("t/0", 0),
        ("u/0", 0),
    ]
    assert [each.row.on_tokens(each.advantages).tolist() for each in found] == [
        [0, 2],
        [0, 6],
        [0, 0, 4.5, 4.0],
        [0, 3],
    ]
    assert [each.extra["has_value"].tolist() for each in found] == [[1], [1], [1, 1], [1]]


@needs_plugin("critic")
def test_bonuses_stay_in_the_advantages() -> None:
    bonus = np.array([0, 0.25, 0.25, 0, 0.25], np.float32)
    (found,) = credited_columns(
        [row(ONE, LEDGER, advantages=bonus, bonuses=bonus)],
        read_credit({"method": "gae"}),
        values=[VALUES],
        by_turn=False,
    )
    assert found.row.on_tokens(found.advantages).tolist() == [0.0, 4.75, 4.25, 0.0, 2.25]
    assert bonus.tolist() == [0, 0.25, 0.25, 0, 0.25]


@needs_plugin("critic")
def test_the_targets_count_rewards_of_parts_whole() -> None:
    """A reward for the turn's second token moves that token's advantage, and the value before the turn."""
    ledger = replace(LEDGER, parts=(PartReward(turn=0, part=TurnPart(start=1, end=2), name="reward", value=1.0),))
    credit = read_credit({"method": "turn_ppo", "gamma": 1.0, "lam": 1.0})
    (found,) = credited_columns([row(ONE, ledger)], credit, values=[VALUES], by_turn=True)
    (plain,) = credited_columns([row(ONE, LEDGER)], credit, values=[VALUES], by_turn=True)
    assert found.extra["returns"].tolist() == plain.extra["returns"].tolist() == [5.0, 5.0, 4.0]
    assert (plain.row.on_tokens(plain.advantages) - found.row.on_tokens(found.advantages)).tolist() == [
        0.0,
        1.0,
        0.0,
        0.0,
        0.0,
    ]


def members_of(row: TrainingRow) -> Mapping[str, Member]:
    assert row.credit is not None
    return row.credit.members


def grouped(*rows: TrainingRow, **without_row: SealedLedger) -> list[TrainingRow]:
    """Rows of one group, and the ledgers of its episodes that have no row."""
    members = {name: member for row in rows for name, member in members_of(row).items()}
    members |= {
        f"t/{name}": Member(ledger=ledger, ends=list(range(1, ledger.turns + 1)))
        for name, ledger in without_row.items()
    }
    return [with_credit(row, members=members) for row in rows]


def advantages(rows: list[TrainingRow], penalties: list[list[float]], **credit: Any) -> list[list[float]]:
    costs = [np.array(of_row) for of_row in penalties]
    return [
        each.row.on_tokens(each.advantages).tolist()
        for each in credited_columns(rows, read_credit(credit), penalties=costs)
    ]


BRANCHES = [row([-1, 1], LEDGER, branch=1), row([-1, -1, 0, 0], LEDGER, branch=0)]
"""Turn 1, with reward 4, in a later branch than turn 0, with reward 1; the rows stand in the other order."""


def test_penalties_of_a_later_branch_count_for_the_tokens_of_an_earlier_one() -> None:
    costs = [[2.0], [0.5, 0.25]]
    assert advantages(BRANCHES, costs, method="turn_return", baseline="none") == [[0, 2], [0, 0, 2.25, 2.25]]
    assert advantages(BRANCHES, costs, method="turn_return", baseline="none", gamma=0.5) == [[0, 2], [0, 0, 1.25, 1.25]]
    assert advantages(BRANCHES, costs, method="outcome", baseline="none") == [[0, 2.25], [0, 0, 2.25, 2.25]]


def test_the_group_subtracts_what_its_other_episodes_earn_less_their_penalties() -> None:
    """Also those of an episode without a row: its tokens are not trained, so it has its rewards and no penalties."""
    rows = grouped(*BRANCHES, row([-1, 0], sealed(7.0), episode_id="t/1"), **{"2": sealed(1.0, 1.0)})
    costs = [[2.0], [0.5, 0.25], [1.0]]
    # returns 2.25, 2 of the first, 6 of the second, 2, 1 of the third
    expected = [[0, 2 - 0.5], [0, 0, 2.25 - 4.0, 2.25 - 4.0], [0, 6 - 2.125]]
    assert advantages(rows, costs, method="turn_return") == expected


def test_groups_of_one_task_are_compared_apart() -> None:
    """A small set of tasks gives a batch two groups of one task, whose later episodes have other ids."""
    rows = grouped(row([0], sealed(1.0)), row([0], sealed(3.0), episode_id="t/1"))
    others = grouped(row([0], sealed(10.0), episode_id="t~1/0"), row([0], sealed(20.0), episode_id="t~1/1"))
    costs = [[0.5], [0.0], [0.0], [5.0]]
    assert advantages([*rows, *others], costs, method="outcome") == [[-2.5], [2.5], [-5.0], [5.0]]


def test_penalties_replace_the_credit_and_leave_the_bonuses() -> None:
    bonuses = np.array([0, 0.25, 0.25, 0, 0.25], np.float32)
    rows = [row(ONE, LEDGER, advantages=bonuses + 99, bonuses=bonuses)]
    found = advantages(rows, [[1.0, 0.0, 2.0]], method="turn_return", baseline="none")
    assert found == [[0.0, 2.25, 2.25, 0.0, 2.25]]
    assert rows[0].advantages.tolist() == [99.25] * 3


@needs_plugin("critic")
@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_targets_of_values_count_penalties(lam: float) -> None:
    """A value predicts what its tokens will cost too; with lambda 1 the targets are rewards less penalties to come."""
    credit = read_credit({"method": "gae", "lam": lam})
    costs = [np.array([0.5, 0.25, 1.0])]
    (found,) = credited_columns([row(ONE, LEDGER)], credit, values=[VALUES], penalties=costs)
    targets = credit.model_copy(update={"lam": 1.0})
    (returns,) = credited_columns([row(ONE, LEDGER)], credit, values=[VALUES], penalties=costs, targets=targets)
    assert found.extra["returns"].tolist() == (found.row.on_tokens(found.advantages)[[1, 2, 4]] + VALUES).tolist()
    assert returns.extra["returns"].tolist() == pytest.approx([5 - 1.75, 5 - 1.25, 4 - 1.0])
    assert returns.row.on_tokens(returns.advantages).tolist() == found.row.on_tokens(found.advantages).tolist()
    assert found.row.on_tokens(found.advantages)[4] == 4 - 1.0 - 2.0
