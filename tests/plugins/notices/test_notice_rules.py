"""Rules about `notify`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from command_line import engine_here

from engine.spec.load import load_spec
from engine.validate import check_spec

HEAD = """\
spec: episode/v1
name: demo
model: {path: org/m}
tasks: {source: inline, rows: [{q: a}]}
prompt: [{role: user, content: "{{q}}"}]
"""


NOTIFY = [
    ("notify: {on: [failed]}", ["notify.on"]),
    (
        "notify: {stall_timeout: 1m, repeat_after: 1m, budget: {tokens: 5}}",
        ["notify.stall_timeout", "notify.repeat_after", "notify.budget"],
    ),
    ('notify: {on: [], command: ["true"]}', ["notify.command"]),
    (
        "notify: {on: [], webhook_env: HOOK, services_env: [HOOK], use: 'math:floor'}",
        ["notify.webhook_env", "notify.services_env", "notify.use"],
    ),
    ('notify: {on: [failed], command: ["true"], stall_timeout: 1m}', ["notify.stall_timeout"]),
    ('notify: {on: [failed], command: ["true"], budget: {time: 1m}}', ["notify.budget"]),
    ('notify: {command: ["true"], budget: {}}', ["notify.budget"]),
    ('notify: {command: ["true"], stall_timeout: 1m, repeat_after: 1m, budget: {time: 1m}}', []),
    ('notify: {command: ["true"], on: [failed, diverged]}', ["notify.on"]),
    ('notify: {command: ["true"], on: [diverged]}\ntrain: {}', []),
    ('notify: {command: ["true"], on: [stalled, budget]}', ["notify.on"]),
    ('notify: {command: ["true"], on: [budget], budget: {}}', ["notify.budget", "notify.on"]),
    ('notify: {command: ["true"], on: [budget], budget: {time: 1m}}', []),
    ('notify: {command: ["true"], on: [budget]}\nrollout: {max_cost: 1}', []),
    ('notify: {command: ["true"]}', []),
]


@pytest.mark.parametrize(("lines", "options"), NOTIFY)
def test_an_option_of_notify_without_effect_is_found(
    lines: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(f"{HEAD}machine: single_turn\n{lines}\n")
    told = [item.message for item in check_spec(load_spec("s.yaml")) if item.rule == "notify.no-effect"]
    assert sorted(words.split("`")[1] for words in told) == sorted(options)


def test_the_package_of_notices_that_is_missing_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apprise", None)
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(f"{HEAD}machine: single_turn\nnotify: {{services_env: [SLACK]}}\n")
    told = [str(item) for item in check_spec(load_spec("s.yaml")) if item.rule == "notify.no-package"]
    assert [line.partition("; ")[0] for line in told] == [
        "s.yaml:7:10: info[notify.no-package] `apprise` is not installed, and `notify.services_env` needs it"
    ]


def test_a_function_of_ones_own_is_checked_and_imported_only_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "notice_code.py").write_text("open('imported', 'w').close()\n\n\ndef tell():\n    pass\n")
    Path("s.yaml").write_text(f"{HEAD}machine: single_turn\nnotify: {{use: 'notice_code:tell'}}\n")
    wrong = "s.yaml:7:15: error[code.protocol] `notice_code:tell` cannot be called: too many positional arguments"
    code, out, _ = engine_here("validate", "s.yaml", cwd=tmp_path)
    assert (code, wrong in out, Path("imported").exists()) == (1, True, False)
    code, out, _ = engine_here("validate", "--import", "s.yaml", cwd=tmp_path)
    assert (code, wrong in out, Path("imported").exists()) == (1, True, True)
