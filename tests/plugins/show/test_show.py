"""`engine show` tells a run and its episodes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import typer
from journals import write_entries, write_result
from typer.testing import CliRunner, Result

from engine.plugins.show.command import show
from engine.plugins.show.episode_report import move_lines
from engine.rewards.ledger import Ledger
from engine.schemas.environment import Reset, Task, UserTurn
from engine.schemas.generation import FinishReason, Generation
from engine.schemas.journal import GenerationRecord, JournalEntry, Record, ResetRecord, UserRecord
from engine.schemas.message import Message, ToolCall
from engine.schemas.reward import Posting, RewardEvent
from engine.schemas.trajectory import Failure, Outcome, Trajectory, Turn
from engine.store import RunHeader, RunStore

RUN = "demo-20260101-000000-abcd"


def turn(index: int, event: str, rewards: dict[str, float]) -> Turn:
    """A turn of five tokens."""
    return Turn(
        index=index,
        branch=0,
        start=4,
        end=9,
        finish=FinishReason(type="stop"),
        event=event,
        rewards=rewards,
        seconds=0.5,
    )


def episode(sample: int, outcome: Outcome) -> Trajectory:
    """An example, then two turns; the user moved part of the second turn's reward to the first."""
    posting = {"name": "reward", "at_turn": 1}
    return Trajectory(
        run_id=RUN,
        episode_id=f"sum/{sample}",
        task_id="sum",
        sample_index=sample,
        seed=42,
        history="branch",
        outcome=outcome,
        messages=[
            Message(role="system", content="Be [bold]brief[/bold]."),
            Message(role="user", content="an example"),
            Message(role="assistant", content="its answer"),
            Message(role="user", content="17 + 25?"),
            Message(role="assistant", tool_calls=[ToolCall(id="c", name="add", arguments={"a": 17, "b": 25})]),
            Message(role="tool", content="42", tool_call_id="c", name="add"),
            Message(role="assistant", content="It is 42.", reasoning="the tool said so"),
        ],
        turns=[turn(0, "tool_calls", {"reward": 0.3}), turn(1, "answered", {"reward": 0.7, "format": 0.1})],
        branches=[],
        postings=[
            Posting(seq=0, turn=1, delta=1.0, after=1.0, op="add", cause="right answer", source="user", **posting),
            Posting(seq=1, turn=1, delta=-0.3, after=0.7, op="transfer", cause="good call", source="rule:0", **posting),
            Posting(seq=2, turn=0, delta=0.3, after=0.3, op="transfer", cause="good call", source="rule:0", **posting),
        ],
        path=[("PENDING", "ready", "GENERATING"), ("GENERATING", "answered", "DONE")],
    )


