"""A stored run of an agent program, in an engine without the folder of this plugin: it is shown and exported, and no episode is run."""

from __future__ import annotations

import json
from pathlib import Path

from agent_kit import play
from one_deleted import copy_without, python

from engine.known_plugins import KNOWN

SCRIPT = Path(__file__).parents[1] / "without_plugins.py"
SHOWN = ["show latest", "show latest {episode}", "show latest {episode} --json", "export latest --out rows.jsonl"]
REFUSED = ["replay latest", "run --resume latest", "replay latest --from-turn 1"]

PROGRAM = "chat(ASK)\nchat(ASK, {'role': 'user', 'content': 'Again.'})\nreward()\n"


async def test_a_run_of_a_program_is_shown_and_not_continued(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    played = await play(tmp_path, tiny_tokenizer_dir, PROGRAM, ["One.", "Two."])
    episode = played.trajectory.episode_id
    copy = copy_without(["agents", "serve"], tmp_path / "copy")
    commands = [line.format(episode=episode).split() for line in [*SHOWN, *REFUSED]]
    asked = {"skipped": ["engine.plugins.agents", "engine.plugins.serve"], "commands": commands}
    done = python(copy, str(SCRIPT), json.dumps(asked), str(copy), at=tmp_path)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])["answers"]
    shown, refused = answers[: len(SHOWN)], answers[len(SHOWN) :]
    assert [code for code, _ in shown] == [0] * len(SHOWN), shown
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == len(played.trajectory.branches)
    why = f"its spec uses the plugin `agents`, which is not installed: {KNOWN['agents']['install'][0]}"
    for code, text in refused:
        assert (code, why in " ".join(text.split())) == (1, True), text
