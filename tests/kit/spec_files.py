"""Spec files in the current folder, and what reading them finds."""

from __future__ import annotations

from pathlib import Path

from engine.spec.load import LoadedSpec, load_spec, read_spec

GOOD = """\
spec: episode/v1
name: demo
model: {path: org/some-model}
tasks: {source: inline, rows: [{question: "1 + 1"}]}
"""


def write(name: str, text: str) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text, encoding="utf-8")
    return name


def errors(name: str, *overrides: str) -> list[str]:
    loaded, problems = read_spec(name, overrides)
    assert loaded is None
    return [str(problem) for problem in problems]


def load(text: str, *overrides: str) -> LoadedSpec:
    return load_spec(write("s.yaml", text), overrides)
