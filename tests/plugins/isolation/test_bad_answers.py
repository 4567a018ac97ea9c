"""What JSON cannot hold is refused alike in threads and in worker processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from written_specs import scripted_spec

SPEC_CODE = '''
from engine.schemas.environment import EpisodeView, Reset, Task, UserTurn


def value(task):
    return eval(task.fields["value"]) if task.fields["value"] else 1


class Board:
    def reset(self, task: Task, seed: int) -> Reset:
        return Reset(facts={"value": value(task)} if task.fields["place"] == "facts" else {})


def work(view: EpisodeView):
    """Work."""
    return value(view.task) if view.task.fields["place"] == "tool" else "done"


class Asker:
    def respond(self, view: EpisodeView) -> UserTurn:
        return UserTurn(satisfied=True, facts={"value": value(view.task)} if view.task.fields["place"] == "user" else {})
'''
VALUES = {
    "bytes": "b'x'",
    "a set": "{1}",
    "an object": "object()",
    "a number as key": "{1: 2}",
    "an integer of 71 bits": "2**70",
    "NaN": "float('nan')",
    "a surrogate": "chr(0xd800)",
    "a list": "[1, [2.5, None]]",
    "a NumPy integer": "__import__('numpy').int64(3)",
    "a NumPy array": "[__import__('numpy').arange(3)]",
}


@pytest.mark.slow
async def test_threads_and_processes_refuse_the_same(
    tmp_path: Path, tiny_tokenizer_dir: Path, run_here: Callable[..., Any]
) -> None:
    (tmp_path / "answers_of_code.py").write_text(SPEC_CODE)
    found = {}
    for mode in ("thread", "process"):
        rows = [
            {"id": f"{p}: {n}", "place": p, "value": v} for p in ("facts", "tool", "user") for n, v in VALUES.items()
        ]
        spec = {
            **scripted_spec(
                "answers", tiny_tokenizer_dir, [{"tool_calls": [{"name": "work"}]}, "Done."], rows, ask="Work."
            ),
            "environment": {"use": "answers_of_code:Board"},
            "tools": [{"use": "answers_of_code:work"}],
            "user": {"use": "answers_of_code:Asker"},
            "machine": {"preset": "tools_and_user"},
            "isolation": {"mode": mode},
        }
        path = tmp_path / f"{mode}.yaml"
        path.write_text(yaml.safe_dump(spec))
        episodes = await run_here(path)
        found[mode] = {task: (e.outcome.failure and e.outcome.failure.blame) for task, e in episodes.items()}
    assert found["process"] == found["thread"]
    assert [
        task
        for task, blame in found["thread"].items()
        if blame is None and "a list" not in task and "NumPy" not in task
    ] == [
        "tool: a number as key",  # tools answer with text: JSON of the value
        "tool: NaN",
    ]
