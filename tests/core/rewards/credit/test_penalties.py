"""Penalties of tokens as a second argument of every credit method: by hand, and against computations of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from credit_kit import sealed
from installed_plugins import needs_plugin

from engine.errors import LedgerError
from engine.rewards.credit import Member, credit, credit_tokens
from engine.rewards.sealed import PartReward, TurnPart
from engine.schemas.credit import read_credit

Turns = list[list[float]]
"""For each turn, one number for each of its sampled tokens."""


def member(rewards: Sequence[float], penalties: Turns | None, values: Turns | None = None, **more: Any) -> Member:
    sizes = [len(turn) for turn in penalties or values or []]
    flat = [None if of is None else np.array([each for turn in of for each in turn]) for of in (penalties, values)]
    ends = np.cumsum(sizes).tolist()
    return Member(ledger=sealed(*rewards), penalties=flat[0], values=flat[1], ends=ends, **more)


def by_token(method: dict[str, Any], group: Sequence[Member]) -> list[list[list[float]]]:
    return [[turn.tolist() for turn in turns] for turns in credit_tokens(read_credit(method), group)]


# Rewards 1, 2 with penalties 0.25 + 0.25 and 1; rewards 0, 1 with penalties 0.5 and 0.25 + 0.25. By turn: 0.5, 1 and 0.5, 0.5.
GROUP = [
    member([1.0, 2.0], [[0.25, 0.25], [1.0]], state_keys=["a", "b"]),
    member([0.0, 1.0], [[0.5], [0.25, 0.25]], state_keys=["a", "c"]),
]
ALONE = {"baseline": "none"}
BY_HAND: list[tuple[dict[str, Any], list[list[float]]]] = [
    # 3 - 1.5 and 1 - 1
    ({"method": "outcome", **ALONE}, [[1.5, 1.5], [0.0, 0.0]]),
    ({"method": "outcome"}, [[1.5, 1.5], [-1.5, -1.5]]),
    # rewards less penalties: 0.5, 1 and -0.5, 0.5
    ({"method": "turn_return", **ALONE}, [[1.5, 1.0], [0.0, 0.5]]),
    ({"method": "turn_return", "gamma": 0.5, **ALONE}, [[1.0, 1.0], [-0.25, 0.5]]),
    ({"method": "turn_return", "gamma": 0.5}, [[1.25, 0.5], [-1.25, -0.5]]),
    ({"method": "turn_discount", "gamma": 0.5, **ALONE}, [[1.0, 1.0], [-0.25, 0.5]]),
    # the largest of 1, 0.5 * 2 less 0.5 + 0.5 * 1; of 0, 0.5 * 1 less 0.5 + 0.5 * 0.5
    ({"method": "turn_discount", "form": "max", "gamma": 0.5, **ALONE}, [[0.0, 1.0], [-0.25, 0.5]]),
    # 3 * 0.5 - 1.5, 1 * 0.5 - 1
    ({"method": "turn_discount", "form": "attempts", "gamma": 0.5, **ALONE}, [[0.0, 0.0], [-0.5, -0.5]]),
    # outcome 2 - 1.5 and 1 - 1, plus the first turn's own 1 and 0
    ({"method": "mt_grpo", **ALONE}, [[1.5, 0.5], [0.0, 0.0]]),
    # the episode's 1.5 and 0; in state a, returns 1.5 and 0; states b and c have one turn each
    ({"method": "gigpo", **ALONE}, [[3.0, 1.5], [0.0, 0.0]]),
    # 1, 2 + (2 - 1) and 0, 1 + (1 - 0), less 0.5, 1 and 0.5, 0.5; then returns
    ({"method": "score", **ALONE}, [[2.5, 2.0], [1.0, 1.5]]),
    # increases of the score 1, 2: 1 and 1; the other episode's only score, 1, is shared: 0.5 and 0.5; less the penalties; then returns
    ({"method": "progress", **ALONE}, [[0.5, 0.0], [0.0, 0.0]]),
    # with no equal states after the first turn: 3, 0 and 1, 0; less the penalties from each turn on
    ({"method": "redistribute", **ALONE}, [[3.0 - 1.5, 0.0 - 1.0], [1.0 - 1.0, 0.0 - 0.5]]),
]


@needs_plugin("credit_methods")
@pytest.mark.parametrize(("method", "expected"), BY_HAND, ids=str)
def test_where_a_turn_is_an_action_it_has_the_sum_of_its_tokens(
    method: dict[str, Any], expected: list[list[float]]
) -> None:
    assert [turns.tolist() for turns in credit(read_credit(method), GROUP)] == expected
    lengths = [[2, 1], [1, 2]]
    wanted = [
        [[value] * n for value, n in zip(turns, sizes, strict=True)]
        for turns, sizes in zip(expected, lengths, strict=True)
    ]
    assert by_token(method, GROUP) == wanted


VALUED = member([0.0, 4.0], [[0.5, 0.25], [1.0, 2.0]], [[1.0, 2.0], [3.0, 1.0]])
CRITIC_BY_HAND: list[tuple[dict[str, Any], Turns]] = [
    # rewards of tokens -0.5, -0.25, -1, 2; delta -0.5 + 2 - 1, -0.25 + 3 - 2, -1 + 1 - 3, 2 - 1 = 0.5, 0.75, -3, 1
    ({"method": "gae"}, [[-0.75, -1.25], [-2.0, 1.0]]),
    ({"method": "gae", "lam": 0.0}, [[0.5, 0.75], [-3.0, 1.0]]),
    # rewards of turns -0.75, 1; delta -0.75 + 3 - 1, 1 - 3 = 1.25, -2
    ({"method": "turn_ppo", "gamma": 1.0, "lam": 1.0}, [[-0.75, -0.75], [-2.0, -2.0]]),
    # from last token to last token: -0.25 - 1 + 1 - 2 = -2.25, then 4 - 2 - 1 = 1: A -1.25, 1
    # tokens before them: -0.5 + 2 - 1 = 0.5 and -1 + 1 - 3 = -3, plus the last token's
    ({"method": "bilevel_gae"}, [[-0.75, -1.25], [-2.0, 1.0]]),
    # the step from turn 0: -0.25 + 0.5 * (1 - 1) - 2 = -2.25, plus 0.5 * 1
    ({"method": "bilevel_gae", "gamma": 0.5, "token_lam": 0.0}, [[0.5, -1.75], [-3.0, 1.0]]),
]


@needs_plugin("critic")
@pytest.mark.parametrize(("method", "expected"), CRITIC_BY_HAND, ids=str)
def test_where_a_token_is_an_action_it_has_its_own(method: dict[str, Any], expected: Turns) -> None:
    assert by_token(method, [VALUED]) == [expected]


@needs_plugin("critic")
@pytest.mark.parametrize("method", ["gae", "turn_ppo", "bilevel_gae"])
def test_with_lambda_1_an_advantage_is_what_comes_less_the_value_also_over_turns_without_tokens(method: str) -> None:
    rng = np.random.default_rng(5)
    penalties, values = ([rng.normal(size=n).tolist() for n in (3, 0, 0, 2, 1)] for _ in range(2))
    rewards = rng.normal(size=5)
    spec = {"method": method} | ({"gamma": 1.0, "lam": 1.0} if method == "turn_ppo" else {})
    found = by_token(spec, [member(rewards.tolist(), penalties, values)])[0]
    for turn, of_turn in enumerate(found):
        for place, advantage in enumerate(of_turn):
            start = 0 if method == "turn_ppo" else place
            later = sum(map(sum, penalties[turn + 1 :])) + sum(penalties[turn][start:])
            to_come = rewards[turn:].sum() - later
            assert advantage == pytest.approx(to_come - values[turn][start], abs=1e-12)


def test_rewards_of_parts_have_penalties_beside_them() -> None:
    """The turn's first token is a part with reward 1: with `turn_return`, its credit is that of the reward and the penalties."""
    first, second = member([1.0], [[0.5, 0.25]]), member([0.0], [[0.25]])
    parts = (PartReward(turn=0, part=TurnPart(start=0, end=1), name="reward", value=1.0),)
    first = replace(first, ledger=replace(first.ledger, parts=parts))
    # without the part 0 - 0.75 and 0 - 0.25, so -0.5 and 0.5; the part alone: 1 - 0
    assert by_token({"method": "turn_return"}, [first, second]) == [[[0.5, -0.5]], [[0.5]]]


