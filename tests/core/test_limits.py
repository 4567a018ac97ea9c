"""A limit is one field of `LimitsSpec` and one entry of the table: everything else follows from these two."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from installed_commands import needs_command

ROOT = Path(__file__).parents[2]

FIELD = '''
    environment_steps: int | None = Field(default=5, ge=1)
    """Steps of the environment."""
'''
ENTRY = """
    Limit(
        "environment_steps",
        "steps",
        "Steps of the environment so far.",
        "step",
        lambda episode: episode.performed.get("step", 0),
        per_use="one",
        variable="steps.environment",
        budget="environment_steps",
    ),
"""
SPEC_CODE = """
from engine.schemas.environment import Reset, Step


class Board:
    events = ("again",)

    def reset(self, task, seed):
        return Reset()

    def step(self, view):
        return Step(event="again")
"""
SPEC = """\
spec: episode/v1
name: steps
model: {path: smollm2-135m-instruct}
tasks: {source: inline, rows: [{q: a}, {q: b}]}
prompt: [{role: user, content: "{{q}}"}]
environment: {use: "game:Board", timeout: 5s}
backend: {kind: scripted, replies: ["x"]}
machine:
  initial: PENDING
  states: {PENDING: {action: reset}, ACTING: {action: step}, FULL: {final: true}, DONE: {final: true}}
  transitions:
    - {trigger: ready, source: PENDING, dest: ACTING}
    - {trigger: again, source: ACTING, dest: DONE, conditions: "steps.environment > GUARD"}
    - {trigger: again, source: ACTING, dest: ACTING}
    - {trigger: limit, source: ACTING, dest: FULL}
    - {trigger: [limit, failed], source: "*", dest: DONE}
limits: {environment_steps: LIMIT, episode_seconds: null}
rollout: {samples_per_task: 2, out: runs}
"""
SCRIPT = """
import json, sys
from pathlib import Path

from engine.validate import check_spec
from engine.validate.worst_case import over_budget, read_budget
from engine.validate.context import CheckContext
from engine.validate.worst_case import worst_case
from engine.cli.main import main
from engine.plugins.schema.command import generated
from spec_page import spec_page
from engine.machine.guards import guard_problems
from engine.spec.load import load_spec
from engine.store import RunStore, find_run

text = Path("spec.yaml").read_text()


def load(limit, guard):
    Path("s.yaml").write_text(text.replace("LIMIT", limit).replace("GUARD", guard))
    return load_spec("s.yaml")


def found(loaded):
    return {item.rule: item.fix for item in check_spec(loaded) if item.severity != "info"}


files = {str(path): content for path, content in generated().items()}
told = {
    "guard": [str(item) for item in guard_problems("steps.environment < limits.environment_steps")],
    "unbounded": found(load("null", "1 && task.q")),
    "constant": found(load("3", "3")),
    "docs": next(line for line in spec_page().splitlines() if line.startswith("| `limits.environment_steps` | steps")),
    "schema": "environment_steps" in json.loads(files["schemas/json/episode.schema.json"])["$defs"]["LimitsSpec"]["properties"],
}
loaded = load("3", "1 && task.q")
worst = worst_case(CheckContext(loaded))
told["findings"] = found(loaded)
told["worst"] = worst.episode["environment_steps"], worst.run["environment_steps"]
told["budget"] = [(item.message, item.path) for item in over_budget(loaded, worst, read_budget(["environment_steps=11"]))]
loaded = load("3", "5")
sys.argv = ["engine", "run", "s.yaml"]
try:
    main()
except SystemExit:
    pass
with RunStore.open(find_run("steps", out=Path("runs")), readonly=True) as store:
    told["outcomes"] = [(one.outcome.limit, one.outcome.state, one.outcome.failure, len(one.path)) for one in store.trajectories()]
print("TOLD", json.dumps(told))
"""


@needs_command("schema")
@pytest.mark.slow
def test_a_limit_that_is_added_is_known_everywhere(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    skip = shutil.ignore_patterns("__pycache__")
    for name in ("engine", "schemas", "environments", "docs"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=skip)
    add(tree / "schemas/limits.py", "class LimitsSpec(", "    turn_tokens: int", FIELD)
    add(tree / "engine/limits.py", "_CORE: tuple", '    Limit("turn_tokens"', ENTRY)
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "game.py").write_text(SPEC_CODE)
    (folder / "spec.yaml").write_text(SPEC)
    environment = {**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{ROOT}/scripts/docs", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=folder, env=environment, capture_output=True, text=True)
    line = next((line for line in done.stdout.splitlines() if line.startswith("TOLD")), None)
    assert line is not None, done.stdout + done.stderr
    told = json.loads(line.removeprefix("TOLD "))
    assert told == {
        "guard": [],
        "unbounded": {
            "machine.unbounded-cycle": "set `limits.environment_steps`",
            "machine.unreachable": "widen the limits or conditions before it, or remove it",
        },
        "constant": {"guard.constant": "remove the transition, or correct the condition"},
        "docs": "| `limits.environment_steps` | steps | `step` | Steps of the environment so far. "
        "| `steps.environment` | `environment_steps` |",
        "schema": True,
        "findings": {},
        "worst": [[3.0, "limits.environment_steps"], [12.0, "limits.environment_steps"]],
        "budget": [
            [
                "the run may cost 12 environment_steps (limits.environment_steps); the budget is 11",
                ["limits", "environment_steps"],
            ]
        ],
        "outcomes": [["environment_steps", "FULL", None, 5]] * 4,
    }


def add(file: Path, after: str, before: str, text: str) -> None:
    """Insert text in front of the first line that begins with `before`, after the line `after`."""
    content = file.read_text()
    at = content.index(before, content.index(after))
    file.write_text(content[:at].rstrip("\n") + "\n" + text.lstrip("\n") + content[at:])
