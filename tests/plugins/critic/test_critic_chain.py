"""A chain of three states with known values: exact advantages from exact values, and a critic that learns the values.

In each of three turns the policy says `a` or `b`, each with probability 1/2. `b` ends the episode without a reward; after three `a` it ends
with 1. With discount g, the values before the turns are g^2/8, g/4 and 1/2. The eight episodes below occur as often as they should, so
the mean return from each state is its value.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_critic_training import critic_of, learner_of, sealed, values_of
from training_rows import row_of

from engine.rewards.credit import Member, credit_tokens
from engine.schemas.credit import read_credit
from engine.store.rows.row import TrainingRow
from engine.train.credited_rows import credited_columns

A, B, PROMPT, STATE = 11, 12, 20, 30
EPISODES = ["b"] * 4 + ["ab"] * 2 + ["aab", "aaa"]


def value(turn: int, gamma: float) -> float:
    return float(gamma ** (2 - turn) * 0.5 ** (3 - turn))


def rows_of() -> list[TrainingRow]:
    """One row for each episode: the prompt, then for each turn the state's token and what was said."""
    rows = []
    for number, said in enumerate(EPISODES):
        ids, turns = [PROMPT, PROMPT + 1], [-1, -1]
        for turn, letter in enumerate(said):
            ids += [STATE + turn, A if letter == "a" else B]
            turns += [-1, turn]
        mask = (np.array(turns) >= 0).astype(np.int32)
        ledger = sealed(*[0.0] * (len(said) - 1), 1.0 if said == "aaa" else 0.0)
        rows.append(row_of({
            "input_ids": np.array(ids, np.int32), "turn_ids": np.array(turns, np.int32), "loss_mask": mask,
            "logprobs": np.where(mask, -np.log(2.0), 0.0).astype(np.float32), "weight_versions": np.where(mask, 0, -1),
            "advantages": np.zeros(len(ids), np.float32), "images": [], "task_id": "chain", "episode_id": f"chain/{number}",
            "branch": 0, "cut": False, "group": {f"chain/{number}": Member(ledger=ledger)},
        }))  # fmt: skip
    return rows


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("method", ["turn_ppo", "bilevel_gae", "gae"])
def test_exact_values_give_exact_advantages(method: str, lam: float, gamma: float) -> None:
    """A(`b`) in turn k is -V_k. In the mean over what follows, A(`a`) is g V_k+1 - V_k, and the mean over both is 0, for any lam."""
    credit = read_credit({"method": method, "gamma": gamma, "lam": lam})
    members = [
        Member(
            ledger=sealed(*[0.0] * (len(said) - 1), 1.0 if said == "aaa" else 0.0),
            values=np.array([value(turn, gamma) for turn in range(len(said))]),
            ends=list(range(1, len(said) + 1)),
        )
        for said in EPISODES
    ]
    found = credit_tokens(credit, members)
    for turn in range(3):
        here = [
            (said[turn], float(each[turn][0])) for said, each in zip(EPISODES, found, strict=True) if len(said) > turn
        ]
        after = value(turn + 1, gamma) if turn < 2 else 1.0
        follows = gamma * after if turn < 2 else 1.0
        assert [advantage for letter, advantage in here if letter == "b"] == pytest.approx(
            [-value(turn, gamma)] * sum(letter == "b" for letter, _ in here)
        )
        assert np.mean([each for letter, each in here if letter == "a"]) == pytest.approx(follows - value(turn, gamma))
        assert np.mean([each for _, each in here]) == pytest.approx(0.0, abs=1e-12)
    if lam == 0.0:
        assert found[-1][0].tolist() == pytest.approx([gamma * value(1, gamma) - value(0, gamma)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("critic", "method", "gamma", "lam"),
    [
        ({"kind": "probe", "width": 32, "lr": 1e-2}, "turn_ppo", 1.0, 1.0),
        ({"kind": "probe", "width": 32, "lr": 1e-2, "update_epochs": 6, "lam": 1.0, "clip": None}, "gae", 0.9, 0.5),
        ({"kind": "probe", "width": 32, "lr": 1e-2}, "gae", 0.9, 0.5),
        ({"kind": "head", "lr": 3e-2}, "bilevel_gae", 0.9, 0.0),
        ({"kind": "network", "lr": 3e-3}, "gae", 1.0, 1.0),
    ],
)
def test_a_critic_learns_the_values(
    critic: dict[str, Any], method: str, gamma: float, lam: float, tiny_model_dir: Path
) -> None:
    """Trained on the eight episodes, its values are the known ones to 0.01 and its advantages the exact ones to 0.02.

    With six passes over each batch it needs a sixth of the batches.
    """
    credit = {"method": method, "gamma": gamma, "lam": lam}
    learner = learner_of(tiny_model_dir, critic | {"warmup_steps": 1000, "max_grad_norm": None}, credit)
    rows = rows_of()
    steps = 300 // critic.get("update_epochs", 1)
    for step in range(steps):
        for group in critic_of(learner).optimizer.param_groups:  # a decaying rate: the values settle
            group["lr"] = critic["lr"] * (1 - step / steps)
        told = learner.step(rows, step)
    found = values_of(learner, rows)
    for said, values in zip(EPISODES, found, strict=True):
        assert values.tolist() == pytest.approx([value(turn, gamma) for turn in range(len(said))], abs=0.01)
    exact = [np.array([value(turn, gamma) for turn in range(len(said))]) for said in EPISODES]
    method_of = read_credit(credit)
    for one, other in zip(
        *(credited_columns(rows, method_of, values=each, by_turn=False) for each in (found, exact)), strict=True
    ):
        np.testing.assert_allclose(one.advantages, other.advantages, atol=0.02)
    if lam == 1.0:  # targets are returns; the states explain this part of their variance
        returns = np.concatenate([gamma ** np.arange(len(s) - 1, -1, -1) * (s == "aaa") for s in EPISODES])
        means = np.concatenate(exact)
        explained = 1 - float((returns - means).var() / returns.var())
        assert told["critic/explained_variance"] == pytest.approx(explained, abs=0.01)
    assert bool(torch.isfinite(torch.tensor(list(told.values()))).all())
