"""The pages in a real browser: hostile content, keyboard, screen readers, a run that goes on, and a page that is a file."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from browser_kit import ENGINE, Visitor, aside, chromium, environment, served
from desk import make_runs
from journals import write_entries, write_result
from store_kit import make_entry, make_header, make_task, make_trajectory

from engine.schemas.journal import FailureRecord, JournalEntry, ScoreRecord, ToolsRecord
from engine.schemas.message import Message, ToolCall, ToolResult
from engine.schemas.reward import RewardEvent
from engine.schemas.trajectory import Failure, Outcome
from engine.store import RunStore

pytestmark = [pytest.mark.browser]

HOSTILE = {
    "script": "<script>window.pwned = 1</script>",
    "image": '<img src=x onerror="window.pwned = 2">',
    "closing": '</script><script>window.pwned = 3</script><!-- ]]> --><svg onload="window.pwned = 4">',
    "template": "${window.pwned = 5}{{constructor.constructor('window.pwned = 6')()}}",
    "address": "javascript:window.pwned=7//",
    "bidi": "abc\u202egnp.exe\u2066\u2067",
    "null": "a\x00b\x07\x1b[31mred",
    "long": "x" * 60_000,
    "separators": "a\u2028b\u2029c\ufeff\u200b",
}
ALL = " ".join(HOSTILE.values())
SHORT = " ".join(value for name, value in HOSTILE.items() if name != "long")


@pytest.fixture(scope="module")
def browser(runs: tuple[Path, Path], hostile: Path) -> Iterator[Any]:
    """A headless Chromium. The runs are made before, because the browser's driver has an event loop in this thread."""
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs of the desk."""
    return make_runs(tmp_path_factory.mktemp("desk"))


async def fill_hostile(store: RunStore) -> None:
    """Write an episode whose texts attack the page."""
    task = make_task(0, **{SHORT: ALL, "answer": ALL})
    begun = await store.begin(task, 0)
    made = make_trajectory(0)
    said = Message(
        role="assistant",
        content=ALL,
        reasoning=ALL,
        tool_calls=[ToolCall(id="c", name=SHORT, arguments={SHORT: ALL})],
    )
    answer = Message(role="tool", content=ALL, tool_call_id="c", name=SHORT)
    failure = Failure(kind="user_error", blame="user", message=ALL, state="GENERATING", turn=1, trace=ALL)
    postings = [replace(each, cause=ALL, source=SHORT, name=SHORT) for each in made.postings]
    turns = [replace(turn, rewards={SHORT: 1.0}, event=SHORT) for turn in made.turns]
    branches = [replace(each, reason=SHORT if each.index else "") for each in made.branches]
    whole = replace(
        made,
        messages=[Message(role="user", content=ALL), said, answer, said, answer],
        outcome=Outcome(state="DONE", event="failed", failure=failure, reward=1.0, rewards={SHORT: 1.0}),
        facts={SHORT: {"deep": ALL}},
        postings=postings,
        turns=turns,
        branches=branches,
    )
    tools = ToolsRecord(results=[ToolResult(call_id="c", name=SHORT, content=ALL, facts={SHORT: ALL})])
    mark = RewardEvent(turn=1, name=SHORT, value=0.7, cause=ALL, source=SHORT)
    score = ScoreRecord(rewards=[mark, mark], replies=[ALL])
    records = (make_entry(0).record, make_entry(1).record, tools, score, FailureRecord(failure=failure))
    for seq, record in enumerate(records):
        entry = JournalEntry(seq=seq, state="S", event="e", dest="D", record=record, at=1.0 + seq, seconds=0.5)
        await write_entries(begun, entry)
    await write_result(begun, whole)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which every text that a model, task, tool or user writes attacks the page."""

    with RunStore.create(tmp_path_factory.mktemp("hostile"), make_header()) as store:
        asyncio.run(fill_hostile(store))
    return store.folder


