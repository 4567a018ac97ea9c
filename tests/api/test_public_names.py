"""Each public name of `engine` is what its table says, in whatever order modules are imported."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest
from installed_plugins import needs_plugin
from written_specs import save_spec

import engine

ROOT = Path(engine.__file__).parent
VOWELS = """
from engine import End, Environment, Reset, action, environment

class Unused(Environment):
    @action
    async def step(self, view):
        return None

@environment
def vowels(task):
    view = yield "Say vowels."
    return End(rewards={"vowels": float(len(view.reply))})
"""
IMPORT_ALL = """
import asyncio, json, pkgutil, sys, warnings
from importlib import import_module
import engine
warnings.simplefilter("ignore")
skipped = []
for info in pkgutil.walk_packages(engine.__path__, "engine.", onerror=lambda name: None):
    if not info.name.endswith("__main__"):
        try:
            import_module(info.name)
        except ImportError as error:  # a library of a plugin
            skipped.append(info.name)
async def last(events):
    return [event async for event in events][-1]
spec = engine.load(sys.argv[1], {"tasks.limit": 1})
run = engine.run(spec, progress=False)
training = engine.fit(spec, progress=False)
with engine.looking(["worlds:vowels"]) as looked:
    pass
called = {
    "looking": looked,
    "check_files": [report.status for report in engine.check_files([sys.argv[1]])],
    "rule_pages": engine.rule_pages()["spec.unknown-key"].severity,
    "check": [item.rule for item in engine.check(spec) if item.severity == "error"],
    "run": run.status,
    "run_async": len(asyncio.run(engine.run_async(spec, progress=False)).episodes),
    "open": engine.open(run.folder).id == run.id,
    "play": type(asyncio.run(last(engine.play(spec, task=0)))).__name__,
    "fit": len(training.metrics),
    "fit_async": len(asyncio.run(engine.fit_async(spec, {"name": "again"}, progress=False)).metrics),
}
print(json.dumps({
    "called": called,
    "skipped": skipped,
    "changed": [name for name, use in engine.PUBLIC.items()
                if getattr(engine, name) is not getattr(sys.modules[use.partition(":")[0]], use.partition(":")[2])],
    "modules": [name for name in engine.PUBLIC if f"engine.{name}" in sys.modules],
}))
"""


def test_types_know_the_names_of_the_table() -> None:
    (typed,) = (node for node in ast.parse((ROOT / "__init__.py").read_text()).body if isinstance(node, ast.If))
    names = {"Episode": "engine.api.runs:StoredEpisode", "Spec": "engine.spec.load:LoadedSpec"}
    for node in typed.body:
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname: f"{node.module}:{alias.name}" for alias in node.names if alias.asname is not None}
    assert names == engine.PUBLIC
    assert set(engine.PUBLIC) <= set(dir(engine))


def test_the_package_itself_imports_the_standard_library_alone() -> None:
    code = (
        "import engine, sys; print([n for n in sys.modules if n.partition('.')[0] in ('engine', 'pydantic', 'rich')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['engine.moved_names', 'engine']"


def test_no_public_name_is_that_of_a_module() -> None:
    """Importing the module `engine.NAME` would put it in place of the public name."""
    assert [name for name in engine.PUBLIC if (ROOT / name).exists() or (ROOT / f"{name}.py").exists()] == []


@pytest.mark.slow
@needs_plugin("local")
def test_public_names_work_after_every_module_is_imported(tmp_path: Path, tiny_model_dir: Path) -> None:
    spec = {
        "spec": "episode/v1",
        "name": "sums",
        "model": {"path": str(tiny_model_dir)},
        "backend": {"kind": "local"},
        "tasks": {"source": "inline", "rows": [{"n": 1}, {"n": 2}]},
        "environment": {"use": "worlds:vowels"},
        "machine": "step",
        "limits": {"turn_tokens": 4},
        "rollout": {"samples_per_task": 2, "out": str(tmp_path / "runs")},
        "train": {"steps": 1, "tasks_per_step": 1, "dynamic_sampling": False},
    }
    (tmp_path / "worlds.py").write_text(VOWELS)
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, str(save_spec(tmp_path / "sums.yaml", spec))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert [name for name in said.pop("skipped") if not name.startswith("engine.plugins.")] == []
    called = {"check": [], "run": "done", "run_async": 2, "open": True, "play": "Trajectory", "fit": 1, "fit_async": 1}
    called |= {"looking": {"worlds:vowels": False}, "check_files": [0], "rule_pages": "error"}
    assert said == {"changed": [], "modules": [], "called": called}
    functions = {name for name in engine.PUBLIC if type(getattr(engine, name)) is FunctionType}
    assert functions - called.keys() == {"load", "action", "environment"}  # called for the spec, and in its code
