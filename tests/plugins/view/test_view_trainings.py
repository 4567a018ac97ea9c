"""The page of trainings in a real browser: it follows, overlays, smooths, and says what a metric means."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from browser_kit import Visitor, chromium, served
from listing_kit import TRAINING, make_training
from store_kit import make_header

from engine.store.lock import RunLock
from engine.store.training import begin
from engine.train.metrics import MetricsLog

pytestmark = [pytest.mark.browser]
OTHER = "other-train-20260102-000000-abcd"
FIRST_PLOT = "document.querySelector('.plot')"


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """A training that runs."""
    lock = RunLock(folder)
    yield
    lock.release()


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A training with episodes that goes on, and another one."""
    folder = tmp_path_factory.mktemp("trainings") / "runs"
    first = asyncio.run(make_training(folder))
    other = begin(folder, make_header(OTHER, spec={"train": {"steps": 2}}))
    asyncio.run(make_training(folder / "x")).joinpath("rollouts").rename(other / "rollouts")
    log = MetricsLog(other)
    for step, value in enumerate((0.0, 1.0, 0.5), start=1):
        log.write(step, {"reward/mean": value})
    return [first, other]


@pytest.fixture(scope="module")
def app(trainings: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str]]:
    """A browser, and the address of `engine view`."""
    with served(*trainings, cwd=tmp_path_factory.mktemp("app")) as address, chromium() as browser:
        yield browser, address


def test_a_training_is_followed_without_a_reload_and_its_steps_lead_to_their_episodes(
    app: tuple[Any, str], trainings: list[Path]
) -> None:
    visitor = Visitor(*app)
    steps = 'table:has(caption:text-is("Steps")) tbody tr > :first-child'
    with held(trainings[0]):
        visitor.open("training", training=TRAINING)
        visitor.sees(steps, "step 1", "step 2")
        visitor.sees(".why", 0)
        visitor.page.evaluate("window.here = true")
        visitor.page.locator('a:text-is("step 2")').focus()
        MetricsLog(trainings[0]).write(3, {"reward/mean": 0.25})
        visitor.sees(steps, "step 1", "step 2", "step 3")
        visitor.page.wait_for_function(f"() => {FIRST_PLOT}.data[0].x.join() === '1,2,3'")
        assert visitor.page.evaluate("window.here && document.activeElement.textContent") == "step 2", "the focus stays"
    visitor.page.locator(".why[data-kind=stopped]").wait_for()
    assert "It does not run: it stopped after step 3 of 5" in visitor.text(".why[data-kind=stopped]")
    visitor.press("j")
    visitor.page.locator('p.why:has-text("Step 1")').wait_for()
    visitor.press("j")
    visitor.page.locator('p.why:has-text("Step 2")').wait_for()
    visitor.press("e")
    visitor.page.locator("table.episodes").wait_for()
    visitor.sees("a.row-link", "t3/0", "t3/1", "t4/0", "t4/1")
    assert visitor.problems == []


def test_trainings_are_overlaid_smoothed_and_logarithmic_and_metrics_explained(app: tuple[Any, str]) -> None:
    visitor = Visitor(*app)
    visitor.open("training", training=OTHER, metrics="reward/mean")
    assert "Mean reward over all episodes of the step" in visitor.text(".chart")
    assert "Look here if: It does not rise" in visitor.text(".chart")
    visitor.page.get_by_label(TRAINING).check()
    visitor.sees('table:has(caption:text-is("Newest values")) tbody th', OTHER, TRAINING)
    visitor.page.wait_for_function(f"() => {FIRST_PLOT}.data?.length === 2")
    visitor.page.get_by_label("Smoothing").select_option("5")
    visitor.page.wait_for_function(f"() => {FIRST_PLOT}.data?.length === 4")
    assert visitor.page.evaluate(f"{FIRST_PLOT}.data[1].y") == [0.0, 0.5, 0.5], "means of the values so far"
    visitor.page.get_by_label("Axes").select_option("y")
    visitor.page.wait_for_function(f"() => {FIRST_PLOT}.layout?.yaxis.type === 'log'")
    assert "1 points at or below 0 are not drawn" in visitor.text(".chart")
    assert visitor.page.evaluate("location.hash").endswith(f"with={TRAINING}&smooth=5&axes=y")
    assert visitor.problems == []
