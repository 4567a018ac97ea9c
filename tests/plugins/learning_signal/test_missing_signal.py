"""A training that cannot learn says so after three steps, and says why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from installed_plugins import needs_plugin
from training_rows import row_of

from engine.plugins.learning_signal.signal import LearningSignal
from engine.runner.batch import Batch, Group
from engine.schemas.credit import read_credit
from engine.schemas.generation import FinishReason
from engine.schemas.train import TrainSpec
from engine.schemas.trajectory import Failure, Outcome, Trajectory, Turn

STOP = FinishReason(type="stop")


def batch(
    advantages: Sequence[float], event: str = "answered", rewards: Sequence[float] = (0.0, 0.0), **more: Any
) -> Batch:
    rows = [row_of(input_ids=[1, 2], loss_mask=[0, 1], advantages=[0.0, value]) for value in advantages]
    episodes = [
        Trajectory(
            run_id="r", episode_id=f"t/{number}", task_id="t", sample_index=number, seed=0, history="branch",
            messages=[], outcome=Outcome(state="DONE", event="answered", reward=reward, **more), branches=[],
            turns=[Turn(index=0, branch=0, start=0, end=4, finish=STOP, event=event, rewards={"reward": reward})],
        )
        for number, reward in enumerate(rewards)
    ]  # fmt: skip
    return Batch(0, used=[Group(0, "t0", 0, episodes, rows)])


def train(**keys: Any) -> TrainSpec:
    return TrainSpec.model_validate({"steps": 5, **keys})


def signal_of(spec: TrainSpec) -> LearningSignal:
    return LearningSignal(spec, read_credit({"method": "turn_return"}), None)


NOTHING, SOMETHING = batch([0.0, 0.0]), batch([0.0, 0.5])


def test_the_third_step_in_a_row_warns_and_one_with_a_signal_begins_anew() -> None:
    missing = signal_of(train())
    steps = [NOTHING, NOTHING, SOMETHING, NOTHING, NOTHING, NOTHING, NOTHING]
    warned = [missing.add(each) for each in steps]
    assert [each is not None for each in warned] == [False, False, False, False, False, True, False]
    assert str(warned[5]).startswith("3 steps in a row had no learning signal: every episode has the reward 0.000, so")
    assert str(missing.close()).startswith(
        "6 of 7 steps had no learning signal: every episode has the reward 0.000, so"
    )


def test_few_steps_without_a_signal_are_not_repeated_at_the_end() -> None:
    missing = signal_of(train())
    for each in (NOTHING, NOTHING, SOMETHING, SOMETHING):
        assert missing.add(each) is None
    assert missing.close() is None


def test_advantages_that_whitening_makes_equal_are_no_signal() -> None:
    equal = batch([0.5, 0.5], rewards=(0.5, 0.5))
    for norm, signal in (("none", True), ("batch", False)):
        missing = signal_of(train(advantage_norm=norm))
        for _ in range(3):
            missing.add(equal)
        assert (missing.close() is None) is signal, norm


@needs_plugin("critic")
def test_with_a_critic_equal_rewards_of_all_turns_are_no_signal() -> None:
    critic = train(critic={"kind": "probe"})
    for rewards, signal in (((1.0, 1.0), False), ((1.0, 0.0), True)):
        missing, step = signal_of(critic), batch([0.3, -0.3], rewards=rewards)
        for _ in range(3):
            missing.add(step)
        assert (missing.close() is None) is signal


FAILURE = Failure(kind="user_error", blame="user", state="A", message="no desk")


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (batch([0, 0], rewards=(0.0, 1.0)), "the episodes of each of the 1 groups have equal rewards, so no reply is"),
        (batch([0, 0], event="truncated"), "and 2 of 2 replies were cut by a limit of tokens; raise `limits.turn"),
        (batch([0, 0], event="malformed"), "and 2 of 2 replies were malformed; check `model.tool_calls`"),
        (batch([0, 0], failure=FAILURE), "2 of 2 episodes failed: 2 user_error (user); correct that first"),
    ],
    ids=["equal", "cut", "malformed", "failed"],
)  # fmt: skip
def test_it_says_why(step: Batch, words: str) -> None:
    missing = signal_of(train())
    for _ in range(3):
        warning = missing.add(step)
    assert words in str(warning)
