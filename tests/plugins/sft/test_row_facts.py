"""The facts of rows are the same from one process, from two and from disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slow_cases import slow_but

from engine.plugins.sft.row_facts import facts_of, open_rows


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; jobs of one row each."""
    monkeypatch.setenv("EPISODE_ENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("engine.plugins.sft.row_facts.PART_BYTES", 1)
    return tmp_path / "cache"


@pytest.mark.parametrize("suffix", slow_but([".jsonl", ".parquet"], ".parquet"))
def test_facts_of_rows(tmp_path: Path, cache: Path, jobs_done: list[str], suffix: str) -> None:
    random = np.random.default_rng(0)
    rows = [_row(number, random.integers(0, 1000, 5 + number).tolist()) for number in range(7)]
    path = tmp_path / f"rows{suffix}"
    _write(path, rows)
    kept = []
    for number, (count, done) in enumerate(((1, 7), (2, 0), (2, 7), (1, 0))):
        if number == 2:
            shutil.rmtree(cache)
        jobs_done.clear()
        kept.append(list(facts_of(path, open_rows(path), count, alone=0.0)))
        assert len(jobs_done) == done
    assert kept[1:] == kept[:1] * 3
    for place, (facts, row) in enumerate(zip(kept[0], rows, strict=True)):
        assert (facts.number, facts.run, facts.episode) == (place + 1, "run", f"e{place}")
        assert (facts.tokens, facts.largest_id) == (len(row["input_ids"]), max(row["input_ids"]))
        assert (facts.trained, facts.trainable) == (sum(row["loss_mask"]), bool(row["trainable"]))
        assert (facts.reward, facts.rewards) == (row["outcome"]["reward"], {"a": 0.5, "b": float(place)})
        assert facts.images == [f"sha256:{place}"]
    assert len({facts.identity for facts in kept[0]}) == 7
    _write(path, [*rows[:3], _row(3, [1, 2, 3]), *rows[4:]])
    assert [facts.tokens for facts in facts_of(path, open_rows(path), 1)] == [5, 6, 7, 3, 9, 10, 11]


def _row(number: int, ids: list[int]) -> dict[str, Any]:
    mask = [0, *([1] * (len(ids) - 1))]
    rewards = [{"name": "a", "value": 0.5}, {"name": "b", "value": float(number)}, {"name": "a", "value": 9.0}]
    return {
        "run_id": "run",
        "task_id": "t",
        "episode_id": f"e{number}",
        "branch": 0,
        "trainable": number != 2,
        "input_ids": ids,
        "loss_mask": mask,
        "turn_ids": mask,
        "outcome": {"reward": None if number == 4 else number / 3, "rewards": rewards},
        "images": [{"image": f"sha256:{number}", "start": 0, "end": 1}],
    }


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
