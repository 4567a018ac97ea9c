"""What the command line imports before it knows what is asked of it."""

from __future__ import annotations

import subprocess
import sys


def test_no_command_imports_what_it_needs_before_it_is_called() -> None:
    code = (
        "import sys, engine.cli.main\n"
        "heavy = {'numpy', 'pydantic', 'torch', 'transformers', 'matplotlib', 'httpx', 'structlog', 'yaml', 'msgspec'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
