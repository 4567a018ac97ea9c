"""No two modules of the engine import each other, in whatever way round, at the top or inside of functions."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import networkx as nx
import pytest

import engine

ROOT = Path(engine.__file__).parent
RUNTIMES = ("plugins.servers.backend", "plugins.servers.http", "backends.scripted", "plugins.sglang")
"""What drives a model."""


def modules() -> dict[str, Path]:
    """Every module of the engine by its name; links to folders are followed."""
    found = {}
    for folder in (ROOT, ROOT / "schemas", ROOT / "environments"):
        for path in folder.rglob("*.py"):
            parts = ("engine", *path.relative_to(ROOT).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def statements(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Every import that runs, inside of functions too; not those for type checkers alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in child.orelse:
                yield from statements(other)
        elif isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        else:
            yield from statements(child)


def imported(path: Path, known: dict[str, Path]) -> set[str]:
    """The modules of the engine that a module imports."""
    found: set[str] = set()
    for node in statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            assert node.level == 0, f"{path}: write imports of the engine with the whole name"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else str(node.module))
    return found & known.keys()


@pytest.mark.slow
def test_no_module_imports_itself_by_way_of_others() -> None:
    known = modules()
    graph = nx.DiGraph((name, other) for name, path in known.items() for other in imported(path, known))
    circles = [sorted(circle) for circle in nx.strongly_connected_components(graph) if len(circle) > 1]
    assert sorted(circles) == []


@pytest.mark.parametrize(
    "reader",
    [
        "engine.runner.replay",
        "engine.plugins.replay.rescore",
        "engine.plugins.audit.store",
        "engine.store.episode_rows",
    ],
)
def test_what_reads_journals_reaches_neither_a_backend_nor_the_executor(reader: str) -> None:
    known = modules()
    if reader not in known:
        pytest.skip("its plugin is not installed")
    reached, new = {reader}, [reader]
    while new:
        found = imported(known[new.pop()], known) - reached
        reached |= found
        new += found
    driving = ("engine.episode.executor", *(f"engine.{name}" for name in RUNTIMES))
    assert [name for name in sorted(reached) if name.startswith(driving)] == []
    assert "engine.episode.episode" in reached or reader == "engine.store.episode_rows"


def test_the_layers_name_every_module_of_the_engine() -> None:
    settings = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())
    layers = settings["tool"]["importlinter"]["contracts"][0]
    assert layers["exhaustive"] is True
    names = {name.strip("() ") for line in layers["layers"] for name in line.split(":")}
    names |= set(layers.get("exhaustive_ignores", []))
    top = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert top - names - {"__init__"} == set()


def test_no_benchmark_has_the_name_of_an_installed_package() -> None:
    """Tests put `bench/` on the path, so such a file would be imported in place of the package."""
    installed = {name.partition(".")[0] for name in packages_distributions()}
    assert not installed & {path.stem for path in (Path(__file__).parents[1] / "bench").glob("*.py")}
