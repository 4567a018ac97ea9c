"""A training's curves, steps and evaluations, also while it is being written."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from listing_kit import TRAINING, batch_record, fill, make_training, new_run

from engine.errors import StoreError
from engine.plugins.show.listing.listing import Listing
from engine.plugins.show.listing.sources import find
from engine.plugins.show.listing.training import Training
from engine.train.batch_log import BatchLog


@pytest.fixture
def training(tmp_path: Path) -> Path:
    """Two steps with three and two tasks, an evaluation after step 2."""

    return asyncio.run(make_training(tmp_path / "runs"))


def test_curves_have_the_steps_with_a_value(training: Path) -> None:
    assert [line["step"] for line in Training(training).lines] == [1, 2]
    assert Training(training).curves() == {"eval/reward": [(2, 0.1)], "reward/mean": [(1, 0.5), (2, 0.75)]}


def test_episodes_have_the_step_that_sampled_them(training: Path) -> None:
    with Listing([training]) as listing:
        assert [row.episode for row in listing.page("run.step == 1 && !run.evaluation").rows] == [
            "t0/0",
            "t0/1",
            "t1/0",
            "t1/1",
            "t2/0",
            "t2/1",
        ]
        run = f"{TRAINING}/rollouts"
        assert [row.step for row in listing.group(run, "t5")] == [None, None]
        log = BatchLog(training)
        log.read()  # as a resumed training: it removes the incomplete line
        log.append(batch_record(3, [5], []))
        assert [row.step for row in listing.group(run, "t5")] == [3, 3]


def test_an_evaluation_leads_to_its_episodes(training: Path) -> None:
    (found,) = Training(training).evaluations()
    assert (found.step, found.run, found.metrics) == (2, f"{TRAINING}/evals/step-000002", {"eval/reward": 0.1})
    with Listing([training]) as listing:
        rows = listing.page(found.filter).rows
        assert [(row.run, row.episode, row.step) for row in rows] == [(found.run, "t0/0", 2), (found.run, "t1/0", 2)]
        assert listing.page("run.evaluation").total == 2
    with Listing([os.path.relpath(training / "rollouts")]) as listing:
        assert listing.sources[0].key == f"{TRAINING}/rollouts"


def test_reading_changes_no_file_of_the_training(training: Path) -> None:
    def content() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in training.iterdir() if path.is_file()}

    before = content()
    assert (Training(training).planned, len(Training(training).evaluations())) == (5, 1)
    with Listing([training]) as listing:
        listing.page("run.step == 1")
    assert content() == before


async def test_latest_is_the_newest_run_or_training(training: Path) -> None:
    out = training.parent
    assert find("latest", out) == training
    with new_run(out, "run-1", created=6.0) as store:
        await fill(store, 1, 1)
    assert find("latest", out) == store.folder
    assert find("demo-train", out) == training
    with pytest.raises(StoreError, match="no run `nothing`"):
        find("nothing", out)


async def test_a_list_has_evaluations_that_are_made_after_it_was_opened(training: Path) -> None:
    with Listing([training, training / "rollouts"]) as listing:
        assert listing.page().total == 14
        with new_run(training / "evals", "step-000004", evaluation=True) as store:
            await fill(store, 1, 1)
        assert listing.page("run.step == 4").total == 1
        assert [source.step for source in listing.sources] == [None, 2, 4]
