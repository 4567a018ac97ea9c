"""`engine validate` prints every finding with its place, and exits with 0, 1 or 2."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from command_line import engine_output
from installed_plugins import needs_plugin
from typer.testing import CliRunner

from engine.cli.main import app
from engine.validate.examine import find_specs

MODEL = {"config.json": "{}", "tokenizer_config.json": '{"chat_template": "{{ tools }}{{ messages }}"}'}
"""Files of a model, so that nothing has to be left unchecked."""
GOOD = """\
spec: episode/v1
name: demo
model: {path: m}
machine: single_turn
tasks: {source: inline, rows: [{question: a}]}
prompt: [{role: user, content: "{{question}}"}]
"""
BAD = GOOD + "limits: {usr_turns: 2}\n"

run = partial(engine_output, "validate")


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m").mkdir()
    for name, text in MODEL.items():
        (Path("m") / name).write_text(text)


def test_a_valid_spec_exits_with_0() -> None:
    Path("s.yaml").write_text(GOOD)
    assert run("s.yaml") == (0, "1 spec valid\n")


def test_an_invalid_spec_exits_with_1_and_shows_line_and_caret() -> None:
    Path("s.yaml").write_text(BAD)
    assert run("s.yaml") == (
        1,
        "s.yaml:7:10: error[spec.unknown-key] unknown key `usr_turns`\n"
        "     7 | limits: {usr_turns: 2}\n"
        "       |          ^^^^^^^^^\n"
        "        fix: did you mean `user_turns`?\n"
        "1 spec, 1 invalid: 1 error\n",
    )


def test_what_cannot_be_read_exits_with_2() -> None:
    Path("s.yaml").write_text(BAD)
    status, output = run("s.yaml", "missing/no.yaml")
    assert status == 2
    assert output.splitlines()[-2:] == [
        "missing/no.yaml:1:1: error[spec.unreadable] `missing/no.yaml` cannot be read: No such file or directory",
        "2 specs, 2 invalid: 2 errors",
    ]
    Path("t.yaml").write_text("a: [1\n")
    assert run("t.yaml") == (
        2,
        "t.yaml:1:4: error[yaml.syntax] `[` is opened here and not closed (the parser stops in line 2)\n"
        "     1 | a: [1\n       |    ^\n        fix: close it with `]`\n"
        "1 spec, 1 invalid: 1 error\n",
    )


def test_a_warning_does_not_make_a_spec_invalid() -> None:
    Path("s.yaml").write_text(GOOD.replace("single_turn", "tools"))
    status, output = run("s.yaml")
    assert status == 0
    assert output.splitlines() == [
        "s.yaml:4:1: warning[tools.missing] `AWAITING_TOOL` calls tools, and the spec has none",
        "     4 | machine: tools",
        "       | ^^^^^^^",
        "        fix: add `tools: [{use: …}]`, or use a machine without them (`machine: retry_with_feedback` or `single_turn`)",
        "1 spec valid: 1 warning",
    ]


def test_an_override_is_shown_with_its_caret() -> None:
    Path("s.yaml").write_text(GOOD)
    assert run("s.yaml", "--set", "limits.user_turns=two", "--set", "name=ok") == (
        1,
        "--set limits.user_turns=two: error[spec.wrong-type] `limits.user_turns` must be a whole number; it is `two`\n"
        "       | --set limits.user_turns=two\n"
        "       |                         ^^^\n"
        "1 spec, 1 invalid: 1 error\n",
    )


def test_a_caret_stands_right_behind_wide_characters_and_tabs() -> None:
    Path("s.yaml").write_text(GOOD + 'limits: {"日本": 1,\tx: 2}\n')
    _, output = run("s.yaml")
    lines = output.splitlines()
    assert lines[lines.index('     7 | limits: {"日本": 1,\tx: 2}') + 1] == "       |          ^^^^^^"
    assert f"       | {' ' * 19}\t^" in lines


def test_an_error_in_a_base_shows_the_bases_line() -> None:
    Path("lib").mkdir()
    Path("lib/base.yaml").write_text(BAD)
    Path("s.yaml").write_text("extends: lib/base.yaml\n")
    status, output = run("s.yaml")
    assert status == 1
    assert output.splitlines()[:2] == [
        "lib/base.yaml:7:10 (extends lib/base.yaml): error[spec.unknown-key] unknown key `usr_turns`",
        "     7 | limits: {usr_turns: 2}",
    ]


def test_json() -> None:
    Path("s.yaml").write_text(BAD)
    Path("t.yaml").write_text(GOOD)
    status, output = run("s.yaml", "t.yaml", "--format", "json")
    assert status == 1
    assert json.loads(output) == {
        "valid": False,
        "specs": [
            {
                "file": "s.yaml",
                "valid": False,
                "readable": True,
                "diagnostics": [
                    {
                        "rule": "spec.unknown-key",
                        "severity": "error",
                        "message": "unknown key `usr_turns`",
                        "fix": "did you mean `user_turns`?",
                        "path": ["limits", "usr_turns"],
                        "file": "s.yaml",
                        "line": 7,
                        "column": 10,
                        "via": "",
                    }
                ],
                "skipped": [],
                "worst_case": None,
            },
            {"file": "t.yaml", "valid": True, "readable": True, "diagnostics": [], "skipped": [], "worst_case": None},
        ],
    }


def test_what_a_module_prints_does_not_mix_with_the_findings() -> None:
    Path("prints_at_import.py").write_text("print('hello')\n\ndef tool(x: int) -> int:\n    'Say it.'\n    return x\n")
    Path("s.yaml").write_text(GOOD + "tools: [{use: 'prints_at_import:tool', timeout: 5s}]\n")
    result = CliRunner().invoke(app, ["validate", "s.yaml", "--format", "json", "--import"])
    assert json.loads(result.stdout) == {
        "valid": True,
        "specs": [
            {"file": "s.yaml", "valid": True, "readable": True, "diagnostics": [], "skipped": [], "worst_case": None}
        ],
    }
    assert result.stderr == "imported code: hello\n"


def test_a_folder_means_every_spec_under_it() -> None:
    for name in ("a/one.yaml", "a/deep/two.yml", "a/.hidden/three.yaml"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(GOOD.replace("path: m", "path: org/m"))
    Path("a/replies.yaml").write_text("replies: [hi]\n")
    Path("a/child.yaml").write_text("extends: one.yaml\n")
    assert [str(path) for path in find_specs([Path("a"), Path("a/one.yaml")])] == [
        "a/child.yaml",
        "a/deep/two.yml",
        "a/one.yaml",
    ]
    assert run("a") == (0, "3 specs valid\n")


def test_a_folder_without_specs_exits_with_2() -> None:
    Path("empty").mkdir()
    assert run("empty") == (2, "no specs under empty\n")


def test_it_imports_no_torch_and_no_transformers() -> None:
    Path("s.yaml").write_text(
        GOOD.replace(
            "single_turn",
            "{preset: tools, transitions: [{trigger: answered, source: GENERATING, "
            "dest: GENERATING, conditions: turns.assistant < 2}]}",
        )
        + "tools: [{use: 'textwrap:dedent', name: d, timeout: 5s}]\n"
    )
    code = (
        "import sys\nfrom pathlib import Path\nfrom engine.validate.examine import Options, examine\n"
        "print([str(d) for d in examine(Path('s.yaml'), Options(imports=True)).diagnostics])\n"
        "print(sorted({'torch', 'transformers', 'renderers', 'pyarrow', 'datasets'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == [
        "['s.yaml:7:15: error[code.protocol] tool `d`: give parameter `text` a type; the model is shown it']",
        "[]",
    ]


@pytest.mark.slow
def test_a_hundred_specs_are_quick(record_property: pytest.TestReport) -> None:
    for index in range(100):
        Path(f"s{index}.yaml").write_text(GOOD.replace("demo", f"demo{index}"))
    began = time.perf_counter()
    assert run(".") == (0, "100 specs valid\n")
    record_property("seconds", time.perf_counter() - began)  # type: ignore[operator]


@needs_plugin("code_scanning")
def test_bytes_of_the_system_that_are_no_text_are_shown_as_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODD", "a\udcff")
    Path("s.yaml").write_text(GOOD + "limits: {user_turns: '${ODD}'}\n")
    Path("t\udcff.yaml").write_text(GOOD + "limits: {user_turns: x}\n")
    for extra in ([], ["--set", "name=\udcff"], ["--format", "json"], ["--format", "sarif"], ["--format", "github"]):
        status, output = run("s.yaml", "t\udcff.yaml", *extra)
        assert status == 1
        assert "${ODD}" in output
        assert ("%FF.yaml" if "sarif" in extra else "\\udcff.yaml") in output  # SARIF names files by URI


def test_a_file_of_replies_is_checked_as_one() -> None:
    Path("s.yaml").write_text(GOOD)
    Path("list.yaml").write_text("- '4'\n- {text: hi, finish: length}\n")
    Path("replies.yaml").write_text("# replies\nreplies: [{txt: hi}]\n")
    assert run("s.yaml", "list.yaml") == (0, "1 spec and 1 file of replies valid\n")
    status, output = run("s.yaml", "list.yaml", "replies.yaml")
    assert status == 1
    assert output.splitlines()[0] == "replies.yaml:2:12: error[spec.unknown-key] unknown key `txt`"
    assert output.splitlines()[-1] == "1 spec and 2 files of replies, 1 invalid: 1 error"
