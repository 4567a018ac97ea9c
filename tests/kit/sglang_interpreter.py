"""The environment of the real SGLang server, which scripts/sglang_cpu.sh installs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "sglang_cpu.sh"


def sglang_python() -> Path:
    """The interpreter of SGLang's own environment. Without one the test is skipped; in CI it fails."""
    python = Path(subprocess.run([SCRIPT, "python"], capture_output=True, text=True, check=True).stdout.strip())
    if not python.exists():
        message = f"SGLang is not installed ({python} is not there): run scripts/sglang_cpu.sh install"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return python
