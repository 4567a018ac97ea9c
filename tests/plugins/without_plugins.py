"""Run in a copy of the engine that lacks plugins: `python without_plugins.py REQUEST`, and prints what it saw as JSON.

The request is JSON: `skipped`, prefixes of modules that are not imported; `commands`, each a list of words after `engine`.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from typer.testing import CliRunner

request = json.loads(sys.argv[1])
root = Path(sys.argv[2])
unimportable = {}
for part in ("engine", "engine/schemas", "engine/environments"):
    for file in sorted((root / part).rglob("*.py")):
        name = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        if any(name == prefix or name.startswith(f"{prefix}.") for prefix in request["skipped"]):
            continue
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  (a library that is not installed is not what this is about)
            if "engine" in (getattr(error, "name", None) or str(error)):
                unimportable[name] = f"{type(error).__name__}: {error}"

from engine.cli.main import app  # noqa: E402  (the copy's)

answers = []
for words in request["commands"]:
    answer = CliRunner().invoke(app, words, env={"COLUMNS": "200", "NO_COLOR": "1"})
    answers.append([answer.exit_code, answer.output])
print(json.dumps({"unimportable": unimportable, "answers": answers}))
