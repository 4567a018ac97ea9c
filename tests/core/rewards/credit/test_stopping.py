"""The stopping toy: a policy that decides when to stop, whose true gradient is known, enumerated exactly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from credit_kit import sealed

from engine.rewards.credit import credit, returns_to_go
from engine.rewards.sealed import SealedLedger
from engine.schemas.credit import TurnReturnCredit

PATHS = [((0.0,), 0.5, (0.5,)), ((0.0, 2.0), 0.25, (-0.5, 0.5)), ((0.0, 1.0), 0.25, (-0.5, -0.5))]
"""A policy that stops after its first turn in half of all episodes, and else chooses between 2 and 1 in the second:
rewards by turn, probability, and the derivative of each choice's log-probability by its logit."""

TRUE = (-1.5 * 0.25, 0.5 * 0.25)
"""The derivatives of the expected return: of stopping, and of choosing 2."""


def expected_gradient(judge: Callable[[list[SealedLedger]], list[np.ndarray]]) -> list[float]:
    """The policy gradient of both choices, over all groups of three, by enumeration."""
    gradient = [0.0, 0.0]
    for group in itertools.product(PATHS, repeat=3):
        weight = math.prod(probability for _, probability, _ in group) / len(group)
        for values, (_, _, scores) in zip(judge([sealed(*path[0]) for path in group]), group, strict=True):
            for turn, score in enumerate(scores):
                gradient[turn] += weight * float(values[turn]) * score
    return gradient


def among_the_living(group: list[SealedLedger]) -> list[np.ndarray]:
    """What `turn_return` must not do: a mean over only the episodes that are still going."""
    returns = [returns_to_go(ledger.totals, 1.0) for ledger in group]
    means = [np.mean([values[turn] for values in returns if len(values) > turn] or [0.0]) for turn in range(2)]
    return [values - means[: len(values)] for values in returns]


@pytest.mark.parametrize(("baseline", "shrunk"), [("none", 1.0), ("leave_one_out", 1.0), ("mean", 2 / 3)])
def test_counting_the_dead_keeps_the_gradients_direction(baseline: str, shrunk: float) -> None:
    spec = TurnReturnCredit(scale="none", baseline=baseline)  # type: ignore[arg-type]
    found = expected_gradient(lambda group: credit(spec, group))
    assert found == pytest.approx([true * shrunk for true in TRUE], rel=1e-12)


def test_a_baseline_over_only_the_living_turns_the_gradient() -> None:
    found = expected_gradient(among_the_living)
    assert found == pytest.approx([TRUE[0] * 2 / 3, TRUE[1] * 5 / 12], rel=1e-12)


HAZARDS = (0.2, 0.5, 0.35)
"""A longer toy: the chance of stopping after each of the first three turns."""
PAYS = (0.0, 1.0, 4.0, -1.0)
"""What stopping after turn t pays, at that turn."""


def stopping_paths() -> list[tuple[tuple[float, ...], float, tuple[float, ...]]]:
    """Every episode: rewards by turn, probability, and d log P(choice) / d logit for each choice (stop or go on)."""
    paths = []
    going = 1.0
    for turn, pay in enumerate(PAYS):
        rewards = (*[0.0] * turn, pay)
        went_on = tuple(-hazard for hazard in HAZARDS[:turn])
        if turn < len(HAZARDS):
            paths.append((rewards, going * HAZARDS[turn], (*went_on, 1.0 - HAZARDS[turn])))
            going *= 1.0 - HAZARDS[turn]
        else:
            paths.append((rewards, going, (*went_on, 0.0)))
    return paths


def true_gradient() -> list[float]:
    """d E[return] / d logit of each hazard, from E itself by the product rule."""
    gradient = []
    for turn, hazard in enumerate(HAZARDS):
        reach = math.prod(1.0 - earlier for earlier in HAZARDS[:turn])
        later, going = 0.0, 1.0
        for after in range(turn + 1, len(PAYS)):
            chance = HAZARDS[after] if after < len(HAZARDS) else 1.0
            later += going * chance * PAYS[after]
            going *= 1.0 - chance
        gradient.append(reach * hazard * (1.0 - hazard) * (PAYS[turn] - later))
    return gradient


def gradient_of(judge: Callable[[list[SealedLedger]], list[np.ndarray]], size: int = 3) -> list[float]:
    """The expected policy gradient over all groups of `size`, by enumeration."""
    gradient = [0.0] * len(HAZARDS)
    paths = stopping_paths()
    ledgers = [sealed(*path[0]) for path in paths]
    for group in itertools.product(range(len(paths)), repeat=size):
        weight = math.prod(paths[path][1] for path in group) / size
        for values, path in zip(judge([ledgers[path] for path in group]), group, strict=True):
            for turn, score in enumerate(paths[path][2][: len(HAZARDS)]):
                gradient[turn] += weight * float(values[turn]) * score
    return gradient


def alive_means(group: list[SealedLedger]) -> list[np.ndarray]:
    """The baseline in use elsewhere: a mean over the episodes that are still going at that turn."""
    returns = [returns_to_go(ledger.totals, 1.0) for ledger in group]
    longest = max(len(values) for values in returns)
    means = np.array([np.mean([values[turn] for values in returns if len(values) > turn]) for turn in range(longest)])
    return [values - means[: len(values)] for values in returns]


def test_the_stopping_toys_gradient_is_the_true_one_within_a_percent() -> None:
    true = true_gradient()
    spec = TurnReturnCredit(scale="none", baseline="leave_one_out")
    found = gradient_of(lambda group: credit(spec, group))
    assert found == pytest.approx(true, rel=1e-12)
    assert max(abs(a - b) / abs(b) for a, b in zip(found, true, strict=True)) < 0.01


def test_with_the_groups_mean_it_is_two_thirds_of_the_true_one_at_every_turn() -> None:
    found = gradient_of(lambda group: credit(TurnReturnCredit(baseline="mean"), group))
    assert found == pytest.approx([value * 2 / 3 for value in true_gradient()], rel=1e-12)


def test_a_mean_over_only_those_still_going_is_far_from_any_multiple_of_it() -> None:
    true, found = np.array(true_gradient()), np.array(gradient_of(alive_means))
    # Of m still going, one's own return takes 1/m of its score away: E[(m - 1) / m] with the other two going or not.
    reach = [1.0, 0.8, 0.8 * 0.5]
    shares = [sum(math.comb(2, k) * p**k * (1 - p) ** (2 - k) * k / (k + 1) for k in range(3)) for p in reach]
    assert found / true == pytest.approx(shares, rel=1e-12)
    assert shares == pytest.approx([2 / 3, 0.5866666666666667, 0.3466666666666667], rel=1e-12)
    cosine = float(true @ found / np.linalg.norm(true) / np.linalg.norm(found))
    assert cosine == pytest.approx(0.97136, abs=1e-5)
