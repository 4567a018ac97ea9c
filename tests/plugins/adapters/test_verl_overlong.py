"""Messages of verl's prompts count for the limits of a task's prompt before it runs."""

from __future__ import annotations

from pathlib import Path

from written_specs import save_spec, scripted_spec

from engine.runner.source import fitting_tasks
from engine.spec.load import load_spec
from engine.spec.tasks import load_tasks
from engine.tokens.loading import load_format


def test_rows_whose_prompt_by_verl_is_too_long_are_left_out(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    rows = [
        {"id": f"r{at}", "chat": [{"role": "user", "content": "no " * words}]}
        for at, words in enumerate([3, 400, 5, 90, 401])
    ]
    spec = scripted_spec("verl", tiny_tokenizer_dir, ["42"] * 5, rows, ask=None) | {
        "environment": {
            "use": "engine.plugins.adapters.verl.interactions:Prompt",
            "effects": "pure",
            "with": {"field": "chat"},
        },
        "machine": "single_turn",
        "limits": {"episode_tokens": 300, "turn_tokens": 32},
    }
    spec["tasks"]["overlong"] = "drop"
    loaded = load_spec(save_spec(tmp_path / "spec.yaml", spec))
    kept = fitting_tasks(load_tasks(loaded), loaded, load_format(loaded.spec.model, loaded.base))
    assert [task.id for task in kept] == ["r0", "r2", "r3"]
