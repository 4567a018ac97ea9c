"""`isolation` says nothing that has no effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from written_specs import save_spec

from engine.errors import SpecError
from engine.spec.load import load_spec
from engine.validate import check_spec

BASE: dict[str, Any] = {
    "spec": "episode/v1",
    "name": "demo",
    "model": {"path": "org/m"},
    "tasks": {"source": "inline", "rows": [{"question": "?"}]},
    "prompt": [{"role": "user", "content": "{{question}}"}],
    "machine": "tools_and_user",
}
TOOL = {"use": "engine.environments.tools.calculator:calculate"}
PLAYED = {"prompt": [{"role": "user", "content": "{{reply}}"}]}


def findings(folder: Path, **changes: Any) -> list[tuple[str, str]]:
    path = save_spec(folder / "spec.yaml", {**BASE, **changes})
    found = [item for item in check_spec(load_spec(path)) if item.rule == "isolation.no-effect"]
    return [(item.message, item.fix or "") for item in found]


@pytest.mark.parametrize(
    "changes",
    [
        {"tools": [{**TOOL, "isolation": {"memory": "1GB"}}]},
        {"tools": [TOOL], "isolation": {"cpu": "1s", "output": "1MB"}},
        {"tools": [{**TOOL, "isolation": {"processes": 4}}], "isolation": "thread"},
        {"tools": [TOOL], "user": {**PLAYED, "isolation": "process"}},
        {"tools": [TOOL], "rewards": {"scorer": {**PLAYED, "isolation": "process"}}},
        {"isolation": "process"},
    ],
)
def test_what_has_no_effect_is_found(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert len(findings(tmp_path, **changes)) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"tools": [{**TOOL, "isolation": {"mode": "process", "memory": "1GB"}}]},
        {"tools": [{**TOOL, "isolation": {"memory": "1GB"}}], "isolation": "process"},
        {"tools": [{**TOOL, "isolation": "process"}], "isolation": {"memory": "1GB"}},
        {"tools": [{**TOOL, "isolation": "thread"}], "isolation": {"mode": "process", "memory": "1GB"}},
        {"tools": [TOOL], "isolation": "thread"},
        {"user": {**PLAYED, "grader": {"use": "engine.environments.arithmetic:Teacher"}, "isolation": "process"}},
    ],
)
def test_what_has_an_effect_is_not(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert findings(tmp_path, **changes) == []


def test_limits_of_a_thread_are_refused_where_they_are_written(tmp_path: Path) -> None:
    path = save_spec(tmp_path / "spec.yaml", {**BASE, "isolation": {"mode": "thread", "memory": "1GB"}})
    with pytest.raises(SpecError, match="`memory` cannot limit code in a thread"):
        load_spec(path)


@pytest.mark.parametrize(("text", "size"), [("64kB", 64_000), ("1.5GiB", 1_610_612_736), (7, 7), ("2 MB", 2_000_000)])
def test_sizes(tmp_path: Path, text: Any, size: int) -> None:
    path = save_spec(tmp_path / "spec.yaml", {**BASE, "isolation": {"mode": "process", "output": text}})
    spec = load_spec(path).spec
    assert spec.isolation is not None
    assert spec.isolation.output == size


def test_what_a_part_leaves_out_is_the_spec_s(tmp_path: Path) -> None:
    tools = [
        {**TOOL, "isolation": {"memory": "2GB"}},
        {**TOOL, "name": "b", "isolation": "thread"},
        {**TOOL, "name": "c"},
    ]
    path = save_spec(
        tmp_path / "spec.yaml", {**BASE, "tools": tools, "isolation": {"mode": "process", "memory": "1GB", "cpu": "3s"}}
    )
    spec = load_spec(path).spec
    whole = [spec.isolation_of(tool.isolation) for tool in spec.tools]
    assert [(one.mode, one.memory, one.cpu) for one in whole] == [
        ("process", 2 * 10**9, 3.0),
        ("thread", None, None),
        ("process", 10**9, 3.0),
    ]
