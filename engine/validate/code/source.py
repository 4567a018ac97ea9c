"""Definitions read as text: what an entry point names, through re-exports, aliases and base classes, without importing
it.

`engine validate` must not run the code of a spec, so it reads modules as text and says only what holds whatever the
code does. What the text leaves open (a base class that cannot be read, a decorator, a name that is bound twice) is
`None`, and never a mistake.

    sources = Sources(base, access)
    found = sources.entry("engine.environments.arithmetic:Arithmetic")
    found.node                                    # ast.ClassDef, or None where the name is bound in another way
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from engine.schemas.base import Struct
from engine.spec.access import Access
from engine.spec.code.entry import EntryError, ModuleFiles, has_submodule, nearest_attribute, parse_entry
from engine.validate.code.module_text import ModuleText, bound_names, is_closed, read_module

MAX_MODULES = 60
"""Maximum number of modules that are read for one spec."""
LARGEST_FOLLOWED = 400_000
"""Maximum size of a module that another one imports, in bytes."""
MAX_STEPS = 20
"""Maximum number of re-exports, aliases and bases that are followed one after the other."""
FUNCTION_EVENTS = ("continue", "done")
"""The events of every environment that is a function."""
_IMPLICIT = frozenset({"__name__", "__doc__", "__file__", "__package__", "__spec__", "__dict__", "__loader__"})
Def = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Module(Struct, frozen=True, kw_only=True, eq=False):
    """One module that was read."""

    name: str
    file: Path
    text: ModuleText

    @property
    def is_package(self) -> bool:
        """Whether it is the `__init__.py` of a package."""
        return self.file.name == "__init__.py"


class Definition(Struct, frozen=True, kw_only=True, eq=False):
    """A class or function, with the module that defines it."""

    node: Def
    module: Module
    owner: ast.ClassDef | None = None
    """The class whose body it is in."""

    @property
    def name(self) -> str:
        """`package.module.Name`; without the class that it is in."""
        return f"{self.module.name}.{self.node.name}"


class ModuleName(Struct, frozen=True, kw_only=True):
    """A module that a name refers to."""

    name: str


class External(Struct, frozen=True, kw_only=True):
    """Something that is not read, such as a class of the standard library: `typing.Sequence`."""

    name: str


class Alias(Struct, frozen=True, kw_only=True, eq=False):
    """An expression that a name stands for: `Sizes = list[int]`."""

    expression: ast.expr
    module: Module


Found = Definition | ModuleName | External | Alias | None


class NotImported(EntryError):
    """What stands for an entry point that was found as text, and not imported."""

    def __init__(self, use: str, definition: Definition | None = None) -> None:
        super().__init__(f"`{use}` is not imported here; add `--import`")
        self.definition = definition
        """The class or function; None where the name is bound in another way, or the text could not be read."""
        self.node = None if definition is None else definition.node
        """Its syntax tree."""
        self.file = None if definition is None else definition.module.file
        """The file that defines it."""


def read_entry(use: str, base: Path | None, access: Access) -> NotImported:
    """Find what `use` names, as `load_entry` would, and import nothing.

    Args:
        use: `package.module:Name`.
        base: The spec's folder.
        access: Which files may be opened; modules on the import path may, too.

    Raises:
        EntryError: it is not of that form, there is no such module, its text is no Python, or it binds no such name.
    """
    return Sources(base, access).entry(use)


class Sources:
    """Reads modules as text, as the import system would find them for one spec.

    Args:
        base: The spec's folder.
        access: Which files may be opened; modules on the import path may, too.
    """

    def __init__(self, base: Path | None, access: Access) -> None:
        self._base = base
        self._files = ModuleFiles(base, access)
        self._modules: dict[str, Module | None] = {}
        self.lineages: dict[ast.AST, Any] = {}
        """Cache of `engine.validate.code.lineage`."""

    def entry(self, use: str) -> NotImported:
        """See `read_entry`.

        Raises:
            EntryError: the module has no such name.
        """
        name, parts = parse_entry(use)
        file = self._files.find(name, use)
        text = None if file is None else read_module(file, name)
        if file is None or text is None:
            return NotImported(use)
        module = self._modules[name] = Module(name=name, file=file, text=text)
        first = parts[0]
        submodule = module.is_package and has_submodule(file.parent, first)
        if text.closed and first not in text.names and first not in _IMPLICIT and not submodule:
            raise EntryError(f"`{name}` has no `{first}`{nearest_attribute(first, sorted(text.names))}")
        definition = self._named(module, first)
        for index, part in enumerate(parts[1:], start=1):
            if not isinstance(definition, Definition) or not isinstance(definition.node, ast.ClassDef):
                return NotImported(use)
            bound, closed = _class_names(definition.node)
            if closed and part not in bound and not hasattr(object, part):
                owner = ".".join([name, *parts[:index]])
                raise EntryError(f"`{owner}` has no `{part}`{nearest_attribute(part, sorted(bound))}")
            definition = inside(definition, part)
        return NotImported(use, definition if isinstance(definition, Definition) else None)

    # ---- names

    def resolve(
        self, expression: ast.expr, module: Module, hidden: frozenset[str] = frozenset(), steps: int = 0
    ) -> Found:
        """Return what a name, or a dotted name, refers to in a module.

        Args:
            expression: The name.
            module: The module that it is written in.
            hidden: Names that mean something else there, such as type parameters.
            steps: Number of names that led here.
        """
        if steps > MAX_STEPS:
            return None
        if isinstance(expression, ast.Name):
            return None if expression.id in hidden else self._named(module, expression.id, steps)
        if isinstance(expression, ast.Attribute):
            owner = self.resolve(expression.value, module, hidden, steps + 1)
            if isinstance(owner, ModuleName):
                return self._member(owner.name, expression.attr, steps + 1)
            if isinstance(owner, External):
                return External(name=f"{owner.name}.{expression.attr}")
            if isinstance(owner, Definition) and isinstance(owner.node, ast.ClassDef):
                return inside(owner, expression.attr)
        return None

    def _named(self, module: Module, name: str, steps: int = 0) -> Found:
        if steps > MAX_STEPS or name in module.text.changed:
            return None
        statements = module.text.bindings.get(name, ())
        if not statements and name not in module.text.names and hasattr(builtins, name):
            return External(name=f"builtins.{name}")
        if len(statements) != 1:
            return None
        statement = statements[0]
        if isinstance(statement, Def):
            return Definition(node=statement, module=module)
        if isinstance(statement, ast.ImportFrom):
            origin = next(item.name for item in statement.names if (item.asname or item.name) == name)
            source = _absolute(module, statement)
            return None if source is None else self._member(source, origin, steps + 1)
        if isinstance(statement, ast.Import):
            item = next(item for item in statement.names if (item.asname or item.name.partition(".")[0]) == name)
            return ModuleName(name=item.name if item.asname else name)
        return self._alias(statement, module, steps)

    def _alias(self, statement: ast.stmt, module: Module, steps: int) -> Found:
        """What `X = Y` or `type X = Y` binds."""
        plain = isinstance(statement, ast.Assign) and len(statement.targets) == 1
        target = (
            statement.targets[0] if isinstance(statement, ast.Assign) and plain else getattr(statement, "target", None)
        )
        value = getattr(statement, "value", None)
        if type(statement).__name__ == "TypeAlias" and isinstance(value, ast.expr):
            return None if getattr(statement, "type_params", None) else Alias(expression=value, module=module)
        if not isinstance(target, ast.Name) or not isinstance(statement, ast.Assign | ast.AnnAssign):
            return None
        if isinstance(value, ast.Name | ast.Attribute):
            return self.resolve(value, module, steps=steps + 1)
        return Alias(expression=value, module=module) if isinstance(value, ast.Subscript | ast.BinOp) else None

    def _member(self, name: str, attribute: str, steps: int) -> Found:
        """What `name.attribute` is, of the module `name`."""
        if name.partition(".")[0] in sys.stdlib_module_names or name.startswith("typing_extensions"):
            return External(name=f"{name}.{attribute}")
        module = self.module(name)
        if module is None:
            return External(name=f"{name}.{attribute}")
        if attribute in module.text.names:
            return self._named(module, attribute, steps)
        if module.is_package and has_submodule(module.file.parent, attribute):
            return ModuleName(name=f"{name}.{attribute}")
        return None

    def module(self, name: str) -> Module | None:
        """Return a module; None if it cannot be read, or if enough were read."""
        if name not in self._modules and len(self._modules) < MAX_MODULES:
            try:
                file = self._files.find(name, name)
                small = file is not None and file.stat().st_size <= LARGEST_FOLLOWED
                text = read_module(file, name) if file is not None and small else None
                self._modules[name] = None if file is None or text is None else Module(name=name, file=file, text=text)
            except (EntryError, OSError):
                self._modules[name] = None
        return self._modules.get(name)

    def own_imports(self, module: Module) -> Iterator[Module | None]:
        """Yield the spec's own modules that a module imports anywhere, and None for one that cannot be read.

        Own are modules below the spec's folder or the current one, outside of what is installed, and the engine's
        environments.
        """
        for node in ast.walk(module.text.tree):
            names = [item.name for item in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and (source := _absolute(module, node)):
                names = [source, *(f"{source}.{item.name}" for item in node.names)]
            for name in names:
                if name.partition(".")[0] not in sys.stdlib_module_names and self._is_own(name):
                    yield self.module(name)

    def _is_own(self, name: str) -> bool:
        if name.startswith("engine."):
            return name.startswith("engine.environments.")
        try:
            file = self._files.find(name, name)
        except EntryError:
            return False
        folders = [folder.resolve() for folder in (self._base, Path()) if folder is not None]
        installed = file is None or not {"site-packages", "dist-packages"}.isdisjoint(file.parts)
        return file is not None and not installed and any(file.resolve().is_relative_to(folder) for folder in folders)


def last_name(expression: ast.expr) -> str | None:
    """`C` of `C`, `a.b.C`, `a.C(…)` and `C[…]`."""
    if isinstance(expression, ast.Call):
        return last_name(expression.func)
    if isinstance(expression, ast.Subscript):
        return last_name(expression.value)
    return expression.id if isinstance(expression, ast.Name) else getattr(expression, "attr", None)


def _absolute(module: Module, statement: ast.ImportFrom) -> str | None:
    """The name of the module that `from … import` names; None if it is above the package."""
    if not statement.level:
        return statement.module
    parts = module.name.split(".")
    package_parts = parts[: len(parts) - statement.level + module.is_package]
    return ".".join([*package_parts, *([statement.module] if statement.module else [])]) if package_parts else None


def _class_names(node: ast.ClassDef) -> tuple[frozenset[str], bool]:
    """Names that the body of a class binds, and whether it has no others."""
    names = frozenset(bound_names(node.body))
    return names, not (node.bases or node.keywords or node.decorator_list) and is_closed(
        ast.Module(body=node.body, type_ignores=[])
    )


def inside(owner: Definition, name: str) -> Definition | None:
    """The one class or function of this name in the body of a class, where nothing else binds it."""
    assert isinstance(owner.node, ast.ClassDef)
    binding = [item for item in owner.node.body if name in bound_names([item])]
    if len(binding) == 1 and isinstance(binding[0], Def):
        return Definition(node=binding[0], module=owner.module, owner=owner.node)
    return None


# ---- what a definition says


def declared_events(node: ast.AST | None) -> tuple[str, ...] | None:
    """The events that a definition declares: `events = ("done",)` in a class, `@action("done")` or `@environment` on a
    function.

    None where its text does not say them as plain strings.
    """
    if is_function_environment(node):
        return FUNCTION_EVENTS
    if isinstance(node, ast.ClassDef):
        value = class_attribute(node, "events")
        return _strings(value.elts) if isinstance(value, ast.Tuple | ast.List) else None
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and len(node.decorator_list) == 1:
        call = node.decorator_list[0]
        if isinstance(call, ast.Call) and not call.keywords:
            return _strings(call.args) if last_name(call.func) == "action" else None
    return None


def is_function_environment(node: ast.AST | None) -> bool:
    """Whether a definition is a function that `@environment` (engine.environments.function) makes an environment of."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.decorator_list) != 1:
        return False
    return last_name(node.decorator_list[0]) == "environment"


def has_yield(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is a generator."""
    waiting: list[ast.AST] = [*node.body]
    while waiting:
        item = waiting.pop()
        if isinstance(item, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(item, Def | ast.Lambda):
            waiting += ast.iter_child_nodes(item)
    return False


def class_attribute(node: ast.ClassDef, name: str) -> ast.expr | None:
    """The value that the body of a class gives to a name."""
    for item in node.body:
        target = item.targets[0] if isinstance(item, ast.Assign) and len(item.targets) == 1 else None
        target = item.target if isinstance(item, ast.AnnAssign) else target
        if isinstance(target, ast.Name) and target.id == name and isinstance(item, ast.Assign | ast.AnnAssign):
            return item.value
    return None


def _strings(items: Sequence[ast.expr]) -> tuple[str, ...] | None:
    names = [item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)]
    return tuple(names) if names and len(names) == len(items) else None
