"""The spec of the tests of adapters of trainers: two turns, credit by turn, groups of different sizes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from written_specs import save_spec

from engine.store.reader import RunReader
from engine.store.rows.export import export_rows

TASKS = 5
FORGETFUL = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and not loop.last %}{{- 'Said.' }}{% else %}{{- message.content }}{% endif %}{{- '<|im_end|>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
"""Rewrites history, so that each turn is a row of its own."""


def write_spec(folder: Path, model: Path, *, template: Path | None = None, **changes: Any) -> Path:
    """Write `spec.yaml`. Its user is `uneven_listener`, which fails in some episodes.

    Args:
        folder: Where to write it.
        model: The folder of the model.
        template: A chat template in place of the model's.
        changes: Keys that replace those of the spec.
    """
    spec: dict[str, Any] = {
        "spec": "episode/v1",
        "name": "two-turns",
        "model": {"path": str(model)} | ({} if template is None else {"chat_template": str(template)}),
        "backend": {"kind": "local"},
        "tasks": {"source": "inline", "rows": [{"id": f"t{n}", "say": f"word {n}"} for n in range(TASKS)], "id": "id"},
        "prompt": [{"role": "user", "content": "Say {{say}}."}],
        "user": {"use": "uneven_listener:UnevenListener"},
        "machine": "tools_and_user",
        "limits": {"turn_tokens": 24, "assistant_turns": 2, "episode_tokens": 160},
        "rewards": {"credit": {"method": "turn_return", "gamma": 0.5}},
        "rollout": {"samples_per_task": 4, "seed": 3},
    }
    return save_spec(folder / "spec.yaml", spec | changes)


def rows_to_train(store: RunReader) -> list[dict[str, Any]]:
    """The trainable rows of groups that failures left with two episodes or more: the default of `train.min_group`."""
    rows = [row for row in export_rows(store) if row["trainable"]]
    sizes = Counter(task for task, _ in {(row["task_id"], row["sample_index"]) for row in rows})
    assert {size > 1 for size in sizes.values()} == {True, False}, "no group is too small, or each is"
    return [row for row in rows if sizes[row["task_id"]] > 1]
