"""Each public name of `engine` is what its table says, in whatever order modules are imported."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import engine

ROOT = Path(engine.__file__).parent
IMPORT_ALL = """
import json, pkgutil, sys, warnings
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
print(json.dumps({
    "skipped": skipped,
    "changed": [name for name, use in engine.PUBLIC.items()
                if getattr(engine, name) is not getattr(sys.modules[use.partition(":")[0]], use.partition(":")[2])],
    "modules": [name for name in engine.PUBLIC if f"engine.{name}" in sys.modules],
    "loaded": engine.load(sys.argv[1], {"tasks.limit": 1}).spec.name,
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
def test_public_names_are_the_same_after_every_module_is_imported() -> None:
    spec = ROOT.parent / "specs" / "quickstart.yaml"
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL, str(spec)], capture_output=True, text=True, check=True)
    said = json.loads(done.stdout.splitlines()[-1])
    assert [name for name in said.pop("skipped") if not name.startswith("engine.plugins.")] == []
    assert said == {"changed": [], "modules": [], "loaded": "quickstart"}
