"""Specs as Python values, for tests that run them: what most of them begin with, and the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

Spec = dict[str, Any]

TALKS_ON_WHEN_CUT = {
    "preset": "tools_and_user",
    "transitions": [{"trigger": "truncated", "source": "GENERATING", "dest": "AWAITING_USER_FEEDBACK"}],
}
"""A machine whose user answers a reply that was cut, too: for models whose replies have no end."""


def scripted_spec(
    name: str,
    tokenizer: Path,
    replies: Any,
    tasks: int | list[Spec] = 1,
    ask: str | None = "What is 17 plus 25?",
    tool_calls: str | None = "hermes",
) -> Spec:
    """The keys of a spec whose replies are written: its model, backend, tasks and prompt.

    Args:
        name: The spec's name.
        tokenizer: The folder of the model's tokenizer.
        replies: The replies, as the scripted backend reads them.
        tasks: The rows of the tasks, or how many; then their ids are t0, t1, …
        ask: The user's message of the prompt; None: no prompt.
        tool_calls: The model's format of calls; None: that of its template.
    """
    rows = [{"id": f"t{number}"} for number in range(tasks)] if isinstance(tasks, int) else tasks
    spec: Spec = {
        "spec": "episode/v1",
        "name": name,
        "model": {"path": str(tokenizer)} | ({} if tool_calls is None else {"tool_calls": tool_calls}),
        "backend": {"kind": "scripted", "replies": replies},
        "tasks": {"source": "inline", "rows": rows, "id": "id"},
    }
    return spec if ask is None else spec | {"prompt": [{"role": "user", "content": ask}]}


def listener_spec(name: str, model: Path) -> Spec:
    """The keys of a spec that a model can learn in a few steps: six tasks, and a listener of tests/core/train that likes vowels."""
    return {
        "spec": "episode/v1",
        "name": name,
        "model": {"path": str(model)},
        "tasks": {"source": "inline", "rows": [{"id": f"t{n}", "say": f"word {n}"} for n in range(6)], "id": "id"},
        "prompt": [{"role": "user", "content": "Say {{say}}."}],
        "user": {"use": "code_for_training:Listener"},
    }


def save_spec(path: Path, spec: Spec) -> Path:
    """Write a spec; its file."""
    path.write_text(yaml.safe_dump(spec))
    return path
