"""A stored run that condensed, in an engine without the folder of this plugin: it is shown and exported, and no episode is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from book_kit import call
from one_deleted import copy_without, python

from engine.known_plugins import KNOWN
from engine.store.codec import entry_row
from engine.store.episode_rows import shared_entries

SCRIPT = Path(__file__).parents[1] / "without_plugins.py"
SHOWN = ["show latest", "show latest a/0", "show latest a/0 --json", "export latest --out rows.jsonl"]
REFUSED = ["replay latest", "run --resume latest", "replay latest --from-turn 2"]


async def test_a_run_that_condensed_is_shown_and_not_continued(play_book: Any, tmp_path: Path) -> None:
    ran = await play_book([*map(call, range(9)), "done"], condense={"expand": True})
    assert len(ran.only.condensations) > 1
    rows = [entry_row(entry) for entry in shared_entries(ran.store.journal("a/0"), 9)]
    ran.store.close()
    copy = copy_without(["condense"], tmp_path / "copy")
    commands = [line.split() for line in [*SHOWN, *REFUSED]]
    asked = {"skipped": ["engine.plugins.condense"], "commands": commands}
    done = python(copy, str(SCRIPT), json.dumps(asked), str(copy), at=tmp_path)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])["answers"]
    shown, refused = answers[: len(SHOWN)], answers[len(SHOWN) :]
    assert [code for code, _ in shown] == [0] * len(SHOWN), shown
    assert "condensed: 1 block, 210 tokens fewer" in shown[2][1]
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == len(ran.only.branches)
    why = f"its spec uses the plugin `condense`, which is not installed: {KNOWN['condense']['install'][0]}"
    for code, text in refused:
        assert (code, why in " ".join(text.split())) == (1, True), text
    journal = (
        "import json, sys; from engine.store import RunStore, find_run; from engine.store.codec import entry_row; "
    )
    journal += "store = RunStore.open(find_run('latest'), readonly=True); "
    journal += "print(json.dumps([[*entry_row(entry)[:6]] for entry in store.journal('a/0')]))"
    again = json.loads(python(copy, "-c", journal, at=tmp_path).stdout)
    assert again[: len(rows)] == [[*row[:6]] for row in rows]
