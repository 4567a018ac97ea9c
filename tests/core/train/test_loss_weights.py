"""Shares: exact fractions, and sums that do not depend on how the rows are parted."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import TrainError
from engine.schemas.loss import (
    BnpoLoss,
    CispoLoss,
    DapoLoss,
    DrGrpoLoss,
    GrpoLoss,
    GspoLoss,
    LossSpec,
    PpoLoss,
    ReinforceLoss,
    SapoLoss,
)
from engine.train.loss_columns import token_loss_weights

LENGTHS = [3, 1, 4, 0]
EPISODES = ["a", "a", "b", "c"]
"""Episode a has two rows; c has nothing that trains, and counts nowhere."""


def by_row(loss: LossSpec, **options: object) -> list[float]:
    found = token_loss_weights(loss, LENGTHS, EPISODES, **options)  # type: ignore[arg-type]
    assert [len(row) for row in found] == LENGTHS
    assert all(len(set(row.tolist())) <= 1 for row in found)
    return [float(row[0]) for row in found if len(row)]


@pytest.mark.parametrize("loss", [GrpoLoss(), GspoLoss(), SapoLoss()])
def test_episodes_count_alike_and_an_episode_is_all_its_rows(loss: LossSpec) -> None:
    assert by_row(loss) == [1 / 8, 1 / 8, 1 / 8]
    assert [row.tolist() for row in token_loss_weights(loss, [1, 4], ["a", "b"])] == [[0.5], [0.125] * 4]


@pytest.mark.parametrize("loss", [BnpoLoss(), DapoLoss(), CispoLoss(), PpoLoss()])
def test_tokens_count_alike(loss: LossSpec) -> None:
    assert by_row(loss) == [1 / 8, 1 / 8, 1 / 8]
    assert [row.tolist() for row in token_loss_weights(loss, [1, 4], ["a", "b"])] == [[0.2], [0.2] * 4]


def test_dr_grpo_divides_by_a_constant() -> None:
    assert by_row(DrGrpoLoss(length=16)) == [1 / 32] * 3
    assert by_row(DrGrpoLoss(), length=8) == [1 / 16] * 3
    assert by_row(DrGrpoLoss(length=16), length=8) == [1 / 32] * 3


@pytest.mark.parametrize(
    ("loss", "forked", "other"),
    [
        (GrpoLoss(), 1 / 12, 1 / 8),
        (DapoLoss(), 1 / 10, 1 / 10),
        (DrGrpoLoss(length=16), 1 / 32, 1 / 32),
        (ReinforceLoss(), 1 / 2, 1 / 2),
    ],
    ids=["grpo", "dapo", "dr_grpo", "reinforce"],
)
def test_an_episode_does_not_count_more_because_it_forked(loss: LossSpec, forked: float, other: float) -> None:
    """Six trained tokens of one episode in one row, in three rows, and in rows of which one has only untrained tokens; four of another."""
    for lengths in ([6], [2, 3, 1], [0, 5, 0, 1]):
        found = token_loss_weights(loss, [*lengths, 4], ["forked"] * len(lengths) + ["other"])
        assert np.concatenate(found[:-1]).tolist() == pytest.approx([forked] * 6, rel=1e-15)
        assert found[-1].tolist() == pytest.approx([other] * 4, rel=1e-15)


def test_dr_grpo_without_a_length_says_what_to_set() -> None:
    with pytest.raises(TrainError, match=r"set `train\.loss\.length`") as raised:
        by_row(DrGrpoLoss())
    assert raised.value.kind == "train_setup"


def test_reinforce_sums_an_episodes_tokens() -> None:
    assert by_row(ReinforceLoss()) == [1 / 2] * 3


def test_in_mini_batches_bnpo_counts_its_own_tokens_and_dapo_all_of_them() -> None:
    lengths, episodes, minibatches = [2, 6, 4], ["a", "b", "c"], [7, 7, 9]
    expected = {
        "bnpo": [1 / 8, 1 / 8, 1 / 4],
        "dapo": [2 / 12] * 3,
        "grpo": [1 / 4, 1 / 12, 1 / 4],
        "reinforce": [1 / 2, 1 / 2, 1],
        "dr_grpo": [1 / 20, 1 / 20, 1 / 10],
    }
    losses: list[LossSpec] = [BnpoLoss(), DapoLoss(), GrpoLoss(), ReinforceLoss(), DrGrpoLoss(length=10)]
    for loss in losses:
        found = token_loss_weights(loss, lengths, episodes, minibatches=minibatches)
        assert [float(row[0]) for row in found] == pytest.approx(expected[loss.kind], rel=1e-15)


def test_an_episode_in_two_mini_batches_is_refused() -> None:
    with pytest.raises(TrainError, match="keep an episode together"):
        token_loss_weights(GrpoLoss(), [1, 1], ["a", "a"], minibatches=[0, 1])


def test_nothing_trained_has_no_shares() -> None:
    assert token_loss_weights(GrpoLoss(), [], []) == []
    assert [row.tolist() for row in token_loss_weights(DapoLoss(), [0, 0], ["a", "b"])] == [[], []]


def exact(loss: LossSpec, rows: list[tuple[int, str]], values: list[list[int]]) -> Fraction:
    """The step's loss, straight from the definition, in fractions."""
    by_episode: dict[str, list[int]] = defaultdict(list)
    for (_, episode), row in zip(rows, values, strict=True):
        by_episode[episode] += row
    episodes = [found for found in by_episode.values() if found]
    if not episodes:
        return Fraction(0)
    tokens = [value for found in episodes for value in found]
    match loss.kind:
        case "grpo" | "gspo" | "sapo":
            return Fraction(sum(Fraction(sum(found), len(found)) for found in episodes), len(episodes))
        case "dr_grpo":
            return Fraction(sum(tokens), 100 * len(episodes))
        case "reinforce":
            return Fraction(sum(tokens), len(episodes))
        case _:
            return Fraction(sum(tokens), len(tokens))


@given(
    rows=st.lists(st.tuples(st.integers(0, 7), st.sampled_from("abcd")), min_size=1, max_size=9),
    loss=st.sampled_from(
        [
            GrpoLoss(),
            GspoLoss(),
            SapoLoss(),
            BnpoLoss(),
            DapoLoss(),
            PpoLoss(),
            CispoLoss(),
            ReinforceLoss(),
            DrGrpoLoss(),
        ]
    ),
    seed=st.integers(0, 99),
)
def test_the_sum_is_the_steps_loss_however_rows_are_parted(
    rows: list[tuple[int, str]], loss: LossSpec, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    values = [rng.integers(-50, 50, length).tolist() for length, _ in rows]
    loss_weights = token_loss_weights(
        loss, [length for length, _ in rows], [episode for _, episode in rows], length=100
    )
    parts = rng.integers(0, 3, len(rows))
    total = sum(
        sum(float(loss_weights[row] @ np.array(values[row], float)) for row in np.flatnonzero(parts == part))
        for part in range(3)
    )
    assert total == pytest.approx(float(exact(loss, rows, values)), rel=1e-12, abs=1e-12)
