"""CEL without its command line is the same CEL."""

from __future__ import annotations

import subprocess
import sys


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


def test_the_command_line_is_not_imported() -> None:
    code = (
        "import sys\nfrom engine.machine.guards import Guard\n"
        "print(Guard('turns.user < 3').evaluate({'turns': {'user': 2}}))\n"
        "print(sorted({'prompt_toolkit', 'cel.cli', 'torch'} & set(sys.modules)))\n"
    )
    assert run(code) == "True\n[]\n"


def test_the_package_may_be_imported_before_and_after() -> None:
    code = (
        "{first}\nfrom engine.machine.celext import cel_module\nmodule = cel_module()\nimport cel\n"
        "print(cel.compile is module.compile, cel.compile('1 + 1').execute())\n"
    )
    assert run(code.format(first="")) == "True 2\n"
    assert run(code.format(first="import cel")) == "True 2\n"
