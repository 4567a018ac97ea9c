"""The first page: runs and trainings, newest first, with numbers that SQL gives, also of runs that begin later."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from browser_kit import Visitor, aside, chromium, served
from listing_kit import TRAINING, fill, make_training, new_run

from engine.errors import StoreError
from engine.plugins.compare.run_comparison import success_of
from engine.plugins.evaluation.measures import evaluate
from engine.plugins.show.listing.listing import Listing
from engine.plugins.view.documents import Documents
from engine.plugins.view.home import newest
from engine.store import RunStore
from engine.store.training import begin as begin_training

MODEL = {"model": {"path": "models/small"}, "backend": {"kind": "scripted"}}


async def make_runs(out: Path) -> None:
    """A finished run, a newer one that goes on, and a training."""
    with new_run(out, "old", name="numbers", spec=MODEL, created=10.0) as store:
        await fill(store, 6, 2)
    with new_run(out, "young", name="words", spec=MODEL, created=30.0, evaluation=True) as store:
        await fill(store, 3, 1)
    await make_training(out)  # created at 5.0


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs."""
    folder = tmp_path_factory.mktemp("runs")
    asyncio.run(make_runs(folder))
    return folder


def documents(out: Path) -> Documents:
    """The documents of `engine view` without a run."""
    return Documents(Listing(()), lambda: newest(out, 200)[0])


def test_runs_and_trainings_stand_newest_first_with_what_their_headers_say(out: Path) -> None:
    found: Any = documents(out).answer("runs", {})
    assert [(each["key"], each["name"], each["kind"], each["status"]) for each in found] == [
        ("young", "words", "evaluation", "done"),
        ("old", "numbers", "run", "done"),
        (TRAINING, "run", "training", "done"),
    ]
    assert found[1] | {"spec": ""} == {
        "key": "old", "kind": "run", "name": "numbers", "spec": "", "model": "models/small", "backend": "scripted",
        "status": "done", "created": 10.0,
    }  # fmt: skip


def test_the_numbers_of_a_run_are_those_of_its_episodes(out: Path) -> None:
    asked = documents(out)
    asked.answer("runs", {})
    found: Any = asked.answer("numbers", {"key": "old"})
    with RunStore.open(out / "old", readonly=True) as store:
        trajectories = list(store.trajectories())
        expected = evaluate(trajectories).estimates["success"]
        assert success_of(store) == expected.plain() | {"episodes": 8}
    assert (found["episodes"], found["done"], found["running"]) == (12, 12, 0)
    assert found["outcomes"] == {"solved": 4, "ended": 0, "limit": 4, "failed": 4}
    assert found["success"]["value"] == 0.5
    assert found["reward"] == pytest.approx(sum(each.outcome.reward for each in trajectories) / 12)
    assert found["cost"] == sum(turn.cost for each in trajectories for turn in each.turns)
    assert 1 <= len(found["curve"]) <= 24


def test_a_training_has_its_steps_and_its_curve(out: Path) -> None:
    asked = documents(out)
    asked.answer("runs", {})
    found: Any = asked.answer("numbers", {"key": TRAINING})
    names = ("status", "steps", "planned", "curve", "curve_of")
    assert [found[name] for name in names] == ["stopped", 2, 5, [0.5, 0.75], "reward/mean"]
    assert found["episodes"] == 12, "its evaluation is not counted"
    with pytest.raises(StoreError, match="there is no run `nothing`"):
        asked.answer("numbers", {"key": "nothing"})


def test_a_run_that_begins_later_and_a_training_without_episodes_appear(tmp_path: Path) -> None:
    from store_kit import make_header

    asked = documents(tmp_path)
    assert asked.answer("runs", {}) == []
    begin_training(tmp_path, make_header("tuned-train-1", spec={}, created=1.0))
    with new_run(tmp_path, "late", created=2.0) as store:
        found: Any = asked.answer("runs", {})
        assert [(each["key"], each["status"]) for each in found] == [("late", "running"), ("tuned-train-1", "done")]
        asyncio.run(fill(store, 1, 1))
    found = asked.answer("runs", {})
    assert [(each["key"], each["status"]) for each in found] == [("late", "done"), ("tuned-train-1", "done")]
    assert asked.answer("numbers", {"key": "tuned-train-1"}) == {
        "status": "done", "steps": 0, "planned": None, "curve": [], "curve_of": None,
    }  # fmt: skip
    assert asked.answer("training", {"training": "tuned-train-1"})["steps"] == []  # type: ignore[call-overload]


def test_a_list_within_a_run_or_a_training_has_its_episodes_alone(out: Path) -> None:
    asked = documents(out)
    asked.answer("runs", {})
    sizes = {key: asked.answer("page", {"within": key})["total"] for key in ("", "old", "young", TRAINING)}  # type: ignore[call-overload]
    assert sizes == {"": 29, "old": 12, "young": 3, TRAINING: 14}
    around: Any = asked.answer("neighbours", {"within": "young", "run": "young", "episode": "t2/0"})
    assert (around["position"], around["total"], around["next"]) == (2, 3, None)
    assert len(list(asked.rows(within="young"))) == 4


@pytest.mark.browser
def test_the_page_opens_with_runs_and_remembers_its_columns(out: Path, tmp_path: Path) -> None:
    with served("--out", out, cwd=tmp_path) as address, chromium() as browser:
        visitor = Visitor(browser, address)
        visitor.sees("table.home a.row-link", "words", "numbers", "run")
        visitor.sees('tr[data-key="old"] td:nth-child(5)', "12")
        visitor.sees('tr[data-key="old"] td:nth-child(3) b', "50 %")
        visitor.sees('tr[data-key="old"] .outcomes rect', 4)
        visitor.click("summary")
        visitor.page.locator("input[name=seconds]").check()
        visitor.page.locator("input[name=model]").uncheck()
        heads = visitor.page.locator("table.home thead th").all_inner_texts()
        assert ("time" in heads, "model" in heads) == (True, False)
        visitor.page.reload()
        visitor.settle()
        visitor.sees("table.home thead th", *heads)
        visitor.page.locator('thead a:has-text("episodes")').click()
        visitor.sees("table.home a.row-link", "numbers", "run", "words")
        visitor.page.select_option("select[name=kind]", "evaluation")
        visitor.sees("table.home a.row-link", "words")
        aside(asyncio.run, add_run(out))
        visitor.open("home")
        visitor.sees("table.home a.row-link", "late", "words", "numbers", "run")
        visitor.click('a.row-link:has-text("words")')
        visitor.sees("table.episodes a.row-link", "t0/0", "t1/0", "t2/0")
        visitor.press("u")
        visitor.page.locator("table.home").wait_for()
        assert visitor.problems == []


async def add_run(out: Path) -> None:
    """The newest run."""
    with new_run(out, "late", name="late", spec=MODEL, created=40.0) as store:
        await fill(store, 1, 1)
