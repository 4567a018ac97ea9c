"""Exported files open in pandas, polars, DuckDB and Hugging Face datasets, with the same values in each."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from installed_plugins import needs_plugin
from journals import write_result
from rows_page import rows_page
from slow_cases import slow_after

from engine.schemas.message import ImagePart, Message, TextPart, ToolCall
from engine.schemas.reward import Posting
from engine.schemas.trajectory import Failure, Outcome
from engine.store import RunStore
from engine.store.loader import read_rows
from engine.store.rows.columns import MEANINGS
from engine.store.rows.export import export_rows, write_jsonl, write_parquet

CALL = ToolCall(id="c", name="add", arguments={"a": 1, "deep": {"x": [1.5, None, "é"]}})


@pytest.fixture
async def files(store: RunStore, maker: Any, tmp_path: Path) -> dict[str, Path]:
    """The same rows twice: two names of rewards and none, a failure, calls, an image, and text that looks like markup."""
    spoken = [
        Message(role="user", content=[TextPart(text="look "), ImagePart(image="sha256:00", width=3, height=4)]),
        Message(role="assistant", content="\x00\x1b[2J \u202e", reasoning="hm", tool_calls=[CALL, CALL]),
        Message(role="tool", content="2", tool_call_id="c", name="add"),
    ]
    failed = Failure(kind="k", blame="user", message="m")
    outcomes = [
        Outcome(state="DONE", event="answered", reward=1.5, rewards={"reward": 1.0, "näme": 0.5}, solved=True),
        Outcome(state="DONE", event="failed", trainable=False, failure=failed),
    ]
    posting = Posting(seq=0, turn=0, name="reward", delta=1.0, after=1.0, at_turn=0, op="add")
    for index, (outcome, messages) in enumerate(zip(outcomes, (spoken, []), strict=True)):
        trajectory = maker.trajectory(index, 0, outcome=outcome, messages=messages, facts={"tries": [1, {"a": None}]})
        begun = await store.begin(maker.task(index), 0)
        await write_result(begun, replace(trajectory, postings=[posting]))
    found = {"jsonl": tmp_path / "rows.jsonl", "parquet": tmp_path / "rows.parquet"}
    assert write_jsonl(export_rows(store), found["jsonl"]) == write_parquet(export_rows(store), found["parquet"])
    return found


def plain(value: Any) -> Any:
    """NumPy's values as Python's, with float32 as its shortest digits."""
    if isinstance(value, np.ndarray):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and value != value else value


def by_pandas(path: Path) -> Any:
    import pandas

    return pandas.read_parquet(path).to_dict("records")


def by_polars(path: Path) -> Any:
    import polars

    return polars.read_parquet(path).to_dicts()


def by_duckdb(path: Path) -> Any:
    import duckdb

    table = duckdb.sql(f"SELECT * FROM '{path}'")
    return [dict(zip(table.columns, row, strict=True)) for row in table.fetchall()]


def by_datasets(path: Path) -> Any:
    import datasets

    datasets.disable_progress_bars()
    cache = str(path.parent / "cache")
    return datasets.load_dataset("parquet", data_files=str(path), split="train", cache_dir=cache).to_list()


@pytest.mark.parametrize("read", slow_after(3, [by_pandas, by_polars, by_duckdb, by_datasets]))
async def test_parquet_opens_with_the_values_of_jsonl(read: Any, files: dict[str, Path]) -> None:
    expected = [json.loads(line) for line in files["jsonl"].read_text().splitlines()]
    rows = plain(read(files["parquet"]))
    assert len(rows) == len(expected)
    for row, want in zip(rows, expected, strict=True):
        assert list(row) == list(want)
        for name in want:
            if name in ("logprobs", "token_rewards", "advantages") and want[name] is not None:
                assert np.array(row[name], np.float32).tolist() == np.array(want[name], np.float32).tolist()
            else:
                assert row[name] == want[name], name


async def test_polars_and_datasets_open_jsonl_too(files: dict[str, Path]) -> None:
    import datasets
    import polars

    expected = [json.loads(line)["outcome"] for line in files["jsonl"].read_text().splitlines()]
    cache = str(files["jsonl"].parent / "cache")
    table = datasets.load_dataset("json", data_files=str(files["jsonl"]), split="train", cache_dir=cache)
    assert [row["rewards"] for row in table["outcome"]] == [outcome["rewards"] for outcome in expected]
    assert [row["rewards"] for row in polars.read_ndjson(files["jsonl"])["outcome"]] == [
        outcome["rewards"] for outcome in expected
    ]


async def test_a_row_holds_its_task_its_facts_and_where_it_comes_from(files: dict[str, Path], maker: Any) -> None:
    first = json.loads(files["jsonl"].read_text().splitlines()[0])
    assert (first["task_index"], json.loads(first["task_fields"])) == (0, maker.task(0).fields)
    assert json.loads(first["facts"]) == {"tries": [1, {"a": None}]}
    assert (first["metadata"]["spec"], first["metadata"]["score"]) == ("run", None)
    assert json.loads(first["metadata"]["credit"])["method"] == "turn_return"
    assert first["outcome"]["rewards"] == [{"name": "reward", "value": 1.0}, {"name": "näme", "value": 0.5}]
    (call, _) = first["messages"][1]["tool_calls"]
    assert json.loads(call["arguments"]) == CALL.arguments


async def test_both_formats_are_read_back_alike(files: dict[str, Path]) -> None:
    for one, other in zip(read_rows(files["jsonl"]), read_rows(files["parquet"]), strict=True):
        for name, value in one.items():
            assert np.array_equal(value, other[name]) if isinstance(value, np.ndarray) else value == other[name]


@needs_plugin("datasets")  # whose columns are on the page too
def test_every_column_is_on_the_page() -> None:
    page = rows_page()
    assert all(f"| `{name}` |" in page for name in MEANINGS)
