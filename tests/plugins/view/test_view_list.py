"""The list of episodes: texts of task and answer, charts whose bars are filters, columns, and what stands first."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser_kit import Visitor, chromium, served
from desk import make_runs
from listing_kit import fill, new_run

from engine.plugins.show.listing.listing import Listing
from engine.plugins.view.charts import charts_of


@pytest.fixture(scope="module")
def listing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listing]:
    """Six tasks with two samples each: t0 and t3 fail, t1 and t4 are ended by a limit, t2 and t5 are solved."""
    with new_run(tmp_path_factory.mktemp("runs")) as store:
        asyncio.run(fill(store))
    with Listing([store.folder]) as found:
        yield found


def bars(listing: Listing, name: str, filter: str = "") -> list[tuple[str, float]]:
    """Labels and values of a chart."""
    found = {chart["name"]: chart["bars"] for chart in charts_of(listing, filter, "")}
    return [(bar["label"], bar["value"]) for bar in found.get(name, [])]


def test_charts_have_the_numbers_of_the_episodes(listing: Listing) -> None:
    assert [bar for bar in bars(listing, "reward") if bar[1]] == [
        ("-1", 1), ("0", 2), ("1", 2), ("2", 2), ("3", 2), ("4", 2), ("5", 1),
    ]  # fmt: skip
    assert bars(listing, "outcome") == [("solved", 4), ("limit: assistant_turns", 4), ("tool_timeout (tool)", 4)]
    assert bars(listing, "turn") == [("1", 4 / 12)]
    assert bars(listing, "task") == [("t0", 0), ("t1", 0), ("t3", 0), ("t4", 0), ("t2", 1), ("t5", 1)]
    assert [bar for bar in bars(listing, "length") if bar[1]] == [("5", 6), ("10", 6)]
    assert bars(listing, "outcome", "outcome.solved") == [("solved", 4)]
    assert charts_of(listing, "outcome.reward > 100.0", "") == []


@pytest.mark.parametrize("name", ["reward", "outcome", "turn", "task", "length", "state"])
def test_each_bar_is_a_filter_for_its_episodes(listing: Listing, name: str) -> None:
    for chart in charts_of(listing, "", ""):
        if chart["name"] == name:
            for bar in chart["bars"]:
                chosen = listing.totals(bar["filter"])
                if name in ("reward", "outcome", "length"):
                    assert chosen.done == bar["value"], bar
                if name == "task":
                    assert chosen.solved / chosen.done == bar["value"], bar
                if name == "turn":
                    assert chosen.done == chosen.solved == 4, bar


def test_time_by_state_is_the_mean_of_the_results(listing: Listing) -> None:
    heads = listing.heads("", "", 200)
    assert len(heads) == 12
    states = {state for head in heads for state in head.seconds}
    means = {state: sum(head.seconds.get(state, 0.0) for head in heads) / 12 for state in states}
    assert dict(bars(listing, "state")) == pytest.approx(means)
    assert len(listing.heads("outcome.solved", "", 2)) == 2


def test_rows_have_the_text_of_task_and_answer_and_the_place_of_a_searched_text(listing: Listing) -> None:
    page = listing.page(text="ÄPFEL", limit=1)
    (texts,) = listing.excerpts(page.rows, "ÄPFEL")
    assert texts["hit"] == ['0 + 1?\nlet me see\nadd {"a":1}\n1\n1\nsaid "0"\n', "Äpfel", ""]
    (head, *_) = listing.heads("", "", 200)
    assert texts["task"] == next(message.text for message in head.messages if message.role == "user")
    assert texts["answer"] == [message.text for message in head.messages if message.role == "assistant"][-1]


async def test_an_episode_that_goes_on_has_the_text_of_its_task(tmp_path: Path) -> None:
    from store_kit import make_task

    with new_run(tmp_path) as store:
        await store.begin(make_task(0, question="How many apples are there?", level="easy"), 0)
        with Listing([store.folder]) as found:
            texts = found.excerpts(found.page().rows, "")
    assert texts == [{"task": "How many apples are there?", "answer": "", "hit": None}]


@pytest.mark.browser
def test_charts_columns_and_texts_of_the_page(tmp_path: Path) -> None:
    first, _ = make_runs(tmp_path)
    with served(first, cwd=tmp_path) as address, chromium() as browser:
        visitor = Visitor(browser, address, viewport={"width": 390, "height": 844})
        heads = visitor.page.locator("table.episodes thead th").all_inner_texts()
        assert heads[:3] == ["reward", "outcome", "episode"], "on a narrow page reward and outcome are seen first"
        seen = visitor.page.locator("table.episodes tbody tr:first-child td:nth-child(2)").bounding_box()
        assert seen is not None
        assert seen["x"] + seen["width"] < 390
        assert visitor.page.evaluate("document.scrollingElement.scrollWidth") == 390
        assert "There are 8." in visitor.text('tr:has-text("desk-0/1") td:nth-child(5)')
        visitor.sees("section.small-chart", 6)
        visitor.click('[data-chart="outcome"] a:has-text("user_error")')
        visitor.sees("a.row-link", "desk-0/3", "desk-1/3", "desk-2/3")
        visitor.click('[data-chart="task"] a:has-text("desk-1")')
        visitor.sees("a.row-link", "desk-1/3")
        visitor.click('[data-chart="task"] a[aria-current]')
        visitor.sees("a.row-link", 3)
        visitor.click("summary")
        visitor.page.locator("input[name=version]").uncheck()
        visitor.page.locator("input[name=failure]").check()
        visitor.page.reload()
        visitor.settle()
        heads = visitor.page.locator("table.episodes thead th").all_inner_texts()
        assert ("version" in heads, "limit or failure" in heads) == (False, True)
        visitor.open("list", text="GREEN ones")
        visitor.sees("a.row-link", 6)
        assert set(visitor.page.locator("mark").all_inner_texts()) == {"green ones"}
        assert visitor.problems == []
        assert [each for each in visitor.requests if not each.startswith("http://127.0.0.1:")] == []
