"""Each page for everyone: by a checker of accessibility, by the keyboard alone, in dark, and on a narrow screen."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_kit import Visitor, chromium, served
from desk import make_runs
from listing_kit import TRAINING, make_training

pytestmark = [pytest.mark.browser]
PANELS = ("rewards", "tokens", "seen", "branches", "machine", "facts", "timing", "review")
MARK_CLICKS = """(() => {
  const add = EventTarget.prototype.addEventListener;
  EventTarget.prototype.addEventListener = function (kind, ...rest) {
    if (kind === 'click' && this instanceof Element && this.id !== 'main') this.setAttribute('data-clicks', '');
    return add.call(this, kind, ...rest);
  };
})()"""
CONTROLS = """() => [...document.querySelectorAll('a[href], button, input, select, textarea, summary, [tabindex="0"], [data-clicks]')]
  .filter(each => each.checkVisibility() && !each.disabled && !each.closest('.js-plotly-plot'))"""
"""What can be operated. `data-clicks`: what listens to a click."""
REACHED = f"""() => {{
  const own = ({CONTROLS})();
  const at = document.activeElement;
  const style = getComputedStyle(at);
  return [own.indexOf(at), style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) > 0, at.outerHTML.slice(0, 160)];
}}"""
LEFT = f"""reached => ({CONTROLS})().filter((each, at) => !reached.includes(at))
  .filter(each => !each.closest('[type=radio], [role=tab], [role=listbox]')).map(each => each.outerHTML.slice(0, 160))"""
"""The controls that the tab key did not reach. Of radio buttons, tabs and options it reaches one; the arrow keys reach
the others."""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[tuple[str, dict[str, Any]]]]:
    """Two runs and a training, and the addresses of all kinds of pages over them."""
    folder = tmp_path_factory.mktemp("desk")
    first, second = make_runs(folder)
    training = asyncio.run(make_training(folder / "runs"))
    run = first.name
    return [first, second, training], [
        ("home", {}),
        ("home", {}),
        ("list", {}),
        ("group", {"run": run, "task": "desk-0"}),
        ("compare", {"first": run, "second": second.name}),
        ("training", {"training": TRAINING, "step": 2}),
        ("episode", {"run": run, "id": "desk-0/3", "turn": 1}),
        *(("episode", {"run": run, "id": "desk-0/0", "turn": 2, "tab": panel}) for panel in PANELS),
    ]


@pytest.fixture(scope="module")
def app(places: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str]]:
    """A browser, and the address of `engine view`."""
    with served(*places[0], cwd=tmp_path_factory.mktemp("app")) as address, chromium() as browser:
        yield browser, address


def visit(app: tuple[Any, str], places: Any, **context: Any) -> Iterator[tuple[Visitor, str]]:
    """Open each page, and wait for what it shows."""
    visitor = Visitor(*app, **context)
    for page, parameters in places[1]:
        visitor.open(page, **parameters)
        if page == "episode":
            visitor.page.locator("#panel:not([aria-busy]) > *").first.wait_for()
        if page == "list":
            visitor.page.locator(".small-chart").first.wait_for()
        if page == "training":
            visitor.page.locator(".plot svg.main-svg").first.wait_for()
        visitor.page.wait_for_load_state("networkidle")
        yield visitor, f"{page} {parameters}"
    assert visitor.problems == []
    visitor.page.context.close()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1360), ("dark", 1360), ("dark", 390)])
def test_a_checker_of_accessibility_finds_nothing(app: Any, places: Any, scheme: str, width: int) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = []
    for visitor, place in visit(app, places, color_scheme=scheme, viewport={"width": width, "height": 850}):
        for rule in axe.run(visitor.page).response["violations"]:
            found += [f"{place}: {rule['id']}: {node['html'][:160]}" for node in rule["nodes"]]
        wide = visitor.page.evaluate("document.scrollingElement.scrollWidth")
        found += [f"{place}: the page is {wide} pixels wide"] * (wide > width)
    assert not found, "\n".join(found)


def test_the_tab_key_reaches_every_control_and_shows_where_it_is(app: Any, places: Any) -> None:
    missed = []
    for visitor, place in visit(app, places, script=MARK_CLICKS):
        page = visitor.page
        page.evaluate("document.querySelector('.skip').focus()")
        reached: set[int] = set()
        while True:
            at, visible, html = page.evaluate(REACHED)
            if at in reached or at < 0:
                break
            reached.add(at)
            missed += [f"{place}: no focus is seen: {html}"] * (not visible)
            page.keyboard.press("Tab")
        missed += [f"{place}: not reached: {each}" for each in page.evaluate(LEFT, sorted(reached))]
    assert not missed, "\n".join(missed)


def test_controls_answer_to_their_own_keys(app: Any) -> None:
    visitor = Visitor(*app)
    visitor.press("Tab")
    visitor.press("Enter")
    assert visitor.page.evaluate("document.activeElement.id") == "main", "the link over the header leads to the content"
    visitor.page.locator('nav a:text-is("Compare")').focus()
    visitor.press("Enter")
    visitor.page.locator('h1:text-is("Compare two runs")').wait_for()
    visitor.press("u")
    visitor.page.locator("table.episodes").wait_for()
    visitor.page.locator('table.episodes thead a:has-text("reward")').first.focus()
    visitor.press("Enter")
    visitor.page.locator('a[aria-label="Sort by reward, now ascending"]').wait_for()
    assert visitor.problems == []
    visitor.page.context.close()


def test_the_keyboard_keeps_its_place_where_a_panel_is_drawn_anew(app: Any, places: Any) -> None:
    visitor = Visitor(*app)
    run = places[0][0].name
    visitor.open("episode", run=run, id="desk-0/0", tab="machine")
    visitor.page.locator('button:text-is("step →")').focus()
    for number in (1, 2):
        visitor.press("Enter")
        visitor.page.locator(f'.stepper:has-text("step {number} of")').wait_for()
        assert visitor.page.evaluate("document.activeElement.textContent") == "step →"
    visitor.page.locator("#tab-machine").focus()
    visitor.press("ArrowLeft")
    visitor.page.locator("#tab-branches[aria-selected=true]").wait_for()
    visitor.page.wait_for_function("() => document.activeElement.id === 'tab-branches'")
    assert visitor.problems == []
    visitor.page.context.close()


def test_the_picture_of_the_machine_fits_its_frame(app: Any, places: Any) -> None:
    for width in (1360, 390):
        visitor = Visitor(*app, viewport={"width": width, "height": 700})
        visitor.open("episode", run=places[0][0].name, id="desk-0/0", tab="machine")
        visitor.page.locator(".machine svg").wait_for()
        over = "each => [each.scrollWidth - each.clientWidth, each.scrollHeight - each.clientHeight]"
        assert visitor.page.locator(".machine").evaluate(over) == [0, 0]
        visitor.click('button:text-is("full size")')
        assert max(visitor.page.locator(".machine").evaluate(over)) > 0, "it is larger than its frame"
        visitor.page.context.close()
