"""Long replies: masked, or penalized as in DAPO; and which limit cut an episode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from installed_plugins import needs_plugin
from trainings import begin_training

from engine.schemas.episode import EpisodeSpec
from engine.schemas.generation import FinishReason
from engine.schemas.limits import LimitsSpec
from engine.schemas.train import OVERLONG_PENALTY, OverlongPenalty
from engine.schemas.trajectory import Outcome, Trajectory, Turn
from engine.spec.load import load_spec
from engine.store import RunStore
from engine.store.rows.row import TrainingRow
from engine.train.batches import GroupBuilder, cut_by, masked_metrics, penalized

SPEC: dict[str, Any] = {
    "spec": "episode/v1",
    "name": "long",
    "model": {"path": "org/m"},
    "backend": {"kind": "local"},
    "tasks": {"source": "inline", "rows": [{"q": "a"}]},
    "prompt": [{"role": "user", "content": "{{q}}"}],
    "limits": {"turn_tokens": 8, "episode_tokens": 64},
}


def trajectory(*sizes: int, event: str = "answered", limit: str | None = None, finish: Any = "stop") -> Trajectory:
    turns = [
        Turn(index=index, branch=0, start=0, end=size, finish=FinishReason(type=finish), event="answered")
        for index, size in enumerate(sizes)
    ]
    outcome = Outcome(state="DONE", event=event, limit=limit)
    return Trajectory(
        run_id="r", episode_id="t/0", task_id="t", sample_index=0, seed=0, history="branch", outcome=outcome, messages=[],
        turns=turns, branches=[],
    )  # fmt: skip


@pytest.mark.parametrize(("size", "reward"), [(1, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0)])
def test_the_penalty_is_equation_13_of_dapo(size: int, reward: float) -> None:
    """L_max 100, L_cache 20."""
    penalty = OverlongPenalty(margin=20)
    found = penalized(trajectory(5, size), penalty, 100).postings
    assert [(each.turn, each.name, each.delta) for each in found] == (
        [(1, OVERLONG_PENALTY, pytest.approx(reward))] if reward else []
    )
    doubled = penalized(trajectory(5, size), OverlongPenalty(margin=20, coefficient=2.0), 100).postings
    assert sum(each.delta for each in doubled) == pytest.approx(2 * reward)


@pytest.mark.parametrize(
    ("made", "limits", "expected"),
    [
        (trajectory(4), {}, None),
        (trajectory(4, event="limit", limit="assistant_turns"), {}, "assistant_turns"),
        (trajectory(8, event="truncated", finish="length"), {"turn_tokens": 8}, "turn_tokens"),
        (trajectory(4, event="truncated", finish="length"), {"turn_tokens": 8, "episode_tokens": 64}, "episode_tokens"),
        (trajectory(4, event="truncated", finish="length"), {"turn_tokens": 8}, "context"),
        (trajectory(8, event="satisfied", finish="length"), {"turn_tokens": 8}, None),
    ],
)
def test_which_limit_cut_an_episode(made: Trajectory, limits: dict[str, Any], expected: str | None) -> None:
    spec = LimitsSpec(**limits)
    assert cut_by(made, spec, spec.turn_tokens) == expected


def test_a_reply_that_sampling_limits_is_cut_by_that_limit() -> None:
    """`sampling.max_new_tokens` is a limit of a turn's tokens too."""
    made = trajectory(4, event="truncated", finish="length")
    assert cut_by(made, LimitsSpec(turn_tokens=8), 4) == "turn_tokens"