def test_penalties_need_a_method_that_takes_them_and_one_for_each_token() -> None:
    with pytest.raises(LedgerError, match=r"gets no penalties of tokens; use `train.kl.in: loss`"):
        credit(read_credit({"method": "entry", "use": "credit_of_my_own:last_takes_all"}), GROUP)
    with pytest.raises(LedgerError, match=r"3 penalties for turns that end at \[2\]; give one for each token"):
        credit(read_credit({"method": "outcome"}), [Member(ledger=sealed(1.0), penalties=np.zeros(3), ends=[2])])


# --- other trainers' formulas, of token rewards [episodes, tokens] as verl makes them: scores less coefficient x k1 on sampled tokens


def token_rewards(rewards: Sequence[Sequence[float]], penalties: Sequence[Turns]) -> list[list[float]]:
    found = []
    for of_turns, costs in zip(rewards, penalties, strict=True):
        flat = []
        for reward, turn in zip(of_turns, costs, strict=True):
            flat += [-cost for cost in turn]
            flat[-1] += reward
        found.append(flat)
    return found


def grpo(rewards: list[list[float]]) -> list[list[float]]:
    """One score for each response, its sum; less the group's mean, over its standard deviation plus 1e-6."""
    scores = [math.fsum(row) for row in rewards]
    mean = math.fsum(scores) / len(scores)
    deviation = math.sqrt(math.fsum((score - mean) ** 2 for score in scores) / (len(scores) - 1))
    return [[(score - mean) / (deviation + 1e-6)] * len(row) for score, row in zip(scores, rewards, strict=True)]


