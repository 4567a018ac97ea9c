"""Writes engine/known_plugins.py: what the engine's own plugins add, so that one whose folder is gone can be named.

python scripts/known_plugins.py            write it
python scripts/known_plugins.py --check    exit status 1 where it is not up to date
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

os.environ["ENGINE_PLUGINS_OFF"] = "strangers"
from engine import plugin

FILE = Path(__file__).parent.parent / "engine" / "known_plugins.py"
HEAD = '''"""What each plugin of the engine adds, for messages about one that is not installed.

Written by scripts/known_plugins.py.
"""

'''


def text() -> str:
    """The module's text."""
    known = {name: plugin.names_of(face) for name, face in plugin.installed().plugins.items()}
    module = f"{HEAD}KNOWN: dict[str, dict[str, tuple[str, ...]]] = {known!r}\n"
    command = ["ruff", "format", "-", "--stdin-filename", str(FILE)]
    return subprocess.run(command, input=module, text=True, capture_output=True, check=True).stdout


if __name__ == "__main__":
    if broken := plugin.installed().broken:
        sys.exit(f"broken plugins: {broken}")
    if "--check" not in sys.argv:
        FILE.write_text(text(), encoding="utf-8")
    elif FILE.read_text(encoding="utf-8") != text():
        sys.exit("engine/known_plugins.py is not up to date: run python scripts/known_plugins.py")
