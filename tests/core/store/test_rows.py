"""Training rows, worked out by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from journals import write_result

from engine.errors import StoreError
from engine.schemas.credit import OutcomeCredit, TurnReturnCredit
from engine.schemas.message import ImagePart, Message, TextPart
from engine.schemas.reward import Posting
from engine.schemas.trajectory import Failure, Outcome
from engine.store import RunStore
from engine.store.rows.columns import outcome_columns
from engine.store.rows.export import export_rows, write_jsonl, write_parquet

OUTCOME = OutcomeCredit(baseline="mean", scale="none")


def earning(maker: Any, sample: int, reward: float, **changes: Any) -> Any:
    """One turn, one branch, one reward."""
    posting = Posting(seq=0, turn=0, name="reward", delta=reward, after=reward, at_turn=0, op="add")
    return maker.trajectory(0, sample, branches=1, postings=[posting], **changes)


async def keep(store: RunStore, maker: Any, *trajectories: Any) -> None:
    for trajectory in trajectories:
        begun = await store.begin(maker.task(int(trajectory.task_id[1:])), trajectory.sample_index)
        await write_result(begun, trajectory)


async def test_a_branch_is_a_row_with_its_arrays_as_stored(store: RunStore, maker: Any) -> None:
    trajectory = maker.trajectory(3, 1)
    await keep(store, maker, trajectory)
    first, second = export_rows(store)
    for row, branch in zip((first, second), trajectory.branches, strict=True):
        for name in ("input_ids", "loss_mask", "logprobs", "weight_versions", "turn_ids"):
            assert row[name].dtype == getattr(branch, name).dtype
            assert row[name].tolist() == getattr(branch, name).tolist()
        assert (row["branch"], row["trainable"]) == (branch.index, True)
    ids = ("run_id", "task_id", "episode_id", "sample_index", "seed")
    assert [first[name] for name in ids] == ["run-20260101-000000-abcd", "t3", "t3/1", 1, 2**62 + 1]
    assert first["turn_ids"].tolist() == [-1, -1, -1, -1, 0, 0, 0, 0, 0, -1]
    assert second["turn_ids"].tolist() == [-1, -1, -1, -1, 1, 1, 1, 1, 1, -1]
    assert first["token_rewards"].tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 0.5, 0]
    assert second["token_rewards"].tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 0.5, 0]
    assert first["turn_rewards"].tolist() == second["turn_rewards"].tolist() == [0.5, 0.5]
    assert first["outcome"] == outcome_columns(trajectory.outcome)
    nothing = {"parts": None, "reasoning": None, "tool_calls": [], "tool_call_id": None, "name": None}
    assert first["messages"] == [
        nothing | {"role": "user", "content": "3 + 1?"},
        nothing
        | {
            "role": "assistant",
            "content": "let me see",
            "tool_calls": [{"id": "c", "name": "add", "arguments": '{"a":1}'}],
        },
        nothing | {"role": "tool", "content": "4", "tool_call_id": "c", "name": "add"},
        nothing | {"role": "assistant", "content": "4"},
    ]


async def test_advantages_are_against_the_group_on_every_sampled_token(store: RunStore, maker: Any) -> None:
    await keep(store, maker, earning(maker, 0, 1.0), earning(maker, 1, 0.0), earning(maker, 2, 0.5))
    rows = list(export_rows(store, credit=OUTCOME))
    assert [row["advantages"].tolist() for row in rows] == [
        [0, 0, 0, 0, value, value, value, value, value, 0] for value in (0.5, -0.5, 0.0)
    ]


async def test_the_uses_of_a_task_in_a_training_are_groups_of_their_own(store: RunStore, maker: Any) -> None:
    """`t0` and `t0~1` have one position in the source, and their episodes begin in any order."""
    for use, sample, reward in (("", 0, 1.0), ("~1", 0, 5.0), ("", 1, 0.0), ("~1", 1, 7.0)):
        name = f"t0{use}"
        made = earning(maker, sample, reward, task_id=name, episode_id=f"{name}/{sample}")
        begun = await store.begin(maker.task(0).model_copy(update={"id": name}), sample)
        await write_result(begun, made)
    rows = [
        (row["episode_id"], row["advantages"].max(), row["advantages"].min())
        for row in export_rows(store, credit=OUTCOME)
    ]
    assert rows == [("t0/0", 0.5, 0.0), ("t0/1", 0.0, -0.5), ("t0~1/0", 0.0, -1.0), ("t0~1/1", 1.0, 0.0)]


async def test_another_credit_needs_no_new_run(store: RunStore, maker: Any) -> None:
    await keep(store, maker, maker.trajectory(0, 0))
    returns = TurnReturnCredit(gamma=0.5, baseline="none", scale="none")
    first, second = export_rows(store, credit=returns)
    assert first["advantages"].tolist() == [0, 0, 0, 0] + [0.75] * 5 + [0]
    assert second["advantages"].tolist() == [0, 0, 0, 0] + [0.5] * 5 + [0]


async def test_what_does_not_train_is_no_baseline_and_has_no_advantage(store: RunStore, maker: Any) -> None:
    failed = Outcome(
        state="DONE", event="failed", trainable=False, failure=Failure(kind="user_error", blame="user", message="m")
    )
    await keep(store, maker, earning(maker, 0, 1.0), earning(maker, 1, 100.0, outcome=failed), earning(maker, 2, 0.0))
    rows = list(export_rows(store, credit=OUTCOME))
    assert [row["trainable"] for row in rows] == [True, False, True]
    assert rows[1]["advantages"] is None
    assert [rows[number]["advantages"][4] for number in (0, 2)] == [0.5, -0.5]
    assert [row["sample_index"] for row in export_rows(store, credit=OUTCOME, trainable_only=True)] == [0, 2]


async def test_groups_are_by_task(store: RunStore, maker: Any) -> None:
    trajectories = [maker.trajectory(index, sample, branches=1) for index in (1, 0) for sample in (1, 0)]
    await keep(store, maker, *trajectories)
    rows = list(export_rows(store, credit=OUTCOME))
    assert [row["episode_id"] for row in rows] == ["t0/0", "t0/1", "t1/0", "t1/1"]
    assert [row["advantages"].tolist() for row in rows] == [[0.0] * 10] * 4


async def test_jsonl_gives_every_float_back(store: RunStore, maker: Any, tmp_path: Path) -> None:
    trajectory = maker.trajectory(0, 0)
    await keep(store, maker, trajectory)
    path = tmp_path / "deep" / "rows.jsonl"
    assert write_jsonl(export_rows(store, credit=OUTCOME), path) == 2
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert list(rows[0]) == [
        "run_id", "task_id", "episode_id", "task_index", "sample_index", "branch", "seed", "trainable", "input_ids", "loss_mask",
        "logprobs", "weight_versions", "turn_ids", "token_rewards", "advantages", "unchecked_prompts", "turn_rewards", "outcome", "messages",
        "images", "routed_experts", "task_fields", "facts", "metadata",
    ]  # fmt: skip
    for row, branch in zip(rows, trajectory.branches, strict=True):
        assert np.array(row["logprobs"], np.float32).tobytes() == branch.logprobs.tobytes()
        assert row["input_ids"] == branch.input_ids.tolist()
        assert len({len(row[name]) for name in list(row)[8:15]}) == 1
    assert [entry.name for entry in path.parent.iterdir()] == ["rows.jsonl"]


async def test_parquet_says_what_jsonl_says(store: RunStore, maker: Any, tmp_path: Path) -> None:
    image = ImagePart(image="sha256:00", mime="image/png", width=3, height=4)
    seen = [Message(role="user", content=[TextPart(text="look "), image, TextPart(text="here")])]
    failed = Outcome(
        state="DONE", event="failed", trainable=False, failure=Failure(kind="k", blame="user", message="m")
    )
    await keep(
        store,
        maker,
        maker.trajectory(0, 0),
        maker.trajectory(1, 0, messages=seen),
        earning(maker, 1, 1.0, outcome=failed),
    )
    assert write_parquet(export_rows(store), tmp_path / "rows.parquet", {"key": "value"}) == 5
    write_jsonl(export_rows(store), tmp_path / "rows.jsonl")
    table = pq.read_table(tmp_path / "rows.parquet")
    assert table.schema.metadata[b"key"] == b"value"
    rows = table.to_pylist()
    for row, expected in zip(rows, map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines()), strict=True):
        for name in expected:
            if name in ("logprobs", "token_rewards", "advantages"):
                got = None if row[name] is None else np.array(row[name], np.float32).tolist()
                want = None if expected[name] is None else np.array(expected[name], np.float32).tolist()
                assert got == want
            else:
                assert row[name] == expected[name]
    assert [row["task_id"] for row in rows] == ["t0", "t0", "t0", "t1", "t1"]
    call = rows[0]["messages"][1]
    assert (call["content"], call["parts"]) == ("let me see", None)
    assert call["tool_calls"] == [{"id": "c", "name": "add", "arguments": '{"a":1}'}]
    shown = rows[3]["messages"][0]
    assert shown["content"] == "look here"
    assert [part["type"] for part in shown["parts"]] == ["text", "image", "text"]
    assert (shown["parts"][1]["image"], shown["parts"][1]["width"]) == ("sha256:00", 3)


async def test_parquet_keeps_nan_and_jsonl_says_null(store: RunStore, maker: Any, tmp_path: Path) -> None:
    trajectory = maker.trajectory(0, 0, branches=1)
    branch = trajectory.branches[0]
    logprobs = branch.logprobs.copy()
    logprobs[4:6] = math.nan, -math.inf
    await keep(store, maker, replace(trajectory, branches=[replace(branch, logprobs=logprobs)]))
    write_parquet(export_rows(store), tmp_path / "rows.parquet")
    got = pq.read_table(tmp_path / "rows.parquet")["logprobs"].to_pylist()[0]
    assert math.isnan(got[4])
    assert got[5] == -math.inf
    write_jsonl(export_rows(store), tmp_path / "rows.jsonl")
    assert json.loads((tmp_path / "rows.jsonl").read_text())["logprobs"][4:6] == [None, None]


async def test_parquet_is_written_in_row_groups(
    store: RunStore, maker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.store.rows.export.GROUP_ROWS", 3)
    await keep(store, maker, *(maker.trajectory(index, 0, branches=1) for index in range(8)))
    assert write_parquet(export_rows(store), tmp_path / "rows.parquet") == 8
    metadata = pq.read_metadata(tmp_path / "rows.parquet")
    assert [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)] == [3, 3, 2]


async def test_a_failed_export_leaves_no_file(store: RunStore, maker: Any, tmp_path: Path) -> None:
    def rows() -> Any:
        yield {"input_ids": np.arange(3)}
        raise StoreError("the run is damaged")

    target = tmp_path / "out"
    with pytest.raises(StoreError, match="the run is damaged"):
        write_jsonl(rows(), target / "rows.jsonl")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write"):
        write_jsonl(iter(()), tmp_path / "file" / "rows.jsonl")
    assert list(target.iterdir()) == []
