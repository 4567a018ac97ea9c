"""Definitions read as text: what an entry point names, through re-exports, aliases and base classes, without importing
it.

`engine validate` must not run the code of a spec, so it reads modules as text and says only what holds whatever the
code does. What the text leaves open (a base class that cannot be read, a decorator, a name that is bound twice) is
`None`, and never a mistake.

    sources = Sources(base, access)
    entry = sources.entry("engine.environments.arithmetic:Arithmetic").definition
    entry.node                               # ast.ClassDef
    lineage(entry, sources)[0]               # the class and its bases, in the order of Python's MRO
    member(entry, "step", sources)           # the method's definition, "missing" or "unknown"
"""

from __future__ import annotations

import ast
import builtins
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal

from engine.schemas.base import Struct
from engine.spec.access import Access
from engine.spec.code.entry import EntryError, ModuleFiles, has_submodule, nearest_attribute, parse_entry

LARGEST = 2 * 2**20
"""Maximum size of a module that is read, in bytes."""
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
_OPENING = frozenset({"globals", "locals", "vars", "exec", "eval", "setattr", "__getattr__", "modules"})
"""Names that let a module have attributes that its text does not bind."""


class Module(Struct, frozen=True, kw_only=True, eq=False):
    """What the text of a module says."""

    name: str
    file: Path
    tree: ast.Module
    names: frozenset[str]
    """Names that its text binds."""
    closed: bool
    """It has no other names."""
    bindings: Mapping[str, Sequence[ast.stmt]]
    """The top-level statements that bind each name; those under `if TYPE_CHECKING:` count as top-level."""
    changed: frozenset[str]
    """Names that functions bind with `global`, and names whose attributes the module sets."""

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


class External(Struct, frozen=True, kw_only=True):
    """Something of which only the name is known, such as a class of the standard library: `typing.Sequence`."""

    name: str
    is_module: bool = False
    """A module, which is read when something of it is named."""


class Alias(Struct, frozen=True, kw_only=True, eq=False):
    """An expression that a name stands for: `Sizes = list[int]`."""

    expression: ast.expr
    module: Module


Found = Definition | External | Alias | None


