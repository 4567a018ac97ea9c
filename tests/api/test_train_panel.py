"""The live table of a training run."""

from __future__ import annotations

import io
import math

from rich.console import Console

from engine.api.progress import ConsoleProgress, TrainPanel, spark
from engine.runner.counters import RunCounters

VALUES = {
    "reward/mean": 0.5, "episode/solved": 0.41, "cut": 0.12, "groups/equal": 3.0, "groups/sampled": 8.0,
    "reward/turn/1": -0.25, "reward/turn/0": 0.75, "eval/reward": 0.625, "loss": 0.0123,
    "policy/approx_kl": 0.00031, "policy/entropy": 1.25, "sampler/diff_mean": 2e-6, "staleness/mean": 0.5,
    "tokens_per_second": 812.4, "time/rollout": 9.0, "time/update": 3.0,
}  # fmt: skip


def rendered(panel: TrainPanel) -> list[str]:
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    console.print(panel)
    file = console.file
    assert isinstance(file, io.StringIO)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_a_spark_runs_from_the_least_to_the_greatest() -> None:
    assert spark([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == "▁▂▃▄▅▆▇█"
    assert spark([3.0, 3.0]) == "▁▁"
    assert spark([0.0, math.nan, 1.0]) == "▁ █"
    assert spark([math.nan]) == " "
    assert spark([9.0, 0.0, 1.0], width=2) == "▁█"
    assert spark([]) == ""


def test_a_step_is_one_line_that_fits_a_terminal() -> None:
    panel = TrainPanel(steps=10)
    panel.update(3, VALUES)
    assert panel.step_line() == "step 3/10 · reward 0.500 · solved 41% · no signal 3/8 · cut 12% · eval 0.625"
    panel.update(4, {"reward/mean": 1.0, "episode/solved": 1.0, "groups/equal": 0.0, "tokens_per_second": 812.4})
    assert panel.step_line() == "step 4/10 · reward 1.000 · solved 100% · 1 min left · tokens/s 812"
    panel.update(5, {"loss": 0.0123, "credit/unplaced_rewards": 3.0, "credit/unplaced_sum": 1.5})
    assert panel.step_line() == "step 5/10 · WARNING: 3 rewards reach no token · loss 0.0123 · 1 min left"
    panel.update(10, {"reward/mean": 1.0, "groups/equal": 8.0, "groups/sampled": 8.0, "updates": 0.0})
    assert panel.step_line() == "step 10/10 · reward 1.000 · no signal 8/8 · no update"
    longest = {name: value * 1000 for name, value in VALUES.items()} | {"credit/unplaced_rewards": 1e9}
    panel.update(10, longest)
    assert len(panel.step_line()) <= 80


def test_quiet_shows_nothing() -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    progress, panel = ConsoleProgress(console, quiet=True), TrainPanel(steps=10)
    with progress.watching(panel):
        panel.update(1, VALUES)
        progress.step(panel.step_line())
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]


def test_the_table_has_every_part() -> None:
    live = RunCounters(total=8)
    live.states.update({"GENERATING": 3, "AWAITING_TOOL": 1, "DONE": 0})
    panel = TrainPanel(steps=10, live=live)
    panel.phase("update")
    panel.update(1, {"reward/mean": 0.25})
    panel.update(2, VALUES)
    head, *rows = rendered(panel)
    assert "step 2/10  update" in head
    assert rows == [
        "reward      0.500  ▁█",
        "by turn     0 +0.750  1 -0.250",
        "evaluation  reward 0.625",
        "policy      KL 0.00031  entropy 1.25",
        "sampler     mean log-prob gap 2e-06  mean staleness 0.5",
        "batch       solved 41%  no signal 3/8",
        "episodes    GENERATING 3  AWAITING_TOOL 1  0.0 turns/s  812 tokens/s",
        "time        rollout 9.0 s (75%)  update 3.0 s (25%)",
    ]


def test_before_the_first_step_there_is_a_table_too() -> None:
    head, *rows = rendered(TrainPanel(steps=10))
    assert "step 0/10" in head
    assert rows == ["reward    –", "episodes  –"]


def test_the_last_evaluation_stays_in_sight() -> None:
    panel = TrainPanel(steps=10)
    panel.update(1, {"eval/reward": 0.5})
    panel.update(2, {"reward/mean": 0.5})
    assert "evaluation  reward 0.500" in rendered(panel)


def test_on_a_terminal_it_is_drawn_live_below_the_lines_of_its_steps() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    progress, panel = ConsoleProgress(console), TrainPanel(steps=10)
    with progress.watching(panel):
        panel.update(7, VALUES)
        progress.step(panel.step_line())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "step 7/10 · reward 0.500" in text
    assert "mean log-prob gap 2e-06" in text
