"""`engine validate` of a stranger's spec runs none of its code, prints nothing that is not the stranger's, and ends."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from command_line import engine_here
from hostile_folders import CODE, FILES, FORGERIES, HANGING, NAMES, SECRET, VARIABLE, VARIABLES, WHOLE, Case, build
from installed_plugins import needs_plugin
from slow_cases import slow_but
from strangers_place import Place, opened

from engine.cli.validate.command import written
from engine.validate.examine import Options, examine_all

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with opened(tmp_path_factory.mktemp("strangers")) as found:
        yield found


def parts(text: str, size: int = 7) -> set[str]:
    return {text[index : index + size] for index in range(len(text) - size + 1)}


def assert_secret(said: str) -> None:
    """No value of a variable, no line of the file, and no long part of either."""
    for value in VARIABLES.values():
        for part in parts(value, min(7, len(value))):
            assert part not in said, f"{part!r} was printed"


@dataclass
class Outcome:
    """What came of validating several cases in one go."""

    specs: Mapping[str, Any]
    done: subprocess.CompletedProcess[str]


def outcome(place: Place, cases: Mapping[str, Case], *arguments: str) -> Outcome:
    folder = place.work / f"cases{len(list(place.work.iterdir()))}"
    files = build(cases, folder, place.outside, place.listener.getsockname()[1])
    named = {name: str(file.relative_to(place.work)) for name, file in files.items()}
    done = place.run("validate", *named.values(), "--format", "json", *arguments)
    found = {spec["file"]: spec for spec in json.loads(done.stdout)["specs"]}
    return Outcome({name: found[file] for name, file in named.items()}, done)


def errors(spec: Any) -> set[str]:
    return {item["rule"] for item in spec["diagnostics"] if item["severity"] == "error"}


STATIC = {**{f"code: {k}": v for k, v in CODE.items()}, **{f"file: {k}": v for k, v in FILES.items()}}
STATIC |= {f"variable: {k}": v for k, v in VARIABLE.items()}


@pytest.fixture(scope="module")
def examined(place: Place) -> Outcome:
    """All of them, with every option that computes something."""
    return outcome(place, STATIC, "--worst-case", "--budget", "tokens=1e30", "--notes")


def test_nothing_of_a_strangers_is_run_asked_or_printed(place: Place, examined: Outcome) -> None:
    assert place.touched() == []
    assert examined.done.stderr == ""
    assert_secret(examined.done.stdout)
    assert examined.done.returncode == 1


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[needs_plugin(case.plugin)] if case.plugin else []) for name, case in STATIC.items()],
)
def test_a_strangers_spec_is_judged(examined: Outcome, name: str) -> None:
    case, spec = STATIC[name], examined.specs[name]
    assert set(case.rules) <= errors(spec)
    if not case.rules:
        assert errors(spec) - {"budget.exceeded"} == set()
    if "environment:" in case.spec and not case.rules:
        assert spec["skipped"], "what was not checked is counted"


def test_a_spec_that_is_no_regular_file_is_not_waited_for(place: Place) -> None:
    os.mkfifo(place.work / "pipe.yaml")
    code, out, _ = engine_here("validate", "pipe.yaml", "/dev/zero", cwd=place.work)
    assert code == 2
    assert out.splitlines()[:3] == [
        "pipe.yaml:1:1: error[spec.unreadable] `pipe.yaml` cannot be read: it is not a regular file",
        "/dev/zero:1:1: error[spec.unreadable] `/dev/zero` cannot be read: it is not a regular file",
        "2 specs, 2 invalid: 2 errors",
    ]


# ---- what is printed


@pytest.fixture(scope="module")
def forged(place: Place) -> list[str]:
    files = build(FORGERIES, place.work / "forged", place.outside, 1)
    found = [str(file.relative_to(place.work)) for file in files.values()]
    for name in NAMES:
        (place.work / name).write_text(WHOLE + "limits: {x: 1}\n")
    (place.work / "linked.yaml").symlink_to(place.outside / "secret.txt")
    return [*found, *NAMES, "linked.yaml"]


def assert_no_command(said: str) -> None:
    """Neither a terminal nor a CI system would take a part of it for a command."""
    assert CONTROL.search(said) is None
    assert "##[" not in said
    assert SECRET not in said


def test_nothing_can_be_forged(place: Place, forged: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = place.run_here("validate", "--notes", "--", *forged, monkeypatch=monkeypatch)
    assert (code, err) == (1, "")
    assert_no_command(out)
    lines = out.splitlines()
    assert [line for line in lines if line.lstrip().startswith("::")] == []
    counted = re.search(r"(\d+) errors", lines[-1])
    assert counted is not None
    assert sum("error[" in line for line in lines) == int(counted[1])


@needs_plugin("code_scanning")
@pytest.mark.parametrize("format", slow_but(["json", "sarif", "github"], "json", "github"))
def test_nothing_can_be_forged_in_other_formats(
    place: Place, forged: list[str], format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place.work)
    said = written(format, examine_all([Path(name) for name in forged], Options())[0])
    assert_no_command(said)
    lines = said.splitlines()
    if format == "github":
        told = re.compile(r"::(error|warning|notice) (file=[^:,]*,line=\d+,col=\d+,)?title=[a-z.-]+::[^\r\n]*")
        assert [line for line in lines if told.fullmatch(line) is None] == []
        return
    assert [line for line in lines if line.lstrip().startswith("::")] == []
    if format == "json":
        specs = json.loads(said)["specs"]
        assert [spec["file"] for spec in specs] == forged, "escapes mean the same to a parser"
        for spec, (name, case) in zip(specs, FORGERIES.items(), strict=False):
            assert set(case.rules) <= errors(spec), name
        assert errors(specs[-1]) == {"spec.outside"}
    else:
        results = json.loads(said)["runs"][0]["results"]
        assert all("](" not in item["message"]["text"].replace("\\](", "") for item in results)


# ---- what ends


@pytest.mark.slow
def test_templates_that_never_end_are_stopped(place: Place) -> None:
    found = outcome(place, {**HANGING, "plain": Case(WHOLE)}, "--timeout", "2")
    assert found.done.returncode == 1
    assert all(line.startswith("while checking: ") for line in found.done.stderr.splitlines())
    for name, case in HANGING.items():
        assert {*case.rules, "check.stopped"} & errors(found.specs[name]), name
    assert "plain" in found.specs


# ---- with --import


ENDINGS = {
    "os._exit": "import os\nos._exit(0)\n",
    "sys.exit": "import sys\nsys.exit(0)\n",
    "KeyboardInterrupt": "raise KeyboardInterrupt\n",
    "kill": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
    "crash": "import ctypes\nctypes.string_at(0)\n",
    "memory": "x = bytearray(2**50)\n",
    "forged result": 'print(\'{"valid": true, "specs": []}\')\nimport os\nos._exit(0)\n',
    "forged frames": (
        "import os, struct\nfor end in range(3, 64):\n    try:\n"
        "        os.write(end, bytes(16) + struct.pack('>Q', 2) + b'{}')\n    except OSError:\n        pass\nos._exit(0)\n"
    ),
    "closed pipes": "import os\nos.closerange(3, 256)\n",
    "left behind": (
        "import os, time\nif os.fork() == 0:\n    time.sleep(3600)\nos._exit(0)\n"  # holds the pipes
    ),
    "reads input": "import sys\nif sys.stdin.read() == '': raise RuntimeError('no input')\n",
    "exit in a thread": "import os, threading\nthreading.Thread(target=os._exit, args=(0,)).start()\nimport time\ntime.sleep(9)\n",
}
"""Modules that end the process that imports them."""
HANGS = {
    "hang": "import time\ntime.sleep(3600)\n",
    "loop": "while True: pass\n",
    "lock": "import signal\nfor n in range(1, 20):\n    try: signal.signal(n, signal.SIG_IGN)\n    except OSError: pass\nwhile True: pass\n",
}
"""Modules that hold it up."""


def beside(text: str) -> Case:
    return Case(WHOLE + "environment: {use: 'beside:Board'}\n", (), {"beside.py": text})


@pytest.mark.slow
def test_imported_code_cannot_look_like_success(place: Place) -> None:
    cases = {name: beside(text) for name, text in ENDINGS.items()}
    fine = "class Board:\n    def reset(self, task, seed): ...\n"
    cases["fine"] = beside("print('::error::x', '##[error]x')\n" + fine)
    cases["unfit"] = beside("class Board: ...\n")
    found = outcome(place, cases, "--import")
    assert found.done.returncode == 1
    for name in ENDINGS:
        assert {"check.import-failed", "code.import"} & errors(found.specs[name]), name
    assert errors(found.specs["fine"]) == set()
    assert errors(found.specs["unfit"]) == {"code.protocol"}
    assert_no_command(found.done.stderr)
    assert all(line.startswith("imported code: ") for line in found.done.stderr.splitlines())


@pytest.mark.slow
def test_imported_code_that_never_ends_is_stopped(place: Place) -> None:
    cases = {name: beside(text) for name, text in HANGS.items()}
    found = outcome(place, cases, "--import", "--timeout", "5")
    assert found.done.returncode == 1
    for name in HANGS:
        assert "check.import-failed" in errors(found.specs[name]), name


@pytest.mark.slow  # by default: nothing of a stranger, above
def test_what_is_found_without_code_stays_found_whatever_the_code_does(place: Place) -> None:
    text = (
        "import engine.validate.check as check, engine.validate.examine as examine\n"
        "check.check_rules = examine.check_rules = lambda *anything: ([], [])\n"
    )
    spec = WHOLE.replace("single_turn", "tools_and_user") + "environment: {use: 'beside:Board'}\n"
    cases = {"tampers": Case(spec, (), {"beside.py": text + "class Board:\n    def reset(self, task, seed): ...\n"})}
    found = outcome(place, cases, "--import")
    assert "user.missing" in errors(found.specs["tampers"])
