"""From values to advantages and targets, on rows: worked out by hand, over turns, branches and cut episodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.rewards.address import TurnPart
from engine.rewards.ledger import Ledger, PartReward, SealedLedger
from engine.schemas.credit import read_credit
from engine.schemas.reward import RewardEvent
from engine.train.credited_rows import credited_rows, value_metrics, value_weights, with_last_state


def sealed(*rewards: float) -> SealedLedger:
    ledger = Ledger()
    for turn, value in enumerate(rewards):
        ledger.post(RewardEvent(turn=turn, value=value), turn)
    return ledger.seal(len(rewards))


def row(turn_ids: list[int], ledger: SealedLedger, **changes: Any) -> dict[str, Any]:
    """A row; -1 is a token that was not sampled."""
    turns = np.array(turn_ids, np.int32)
    return {
        "task_id": "t", "episode_id": "t/0", "branch": 0, "cut": False, "ledger": ledger,
        "input_ids": np.arange(len(turns), dtype=np.int32), "turn_ids": turns,
        "loss_mask": (turns >= 0).astype(np.int32), "advantages": np.zeros(len(turns), np.float32),
    } | changes  # fmt: skip


LEDGER = sealed(1.0, 4.0)
ONE = [-1, 0, 0, -1, 1]
"""Two sampled tokens in turn 0, one in turn 1."""
VALUES = np.array([0.5, 1.0, 2.0])


def test_token_gae_and_its_targets() -> None:
    (found,) = credited_rows(
        [row(ONE, LEDGER)], [VALUES], read_credit({"method": "gae", "gamma": 0.5, "lam": 0.5}), by_turn=False
    )
    # rewards on tokens: 0, 1, 4. delta: 0 + 0.5 * 1 - 0.5 = 0; 1 + 0.5 * 2 - 1 = 1; 4 - 2 = 2
    # A: 2; 1 + 0.25 * 2 = 1.5; 0 + 0.25 * 1.5 = 0.375
    assert found["advantages"].tolist() == [0.0, 0.375, 1.5, 0.0, 2.0]
    assert found["returns"].tolist() == [0.875, 2.5, 4.0]
    assert found["values"].tolist() == VALUES.tolist()
    assert found["has_value"].tolist() == [1.0, 1.0, 1.0]


def test_targets_may_have_a_lambda_of_their_own() -> None:
    """Advantages are those of the credit's lambda; with lambda 1 the targets are the discounted rewards, whatever the values are."""
    credit = read_credit({"method": "gae", "gamma": 0.5, "lam": 0.5})
    plain = credited_rows([row(ONE, LEDGER)], [VALUES], credit, by_turn=False)[0]
    for values in (VALUES, 3 * VALUES):
        (found,) = credited_rows(
            [row(ONE, LEDGER)], [values], credit, by_turn=False, targets=credit.model_copy(update={"lam": 1.0})
        )
        # rewards on tokens: 0, 1, 4: 4; 1 + 0.5 * 4 = 3; 0 + 0.5 * 3 = 1.5
        assert found["returns"].tolist() == pytest.approx([1.5, 3.0, 4.0])
        if values is VALUES:
            assert found["advantages"].tolist() == plain["advantages"].tolist()


