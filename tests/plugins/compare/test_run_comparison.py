"""Two runs, paired by task: the same numbers as `engine compare`, better and worse tasks, and differences of the specs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import engine_here
from listing_kit import ended, fill, new_run
from store_kit import make_task

from engine.plugins.compare.run_comparison import compare_runs
from engine.plugins.evaluation.measures import by_task, collect, differences
from engine.schemas.trajectory import Trajectory
from engine.store import RunStore


def other(index: int, sample: int) -> Trajectory:
    """As `ended`; task t1 is worse and t5 is better."""
    made = ended(index, sample)
    reward = made.outcome.reward + {1: -2.0, 5: 3.0}.get(index, 0.0)
    return replace(made, outcome=replace(made.outcome, reward=reward))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunStore, RunStore]:
    """Two runs with tasks t0 to t5 and t1 to t6."""

    async def make(out: Path) -> list[Path]:
        specs = [
            {"sampling": {"temperature": 1.0}, "name": "a"},
            {"sampling": {"temperature": 0.7, "top_p": 0.9}, "name": "a"},
        ]
        folders = []
        for number, (spec, episodes) in enumerate(zip(specs, (ended, other), strict=True)):
            with new_run(out, f"run-{number}", spec=spec, packages={"torch": f"2.{number}"}) as store:
                await fill(store, 6, 2, of=episodes, first=number)
                folders.append(store.folder)
        return folders

    first, second = asyncio.run(make(tmp_path_factory.mktemp("runs")))
    return RunStore.open(first, readonly=True), RunStore.open(second, readonly=True)


def test_tasks_are_paired_and_sorted_from_loss_to_gain(runs: tuple[RunStore, RunStore]) -> None:
    found = compare_runs(*runs)
    assert [(pair.task, pair.verdict, pair.difference) for pair in found.tasks] == [
        ("t1", "worse", -2.0), ("t2", "same", 0.0), ("t4", "same", 0.0), ("t5", "better", 3.0),
    ]  # fmt: skip
    assert found.counts == {"better": 1, "worse": 1, "same": 2}
    assert found.tasks[3].first.plain() == {"episodes": 2, "solved": 1.0, "reward": 4.5, "turns": 2.0, "tokens": 10.0}
    assert (found.only_first, found.only_second, found.changed) == (0, 0, [])
    assert found.masked == [4, 4]
    json.dumps(found.plain())


def test_the_measures_are_those_of_the_trajectories(runs: tuple[RunStore, RunStore]) -> None:
    left, right = (by_task(collect(run.trajectories())[0]) for run in runs)
    assert compare_runs(*runs).measures == differences(left, right, [task for task in left if task in right])


def test_differences_of_specs_have_paths_and_both_values(runs: tuple[RunStore, RunStore]) -> None:
    assert [(each.path, each.first, each.second) for each in compare_runs(*runs).spec] == [
        ("sampling.temperature", 1.0, 0.7),
        ("sampling.top_p", None, 0.9),
        ("packages.torch", "2.0", "2.1"),
    ]
    assert list(compare_runs(runs[0], runs[0]).spec) == []


async def begun(store: RunStore) -> None:
    """A task that has not ended."""
    await store.begin(make_task(0), 0)


@pytest.mark.parametrize(
    ("second", "told"),
    [
        (begun, "the second run has no finished episode yet"),
        (lambda store: fill(store, 1, 2), "all 2 finished episodes of the second run have a failure"),
        (lambda store: fill(store, 2, 1, first=7), "the first has tasks like `t1`, the second like `t7`"),
        (lambda store: fill(store, 1, 1, first=1, answer="other"), "have other fields in the second run, such as `t1`"),
    ],
)
def test_runs_in_which_nothing_can_be_compared_say_why(
    runs: tuple[RunStore, RunStore], tmp_path: Path, second: Callable[[RunStore], Coroutine[Any, Any, None]], told: str
) -> None:
    with new_run(tmp_path) as store:
        asyncio.run(second(store))
        found = compare_runs(runs[0], store)
    assert found.tasks == []
    assert told in str(found.nothing)
    code, _, problems = engine_here("compare", runs[0].folder, store.folder, cwd=tmp_path)
    assert code == 2
    assert told in " ".join(problems.split())