@pytest.fixture(scope="module")
def app(runs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `engine view` with both runs of the desk."""
    with served(*runs, cwd=tmp_path_factory.mktemp("app")) as address:
        yield address


PANELS = ("rewards", "tokens", "seen", "branches", "machine", "facts", "timing")


def attacked(visitor: Visitor, offline: bool = False) -> None:
    """Nothing of the hostile run became anything but text."""
    page = visitor.page
    assert page.evaluate("window.pwned === undefined")
    assert page.locator("main script, main iframe, main [onerror], main [onload], main object, main style").count() == 0
    assert page.locator('a[href^="javascript"]').count() == 0
    wide = "[...document.querySelectorAll('main *')].filter(each => each.getBoundingClientRect().right > innerWidth + 1 && !each.closest('.scroll, .panel-body, .group'))"
    assert (
        page.evaluate(f"{wide}.map(each => each.parentElement.className + ' > ' + each.tagName + '.' + each.className)")
        == []
    ), "a long line makes the page wider"
    text = page.locator("main").inner_text()
    assert not set(text) & set("\u202e\u2066\u2067\x00\x07\x1b\u200b\ufeff"), "a hidden character is shown as it is"


def look_everywhere(visitor: Visitor, run: str) -> None:
    """Open each page and panel of the hostile run, with everything unfolded."""
    visitor.open("list")
    visitor.page.locator("table.episodes").wait_for()
    attacked(visitor)
    for panel in PANELS:
        visitor.open("episode", run=run, id="t0/0", turn=1, tab=panel)
        visitor.page.locator(f'#panel[data-tab="{panel}"] > *').first.wait_for()
        visitor.page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
        visitor.page.evaluate("for (const each of document.querySelectorAll('button.more')) each.click()")
        attacked(visitor)
    assert "<script>window.pwned = 1</script>" in visitor.text(".transcript")
    assert "U+202E" in visitor.text(".transcript")
    assert "<script>window.pwned = 1</script>" in visitor.text(".message.judge .prose"), "what the judge said"
    assert "+0.7" in visitor.text(".message.judge header"), "its mark"
    visitor.sees(".step-note.mark", 1)  # that no judge gave
    visitor.open("group", run=run, task="t0")
    visitor.page.locator(".cell.head").first.wait_for()
    attacked(visitor)


def test_hostile_texts_stay_texts(browser: Any, hostile: Path, tmp_path: Path) -> None:
    with served(hostile, cwd=tmp_path) as address:
        visitor = Visitor(browser, address)
        look_everywhere(visitor, hostile.name)
        assert visitor.problems == []


def test_hostile_texts_stay_texts_in_a_file(browser: Any, hostile: Path, tmp_path: Path) -> None:
    file = export(tmp_path, hostile)
    visitor = Visitor(browser, file.as_uri(), offline=True)
    look_everywhere(visitor, hostile.name)
    assert visitor.problems == []
    assert [each for each in visitor.requests if not each.startswith(("file:", "data:"))] == []


def export(folder: Path, *arguments: str | Path) -> Path:
    """`engine view --export`; gives the file."""

    subprocess.run(
        [*ENGINE, "view", *arguments, "--export", folder / "file.html"], cwd=folder, env=environment(), check=True
    )
    return folder / "file.html"


def test_a_file_shows_the_chosen_episodes_without_a_server(
    browser: Any, runs: tuple[Path, Path], tmp_path: Path
) -> None:
    file = export(tmp_path, runs[0], "--filter", 'outcome.solved && task.level == "hard"')
    visitor = Visitor(browser, file.as_uri(), offline=True)
    visitor.sees("a.row-link", "desk-0/0", "desk-0/1", "desk-2/0", "desk-2/1")
    visitor.page.fill("input[name=text]", "CALCULATE")
    visitor.press("Enter")
    visitor.sees("a.row-link", 2)
    visitor.click("a.row-link")
    visitor.page.locator(".message img").wait_for()
    assert visitor.page.evaluate("document.querySelector('.message img').naturalWidth") == 168
    visitor.click('#turn-2 button:has-text("tokens")')
    visitor.sees(".tokens .token", 7)
    for key, panel in (("4", "branches"), ("5", "machine"), ("7", "timing")):
        visitor.press(key)
        visitor.page.locator(f'#panel[data-tab="{panel}"] table').first.wait_for()
    visitor.press("g")
    visitor.page.locator(".cell.head").nth(1).wait_for()
    assert visitor.problems == []
    assert [each for each in visitor.requests if not each.startswith(("file:", "data:"))] == []


def test_the_keyboard_alone_goes_everywhere(browser: Any, app: str) -> None:
    visitor = Visitor(browser, app + "#/list")
    visitor.page.locator("table.episodes").wait_for()
    focused = "document.activeElement.textContent"
    for key, name in (("j", "desk-0/0"), ("j", "desk-0/1"), ("k", "desk-0/0")):
        visitor.press(key)
        assert visitor.page.evaluate(focused) == name
    visitor.press("Enter")
    visitor.page.locator("#turn-2").wait_for()
    for key, turn in (("j", 0), ("j", 1), ("j", 2), ("j", 2), ("k", 1)):
        visitor.press(key)
        visitor.page.locator(f"#turn-{turn}.selected").wait_for()
    assert "turn=1" in visitor.page.url
    for at, panel in enumerate(PANELS, start=1):
        visitor.press(str(at))
        visitor.page.locator(f'#panel[data-tab="{panel}"] > *').first.wait_for()
        visitor.page.locator(f"#tab-{panel}[role=tab][aria-selected=true]").wait_for()
    visitor.press("2")
    visitor.page.locator(".tokens .token").first.focus()
    visitor.press("ArrowRight")
    assert visitor.page.evaluate("document.activeElement.getAttribute('aria-selected')") == "true"
    visitor.press("?")
    assert "Next turn" in visitor.text("dialog")
    visitor.press("Escape")
    visitor.page.locator("dialog").wait_for(state="detached")
    visitor.press("n")
    visitor.page.locator('h1:has-text("desk-0/1")').wait_for()
    visitor.press("g")
    visitor.page.locator(".cell.head").first.wait_for()
    visitor.press("u")
    visitor.page.locator("table.episodes").wait_for()
    visitor.press("f")
    visitor.page.keyboard.type("outcome.solved && task.level == 'easy' && turns.assistant < 3")
    visitor.press("Enter")
    visitor.sees("a.row-link", 1)  # of the run that the task belongs to
    assert visitor.problems == []


def test_a_permalink_opens_the_episode_at_its_turn(browser: Any, app: str, runs: tuple[Path, Path]) -> None:
    place = f"#/episode?run={runs[0].name}&id=desk-1%2F0&turn=2&tab=seen"
    visitor = Visitor(browser, app + place)
    visitor.page.locator("#turn-2.selected").wait_for()
    assert "desk-1/0" in visitor.text("h1")
    visitor.page.locator("ol.seen").wait_for()


def test_a_link_survives_a_restart_and_is_opened_from_another_site(browser: Any, runs: tuple[Path, Path]) -> None:
    folder = runs[0].parents[1]
    with served(runs[0], cwd=folder) as address:
        visitor = Visitor(browser, address)
        visitor.open("episode", run=runs[0].name, id="desk-1/0", turn=2)
        link = visitor.page.url
    assert "token" not in link
    with served(runs[1], cwd=folder):  # of other runs, of the same folder
        visitor.page.goto("data:text/html," + quote(f'<a href="{link.replace("&", "&amp;")}">of another site</a>'))
        visitor.page.click("a")
        visitor.settle()
        visitor.page.locator("#turn-2.selected").wait_for()
        assert visitor.text("h1") == "desk-1/0"


def test_the_head_of_a_failed_episode_says_so_and_has_no_green_number(
    browser: Any, app: str, runs: tuple[Path, Path]
) -> None:
    visitor = Visitor(browser, app)
    green = ".episode-head .good, .cell.head .good"
    visitor.open("episode", run=runs[0].name, id="desk-0/3")
    head = visitor.text(".episode-head")
    assert "failed: user_error (user)" in head
    assert "not trainable" in head
    assert "+0.200" in head
    visitor.sees(green, 0)
    visitor.sees('.episode-head button:has-text("First trained token")', 0)
    visitor.open("group", run=runs[0].name, task="desk-0", samples="3")
    assert "+0.200" in visitor.text(".cell.head")
    visitor.sees(green, 0)
    assert visitor.problems == []


def test_a_key_leads_to_the_first_trained_token_whose_address_opens_it_again(
    browser: Any, app: str, runs: tuple[Path, Path]
) -> None:
    visitor = Visitor(browser, app)
    visitor.open("episode", run=runs[0].name, id="desk-0/0")
    visitor.press("t")
    chosen = visitor.page.locator('.token[aria-selected="true"]')
    visitor.page.wait_for_function("() => document.activeElement.matches('.token[aria-selected=true]')")
    with RunStore.open(runs[0], readonly=True) as store:
        first = store.trajectory("desk-0/0").branches[0].loss_mask.tolist().index(1)
    assert chosen.get_attribute("data-at") == str(first)
    assert "sampled" in (chosen.get_attribute("class") or "")
    again = Visitor(browser, app + visitor.page.evaluate("location.hash"))
    again.page.locator(f'.token[aria-selected="true"][data-at="{first}"]').wait_for()
    assert visitor.problems + again.problems == []


def test_a_wrong_filter_says_what_is_wrong(browser: Any, app: str) -> None:
    visitor = Visitor(browser, app + "#/list")
    visitor.page.fill("input[name=filter]", "outcome.rewrd > 1")
    visitor.press("Enter")
    assert "reward" in visitor.text("p.error")
    assert visitor.page.locator("input[name=filter]").input_value() == "outcome.rewrd > 1"


def test_an_episode_that_goes_on_grows_in_the_page(browser: Any, tmp_path: Path) -> None:
    loop = asyncio.new_event_loop()
    with ExitStack() as stack:
        stack.callback(loop.close)
        store = stack.enter_context(RunStore.create(tmp_path / "runs", make_header()))
        begun = aside(loop.run_until_complete, store.begin(make_task(), 0))
        for seq in range(2):
            aside(loop.run_until_complete, write_entries(begun, make_entry(seq)))
        address = stack.enter_context(served(store.folder, cwd=tmp_path))
        visitor = Visitor(browser, address)
        assert "running" in visitor.text("table.episodes")
        visitor.click("a.row-link")
        visitor.page.locator("#turn-0").wait_for()
        assert visitor.page.locator("#turn-1").count() == 0
        for seq in range(2, 4):
            aside(loop.run_until_complete, write_entries(begun, make_entry(seq)))
        visitor.page.locator("#turn-1").wait_for()
        aside(loop.run_until_complete, write_result(begun, make_trajectory()))
        visitor.page.locator(".episode-head .reward.big").wait_for()
        visitor.press("u")
        visitor.page.locator("table.episodes .reward").wait_for()
        assert visitor.problems == []


def test_a_test_is_made_of_an_episode(browser: Any, app: str, runs: tuple[Path, Path]) -> None:
    visitor = Visitor(browser, app + "#/list")
    visitor.open("episode", run=runs[0].name, id="desk-0/1")
    visitor.click('button:has-text("Make a test")')
    told = visitor.text("dialog pre")
    assert "There are 8." in told
    assert "scenarios:" in told
    with visitor.page.expect_download() as saved:
        visitor.click('dialog a:has-text("Save")')
    assert "There are 8." in Path(saved.value.path()).read_text()
    assert visitor.problems == []


def test_the_rows_of_the_list_are_downloaded(browser: Any, app: str, runs: tuple[Path, Path]) -> None:
    visitor = Visitor(browser, app + "#/list")
    visitor.open("list", filter='outcome.failure != "" && run.id == "' + runs[0].name + '"')
    with visitor.page.expect_download() as saved:
        visitor.click('a:has-text("Download the training rows")')
    rows = [json.loads(line) for line in Path(saved.value.path()).read_text().splitlines()]
    assert [row["episode_id"] for row in rows] == ["desk-0/3", "desk-1/3", "desk-2/3"]


def test_no_file_of_a_spec_is_imported(runs: tuple[Path, Path], tmp_path: Path) -> None:
    code = runs[0].parents[1] / "desk.py"
    text = code.read_text()
    try:
        code.write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n{text}")
        export(tmp_path, runs[0])
    finally:
        code.write_text(text)
    assert not os.path.exists(tmp_path / "imported")  # noqa: PTH110