def test_a_method_over_turns_trains_the_value_before_each_turn() -> None:
    credit = read_credit({"method": "turn_ppo", "gamma": 0.5, "lam": 1.0})
    (found,) = credited_rows([row(ONE, LEDGER)], [VALUES], credit, by_turn=True)
    # V: 0.5, 2. A_1 = 4 - 2 = 2; A_0 = 1 + 0.5 * 2 - 0.5 + 0.5 * 2 = 2.5
    assert found["advantages"].tolist() == [0.0, 2.5, 2.5, 0.0, 2.0]
    assert found["values"].tolist() == [0.5, 0.5, 2.0]
    assert found["returns"].tolist() == [3.0, 3.0, 4.0]
    assert found["has_value"].tolist() == [1.0, 0.0, 1.0]
    (finer,) = credited_rows([row(ONE, LEDGER)], [VALUES], credit, by_turn=False)
    assert finer["advantages"].tolist() == found["advantages"].tolist()
    assert finer["returns"].tolist() == [3.0, 3.0, 4.0]  # the turn's return, for every token of the turn
    assert finer["has_value"].tolist() == [1.0, 1.0, 1.0]


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
    assert longer["loss_mask"].tolist() == [0, 1, 1, 0, 1, 1]
    assert cut["loss_mask"].tolist() == [0, 1, 1, 0, 1]
    method = read_credit(credit)
    by_turn = method.value_level == "turn"
    (found,) = credited_rows([cut], [np.append(VALUES, 8.0)], method, by_turn=by_turn)
    assert found["advantages"][[1, 2, 4]].tolist() == expected
    assert found["returns"][-1] == 8.0
    (ended,) = credited_rows([row(ONE, LEDGER)], [VALUES], method, by_turn=by_turn)
    assert ended["advantages"][-1] == 2.0
    assert with_last_state(row(ONE, LEDGER))["loss_mask"].tolist() == [0, 1, 1, 0, 1]


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
    found = credited_rows(rows, values, credit, by_turn=False)
    assert [(each["episode_id"], each["branch"]) for each in found] == [("t/0", 1), ("t/1", 0), ("t/0", 0), ("u/0", 0)]
    assert [each["advantages"].tolist() for each in found] == [[0, 2], [0, 6], [0, 0, 4.5, 4.0], [0, 3]]
    assert [each.tolist() for each in value_weights(found)] == [[0.2], [0.2], [0.2, 0.2], [0.2]]


def test_bonuses_stay_in_the_advantages() -> None:
    bonus = np.array([0, 0.25, 0.25, 0, 0.25], np.float32)
    (found,) = credited_rows(
        [row(ONE, LEDGER, advantages=bonus)], [VALUES], read_credit({"method": "gae"}), by_turn=False
    )
    assert found["advantages"].tolist() == [0.0, 4.75, 4.25, 0.0, 2.25]
    assert bonus.tolist() == [0, 0.25, 0.25, 0, 0.25]


def test_the_metrics_are_over_trained_values() -> None:
    credit = read_credit({"method": "turn_ppo", "gamma": 1.0, "lam": 1.0})
    (found,) = credited_rows([row(ONE, LEDGER)], [np.array([4.0, 99.0, 2.0])], credit, by_turn=True)
    # targets 5 and 4; values 4 and 2: errors 1 and 2
    assert value_metrics([found]) == pytest.approx(
        {"critic/value_mean": 3.0, "critic/return_mean": 4.5, "critic/explained_variance": 1 - 0.25 / 0.25}
    )
    (exact,) = credited_rows([row(ONE, LEDGER)], [np.array([5.0, 0.0, 4.0])], credit, by_turn=True)
    assert value_metrics([exact])["critic/explained_variance"] == 1.0
    assert exact["advantages"].tolist() == [0.0] * 5
    assert "critic/explained_variance" not in value_metrics([exact | {"returns": np.array([1.0, 1.0, 1.0])}])


def test_the_targets_count_rewards_of_parts_whole() -> None:
    """A reward for the turn's second token moves that token's advantage, and the value before the turn."""
    ledger = replace(LEDGER, parts=(PartReward(turn=0, part=TurnPart(start=1, end=2), name="reward", value=1.0),))
    credit = read_credit({"method": "turn_ppo", "gamma": 1.0, "lam": 1.0})
    (found,) = credited_rows([row(ONE, ledger)], [VALUES], credit, by_turn=True)
    (plain,) = credited_rows([row(ONE, LEDGER)], [VALUES], credit, by_turn=True)
    assert found["returns"].tolist() == plain["returns"].tolist() == [5.0, 5.0, 4.0]
    assert (plain["advantages"] - found["advantages"]).tolist() == [0.0, 1.0, 0.0, 0.0, 0.0]
