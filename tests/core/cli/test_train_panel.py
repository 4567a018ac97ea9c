"""The live table of a training run."""

from __future__ import annotations

import io
import math

from rich.console import Console

from engine.api.train_panel import TrainPanel, shown, spark
from engine.runner.counters import RunCounters

VALUES = {
    "reward/mean": 0.5, "reward/turn/1": -0.25, "reward/turn/0": 0.75, "eval/reward": 0.625, "loss": 0.0123,
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


def test_a_step_is_one_line_where_there_is_no_terminal() -> None:
    console = Console(file=io.StringIO(), width=20, force_terminal=False)
    panel = TrainPanel(steps=10)
    with shown(panel, console):
        panel.update(3, VALUES)
        panel.update(4, {"reward/mean": 1.0})
    panel.update(5, VALUES)
    assert console.file.getvalue() == (  # type: ignore[attr-defined]
        "step 3/10 · 1 min 24 s left · reward 0.500 · eval reward 0.625 · loss 0.0123 · KL 0.00031 · entropy 1.250 · "
        "sampler/trainer log-prob gap 2e-06 · staleness 0.5 · tokens/s 812 · rollout 9.0s update 3.0s\n"
        "step 4/10 · 1 min 12 s left · reward 1.000\n"
    )


def test_quiet_shows_nothing() -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    panel = TrainPanel(steps=10)
    with shown(panel, console, quiet=True):
        panel.update(1, VALUES)
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


def test_on_a_terminal_it_is_drawn_live() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    panel = TrainPanel(steps=10)
    with shown(panel, console):
        panel.update(7, VALUES)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "step 7/10" in text
    assert panel.printer is None


def test_a_step_without_an_update_and_one_that_sampled_more_groups_say_so() -> None:
    panel = TrainPanel(4)
    panel.update(1, {"groups/used": 8.0, "groups/sampled": 8.0, "updates": 1.0})
    assert panel.line() == "step 1/4"
    panel.update(2, {"groups/used": 2.0, "groups/sampled": 32.0, "updates": 1.0})
    assert panel.line() == "step 2/4 · 2 of 32 sampled groups have a signal"
    panel.update(3, {"groups/used": 0.0, "groups/sampled": 32.0, "updates": 0.0})
    assert panel.line() == "step 3/4 · 0 of 32 sampled groups have a signal · no update: no group has a signal"
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(panel)
    assert "no update: no group has a signal" in console.export_text()
