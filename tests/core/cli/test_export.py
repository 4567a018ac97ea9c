"""`engine export` writes rows where it says."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import typer
from journals import write_result
from typer.testing import CliRunner, Result

from engine.cli.export import export
from engine.schemas.environment import Task
from engine.schemas.generation import FinishReason
from engine.schemas.reward import Posting
from engine.schemas.trajectory import Branch, Outcome, Span, Trajectory, Turn
from engine.store import RunHeader, RunStore

RUN = "demo-20260101-000000-abcd"


def episode(sample: int, reward: float, trainable: bool = True) -> Trajectory:
    """One turn of two tokens after a prompt of one."""
    branch = Branch.read(
        {
            "index": 0,
            "spans": [Span(kind="prompt", start=0, end=1), Span(kind="generated", start=1, end=3, turn=0)],
            "input_ids": [5, 6, 7],
            "loss_mask": [0, 1, 1],
            "logprobs": [0, -0.5, -0.25],
            "weight_versions": [-1, 0, 0],
            "turn_ids": [-1, 0, 0],
        }
    )
    return Trajectory(
        run_id=RUN,
        episode_id=f"t/{sample}",
        task_id="t",
        sample_index=sample,
        seed=1,
        history="branch",
        outcome=Outcome(state="DONE", event="answered", reward=reward, trainable=trainable),
        messages=[],
        turns=[Turn(index=0, branch=0, start=1, end=3, finish=FinishReason(type="stop"), event="answered")],
        branches=[branch],
        postings=[Posting(seq=0, turn=0, name="reward", delta=reward, after=reward, at_turn=0, op="add")],
    )


async def fill(out: Path, *, whole: bool) -> None:
    credit = {"method": "outcome", "baseline": "mean", "scale": "none"}
    header = RunHeader(run_id=RUN, name="demo", created=0.0, engine_version="0", spec={"rewards": {"credit": credit}})
    with RunStore.create(out, header) as store:
        for sample, (reward, trainable) in enumerate([(1.0, True), (0.0, True), (9.0, False)]):
            begun = await store.begin(Task(id="t", index=0, fields={}), sample)
            await write_result(begun, episode(sample, reward, trainable))
        if not whole:
            begun = await store.begin(Task(id="t", index=0, fields={}), 3)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with the run above, all done."""
    asyncio.run(fill(tmp_path / "runs", whole=True))
    return tmp_path / "runs"


def call(runs: Path, *words: str) -> Result:
    app = typer.Typer()
    app.command()(export)
    return CliRunner().invoke(app, [*words, "--runs", str(runs)])


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_it_writes_jsonl_into_the_runs_folder_with_the_specs_credit(runs: Path) -> None:
    result = call(runs, "latest")
    assert (result.exit_code, result.output) == (0, f"3 rows: {runs / RUN / 'rows.jsonl'}\n")
    rows = read(runs / RUN / "rows.jsonl")
    assert [row["trainable"] for row in rows] == [True, True, False]
    assert [row["advantages"] for row in rows] == [[0.0, 0.5, 0.5], [0.0, -0.5, -0.5], None]
    assert [row["token_rewards"] for row in rows] == [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 9.0]]


def test_the_files_ending_says_the_format(runs: Path, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rows.parquet"
    assert call(runs, "demo", "--out", str(path), "--trainable-only").output == f"2 rows: {path}\n"
    table = pq.read_table(path)
    assert np.array(table["advantages"].to_pylist()).tolist() == [[0.0, 0.5, 0.5], [0.0, -0.5, -0.5]]
    assert table.schema.metadata[b"episode_engine.run_id"].decode() == RUN
    assert json.loads(table.schema.metadata[b"episode_engine.credit"])["scale"] == "none"
    other = tmp_path / "rows.data"
    assert call(runs, "demo", "--format", "parquet", "--out", str(other)).exit_code == 0
    assert pq.read_metadata(other).num_rows == 3


def test_another_credit_is_taken_from_the_command_line(runs: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert call(runs, "demo", "--out", str(path), "--credit", "baseline=none").exit_code == 0
    assert [row["advantages"] for row in read(path)] == [[0.0, 1.0, 1.0], [0.0, 0.0, 0.0], None]


def test_groups_that_are_not_whole_are_told(tmp_path: Path) -> None:
    asyncio.run(fill(tmp_path, whole=False))
    assert call(tmp_path, "demo").output.splitlines()[1] == (
        "1 tasks have episodes that are not done: their advantages are computed from the episodes that are done"
    )


def test_a_filter_leaves_out_rows_and_changes_no_advantage(runs: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    result = call(runs, "demo", "--out", str(path), "--filter", "outcome.reward < 1.0")
    assert result.output == f"1 rows: {path}\n"
    assert [row["advantages"] for row in read(path)] == [[0.0, -0.5, -0.5]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--credit", "methd=outcome"], "--credit methd: Extra inputs are not permitted (keys: method, "),
        (["demo", "--credit", "gamma"], "--credit gamma: write KEY=VALUE, such as method=turn_return"),
        (["other"], "no run `other` in "),
        (["demo", "--filter", "outcome.solvd"], "--filter `outcome.solvd`, column 9: "),
    ],
)
def test_what_cannot_be_done_is_said_and_exits_with_2(runs: Path, arguments: list[str], message: str) -> None:
    result = call(runs, *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(message)
