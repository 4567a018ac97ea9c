"""Metrics in the tools that show them: written by us, read back with their own readers."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tracked import TrackedMetrics

from engine.plugins.report.spec import TrackingSpec

CONFIG = {"name": "arithmetic", "train": {"steps": 3, "loss": {"kind": "grpo"}}}


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    log = TrackedMetrics(tmp_path, ["tensorboard"], CONFIG)
    log.write(1, {"reward/mean": 0.25, "loss": 2.0})
    assert scalars(tmp_path, "reward/mean") == [(1, 0.25)]  # there without closing
    log.write(2, {"reward/mean": 0.5})
    log.close()
    assert scalars(tmp_path, "reward/mean") == [(1, 0.25), (2, 0.5)]
    assert scalars(tmp_path, "loss") == [(1, 2.0)]


def test_tensorboard_forgets_the_steps_that_were_cut(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    log = TrackedMetrics(tmp_path, ["tensorboard"])
    for step in (1, 2, 3):
        log.write(step, {"loss": float(step)})
    log.close()
    resumed = TrackedMetrics(tmp_path, ["tensorboard"])
    resumed.truncate(1)
    resumed.write(2, {"loss": 8.0})
    resumed.close()
    assert scalars(tmp_path, "loss") == [(1, 1.0), (2, 8.0)]


@pytest.mark.slow
def test_trackio_has_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    write = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from pathlib import Path\n"
        "from engine.plugins.report.spec import TrackingSpec; from tracked import TrackedMetrics\n"
        "step = int(sys.argv[2])\n"
        "log = TrackedMetrics(Path(sys.argv[1]), ['trackio'], {'steps': 3}, TrackingSpec(name='run'))\n"
        "log.write(step, {'reward/mean': step / 4, 'loss': float('nan')}); log.close()\n"
    )
    for step in ("1", "2"):  # the second goes on with the same run
        subprocess.run([sys.executable, "-c", write, str(tmp_path), step], check=True, timeout=120)
    read = (
        "from trackio.sqlite_storage import SQLiteStorage as S\n"
        "print([(row['step'], row['reward/mean']) for row in S.get_logs('episode-engine', 'run')])\n"
    )
    told = subprocess.run([sys.executable, "-c", read], check=True, capture_output=True, text=True, timeout=120)
    assert told.stdout.strip().splitlines()[-1] == "[(1, 0.25), (2, 0.5)]"


def leveldb_records(data: bytes, start: int) -> Iterator[bytes]:
    """The records of a log in LevelDB's format, blocks of 32 KiB, after `start` bytes of its own header."""
    at, record = 0, b""
    while at < len(data):
        room = 32768 - (at + start) % 32768
        if room < 7:
            at += room
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)  # after the checksum
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


@pytest.mark.slow
def test_wandb_has_the_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracking = TrackingSpec(project="sums", name="first", group="seeds", tags=["a", "b"])
    log = TrackedMetrics(tmp_path, ["wandb"], CONFIG, tracking)
    log.write(1, {"reward/mean": 0.25, "eval/pass@4": 0.5})
    log.write(2, {"reward/mean": 0.5})
    log.close()
    name = (tmp_path / "wandb_run").read_text().strip()
    (file,) = (tmp_path / "wandb").glob(f"offline-run-*/run-{name}.wandb")

    from wandb.proto import wandb_internal_pb2 as proto

    rows, runs = [], []
    for data in leveldb_records(file.read_bytes()[7:], start=7):
        record = proto.Record()
        record.ParseFromString(data)
        if record.HasField("run"):
            runs.append((record.run.project, record.run.display_name, record.run.run_group, tuple(record.run.tags)))
        if record.HasField("history"):
            items = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
            rows.append({key: value for key, value in items.items() if not key.startswith("_")})
    assert rows == [{"step": 1, "reward/mean": 0.25, "eval/pass@4": 0.5}, {"step": 2, "reward/mean": 0.5}]
    assert set(runs) == {("sums", "first", "seeds", ("a", "b"))}


@pytest.mark.slow
def test_mlflow_has_the_run_and_goes_on_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "tests")
    for step in (1, 2):
        log = TrackedMetrics(tmp_path, ["mlflow"], CONFIG)
        log.write(step, {"reward/mean": step / 4, "eval/pass@4": 0.5})
        log.close()
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("tests")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params == {"name": "arithmetic", "train.steps": "3", "train.loss.kind": "grpo"}
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "reward/mean")] == [
        (1, 0.25),
        (2, 0.5),
    ]
    assert run.data.metrics["eval/pass_4"] == 0.5
