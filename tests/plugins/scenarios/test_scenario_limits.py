"""Limits of a user, in the coverage of scenarios."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.plugins.scenarios.coverage import coverage_of
from engine.spec.load import load_spec
from engine.validate import check_spec
from engine.validate.context import CheckContext

USERS = """\
spec: episode/v1
name: users
model: {path: smollm2-135m-instruct}
tasks: {source: inline, rows: [{q: a}]}
prompt: [{role: user, content: "{{q}}"}]
backend: {kind: scripted, replies: ["x"]}
user: {prompt: [{role: user, content: "{{q}}"}], USER}
machine:
  preset: retry_with_feedback
  states: {SILENT: {final: true}}
  transitions: [{trigger: limit, source: AWAITING_USER_FEEDBACK, dest: SILENT}]
limits: {user_turns: null, episode_seconds: null}
"""


@pytest.mark.parametrize(
    ("user", "unreachable"), [("limits: {turns: 2}", False), ("limits: {tokens: 9}", False), ("timeout: 5s", True)]
)
def test_the_limits_of_a_user_can_stop_the_user(
    user: str, unreachable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(USERS.replace("USER}", user + "}"))
    loaded = load_spec("s.yaml")
    context = CheckContext(loaded)
    found = {item.rule for item in check_spec(loaded)}
    stopped = [edge for edge in coverage_of(loaded, []).taken if edge[:2] == ("AWAITING_USER_FEEDBACK", "limit")]
    assert (
        "machine.unreachable" in found,
        "SILENT" in {place.state for place in context.graph.steps},
        len(stopped),
    ) == ((True, False, 0) if unreachable else (False, True, 1))
