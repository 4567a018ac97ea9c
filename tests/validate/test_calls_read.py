"""Tools with a model whose calls nobody reads are refused before the run."""

from __future__ import annotations

from pathlib import Path

import pytest
from chat_kit import THINKING, make_tokenizer

from engine.spec.load import load_spec
from engine.validate import check_spec

UNREAD = THINKING.replace('"arguments": ', '"given": ')


@pytest.mark.parametrize(
    ("template", "calls", "found"),
    [(UNREAD, "auto", True), (UNREAD, "hermes", False), (UNREAD, "plain", False), (THINKING, "auto", False)],
)
def test_tools_whose_calls_nobody_reads_are_refused(tmp_path: Path, template: str, calls: str, found: bool) -> None:
    make_tokenizer(tmp_path / "model", template)
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "spec.yaml").write_text(
        "spec: episode/v1\nname: demo\n"
        f"model: {{path: model, tool_calls: {calls}}}\n"
        "tasks: {source: inline, rows: [{question: hm}]}\n"
        'prompt: [{role: user, content: "{{question}}"}]\n'
        "machine: tools\n"
        'tools: [{use: "environments.tools.calculator:calculate"}]\n'
    )
    ids = [finding.rule for finding in check_spec(load_spec(tmp_path / "spec.yaml"))]
    assert ("model.calls-not-read" in ids) is found