def test_the_limits_that_cut_the_masked_replies_are_counted() -> None:
    """Only limits on the tokens of a reply mask: an episode that another limit ended is trained on."""
    spec = EpisodeSpec.model_validate(SPEC | {"train": {"overlong": "mask"}})
    ended = [
        trajectory(8, 3, event="truncated", finish="length"),
        trajectory(8, finish="length"),
        trajectory(5, event="limit", limit="assistant_turns"),
        trajectory(5, event="limit", limit="episode_seconds"),
        trajectory(4),
    ]
    assert masked_metrics(spec, ended) == {
        "overlong/episodes": 2.0,
        "overlong/turn_tokens": 2.0,
        "overlong/episode_tokens": 1.0,
    }
    without = spec.model_copy(update={"limits": LimitsSpec(turn_tokens=8)})
    assert masked_metrics(without, ended)["overlong/context"] == 1.0
    assert masked_metrics(EpisodeSpec.model_validate(SPEC | {"train": {}}), ended) == {}


Rows = Callable[..., list[TrainingRow]]


@pytest.fixture
async def trained(train_spec: Any, tmp_path: Path) -> tuple[list[Trajectory], Rows]:
    """A group of a training whose replies of at most 6 tokens are nearly all cut, and its rows for other settings of `train`."""
    loaded = load_spec(
        train_spec(train={"steps": 1}, limits={"turn_tokens": 6, "assistant_turns": 2, "episode_tokens": 64})
    )
    trainer = begin_training(loaded, tmp_path / "runs")
    await trainer.run()
    with RunStore.open(trainer.folder / "rollouts", readonly=True) as store:
        group = [each for each in store.trajectories() if each.task_id == next(iter(store.trajectories())).task_id]

    def rows(**train: Any) -> list[TrainingRow]:
        spec, changed = loaded.spec, loaded.spec.train
        assert changed is not None
        credit = {"credit": {"method": "gae"}} if "critic" in train else spec.rewards.model_dump()
        rewards = type(spec.rewards).model_validate(credit)
        whole = type(changed).model_validate(changed.model_dump() | train)
        return GroupBuilder(spec.model_copy(update={"rewards": rewards}), whole, loaded.base).rows(group)

    return group, rows


async def test_rows_of_a_training(trained: tuple[list[Trajectory], Rows]) -> None:
    """Of a reply that is cut: masked, or penalized."""
    group, rows = trained
    plain, masked = rows(), {row.episode.episode_id: row for row in rows(overlong="mask")}
    cut = {each.episode_id: {turn.index for turn in each.turns if turn.finish.type == "length"} for each in group}
    assert any(cut.values())
    for row in plain:
        stays = (row.loss_mask() == 1) & ~np.isin(row.branch.turn_ids, list(cut[row.episode.episode_id]))
        if stays.any():
            other = masked[row.episode.episode_id]
            assert other.loss_mask().tolist() == stays.astype(int).tolist()
            assert other.branch is row.branch
            expected_advantages = np.where(stays, row.on_tokens(row.advantages), 0.0)
            assert other.columns()["advantages"].tolist() == expected_advantages.tolist()
        else:
            assert row.episode.episode_id not in masked

    for row, before in zip(rows(overlong={"margin": 3, "coefficient": 0.5}), plain, strict=True):
        sizes = np.bincount(row.branch.turn_ids[row.loss_mask() == 1])
        costs = -0.5 * np.maximum(sizes - 3, 0) / 3
        np.testing.assert_allclose(row.episode.turn_rewards, before.episode.turn_rewards + costs)


@needs_plugin("critic")
async def test_rows_that_a_critic_values_after_the_cut(trained: tuple[list[Trajectory], Rows]) -> None:
    group, rows = trained
    for bootstrap, expected in ((["assistant_turns", "user_turns"], True), (["episode_seconds"], False)):
        found = rows(critic={"kind": "probe", "bootstrap": bootstrap})
        ended = {each.episode_id: each.outcome.limit for each in group}
        assert [row.credit.cut for row in found] == [
            expected and ended[row.episode.episode_id] is not None for row in found
        ]
        assert all(not row.advantages.any() for row in found)
        assert all(row.credit.members[row.episode.episode_id].ledger.turns == 2 for row in found)
