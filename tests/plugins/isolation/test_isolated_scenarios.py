"""Scenarios and replays of a spec whose code is isolated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml


@pytest.mark.slow
def test_scripted_answers_stand_before_isolated_parts(write: Callable[..., Path], command: Callable[..., Any]) -> None:
    spec = write([{"id": "healthy"}])
    calls = [{"name": "work", "arguments": {"times": 2}}]
    wrong = [{"name": "work", "arguments": {"times": "often"}}]
    scenarios = {
        "scenarios": [
            {
                "name": "scripted, refused and real",
                "replies": [{"tool_calls": calls}, {"tool_calls": wrong}, {"tool_calls": calls}, "It is done."],
                "tools": [{"tool": "work", "arguments": {"times": 2}, "result": "from the script", "times": 1}],
                "expect": {
                    "messages": [
                        ...,
                        {"role": "tool", "content": "from the script"},
                        ...,
                        {"role": "tool", "contains": "Wrong arguments for `work`: `times`"},
                        ...,
                        {"role": "tool", "content": "done done "},
                        ...,
                    ],
                    "outcome": {"solved": True},
                },
            },
            {
                "name": "a user that fails by the script, and an isolated environment",
                "replies": ["It is done."],
                "user": [{"error": "no"}],
                "expect": {"outcome": {"failure": {"kind": "user_error", "blame": "user"}}},
            },
        ]
    }
    text = yaml.safe_dump(json.loads(json.dumps(scenarios, default=lambda _: "...")))
    spec.with_name("spec.scenarios.yaml").write_text(text.replace("'...'", "...").replace("- '...'", "- ..."))
    ran = command("test", str(spec))
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.slow
def test_an_isolated_run_replays_to_the_same_bytes(write: Callable[..., Path], command: Callable[..., Any]) -> None:
    rows = [
        {"id": "healthy"},
        {"id": "a", "role": "environment", "kind": "exit"},
        {"id": "b", "role": "user", "kind": "segv"},
    ]
    assert command("run", str(write(rows)), "-q").returncode == 0
    replayed = command("replay", "latest")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
