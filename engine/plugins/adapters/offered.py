"""What a spec may name: adapters, and the environments, users and tools that ship or that installed packages offer.

A package offers its own by entry points in its `pyproject.toml`:

    [project.entry-points."episode_engine.environments"]
    vault = "my_package.vault:Vault"

A spec writes the name (`use: vault`) or the entry point. Nothing is imported to list them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from engine.plugin import installed
from engine.schemas.entry import (
    ADAPTERS,
    TOOL_ADAPTERS,
    AdapterFacts,
    ToolAdapterFacts,
    installed_points,
)
from engine.spec.code.entry import GROUPS
from engine.validate.code.source import is_function_environment

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_METHODS = {"reset": "environment", "respond": "user"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """One thing that a spec may name."""

    kind: str
    """`adapter`, `tool adapter`, `environment`, `user`, `tool` or `scorer`."""
    name: str
    use: str
    """What a spec writes."""
    entry: str = ""
    """The entry point that the name of an installed package's offer stands for."""
    needs: tuple[str, ...] = ()
    """Packages that must be importable."""
    installed: bool = True
    """Whether they are."""
    install: str = ""
    """How to install them."""
    source: str = "episode-engine"
    """The package that it comes with, and its version if it is not the engine's."""


def offered() -> list[Offered]:
    """All of them: adapters, what ships, and what installed packages offer, by kind and name."""
    tables: dict[str, Mapping[str, AdapterFacts | ToolAdapterFacts]] = {
        "adapters": ADAPTERS.of_plugins(),
        "tool_adapters": TOOL_ADAPTERS.of_plugins(),
    }
    adapters: list[Offered] = []
    for point, table in tables.items():
        for face in installed().plugins.values():
            package = installed().packages[face.name]
            for name in getattr(face, point):
                facts = table[name]
                adapter = Offered(
                    kind=point.replace("_", " ").removesuffix("s"),
                    name=name,
                    use=f"adapter: {name}; use: {facts.use}",
                    needs=facts.packages,
                    installed=all(find_spec(package) is not None for package in facts.packages),
                    install=facts.install,
                    source="episode-engine" if package.startswith("episode-engine ") else package,
                )
                adapters.append(adapter)
    others: list[Offered] = []
    for kind, group in {**GROUPS, "adapter": ADAPTERS.group, "tool adapter": TOOL_ADAPTERS.group}.items():
        for name, points in installed_points(group).items():
            use = f"adapter: {name}" if kind.endswith("adapter") else name
            for entry, source in points.items():
                others.append(Offered(kind=kind, name=name, use=use, entry=entry, source=source))
    return [*adapters, *_shipped(), *sorted(others, key=lambda item: (item.kind, item.name))]


def _shipped() -> Iterator[Offered]:
    """Environments and users of `engine.environments`, by their methods or `@environment`; tools are the functions in
    `tools/`."""
    package = find_spec("engine.environments")
    for root in (package.submodule_search_locations or []) if package is not None else []:
        for file in sorted(Path(root).rglob("*.py")):
            parts = file.relative_to(root).with_suffix("").parts
            for node in ast.parse(file.read_text()).body:
                if not isinstance(node, (ast.ClassDef, *_FUNCTIONS)):
                    continue
                if isinstance(node, ast.ClassDef):
                    methods = {item.name for item in node.body if isinstance(item, _FUNCTIONS)}
                    kind = next((kind for name, kind in _METHODS.items() if name in methods), None)
                elif is_function_environment(node):
                    kind = "environment"
                else:
                    kind = "tool" if parts[0] == "tools" else None
                if kind is not None and not node.name.startswith("_"):
                    yield Offered(kind=kind, name=node.name, use=f"engine.environments.{'.'.join(parts)}:{node.name}")
