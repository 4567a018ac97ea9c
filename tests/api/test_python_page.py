"""docs/python.md: its code runs, and it names every public name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import engine

PAGE = Path(engine.__file__).parents[1] / "docs" / "python.md"
HELLO = """
spec: episode/v1
name: hello
model: {{path: {tokenizer}}}
backend: {{kind: scripted, replies: {replies}}}
tasks: {{source: inline, rows: [{{name: Ada}}, {{name: Bo}}]}}
machine: step
environment: {{use: "{use}"}}
"""
GUESS = """
from engine import End, environment

@environment
def guess(task):
    view = yield "A number?"
    return End(rewards={"won": 1.0}, solved=True)
"""


def test_the_page_names_every_public_name() -> None:
    text = PAGE.read_text()
    assert [name for name in engine.PUBLIC if not re.search(rf"`{name}\b|\.{name}\b", text)] == []


def test_its_code_runs(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    first, second = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "worlds.py").write_text(GUESS)
    for name, use, replies in (("guess", "worlds:guess", "[seven]"), ("hello", "worlds:guess", "['Hello, Ada!']")):
        text = HELLO.format(tokenizer=tiny_tokenizer_dir, replies=replies, use=use)
        (tmp_path / f"{name}.yaml").write_text(text)
    done = [
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
        for code in (f"{first}\nassert run.summary.mean_reward == 1.0, run.summary", second)
    ]
    assert [item.returncode for item in done] == [0, 0], [item.stderr[-1500:] for item in done]
    reset, *_, trajectory = done[1].stdout.split("JournalEntry(")[1:]
    assert "Say hello to Ada." in reset
    assert "rewards={'named': 1.0}" in trajectory