async def fill(out: Path) -> None:
    """Two episodes that are done and one that is not."""
    header = RunHeader(run_id=RUN, name="demo", created=0.0, engine_version="0", spec={})
    task = Task(id="sum", index=0, fields={})
    failure = Failure(kind="user_error", blame="user", message="it hung", state="AWAITING_USER", turn=1, trace="Trace")
    with RunStore.create(out, header) as store:
        begun = await store.begin(task, 0)
        await write_result(
            begun,
            episode(0, Outcome(state="DONE", event="satisfied", solved=True, reward=1.1, rewards={"reward": 1.0})),
        )
        begun = await store.begin(task, 1)
        await write_result(begun, episode(1, Outcome(state="DONE", event="failed", failure=failure, trainable=False)))
        begun = await store.begin(task, 2)
        records: list[tuple[str, str, str, Record]] = [
            ("PENDING", "ready", "GENERATING", ResetRecord(reset=Reset(messages=[Message(role="user", content="q")]))),
            (
                "GENERATING",
                "answered",
                "AWAITING_USER",
                GenerationRecord(
                    generation=Generation.read(
                        {"output_ids": [1, 2], "logprobs": [0, 0], "finish": FinishReason(type="length")}
                    )
                ),
            ),
            ("AWAITING_USER", "feedback", "GENERATING", UserRecord(turn=UserTurn(content="Not\nright.", solved=True))),
        ]
        for seq, (state, event, dest, record) in enumerate(records):
            await write_entries(
                begun, JournalEntry(seq=seq, state=state, event=event, dest=dest, record=record, at=0.0, seconds=1.25)
            )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run above."""
    out = tmp_path_factory.mktemp("runs")
    asyncio.run(fill(out))
    return out


def call(out: Path, *words: str) -> Result:
    app = typer.Typer()
    app.command()(show)
    return CliRunner().invoke(app, [*words, "--out", str(out)], env={"COLUMNS": "150", "TERM": "dumb"})


def words(output: str) -> list[str]:
    return [" ".join(line.split()) for line in output.splitlines() if line.strip()]


def test_without_an_episode_it_is_a_table_of_all(runs: Path) -> None:
    result = call(runs, "latest")
    assert result.exit_code == 0, result.output
    shown = [line for line in words(result.output) if "──" not in line]
    assert shown[0] == f"{RUN} · interrupted · {runs / RUN}"
    assert shown[1] == "episode status ended turns tokens reward seconds"
    assert [line.rpartition(" ")[0] for line in shown[2:4]] == [
        "sum/0 done solved 2 10 +1.100",
        "sum/1 done failed: user_error (user) 2 10 +0.000",
    ]
    assert shown[4:] == [
        "sum/2 broken off GENERATING 1 2",
        "2 of 3 episodes done · mean reward 0.550 · 1 solved · 1 failed",
        "1 × user_error (user): it hung",
        f"To show one: engine show {RUN} sum/1",
    ]


def test_the_table_may_be_cut_or_narrowed(runs: Path) -> None:
    assert "… and 2 more: --limit 3 shows them" in call(runs, "demo", "--limit", "1").output
    rows = [line.split()[0] for line in words(call(runs, "demo", "--failed").output) if line.startswith("sum/")]
    assert rows == ["sum/1"]


def test_an_episode_is_told_with_its_rewards_and_who_moved_them(runs: Path) -> None:
    result = call(runs, RUN, "sum/0")
    assert result.exit_code == 0, result.output
    assert [line for line in words(result.output) if "──" not in line] == [
        "sum/0 · solved · reward +1.100 · 2 turns · 10 sampled tokens · 0 training rows · trainable · seed 42",
        "system",
        "Be [bold]brief[/bold].",
        "user",
        "an example",
        "assistant",
        "its answer",
        "user",
        "17 + 25?",
        "assistant · turn 0 · 5 tokens · tool_calls · 0.50 s · reward +0.300",
        "→ add(a=17, b=25)",
        "tool add",
        "42",
        "assistant · turn 1 · 5 tokens · answered · 0.50 s · format +0.100, reward +0.700",
        "the tool said so",
        "It is 42.",
        "⇄ reward +1.000 on turn 1 · user: right answer",
        "⇄ reward 0.300 moved from turn 1 to turn 0 · rule:0: good call",
        "Rewards",
        "# at turn turn reward did change holds by why",
        "0 1 1 reward add +1.000 1.000 user right answer",
        "1 1 1 reward transfer -0.300 0.700 rule:0 good call",
        "2 1 0 reward transfer +0.300 0.300 rule:0 good call",
        "Path: PENDING –ready→ GENERATING –answered→ DONE",
    ]


def test_a_failure_is_told_with_its_blame_and_trace(runs: Path) -> None:
    assert words(call(runs, RUN, "sum/1").output)[-4:] == [
        "Failed in AWAITING_USER at turn 1: user_error",
        "blame: user",
        "it hung",
        "Trace",
    ]


def test_an_episode_that_is_not_done_is_told_by_its_journal(runs: Path) -> None:
    lines = [line for line in words(call(runs, RUN, "sum/2").output) if "──" not in line]
    assert lines[:3] == ["sum/2 · broken off · 3 steps so far", "user", "q"]
    assert lines[3] == "assistant · turn 0 · 2 tokens · answered · 0.00 s · rewards are known at its end"
    at = lines.index("step state event to seconds what")
    assert lines[at - 2 : at] == ["Not", "right."]
    assert lines[at:] == [
        "step state event to seconds what",
        "0 PENDING ready GENERATING 1.25 1 message",
        "1 GENERATING answered AWAITING_USER 1.25 2 tokens, length",
        "2 AWAITING_USER feedback GENERATING 1.25 solved; Not right.",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "sum"], "task `sum` has 3 episodes: sum/0, sum/1, sum/2; name one"),
        (["demo", "other"], f"{RUN} has no episode `other`; `engine show {RUN}` lists them"),
        (["demi"], "no run `demi` in OUT; give a run's folder, its id, or `latest`"),
    ],
)
def test_what_is_not_there_is_said_and_exits_with_2(runs: Path, arguments: list[str], message: str) -> None:
    result = call(runs, *arguments)
    assert result.exit_code == 2
    assert result.stderr.replace(str(runs), "OUT") == message + "\n"


def test_what_moved_is_told_where_it_moved() -> None:
    ledger = Ledger()
    ledger.post(RewardEvent(value=1.0, source="tool:add", cause="used"), 0)
    ledger.post(RewardEvent(name="correct", value=2.0, source="user", cause="right"), 2)
    ledger.post(RewardEvent(turn="last", op="transfer", to="all", share=0.5, source="rule:0", cause="shared"), 2)
    ledger.post(RewardEvent(turn=0, op="set", value=0.25, source="score"), 2)
    assert move_lines(ledger.seal(3).postings) == {
        0: ["reward +1.000 on turn 0 · tool:add: used"],
        2: [
            "correct +2.000 on turn 2 · user: right",
            "correct 0.333 moved from turn 2 to turn 0 · rule:0: shared",
            "correct 0.333 moved from turn 2 to turn 1 · rule:0: shared",
            "reward set to 0.250 on turn 0 · score",
        ],
    }
