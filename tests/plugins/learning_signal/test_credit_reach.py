"""Rewards that change no advantage are counted, and named in a warning."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from installed_plugins import needs_plugin
from structlog.testing import capture_logs
from training_rows import row_of
from trainings import begin_training, metric_lines

from engine.plugins.learning_signal import signal as learning_signal
from engine.plugins.learning_signal.signal import reach_of
from engine.rewards.credit import Member
from engine.rewards.ledger import Ledger
from engine.rewards.sealed import TurnPart
from engine.schemas.credit import read_credit
from engine.schemas.reward import PartAddress, RewardEvent
from engine.spec.load import load_spec


def _located(turn: int, part: PartAddress) -> TurnPart:
    start, end = part.tokens or (0, 1)
    return TurnPart(start=start, end=end)


PARTS: Any = SimpleNamespace(locate=_located)


def member(*events: dict[str, Any], sizes: tuple[int, ...] = (4, 4)) -> Member:
    ledger = Ledger()
    for event in events:
        read = RewardEvent.model_validate(event)
        ledger.post(read, len(sizes) - 1, PARTS)
    ends = [sum(sizes[: turn + 1]) for turn in range(len(sizes))]
    return Member(ledger=ledger.seal(len(sizes)), ends=ends)


def reach(monkeypatch: pytest.MonkeyPatch, credit: dict[str, Any], *members: Member) -> learning_signal.CreditReach:
    """Of one group whose episodes have these ledgers."""
    monkeypatch.setattr(learning_signal, "member_of", lambda trajectory: trajectory.member)
    episodes = [
        SimpleNamespace(episode_id=str(number), outcome=SimpleNamespace(trainable=True), turns=[1], member=of)
        for number, of in enumerate(members)
    ]
    group: Any = SimpleNamespace(
        trajectories=episodes,
        rows=[row_of(input_ids=[1], loss_mask=[0], episode_id=one.episode_id) for one in episodes],
    )
    return reach_of(read_credit(credit), [group], None)


@needs_plugin("credit_methods")
def test_rewards_that_a_method_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    one = member({"turn": 1, "name": "right", "value": 1.0}, {"turn": 1, "name": "polite", "value": 0.5})
    found = reach(monkeypatch, {"method": "mt_grpo", "outcome": ["right"]}, one, member())
    assert found.metrics() == {
        "credit/turn_advantage": 4.0,  # 1 on both turns of one episode, -1 on those of the other
        "credit/token_advantage": 4.0,
        "credit/cancelled_rewards": 0.0,
        "credit/unplaced_rewards": 1.0,
        "credit/unplaced_sum": 0.5,
    }
    assert found.unplaced() == "1 of `polite` in the last turn"
    assert reach(monkeypatch, {"method": "mt_grpo"}, one, member()).unplaced() == ""


def test_a_turn_without_tokens_keeps_its_advantage(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = member({"turn": 1, "value": 1.0}, sizes=(4, 0)), member(sizes=(4, 0))
    found = reach(monkeypatch, {"method": "turn_return", "gamma": 0.0}, one, other)
    told = found.metrics()
    assert (told["credit/turn_advantage"], told["credit/token_advantage"]) == (2.0, 0.0)
    assert (told["credit/unplaced_rewards"], told["credit/unplaced_sum"]) == (1.0, 1.0)
    assert reach(monkeypatch, {"method": "turn_return"}, one, other).unplaced() == ""  # the first turn has it


def test_rewards_that_cancel_each_other_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    signs = ({"name": "a", "value": 1.0}, {"name": "b", "value": -0.75})
    whole = member(*({"turn": 0, **event} for event in signs))
    parts = member(*({"turn": 0, "part": {"tokens": [at, at + 1]}, **event} for at, event in enumerate(signs)))
    assert reach(monkeypatch, {"method": "turn_return"}, whole, member()).metrics()["credit/cancelled_rewards"] == 1.5
    assert reach(monkeypatch, {"method": "turn_return"}, parts, member()).metrics()["credit/cancelled_rewards"] == 0.0


def test_a_method_without_group_places_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    one = member({"turn": 0, "value": 1.0})
    found = reach(monkeypatch, {"method": "outcome", "baseline": "mean"}, one)
    assert found.unplaced() == "1 of `reward` in earlier turns"


@needs_plugin("credit_methods")
async def test_a_training_warns_of_rewards_that_reach_no_token(train_spec: Any, tmp_path: Path) -> None:
    spec = train_spec(
        train={"steps": 1, "tasks_per_step": 1, "dynamic_sampling": False},
        rewards={"credit": {"method": "mt_grpo", "outcome": ["nothing"], "weight": 0}},
    )
    loaded = load_spec(spec)
    trainer = begin_training(loaded, tmp_path / "runs")
    with capture_logs() as logs:
        await trainer.run()
    (line,) = metric_lines(trainer.folder)
    assert line["credit/unplaced_rewards"] > 0
    warned = [entry for entry in logs if entry["event"] == "rewards reach no token"]
    assert [(entry["log_level"], entry["step"]) for entry in warned] == [("warning", 1)]
