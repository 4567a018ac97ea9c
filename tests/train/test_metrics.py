"""The metrics file: what is written is there, whatever happens next."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import StoreError, TrainError
from engine.plugins.report import trackers as sinks
from engine.schemas.train import TrackingSpec
from engine.train.metrics import CUT, MetricsLog, read_metrics, series


def ticking(start: int = 100) -> Callable[[], float]:
    """A clock that moves on by one second each time."""
    seconds = count(start)
    return lambda: float(next(seconds))


def written(folder: Path, *steps: int) -> MetricsLog:
    log = MetricsLog(folder, clock=ticking())
    for step in steps:
        log.write(step, {"loss": step / 2})
    return log


def test_a_step_is_one_line_with_step_and_time_before_the_values(tmp_path: Path) -> None:
    written(tmp_path, 1, 2).close()
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 1, "time": 100.0, "loss": 0.5}\n{"step": 2, "time": 101.0, "loss": 1.0}\n'
    )


def test_what_is_no_number_is_null_and_nan_again(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, clock=ticking())
    log.write(1, {"loss": math.nan, "grad_norm": math.inf, "lr": 1e-6})
    log.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "step": 1, "time": 100.0, "loss": None, "grad_norm": None, "lr": 1e-6,
    }  # fmt: skip
    (line,) = read_metrics(tmp_path)
    assert math.isnan(line["loss"])
    assert math.isnan(line["grad_norm"])


def test_a_metric_cannot_take_the_lines_own_names(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    with pytest.raises(ValueError, match="cannot be named 'time'"):
        log.write(1, {"time": 3.0})
    log.close()


def test_a_broken_last_line_is_left_out_and_cut_off_when_the_log_goes_on(tmp_path: Path) -> None:
    written(tmp_path, 1).close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "ti')
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]
    written(tmp_path, 2).close()
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_broken_line_before_the_last_is_named(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(StoreError, match=r"metrics\.jsonl:2 is not a line of metrics"):
        read_metrics(tmp_path)


def test_no_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"metrics\.jsonl cannot be read: No such file"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_what_is_cut_on_resuming_is_kept_beside_it(tmp_path: Path) -> None:
    log = written(tmp_path, 1, 2, 3)
    assert log.truncate(1) == 2
    log.write(2, {"loss": 7.0})
    assert log.truncate(2) == 0
    log.close()
    assert [(line["step"], line["loss"]) for line in read_metrics(tmp_path)] == [(1, 0.5), (2, 7.0)]
    assert [(line["step"], line["loss"]) for line in read_metrics(tmp_path / CUT)] == [(2, 1.0), (3, 1.5)]


@given(steps=st.lists(st.integers(0, 20), max_size=12), cut=st.integers(-1, 21))
def test_a_cut_loses_no_line(tmp_path_factory: pytest.TempPathFactory, steps: list[int], cut: int) -> None:
    folder = tmp_path_factory.mktemp("cut")
    log = written(folder, *sorted(steps))
    gone = log.truncate(cut)
    log.close()
    kept = [line["step"] for line in read_metrics(folder)]
    aside = [line["step"] for line in read_metrics(folder / CUT)] if gone else []
    assert kept == [step for step in sorted(steps) if step <= cut]
    assert kept + aside == sorted(steps)


def test_what_write_returned_from_survives_a_kill(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from engine.train.metrics import MetricsLog\n"
        "log = MetricsLog(Path(sys.argv[1])); step = 0\n"
        "while True:\n    step += 1; log.write(step, {'loss': step}); print(step, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen = [int(process.stdout.readline()) for _ in range(20)]
        os.kill(process.pid, signal.SIGKILL)
        seen += [int(line) for line in process.stdout if line.endswith("\n")]
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines[: len(seen)]] == seen
    assert len(lines) - len(seen) in (0, 1)  # one was written and not yet told of


def test_of_two_values_at_a_step_the_last_counts() -> None:
    rows = [{"step": 1, "loss": 4.0}, {"step": 2, "kl": 1.0}, {"step": 1, "loss": 5.0}, {"step": 3, "loss": 6.0}]
    assert series(rows, "loss") == ([1, 3], [5.0, 6.0])


def test_a_package_that_is_not_there_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(TrainError, match=r"pip install 'episode-engine\[trackio\]', or leave it out") as caught:
        MetricsLog(tmp_path, ["trackio"])
    assert caught.value.kind == "train_setup"


def test_an_unknown_sink_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="unknown tracker 'neptune'; write one of tensorboard, trackio, wandb, mlflow"):
        MetricsLog(tmp_path, ["neptune"])


def test_a_sink_that_fails_does_not_end_the_training(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    log = MetricsLog(tmp_path, ["tensorboard"], clock=ticking())
    sink = log._sinks["tensorboard"]
    sink.close()
    sink._writer = None  # type: ignore[attr-defined]
    log.write(1, {"loss": 0.5})
    log.write(2, {"loss": 0.5})
    log.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


class Tracker:
    """Keeps what it was sent, by run."""

    runs: ClassVar[dict[str, list[tuple[int, float]]]] = {}
    told: ClassVar[list[TrackingSpec]] = []
    buffers = False
    can_remove = False

    def __init__(self, folder: Path, run: str, config: object, tracking: TrackingSpec) -> None:
        self.told.append(tracking)
        self.shown = self.runs.setdefault(run, [])

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.shown.append((step, values["loss"]))

    def truncate(self, step: int) -> bool:
        if self.can_remove:
            self.shown[:] = [point for point in self.shown if point[0] <= step]
        return self.can_remove

    def close(self) -> None:
        pass


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> type[Tracker]:
    made = type("Made", (Tracker,), {"runs": {}, "told": []})
    monkeypatch.setitem(sinks._SINKS, "made", made)
    return made


def killed_after(folder: Path, *steps: int, shown: int) -> None:
    """A training that wrote lines of these steps and was killed when the tracker had the first `shown` of them."""
    log = MetricsLog(folder, ["made"], "run")
    for number, step in enumerate(steps):
        if number == shown:
            log._sinks.clear()
        log.write(step, {"loss": float(step)})
    os.close(log._file)


def test_a_line_that_a_kill_kept_from_a_tracker_is_sent_by_the_next_process(
    tmp_path: Path, tracker: type[Tracker]
) -> None:
    killed_after(tmp_path, 1, 2, 3, shown=2)
    assert tracker.runs == {"run": [(1, 1.0), (2, 2.0)]}
    log = MetricsLog(tmp_path, ["made"], "run")
    log.truncate(3)
    log.write(4, {"loss": 4.0})
    log.close()
    assert tracker.runs == {"run": [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]}


@pytest.mark.parametrize("can_remove", [True, False])
def test_a_tracker_never_shows_two_values_of_a_step(can_remove: bool, tmp_path: Path, tracker: type[Tracker]) -> None:
    tracker.can_remove = can_remove
    killed_after(tmp_path, 1, 2, 3, shown=3)
    for value in (20.0, 30.0):
        log = MetricsLog(tmp_path, ["made"], "run")
        log.truncate(1)
        log.write(2, {"loss": value})
        log.close()
    first = [(1, 1.0), (2, 2.0), (3, 3.0)]
    others = {"run": first, "run-2": [(1, 1.0), (2, 20.0)], "run-3": [(1, 1.0), (2, 30.0)]}
    assert tracker.runs == ({"run": [(1, 1.0), (2, 30.0)]} if can_remove else others)


def test_what_a_tracker_may_have_held_in_a_buffer_is_sent_again(tmp_path: Path, tracker: type[Tracker]) -> None:
    tracker.buffers = True
    killed_after(tmp_path, 1, 2, shown=2)
    for shown in (
        [(1, 1.0), (2, 2.0), (2, 2.0)],
        [(1, 1.0), (2, 2.0), (2, 2.0)],
    ):  # the second time it was closed in order
        log = MetricsLog(tmp_path, ["made"], "run")
        log.truncate(2)
        log.close()
        assert tracker.runs == {"run": shown}


def test_a_tracker_is_given_the_names_of_the_spec(tmp_path: Path, tracker: type[Tracker]) -> None:
    wanted = TrackingSpec(project="sums", name="first", group="g", tags=["a"])
    log = MetricsLog(tmp_path, ["made"], "run", {}, wanted)
    log.write(1, {"loss": 1.0})
    log.write(2, {"loss": 2.0})
    log.truncate(1)  # a tracker that cannot remove values gets another run, with the same names
    log.close()
    assert tracker.told == [wanted, wanted]
    assert tracker.runs == {"first": [(1, 1.0), (2, 2.0)], "first-2": [(1, 1.0)]}
