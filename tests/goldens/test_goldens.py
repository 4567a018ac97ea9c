"""Goldens: the recorded files equal what the engine writes, and a difference is reported with its place (`golden_kit`)."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from golden_kit import HERE, HINTS, ROOT, Record, check, committed, differences, first_difference, goldens, written
from old_runs import SPECS, count, unpack_run
from slow_cases import slow_but

NAMES = list(goldens())
LARGEST = 2_000_000
"""Bytes of all old runs."""


@pytest.mark.parametrize("name", slow_but(NAMES, "condensed", "failed", "transfer", "qwen3-tools"))
def test_what_is_written_down_is_what_comes_out(name: str) -> None:
    _, found, _ = check(name)
    assert not found, "\n".join(found)


def changed(place: str, change: Callable[[Any], Any]) -> Callable[[Record], None]:
    """Changes one value of a record, at a path such as `turns.0.reward`."""

    def plant(record: Record) -> None:
        *path, last = [int(key) if key.isdigit() else key for key in place.split("/")]
        value: Any = record
        for key in path:
            value = value[key]
        value[last] = change(value[last])

    return plant


FAULTS: dict[str, tuple[str, str, str, Callable[[Any], Any]]] = {
    "an id": ("transfer", "row a/0 branch 0", "input_ids/3", lambda number: number + 1),
    "a log-prob": ("transfer", "row a/0 branch 0", "logprobs/1/0", lambda number: number + 1e-7),
    "a mask": ("condensed", "row a/0 branch 1", "loss_mask/0/1", lambda number: number - 1),
    "an id of a stored branch": ("qwen3-thinking", "branch a/0 1", "input_ids/3", lambda number: number + 1),
    "a journal's payload": ("agent", "journal a/0 attempt 0 entry 2", "payload/kind", lambda text: text + " "),
    "a trajectory's field": (
        "failed",
        "trajectory user/0",
        "trajectory/outcome/failure/kind",
        lambda text: "tool_error",
    ),
    "a number that was whole": ("resumed", "episode a/0", "turns", float),
    "a loss": ("training", "batch of step 3", "metrics/loss", lambda number: number + 1e-4),
    "a column of an adapter": ("adapters", "skyrl", "loss_masks/0/0", lambda pair: [1, 1]),
    "bytes of an image in a trainer's row": (
        "adapters-images",
        "slime",
        "multimodal_train_inputs/0/pixel_values/sha256",
        lambda text: text[::-1],
    ),
    "a row of an old run": (
        "old-run",
        "resumed export sum-0-0001/1 branch 0",
        "input_ids/0",
        lambda number: number + 1,
    ),
    "a line of help": ("help", "engine run", "help/1", lambda text: text + "."),
    "a rule's message": ("rules", "spec.unknown-key", "messages/0", lambda text: text.replace("unknown", "strange")),
    "a schema's type": ("schemas", "task", "type", lambda text: "array"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_change_is_told_with_golden_record_field_and_what_to_do(fault: str) -> None:
    name, at, place, change = FAULTS[fault]
    golden = goldens()[name]
    records = copy.deepcopy(committed(golden))
    (record,) = [record for record in records if record["at"] == at]
    changed(place, change)(record)
    told, hint = differences(golden, records)
    field = re.sub(r"\.(\d+)", r"[\1]", place.replace("/", "."))
    assert told.startswith(f"{golden.set}/{name}: {at}: {field}")
    assert ", now " in told
    assert hint == HINTS[golden.set]


def test_what_comes_out_again_has_no_difference_and_rounding_of_losses_is_none() -> None:
    for golden in goldens().values():
        assert list(differences(golden, committed(golden))) == []
    golden = goldens()["training"]
    records = committed(golden)
    records[0]["metrics"]["loss"] += 5e-6
    records[0]["metrics"]["policy/ratio_max"] += 5e-5
    assert list(differences(golden, records)) == []


def test_of_long_texts_the_place_of_the_difference_is_shown() -> None:
    golden = goldens()["transfer"]
    records = copy.deepcopy(committed(golden))
    long = "word " * 100
    records[0]["text"] = long + records[0]["text"]
    before = copy.deepcopy(records)
    records[0]["text"] = long + "!" + records[0]["text"][len(long) :]
    told = first_difference(before[0], records[0])
    assert told is not None
    assert told.startswith('text, character 425: "word word')
    assert "word !<|im_start|>user" in told


def test_records_that_are_missing_or_new_or_in_another_order_are_told() -> None:
    golden = goldens()["transfer"]
    first, *others = committed(golden)
    assert next(differences(golden, others)) == f"bytes/transfer: {first['at']}: is missing"
    assert "bytes/transfer: new: was not there" in differences(golden, [first, *others, {"at": "new"}])
    assert "bytes/transfer: the order of the records has changed" in differences(golden, [*others, first])


@pytest.mark.parametrize("name", ["condensed", "old-run"])
def test_bytes_and_old_runs_are_not_recorded_anew(name: str) -> None:
    from golden_kit import record

    before = goldens()[name].file.read_bytes()
    with pytest.raises(SystemExit, match="must not be recorded anew"):
        record([name])
    assert goldens()[name].file.read_bytes() == before


def test_there_is_a_golden_for_each_kind_of_episode() -> None:
    stored = {name: committed(golden) for name, golden in goldens().items() if golden.set == "bytes"}
    rows = [record for records in stored.values() for record in records if record["at"].startswith("row ")]
    assert {row["branch"] for row in rows} >= {0, 1, 2, 3}
    assert any(len(row["images"]) > 1 for row in rows)
    text = {name: written(records) for name, records in stored.items()}
    assert '"reason": "condensed: 2 blocks' in text["condensed"]
    assert '"reason": "subagent"' in text["agent"]
    assert '"op": "transfer"' in text["transfer"]
    assert '"failure": null' not in next(line for line in text["failed"].splitlines() if "trajectory user/0" in line)
    assert len([record for record in stored["training"] if record["at"].startswith("batch ")]) == 4


def test_goldens_tell_nothing_of_the_machine() -> None:
    for file in [file for file in HERE.rglob("*.jsonl") if file.is_file()]:
        text = file.read_text(encoding="utf-8")
        assert not re.search(
            rf"/tmp/|/root/|/home/|/work/|/usr/|site-packages|{re.escape(os.uname().nodename)}-", text
        ), file
        assert not re.search(r"-20\d{6}-\d{6}-[0-9a-f]{4}", text.replace("runs/sums-", "")), file


def test_old_runs_are_small_and_not_finished(tmp_path: Path) -> None:
    assert sum(file.stat().st_size for file in (HERE / "old").iterdir()) < LARGEST
    for name in SPECS:
        folder = tmp_path / name
        folder.mkdir()
        stores = [*unpack_run(name, folder).glob("run.db"), *folder.glob("runs/*/drivers/*/run.db")]
        assert sum(count(store, "status = 'done'") for store in stores) > 0, name
        assert sum(count(store, "status = 'running'") for store in stores) > 0, name


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_an_old_sharded_run_is_resumed_on_a_cluster(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install 'episode-engine[ray]'")
    run = unpack_run("sharded", tmp_path)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [ROOT, HERE])), "RAY_AUTH_MODE": "disabled"}
    for command in (["run", "--resume", run, "--quiet"], ["export", run, "--out", tmp_path / "rows.jsonl"]):
        ended = subprocess.run(
            [sys.executable, "-m", "engine.cli.main", *command],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = {row["episode_id"]: row for row in map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())}
    at = "resumed export "
    recorded = {
        record["episode_id"]: record
        for record in committed(goldens()["old-sharded"])
        if record["at"].startswith(at) and "input_ids" in record
    }
    assert len(recorded) == 8
    for episode, record in recorded.items():
        assert rows[episode]["input_ids"] == record["input_ids"]
