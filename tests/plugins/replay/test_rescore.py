"""Rescoring: other rules and another credit on stored episodes, the old result kept beside."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from slow_cases import slow_but

from engine.errors import StoreError
from engine.plugins.replay.rescore import Rescored, rescore
from engine.runner.replay import first_difference
from engine.schemas.trajectory import Trajectory
from engine.spec.load import load_spec
from engine.store import RunStore
from engine.store.rows.export import export_rows

FIRST = {"at": "AWAITING_USER_FEEDBACK", "op": "transfer", "turn": "last", "to": "previous", "share": 0.5}
SOLVED = {**FIRST, "when": "feedback.solved"}
PAY = {"at": "AWAITING_USER_FEEDBACK", "op": "add", "turn": "last", "name": "talk", "value": 2.0}


async def again(ran: Any, path: Path, label: str = "new", **options: Any) -> Rescored:
    with RunStore.open(ran.store.folder) as store:
        return await rescore(store, load_spec(path), ran.template, label, **options)


def same(some: Iterable[Trajectory], others: Iterable[Trajectory]) -> bool:
    return [first_difference(one, other) for one, other in zip(some, others, strict=True)] == [None] * len(list(others))


@pytest.fixture
async def ran(make_spec: Callable[..., Path], run_spec: Callable[..., Any]) -> Any:
    """Two episodes: wrong, then right; rewards -0.1 and 1.0 by name, nothing moved."""
    spec = make_spec(["It is 41.", "It is 42."], rollout={"samples_per_task": 2})
    return await run_spec(spec)


async def test_the_same_rewards_give_the_same_result(ran: Any, make_spec: Callable[..., Path]) -> None:
    spec = make_spec(["other replies"], name="spec", rollout={"samples_per_task": 2})
    result = await again(ran, spec)
    assert (result.episodes, result.changed, result.failures.total()) == (2, [], 0)
    assert same(list(ran.store.trajectories("new")), list(ran.store.trajectories()))


async def test_other_rules_are_kept_beside_the_old_result(ran: Any, make_spec: Callable[..., Path]) -> None:
    old = list(ran.store.trajectories())
    spec = make_spec([], rewards={"reassign": [SOLVED, PAY], "credit": {"method": "outcome", "scale": "none"}})
    result = await again(ran, spec)
    assert (result.episodes, result.failures.total()) == (2, 0)
    assert result.changed == [(name, pytest.approx(0.9), pytest.approx(4.9)) for name in ("a/0", "a/1")]
    assert (result.before, result.after) == (pytest.approx(1.8), pytest.approx(1.8 + 2 * 4.0))
    new = ran.store.trajectory("a/0", "new")
    assert [turn.rewards for turn in old[0].turns] == [{"reward": -0.1}, {"correct": 1.0}]
    assert [turn.rewards for turn in new.turns] == [
        {"reward": -0.1, "talk": 2.0, "correct": 0.5},
        {"correct": 0.5, "talk": 2.0},
    ]
    assert new.outcome.rewards == {"reward": -0.1, "talk": 4.0, "correct": 1.0}
    assert [posting.source for posting in new.postings] == ["user", "rule:1", "user", "rule:0", "rule:0", "rule:1"]
    for name in ("messages", "path", "counts", "seed"):
        assert getattr(new, name) == getattr(old[0], name)
    assert [branch.input_ids.tolist() for branch in new.branches] == [b.input_ids.tolist() for b in old[0].branches]
    assert same(ran.store.trajectories(), old)
    assert [row.reward for row in ran.store.episodes("new")] == [pytest.approx(4.9)] * 2
    assert [row.reward for row in ran.store.episodes()] == [pytest.approx(0.9)] * 2


async def test_rows_are_exported_by_the_scores_rewards_and_credit(ran: Any, make_spec: Callable[..., Path]) -> None:
    credit = {"method": "turn_discount", "gamma": 0.5, "baseline": "none", "scale": "none"}
    await again(ran, make_spec([], rewards={"reassign": [SOLVED], "credit": credit, "placement": "spread"}))
    row = next(iter(export_rows(ran.store, score="new")))
    assert row["turn_rewards"].tolist() == pytest.approx([0.4, 0.5])
    for turn, (reward, advantage) in enumerate([(0.4, 0.65), (0.5, 0.5)]):
        tokens = row["turn_ids"] == turn
        assert row["token_rewards"][tokens] == pytest.approx([reward / tokens.sum()] * tokens.sum(), rel=1e-6)
        assert row["advantages"][tokens] == pytest.approx([advantage] * tokens.sum(), rel=1e-6)
    assert next(iter(export_rows(ran.store)))["turn_rewards"].tolist() == pytest.approx([-0.1, 1.0])


async def test_a_rule_that_cannot_be_carried_out_fails_that_score_alone(
    ran: Any, make_spec: Callable[..., Path]
) -> None:
    result = await again(ran, make_spec([], rewards={"reassign": [FIRST]}))
    assert result.failures == {"ledger_error": 2}
    scored = ran.store.trajectory("a/1", "new")
    failure = scored.outcome.failure
    assert failure is not None
    assert (failure.kind, failure.blame, failure.turn) == ("ledger_error", "spec", 0)
    assert failure.message.startswith(
        "rewards.reassign[0] at AWAITING_USER_FEEDBACK: rule:0: there is no turn `previous`"
    )
    assert (scored.outcome.trainable, scored.outcome.reward, scored.postings) == (False, 0.0, [])
    assert [turn.rewards for turn in scored.turns] == [{}, {}]
    assert [row["trainable"] for row in export_rows(ran.store, score="new")] == [False, False]
    assert [row["trainable"] for row in export_rows(ran.store)] == [True, True]


async def test_rules_that_would_have_led_elsewhere_say_so(
    make_spec: Callable[..., Path], run_spec: Callable[..., Any]
) -> None:
    stop = {
        "trigger": "feedback",
        "source": "AWAITING_USER_FEEDBACK",
        "dest": "DONE",
        "conditions": "rewards.total > 1.0",
    }
    machine = {"preset": "tools_and_user", "transitions": [stop]}
    ran = await run_spec(make_spec(["It is 41.", "It is 42."], machine=machine))
    result = await again(ran, make_spec([], machine=machine, rewards={"reassign": [PAY]}))
    assert result.failures == {"other_path": 1}
    assert result.examples["other_path"].startswith(
        "a/0: a/0: step 2 led from AWAITING_USER_FEEDBACK by `feedback` to GENERATING; now"
    )


async def test_a_spec_of_other_episodes_is_refused_with_each_place(ran: Any, make_spec: Callable[..., Path]) -> None:
    changed = {"limits": {"user_turns": 2}, "prompt": [{"role": "user", "content": "What is 1 plus 1?"}]}
    with pytest.raises(StoreError) as caught:
        await again(ran, make_spec([], **changed))
    assert str(caught.value).splitlines()[1:] == [
        "  prompt[0].content: 'What is 17 plus 25?' in the run, 'What is 1 plus 1?' in the spec",
        "  limits.user_turns: 8 in the run, 2 in the spec",
    ]
    assert ran.store.scores() == []


async def test_a_label_is_taken_once_unless_it_is_replaced(ran: Any, make_spec: Callable[..., Path]) -> None:
    spec = make_spec([], rewards={"reassign": [PAY]})
    await again(ran, spec)
    with pytest.raises(StoreError, match="there is a score `new` already; give this one another --label, or --replace"):
        await again(ran, spec)
    await again(ran, make_spec([]), replace_label=True)
    await again(ran, spec, "other")
    assert [head.label for head in ran.store.scores()] == ["new", "other"]
    assert same([ran.store.trajectory("a/0", "new")], [ran.store.trajectory("a/0")])
    with pytest.raises(StoreError, match="has no score `third`: it has new, other"):
        ran.store.trajectory("a/0", "third")


async def test_states_are_written_down_by_rescoring(
    make_spec: Callable[..., Path], run_spec: Callable[..., Any]
) -> None:
    gigpo = {"method": "gigpo", "scale": "none", "state_key": "tries"}
    ran = await run_spec(make_spec(["It is 40.", "It is 41.", "It is 42."]))
    assert [turn.state_key for turn in ran.only.turns] == [None, None, None]
    await again(ran, make_spec([], rewards={"credit": gigpo}))
    assert [turn.state_key for turn in ran.store.trajectory("a/0", "new").turns] == ["", "1", "2"]
    await again(ran, make_spec([], rewards={"credit": gigpo | {"state_key": "[turns.user, facts.size()]"}}), "cel")
    assert [turn.state_key for turn in ran.store.trajectory("a/0", "cel").turns] == ["[0,0]", "[1,1]", "[2,1]"]
    await again(ran, make_spec([], rewards={"credit": {"method": "gigpo"}}), "seen")
    seen = [turn.state_key for turn in ran.store.trajectory("a/0", "seen").turns]
    assert len(set(seen)) == 3
    assert '"Not It is 41.. Again."' in str(seen[2])


@pytest.mark.parametrize("version", slow_but([1, 2, 3, 4, 5], 1, 5))
async def test_a_run_of_an_older_store_version_is_refused_by_name_and_not_changed(ran: Any, version: int) -> None:
    file = ran.store.folder / "run.db"
    with sqlite3.connect(file) as connection:
        connection.executescript(f"PRAGMA user_version = {version}; PRAGMA wal_checkpoint(TRUNCATE);")
    before = file.read_bytes()
    words = f"{file} has store version {version}, and this engine reads versions 6 and 7: use the engine that wrote it"
    for readonly in (True, False):
        with pytest.raises(StoreError, match=re.escape(words)):
            RunStore.open(ran.store.folder, readonly=readonly)
    assert file.read_bytes() == before
