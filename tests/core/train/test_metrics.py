"""The metrics file: what is written is there, whatever happens next."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import StoreError
from engine.train.metrics import MetricsLog, read_metrics, series


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
    written(tmp_path, 1, 2)
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 1, "time": 100.0, "loss": 0.5}\n{"step": 2, "time": 101.0, "loss": 1.0}\n'
    )


def test_what_is_no_number_is_null_and_nan_again(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, clock=ticking())
    log.write(1, {"loss": math.nan, "grad_norm": math.inf, "lr": 1e-6})
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


def test_a_broken_last_line_is_left_out_and_cut_off_when_the_log_goes_on(tmp_path: Path) -> None:
    written(tmp_path, 1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "ti')
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]
    written(tmp_path, 2)
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_broken_line_before_the_last_is_named(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(StoreError, match=r"metrics\.jsonl:2 is damaged"):
        read_metrics(tmp_path)


def test_no_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"metrics\.jsonl cannot be read: No such file"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_what_is_cut_on_resuming_is_kept_beside_it(tmp_path: Path) -> None:
    log = written(tmp_path, 1, 2, 3)
    assert log.truncate(1) == 2
    log.write(2, {"loss": 7.0})
    assert log.truncate(2) == 0
    assert [(line["step"], line["loss"]) for line in read_metrics(tmp_path)] == [(1, 0.5), (2, 7.0)]
    assert [(line["step"], line["loss"]) for line in read_metrics(tmp_path / "metrics.cut.jsonl")] == [
        (2, 1.0),
        (3, 1.5),
    ]


@given(steps=st.lists(st.integers(0, 20), max_size=12), cut=st.integers(-1, 21))
def test_a_cut_loses_no_line(tmp_path_factory: pytest.TempPathFactory, steps: list[int], cut: int) -> None:
    folder = tmp_path_factory.mktemp("cut")
    log = written(folder, *sorted(steps))
    gone = log.truncate(cut)
    kept = [line["step"] for line in read_metrics(folder)]
    aside = [line["step"] for line in read_metrics(folder / "metrics.cut.jsonl")] if gone else []
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
