"""The scenarios of a stranger's spec run nothing when they are validated."""

from __future__ import annotations

from pathlib import Path

import pytest
from hostile_folders import CODE, build
from strangers_place import opened


def test_scenarios_of_a_stranger_run_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as place:
        files = build({k: CODE[k] for k in ("rows of a shell", "rows beside")}, place.work / "played", place.outside, 1)
        named = []
        for file in files.values():
            scenarios = file.with_name("s.scenarios.yaml")
            scenarios.write_text(
                "scenarios:\n"
                "  - {name: named, task: a, replies: [x], expect: {states: [PENDING, GENERATING, DONE]}}\n"
                "  - {name: first, replies: [x], expect: {states: [PENDING, GENERATING, DONE]}}\n"
                "  - {name: own, set: {tasks: {source: python, use: 'subprocess:getoutput', with: {cmd: 'touch $CANARY'}}},\n"
                "     replies: [x], expect: {states: [PENDING, GENERATING, DONE]}}\n"
            )
            named.append(str(scenarios.relative_to(place.work)))
        code, out, err = place.run_here("validate", *named, monkeypatch=monkeypatch)
        assert out == "2 files of scenarios valid; `--import` would add 2 checks\n"
        assert (code, err, place.touched()) == (0, "", [])
