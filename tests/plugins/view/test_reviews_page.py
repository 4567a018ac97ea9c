"""A person reviews an episode in a real browser: by keys, in the panel, in the list, and in a file that only shows."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from browser_kit import ENGINE, Visitor, chromium, environment, served
from desk import make_runs

pytestmark = [pytest.mark.browser]


def test_ratings_tags_and_notes(tmp_path: Path) -> None:
    run, _ = make_runs(tmp_path)
    with served(run, cwd=tmp_path) as address, chromium() as browser:
        visitor = Visitor(browser, address)
        page = visitor.page
        visitor.open("episode", run=run.name, id="desk-0/0")
        visitor.press("+")
        page.locator("#live", has_text="Stored, rated +1").wait_for(state="attached")
        visitor.press("8")
        assert "+1" in visitor.text(".review table")
        page.fill("input[name=tags]", "fair <i>")
        visitor.click("button:has-text('Store tags and note')")
        assert "tags" in visitor.text(".review .error")
        page.fill("input[name=tags]", "fair, short")
        page.fill("textarea[name=note]", "<b>asks first</b>")
        visitor.click("button:has-text('Store tags and note')")
        page.locator(".review td", has_text="<b>asks first</b>").wait_for()
        visitor.open("list", filter="facts.review.rating > 0")
        assert page.locator("table.episodes a.row-link").all_inner_texts() == ["desk-0/0"]
        visitor.click("table.episodes a:has-text('short')")
        page.wait_for_function("() => location.hash.includes('review.tags')")
        visitor.settle()
        assert page.locator("table.episodes a.row-link").all_inner_texts() == ["desk-0/0"]
        assert [problem for problem in visitor.problems if "400" not in problem] == []

        lines = [json.loads(line) for line in (run / "reviews.jsonl").read_text().splitlines()]
        assert [(line["rating"], line["tags"], line["note"]) for line in lines] == [
            (1.0, [], ""), (1.0, ["fair", "short"], "<b>asks first</b>"),
        ]  # fmt: skip
        command = [*ENGINE, "view", str(run), "--export", "one.html", "--filter", "facts.review.rated"]
        subprocess.run(command, cwd=tmp_path, env=environment(), check=True)
        file = Visitor(browser, (tmp_path / "one.html").as_uri())
        file.open("episode", run=run.name, id="desk-0/0", tab="review")
        assert "<b>asks first</b>" in file.text(".review table")
        assert file.page.locator(".review form").count() == 0
        assert file.problems == []
