"""The six questions about episodes, each answered in a real browser in at most three clicks or keys from the list."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_kit import Visitor, chromium, served
from desk import make_runs

from engine.store import RunStore
from engine.store.rows.export import export_rows

pytestmark = [pytest.mark.browser]
ACTIONS = 3


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs of the desk."""
    return make_runs(tmp_path_factory.mktemp("desk"))


@pytest.fixture(scope="module")
def app(runs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str]]:
    """A browser, and the address of `engine view` with both runs."""
    with served(*runs, cwd=tmp_path_factory.mktemp("app")) as address, chromium() as browser:
        yield browser, address


@pytest.fixture
def visitor(app: tuple[Any, str]) -> Iterator[Visitor]:
    """A visitor who begins at the list."""
    found = Visitor(app[0], app[1] + "#/list")
    found.page.locator("table.episodes").wait_for()
    yield found
    assert found.problems == []
    assert found.actions <= ACTIONS
    found.page.context.close()


def row(name: str) -> str:
    """The link of an episode of the first run in the list."""
    return f'table.episodes tr:not(:has-text("desk-cooler")) a.row-link:has-text("{name}")'


def test_why_did_this_episode_fail(visitor: Visitor) -> None:
    visitor.click(row("desk-0/3"))
    told = visitor.text("section.why")
    assert "user_error" in told
    assert "blame: user" in told
    assert "the price list has no item 'plum'" in told
    assert "AWAITING_USER_FEEDBACK" in told
    assert "turn 1" in told
    visitor.keep("why-failed")


def test_which_tokens_of_a_turn_trained_and_with_which_advantage(visitor: Visitor, runs: tuple[Path, Path]) -> None:
    visitor.click(row("desk-0/0"))
    visitor.click("#turn-2 button.advantage")
    tokens = visitor.page.locator(".tokens .token")
    tokens.first.wait_for()
    with RunStore.open(runs[0], readonly=True) as store:
        rows = [each for each in export_rows(store) if each["episode_id"] == "desk-0/0"]
        found = next(each for each in rows if (each["turn_ids"] == 2).any())
        turn = store.trajectory("desk-0/0").turns[2]
        ids = found["input_ids"][turn.start : turn.end].tolist()
        advantages = found["advantages"][turn.start : turn.end].tolist()
    visitor.sees(".tokens .token", len(ids))
    assert tokens.nth(0).evaluate("each => each.classList.contains('coloured')")
    for at in (0, len(ids) - 1):
        tokens.nth(at).hover()
        names = visitor.page.locator(".token-values dt").all_inner_texts()
        values = dict(zip(names, visitor.page.locator(".token-values dd").all_inner_texts(), strict=True))
        assert values["id"] == str(ids[at])
        assert values["loss mask"] == "1"
        assert values["turn"] == "2"
        assert float(values["advantage"]) == pytest.approx(advantages[at], abs=1e-7)
    visitor.keep("tokens")


def test_who_moved_this_reward(visitor: Visitor) -> None:
    visitor.click(row("desk-0/0"))
    visitor.click('#turn-0 button.reward:has-text("correct")')
    moved = visitor.text("tr.transfer-row")
    assert "turn 2 → turn 0" in moved
    assert "rule:0" in moved
    assert "solved after feedback" in moved
    visitor.sees(".timeline .transfer .arc", 1)
    visitor.keep("rewards")


def test_what_did_the_model_see_at_a_turn(visitor: Visitor) -> None:
    visitor.click(row("desk-0/0"))
    visitor.click('#turn-2 button:text-is("seen")')
    visitor.sees("ol.seen > li .role", "system", "user", "assistant", "tool calculate", "assistant", "user")
    visitor.sees("ol.seen img", 1)
    assert "Count the green ones again" in visitor.text("ol.seen > li:last-child")
    visitor.keep("seen")


def test_where_do_two_samples_part(visitor: Visitor) -> None:
    visitor.click('table.episodes tr:not(:has-text("desk-cooler")) a[href*="#/group"]:has-text("desk-0")')
    visitor.sees(".cell.parting", 3)
    told = visitor.page.locator(".cell.head").all_inner_texts()
    assert "turn 0, token 0" in told[1]
    assert "turn 1, token 0" in told[3], "both call the tool with the same tokens first"
    assert "One of them" in told[3]
    visitor.keep("samples")


def test_what_changed_between_two_runs(visitor: Visitor) -> None:
    visitor.click('nav a:text-is("Compare")')
    visitor.page.locator('caption:text-is("Differences of the specs")').wait_for()
    changed = visitor.page.locator('table:has(caption:text-is("Differences of the specs")) tbody tr').all_inner_texts()
    assert "rewards.credit.gamma\t0.9\t0.5" in changed
    assert "sampling.temperature\t1\t0.7" in changed
    assert "desk-2" in visitor.text('table:has(caption:has-text("Worse"))')
    assert "desk-0" in visitor.text('table:has(caption:has-text("Better"))')
    visitor.keep("compare")


@pytest.mark.parametrize(("scheme", "ground"), [("light", "rgb(251, 251, 250)"), ("dark", "rgb(22, 24, 27)")])
def test_the_colours_follow_the_system(app: tuple[Any, str], scheme: str, ground: str) -> None:
    visitor = Visitor(app[0], app[1] + "#/list", color_scheme=scheme)
    visitor.page.wait_for_function("() => document.querySelector('.small-chart') !== null")
    assert visitor.page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == ground
    visitor.keep(f"list-{scheme}")
    visitor.click(row("desk-0/0"))
    visitor.click('#turn-2 button.reward:has-text("correct")')
    visitor.page.locator(".timeline").wait_for()
    visitor.keep(f"episode-{scheme}")
    assert visitor.problems == []
    visitor.page.context.close()
