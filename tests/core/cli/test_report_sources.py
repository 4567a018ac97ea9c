"""The summary of a run on a mix of task sources."""

from __future__ import annotations

import io

from rich.console import Console

from engine.cli.run_report import print_summary
from engine.runner.summary import RunSummary
from engine.schemas.trajectory import Outcome, Trajectory


def ended(task_id: str, reward: float) -> Trajectory:
    outcome = Outcome(state="DONE", event="satisfied", solved=reward == 1, reward=reward)
    return Trajectory(
        run_id="r", episode_id=f"{task_id}/0", task_id=task_id, sample_index=0, seed=0, history="branch", outcome=outcome,
        messages=[], turns=[], branches=[],
    )  # fmt: skip


def test_the_summary_counts_each_source() -> None:
    summary = RunSummary(mix=("easy", "hard", "unused"))
    for task, reward in (("easy:0", 1.0), ("easy:a:1", 0.5), ("hard:0", 0.0)):
        summary.add(ended(task, reward))
    text = io.StringIO()
    print_summary(Console(file=text, width=120), summary)
    rows = [line.replace("│", " ").split() for line in text.getvalue().splitlines()]
    assert ["easy", "2", "67%", "+0.750", "50%"] in rows
    assert ["hard", "1", "33%", "+0.000", "0%"] in rows
    assert ["unused", "0", "0%", "–", "–"] in rows