class NotImported(EntryError):
    """What stands for an entry point that was found as text, and not imported."""

    def __init__(self, use: str, definition: Definition | None = None) -> None:
        super().__init__(f"`{use}` is not imported here; add `--import`")
        self.definition = definition
        """The class or function; None where the name is bound in another way, or the text could not be read."""


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
        self.lineages: dict[ast.AST, tuple[Sequence[Definition], bool]] = {}
        """Cache of `lineage`."""

    def entry(self, use: str) -> NotImported:
        """Find what `use` (`package.module:Name`) names, as `load_entry` would, and import nothing.

        Raises:
            EntryError: it is not of that form, there is no such module, its text is no Python, or it binds no such
                name.
        """
        name, parts = parse_entry(use)
        file = self._files.find(name, use)
        module = None if file is None else read_module(file, name)
        if file is None or module is None:
            return NotImported(use)
        self._modules[name] = module
        first = parts[0]
        submodule = module.is_package and has_submodule(file.parent, first)
        if module.closed and first not in module.names and first not in _IMPLICIT and not submodule:
            raise EntryError(f"`{name}` has no `{first}`{nearest_attribute(first, sorted(module.names))}")
        definition = self._named(module, first)
        for index, part in enumerate(parts[1:], start=1):
            if not isinstance(definition, Definition) or not isinstance(definition.node, ast.ClassDef):
                return NotImported(use)
            bound = frozenset(bound_names(definition.node.body))
            plain = not (definition.node.bases or definition.node.keywords or definition.node.decorator_list)
            closed = plain and is_closed(ast.Module(body=definition.node.body, type_ignores=[]))
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
            if isinstance(owner, External):
                if owner.is_module:
                    return self._member(owner.name, expression.attr, steps + 1)
                return External(name=f"{owner.name}.{expression.attr}")
            if isinstance(owner, Definition) and isinstance(owner.node, ast.ClassDef):
                return inside(owner, expression.attr)
        return None

    def _named(self, module: Module, name: str, steps: int = 0) -> Found:
        if steps > MAX_STEPS or name in module.changed:
            return None
        statements = module.bindings.get(name, ())
        if not statements and name not in module.names and hasattr(builtins, name):
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
            return External(name=item.name if item.asname else name, is_module=True)
        return self._alias(statement, module, steps)

    def _alias(self, statement: ast.stmt, module: Module, steps: int) -> Found:
        """What `X = Y` or `type X = Y` binds."""
        target = getattr(statement, "target", None)
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
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
        is_library = name.partition(".")[0] in sys.stdlib_module_names or name.startswith("typing_extensions")
        if is_library or (module := self.module(name)) is None:
            return External(name=f"{name}.{attribute}")
        if attribute in module.names:
            return self._named(module, attribute, steps)
        if module.is_package and has_submodule(module.file.parent, attribute):
            return External(name=f"{name}.{attribute}", is_module=True)
        return None

    def module(self, name: str) -> Module | None:
        """Return a module; None if it cannot be read, or if enough were read."""
        if name not in self._modules and len(self._modules) < MAX_MODULES:
            try:
                file = self._files.find(name, name)
                small = file is not None and file.stat().st_size <= LARGEST_FOLLOWED
                self._modules[name] = read_module(file, name) if file is not None and small else None
            except (EntryError, OSError):
                self._modules[name] = None
        return self._modules.get(name)

    def own_imports(self, module: Module) -> Iterator[Module | None]:
        """Yield the spec's own modules that a module imports anywhere, and None for one that cannot be read.

        Own are modules below the spec's folder or the current one, outside of what is installed, and the engine's
        environments.
        """
        for node in ast.walk(module.tree):
            names = [item.name for item in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and (source := _absolute(module, node)):
                names = [source, *(f"{source}.{item.name}" for item in node.names)]
            for name in names:
                if name.partition(".")[0] not in sys.stdlib_module_names and self._is_own(name):
                    yield self.module(name)

    def _is_own(self, name: str) -> bool:
        if name.startswith("engine."):
            helper = name.startswith("engine.environments.function")  # what a world is written with: it writes no names
            return name.startswith("engine.environments.") and not helper
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


def inside(owner: Definition, name: str) -> Definition | None:
    """The one class or function of this name in the body of a class, where nothing else binds it."""
    assert isinstance(owner.node, ast.ClassDef)
    binding = [item for item in owner.node.body if name in bound_names([item])]
    if len(binding) == 1 and isinstance(binding[0], Def):
        return Definition(node=binding[0], module=owner.module, owner=owner.node)
    return None


# ---- the text of a module


def read_module(file: Path, name: str) -> Module | None:
    """The module; None where it is too large to be read, or cannot be.

    Raises:
        EntryError: it is no Python.
    """
    try:
        status = file.stat()
        module = _parse(file, name, status.st_mtime_ns, status.st_size)
    except OSError:
        return None
    if isinstance(module, SyntaxError):
        raise EntryError(f"importing `{name}` failed at {module.filename}:{module.lineno}: SyntaxError: {module}")
    return module


@lru_cache(maxsize=256)
def _parse(file: Path, name: str, changed: int, size: int) -> Module | SyntaxError | None:
    data = Access(roots=(file.resolve().parent,)).read(file, LARGEST) if size <= LARGEST else None
    if data is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings quote the line
            tree = ast.parse(data, filename=str(file))
    except SyntaxError as error:
        return error
    except (ValueError, RecursionError, MemoryError):
        return None
    nodes = list(ast.walk(tree))
    declared = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
    patched = {
        node.value.id
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name)
    }
    calls = [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr"]
    patched |= {call.args[0].id for call in calls if call.args and isinstance(call.args[0], ast.Name)}
    bindings: dict[str, list[ast.stmt]] = {}
    top_level = [
        statement
        for item in tree.body
        for statement in (
            item.body
            if isinstance(item, ast.If) and not item.orelse and last_name(item.test) == "TYPE_CHECKING"
            else [item]
        )
    ]
    for statement in top_level:
        for bound in dict.fromkeys(bound_names([statement])):
            bindings.setdefault(bound, []).append(statement)
    return Module(
        name=name,
        file=file,
        tree=tree,
        names=frozenset(bindings) | declared,
        closed=is_closed(tree),
        bindings=bindings,
        changed=frozenset(declared | patched),
    )


def is_closed(tree: ast.Module) -> bool:
    """Whether a module has no names but those that its text binds."""
    return not any(
        (isinstance(node, ast.ImportFrom) and any(item.name == "*" for item in node.names))
        or (isinstance(node, ast.Name) and node.id in _OPENING)
        or (isinstance(node, ast.Attribute) and node.attr in _OPENING)
        or (isinstance(node, ast.FunctionDef) and node.name == "__getattr__")
        for node in ast.walk(tree)
    )


def bound_names(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Names that statements bind, those of nested blocks too; not those of functions and classes."""
    for statement in body:
        for node in _shallow(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
                yield node.id
            elif isinstance(node, Def):
                yield node.name
            elif isinstance(node, ast.Import | ast.ImportFrom):
                yield from (item.asname or item.name.partition(".")[0] for item in node.names)
            elif isinstance(node, ast.MatchAs | ast.MatchStar) and node.name:
                yield node.name
            elif isinstance(node, ast.MatchMapping) and node.rest:
                yield node.rest


def _shallow(statement: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement, without what is inside of functions and classes."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, Def | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


# ---- bases

_KNOWN_BASES = frozenset(
    {
        "builtins.object",
        "abc.ABC",
        *(f"{module}.{name}" for module in ("typing", "typing_extensions") for name in ("Generic", "Protocol")),
    }
)
"""Bases that add no method which the engine calls."""
_KNOWN_DECORATORS = frozenset({"dataclass", "final", "runtime_checkable"})
"""Decorators of classes that remove no method."""


def lineage(definition: Definition, sources: Sources) -> tuple[Sequence[Definition], bool]:
    """Return a class with its bases, in the order of Python's MRO, the class first; and whether these are all, and
    nothing else adds members to them."""
    cached = sources.lineages.get(definition.node)
    if cached is None:
        types: dict[ast.AST, type] = {}
        try:
            top, complete = _type_of(definition, sources, types, 0)
            classes = [vars(item)["definition"] for item in top.__mro__ if "definition" in vars(item)]
        except TypeError:  # bases that Python refuses
            classes, complete = [definition], False
        cached = sources.lineages[definition.node] = classes, complete
    return cached


def _type_of(definition: Definition, sources: Sources, types: dict[ast.AST, type], steps: int) -> tuple[type, bool]:
    """Return an empty class with the same bases, so that Python orders them, and whether all of them are known."""
    node = definition.node
    assert isinstance(node, ast.ClassDef)
    complete = (  # the body of the class shows all its own members
        steps <= MAX_STEPS
        and node.name not in definition.module.changed
        and is_closed(ast.Module(body=node.body, type_ignores=[]))
        and {"__getattribute__", "__init_subclass__", "__class_getitem__"}.isdisjoint(bound_names(node.body))
        and all(item.arg == "metaclass" and last_name(item.value) == "ABCMeta" for item in node.keywords)
        and _KNOWN_DECORATORS.issuperset(map(last_name, node.decorator_list))
    )
    bases: list[type] = []
    for item in node.bases if steps <= MAX_STEPS else ():
        base = sources.resolve(item.value if isinstance(item, ast.Subscript) else item, definition.module)
        if isinstance(base, Definition) and isinstance(base.node, ast.ClassDef):
            if base.node not in types:
                types[base.node], base_complete = _type_of(base, sources, types, steps + 1)
                complete = complete and base_complete
            bases.append(types[base.node])
        elif not (isinstance(base, External) and base.name in _KNOWN_BASES):
            complete = False
    return type(node.name, tuple(bases), {"definition": definition}), complete


def member(definition: Definition, name: str, sources: Sources) -> Definition | Literal["missing", "unknown"]:
    """Return the method of a class; `unknown` where the text leaves open what it is, or whether there is one."""
    classes, complete = lineage(definition, sources)
    for item in classes:
        assert isinstance(item.node, ast.ClassDef)
        if any(
            isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name)
            for node in ast.walk(item.node)
            if getattr(node, "attr", "") == name
        ):
            return "unknown"  # a method sets it on its object
        if name in bound_names(item.node.body):
            method = inside(item, name)
            is_protocol = any(last_name(base) == "Protocol" for base in item.node.bases)
            if (
                is_protocol
                and method is not None
                and all(
                    isinstance(statement, ast.Pass)
                    or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
                    for statement in method.node.body
                )
            ):
                continue  # it is only declared: `pass`, `...` or a docstring
            certain = complete or item.node is definition.node
            if method is None or not certain or isinstance(method.node, ast.ClassDef):
                return "unknown"
            return method
    return "missing" if complete else "unknown"


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
    return any(isinstance(item, ast.Yield | ast.YieldFrom) for statement in node.body for item in _shallow(statement))


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
