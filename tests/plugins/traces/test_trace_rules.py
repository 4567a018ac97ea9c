"""Rules about `traces`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engine.spec.load import load_spec
from engine.validate import check_spec

HEAD = """\
spec: episode/v1
name: demo
model: {path: org/m}
tasks: {source: inline, rows: [{q: a}]}
prompt: [{role: user, content: "{{q}}"}]
"""


@pytest.mark.parametrize(
    ("lines", "options"),
    [
        ("traces: {of: failed}", ["traces.of"]),
        ("traces: {of: failed, content: true, episodes: true}", ["traces.content"]),
        ("traces: {of: failed, content: true, spans: true}", []),
        ("traces: {of: failed, content: true, otlp: 'http://127.0.0.1:4318'}", []),
    ],
)
def test_an_option_of_traces_without_effect_is_found(
    lines: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(f"{HEAD}machine: single_turn\n{lines}\n")
    told = [item.message for item in check_spec(load_spec("s.yaml")) if item.rule == "traces.no-effect"]
    assert sorted(words.split("`")[1] for words in told) == sorted(options)


def test_the_packages_of_spans_that_are_missing_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(f"{HEAD}machine: single_turn\ntraces: {{spans: true}}\n")
    told = [str(item) for item in check_spec(load_spec("s.yaml")) if item.rule == "traces.no-package"]
    assert [line.partition("; ")[0] for line in told] == [
        "s.yaml:7:10: info[traces.no-package] `opentelemetry-sdk` is not installed, and spans need it"
    ]
