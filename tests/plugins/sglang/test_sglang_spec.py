"""The section `backend` of SGLang servers."""

from __future__ import annotations

from pathlib import Path

from written_specs import save_spec, scripted_spec

from engine.spec.load import read_spec


def test_an_old_key_is_refused_and_the_new_one_named(tmp_path: Path) -> None:
    backend = {"kind": "sglang", "urls": ["http://127.0.0.1:30000"], "patience": 30}
    spec = scripted_spec("old", tmp_path, ["Done."], tool_calls=None) | {"backend": backend}
    loaded, problems = read_spec(save_spec(tmp_path / "s.yaml", spec))
    assert loaded is None
    assert [(problem.rule, problem.message, problem.fix) for problem in problems] == [
        ("spec.unknown-key", "unknown key `patience`", "did you mean `health_timeout`?")
    ]