def rloo(rewards: list[list[float]]) -> list[list[float]]:
    """One score for each response, less the mean of the other ones."""
    scores = [math.fsum(row) for row in rewards]
    return [
        [score - math.fsum(scores[:at] + scores[at + 1 :]) / (len(scores) - 1)] * len(row)
        for at, (score, row) in enumerate(zip(scores, rewards, strict=True))
    ]


def reinforce_plus_plus(rewards: list[list[float]]) -> list[list[float]]:
    """The return of each token before whitening."""
    return [[math.fsum(row[at:]) for at in range(len(row))] for row in rewards]


def discounted_gae(rewards: list[list[float]], gamma: float = 0.9, lam: float = 0.8) -> list[list[float]]:
    """The sum over later tokens of (gamma lam)^k delta, with values 0.1 x place."""
    found = []
    for row in rewards:
        values = [0.1 * place for place in range(len(row))] + [0.0]
        deltas = [reward + gamma * values[at + 1] - values[at] for at, reward in enumerate(row)]
        found.append([
            math.fsum((gamma * lam) ** (k - at) * deltas[k] for k in range(at, len(row))) for at in range(len(row))
        ])  # fmt: skip
    return found


FORMULAS: list[tuple[dict[str, Any], Callable[[list[list[float]]], list[list[float]]], float]] = [
    ({"method": "outcome", "baseline": "mean", "scale": "std"}, grpo, 0.0),
    ({"method": "outcome"}, rloo, 0.0),
    ({"method": "gae"}, reinforce_plus_plus, 0.0),
    ({"method": "gae", "gamma": 0.9, "lam": 0.8}, discounted_gae, 0.1),
]


@needs_plugin("critic")
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("method", "formula", "slope"), FORMULAS, ids=["grpo", "rloo", "reinforce++", "gae"])
def test_advantages_are_those_of_penalties_in_token_rewards(
    method: dict[str, Any], formula: Callable[[list[list[float]]], list[list[float]]], slope: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    turns = rng.integers(1, 5, 6)
    rewards = [rng.normal(size=n).tolist() for n in turns]
    penalties = [[(0.1 * rng.normal(size=rng.integers(1, 7))).tolist() for _ in range(n)] for n in turns]
    group = []
    for of_turns, costs in zip(rewards, penalties, strict=True):
        places = iter(range(1000))
        values = [[slope * next(places) for _ in turn] for turn in costs]
        group.append(member(of_turns, costs, values))
    found = [[value for turn in turns for value in turn] for turns in by_token(method, group)]
    for mine, expected in zip(found, formula(token_rewards(rewards, penalties)), strict=True):
        assert mine == pytest.approx(expected, abs=1e-12)


def test_a_baseline_takes_the_mean_penalty_out_of_every_weight() -> None:
    """500 groups of 8 episodes of 10 tokens without a reward: the weight has mean 0, and the variance of n / (n - 1) sums."""
    rng = np.random.default_rng(0)
    weights = []
    for _ in range(500):
        costs = [[(0.1 * rng.normal(0.5, 1.67, 10)).tolist()] for _ in range(8)]
        group = [member([0.0], of_episode) for of_episode in costs]
        weights += [turns[0][0] for turns in by_token({"method": "turn_return"}, group)]
    # a sum over ten tokens has variance 10 * 0.167^2 = 0.279
    assert np.mean(weights) == pytest.approx(0.0, abs=1e-9)
    assert np.mean(np.square(weights)) == pytest.approx(0.279 * 8 / 7, rel=0.05)
