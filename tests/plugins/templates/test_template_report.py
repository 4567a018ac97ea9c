"""What `engine template` says about real templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_kit import make_tokenizer
from exactness import SHIPPED, cases, load_case
from typer.testing import CliRunner

from engine.cli.main import app
from engine.plugins.templates.report import branch_rule, masks, parting, usual_turns
from engine.tokens.bridge.kinds import ASSISTANT, REASONS, USER
from engine.tokens.template import ChatTemplate


def load(name: str, folder: Path, **model: Any) -> ChatTemplate:
    folder.mkdir(exist_ok=True)
    return load_case(SHIPPED / name, folder, make_tokenizer, **model)


def test_both_renderings_are_shown_where_they_part(tmp_path: Path) -> None:
    form = load("qwen3", tmp_path)
    turns = usual_turns(form)
    assert {name: turn.goes_on for name, turn in turns.items()} == {
        "user after an answer": True,
        "user after reasoning": False,
        "tool after a call": True,
        "tool after reasoning and a call": True,
        "user after calls and an answer": True,
    }
    was, now = turns["user after reasoning"].was, turns["user after reasoning"].now
    assert was == ">\n<|im_start|>assistant\n<think>\nWhy Qz1vKxProbew\n</think>\n\nQz1vKxProbe"
    assert now == ">\n<|im_start|>assistant\nQz1vKxProbe<|im_end|>\n<|im_start|>user\nQz2vKxProbe<|im_e"
    assert branch_rule(turns, "branch") == "a new branch, and so another row, begins at: user after reasoning"
    assert branch_rule(turns, "keep").startswith("`history: keep` continues with the sampled tokens")
    patched = usual_turns(load("qwen3", tmp_path / "patched", template_patches=True))
    assert all(turn.goes_on for turn in patched.values())
    assert branch_rule(patched, "branch") == "every usual turn continues the tape: an episode is one row"


def test_the_generation_prompt_is_compared_too(tmp_path: Path) -> None:
    """Qwen3.5 opens the reasoning in the prompt, and shows earlier replies without it."""
    was, now = parting(load("qwen3_5_think", tmp_path), [USER, ASSISTANT + REASONS, USER])
    assert was.endswith("<|im_start|>assistant\n<think>\n")
    assert now.startswith(was.removesuffix("<think>\n") + "Qz1vKxProbe<|im_end|>")


def test_what_is_trained_is_what_was_sampled(tmp_path: Path) -> None:
    rows = masks(load("qwen3", tmp_path))
    assert [[piece.text for piece in row if piece.trained] for row in rows] == [
        [
            '<think>\nI add.\n</think>\n\n<tool_call>\n{"name": "probe_tool", "arguments": {"count": 2}}\n</tool_call><|im_end|>',
            "<think>\nI add.\n</think>\n\nIt is 2.<|im_end|>",
        ],
        ["<think>\nI add.\n</think>\n\nYes.<|im_end|>"],
    ]
    (row,) = masks(load("gemma3", tmp_path / "gemma"))
    assert [piece.text for piece in row if piece.trained] == ["It is 2.<end_of_turn>", "Yes.<end_of_turn>"]


@pytest.mark.slow
@pytest.mark.parametrize("name", cases())
def test_every_template_has_a_report(name: str, tmp_path: Path) -> None:
    form = load(name, tmp_path)
    turns = usual_turns(form)
    assert turns
    assert masks(form)
    for turn in turns.values():
        assert turn.goes_on or turn.why
        assert turn.was != turn.now or turn.was == ""


def test_the_command_prints_the_report(tokenizer_dirs: dict[str, Path], tmp_path: Path) -> None:
    model, out = str(tokenizer_dirs["thinking"]), tmp_path / "template.jinja"
    told = json.loads(CliRunner().invoke(app, ["template", model, "--json"]).stdout)
    assert told["turns"]["user after an answer"] == {"goes_on": True}
    assert told["turns"]["user after reasoning"]["now"].startswith(">\n<|im_start|>assistant\nQz1vKxProbe")
    assert [piece["trained"] for piece in told["trained"][0]][:2] == [False, True]
    shown = CliRunner().invoke(app, ["template", model, "--write", str(out)])
    assert shown.exit_code == 0
    assert "\n    before: '" in shown.stdout
    assert "\n    trained '" in shown.stdout
    assert out.read_text().startswith("{%- if tools %}")
    for words in (["--write", str(out)], ["--patches"], ["--history", "both"]):
        assert CliRunner().invoke(app, ["template", model, *words]).exit_code == 2


def test_how_tokens_of_images_are_found_is_in_the_report() -> None:
    result = CliRunner().invoke(app, ["template", "tiny-qwen2_5-vl", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["images"] == "tokens from the image's size"
