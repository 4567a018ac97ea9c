"""Sizes of the project, and a ratchet that keeps them from growing.

    python scripts/size.py                      the table: each figure, the one recorded in size.txt, and the budget
    python scripts/size.py --plugins            also lines and files of each plugin
    python scripts/size.py --path               the stations that docs/architecture.md names: lines and classes of each file
    python scripts/size.py --list NAME          the places that a figure counts, one a line
    python scripts/size.py --check              exit status 1 where a figure is more than 0.5 % above the recorded one
    python scripts/size.py --record             writes the figures that fell to size.txt
    python scripts/size.py --record --allow NAME "reason"
                                                also writes this figure, which rose, and the reason behind it

The core is `engine/` and `schemas/` without `engine/plugins/` and the checks of specs. Lines include blank ones and
docstrings. Statements leave out imports and docstrings, so that a denser line saves nothing. Nothing is imported.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

NAMED = 5
"""Files that a failed check names."""
VAGUE = frozenset({"found", "told", "kept", "whole", "own", "known", "each"})
"""Names of locals that say nothing of the value."""
LONG = 60
"""Lines of a function that count as many."""
_CLASS_MAKERS = frozenset({"make_dataclass", "NamedTuple", "namedtuple", "defstruct", "create_model"})
_STATIONS = re.compile(r"^#+ [^\n]*(?:twelve|12) stations[^\n]*\n(.*?)(?=^#+ |\Z)", re.M | re.S | re.I)
_STATION = re.compile(r"`([\w./]+\.py):([\w.]+)`")


class Figure(NamedTuple):
    """What is known of a figure beside its value."""

    budget: float | None = None
    """The goal; None where there is none."""
    ratchet: bool = True
    """Whether `--check` compares it. Totals may grow while files move."""
    margin: float = 0.005
    """It may be this share above the recorded one before `--check` fails."""


SIZES = {
    "core lines": Figure(50_000),
    "core files": Figure(300),
    "validate lines": Figure(9_000),
    "classes": Figure(1_050),
    "functions": Figure(6_000),
    "statements": Figure(49_500),
    "lines, all": Figure(ratchet=False),
    "files, all": Figure(640, ratchet=False),
    "functions over 60 lines": Figure(22),
    "core imports of plugins": Figure(0),
    "modules with one importer": Figure(120),
    "forwarding functions": Figure(40),
    "classes with one method": Figure(),
    "vague locals": Figure(),
    "vague locals of the core": Figure(0),
    "class names twice in the core": Figure(0),
    "frozen dataclasses and NamedTuples of the core": Figure(),
    "reading path, files": Figure(25),
    "reading path, lines": Figure(7_300),
    "reading path, classes": Figure(90),
    "reading path, lost names": Figure(0),
}
_OF_TURN = {"Python calls": 300, "C calls": 370, "functions": 180, "frames": 5, "resumptions": 2.2}
CALLS = {
    f"{workload} turn, {name}": Figure(round(budget * factor, 1), margin=0.1 if name == "resumptions" else 0.02)
    for workload, factor in (("plain", 1), ("loose", 1.3), ("thinking", 1.3))
    for name, budget in _OF_TURN.items()
} | {f"guard, {kind} calls a turn": Figure(margin=0.02) for kind in ("Python", "C")}
"""What bench/calls.py counts. Counts vary by about 1 % with what one round of a loop takes."""
FIGURES = SIZES | CALLS


@dataclass(frozen=True)
class Module:
    """One file."""

    path: str
    """Relative to the root, with slashes."""
    text: str

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """The syntax tree: the module first, then every other node."""
        return list(ast.walk(ast.parse(self.text)))

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @property
    def room(self) -> str:
        """`core`, `validate`, `environments` or `plugins/NAME`."""
        top, second, *rest = [*self.path.split("/"), ""]
        if (top, second) == ("engine", "plugins"):
            return "plugins/" + (rest[0] if len(rest) > 2 else "")
        if top == "engine" and second in ("validate", "checks"):
            return "validate"
        return "environments" if top == "environments" else "core"

    @property
    def dotted(self) -> str:
        """The name that it is imported by."""
        dotted = self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        return dotted if dotted.startswith("engine") else f"engine.{dotted}"

    @cached_property
    def imports(self) -> list[tuple[str, int]]:
        """The dotted names that it imports, anywhere, or gives to `import_module` as a literal; each with its line."""
        pairs: list[tuple[str, int]] = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                pairs += [(alias.name, node.lineno) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                pairs.append((node.module, node.lineno))
                pairs += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
            elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
                literals = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
                pairs += [(value, node.lineno) for value in literals if isinstance(value, str)]
        return pairs


def _called(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def read_modules(root: Path) -> list[Module]:
    """The Python files of `engine/`, `schemas/` and `environments/`; folders that are links are left out."""
    paths = [
        Path(folder, name)
        for base in ("engine", "schemas", "environments")
        for folder, _, names in os.walk(root / base)
        for name in names
        if name.endswith(".py")
    ]
    return [Module(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")) for path in sorted(paths)]


class Sizes:
    """The figures of one checkout.

    Args:
        root: Its folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.modules = read_modules(root)
        self.places: dict[str, list[str]] = defaultdict(list)
        """By figure: the places that it counts, as `path:line what`."""
        for module in self.modules:
            self._count(module)
        self._count_importers()
        self._count_names()
        self.values: dict[str, float | None] = {name: len(self.places[name]) for name in SIZES}
        self._sum_lines()
        self._measure_path()

    def _add(self, name: str, module: Module, node: ast.AST, what: str = "") -> None:
        self.places[name].append(f"{module.path}:{getattr(node, 'lineno', 1)} {what}".rstrip())

    def _count(self, module: Module) -> None:
        fields = {
            statement.target
            for node in module.nodes
            if isinstance(node, ast.ClassDef)
            for statement in node.body
            if isinstance(statement, ast.AnnAssign)
        }
        for node in module.nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self._add("functions", module, node, node.name)
                if (node.end_lineno or node.lineno) - node.lineno > LONG:
                    self._add("functions over 60 lines", module, node, node.name)
                if _forwards(node):
                    self._add("forwarding functions", module, node, node.name)
            elif isinstance(node, ast.ClassDef):
                self._add("classes", module, node, node.name)
                if module.room == "core" and is_other_record(node):
                    self._add("frozen dataclasses and NamedTuples of the core", module, node, node.name)
                if _has_one_method(node):
                    self._add("classes with one method", module, node, node.name)
            elif isinstance(node, ast.Call):
                if _called(node) in _CLASS_MAKERS or (_called(node) == "type" and len(node.args) == 3):
                    self._add("classes", module, node)
            elif (
                isinstance(node, ast.Name)
                and isinstance(node.ctx, ast.Store)
                and node.id in VAGUE
                and node not in fields
            ):
                self._add("vague locals", module, node, node.id)
                if module.room == "core":
                    self._add("vague locals of the core", module, node, node.id)
            if _is_statement(node):
                self._add("statements", module, node)
        if not module.room.startswith("plugins"):
            for name, line in module.imports:
                if name.startswith("engine.plugins."):
                    self.places["core imports of plugins"].append(f"{module.path}:{line} {name}")

    def _count_importers(self) -> None:
        by_name = {module.dotted: module for module in self.modules}
        importers: dict[str, set[str]] = defaultdict(set)
        for module in self.modules:
            for name, _ in module.imports:
                if name in by_name and name != module.dotted:
                    importers[name].add(module.path)
        for name, paths in sorted(importers.items()):
            if len(paths) == 1 and not by_name[name].path.endswith("__init__.py"):
                self.places["modules with one importer"].append(f"{by_name[name].path}:1 only in {paths.pop()}")

    def _count_names(self) -> None:
        core = [module for module in self.modules if module.room == "core"]
        classes = [
            (node.name, f"{module.path}:{node.lineno} {node.name}")
            for module in core
            for node in ast.iter_child_nodes(module.nodes[0])
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        ]
        files: dict[str, list[str]] = defaultdict(list)
        for name, place in classes:
            files[name].append(place)
        for _, places in sorted(files.items()):
            if len(places) > 1:
                self.places["class names twice in the core"].append("  ".join(places))

    def _sum_lines(self) -> None:
        lines = Counter[str]()
        files = Counter[str]()
        for module in self.modules:
            lines[module.room] += module.lines
            files[module.room] += 1
        self.rooms = {room: (lines[room], files[room]) for room in sorted(lines, key=lambda room: -lines[room])}
        self.values |= {
            "core lines": lines["core"],
            "core files": files["core"],
            "validate lines": lines["validate"],
            "lines, all": lines.total(),
            "files, all": files.total(),
        }

    def _measure_path(self) -> None:
        section = _STATIONS.search((self._root / "docs/architecture.md").read_text(encoding="utf-8"))
        stations = _STATION.findall(section[1]) if section else []
        by_path = {module.path: module for module in self.modules}
        lost = [
            f"{path}:{name}"
            for path, name in stations
            if path not in by_path or not _defines(by_path[path].text, name.split(".")[-1])
        ]
        if section and len(stations) < 12:
            lost.append(f"{len(stations)} of 12 stations")
        files = [by_path[path] for path in dict.fromkeys(path for path, _ in stations) if path in by_path]
        self.places["reading path, files"] = [
            f"{module.lines:>6,d} lines {_classes(module):>3} classes   {module.path}" for module in files
        ]
        self.places["reading path, lost names"] = lost
        self.values |= {
            "reading path, files": len(files) or None,
            "reading path, lines": sum(module.lines for module in files) or None,
            "reading path, classes": sum(map(_classes, files)) or None,
            "reading path, lost names": len(lost) if section else None,
        }


def _classes(module: Module) -> int:
    return sum(isinstance(node, ast.ClassDef) for node in module.nodes)


def _defines(text: str, name: str) -> bool:
    return re.search(rf"^\s*(?:async def|def|class) {re.escape(name)}\b", text, re.M) is not None


def _is_statement(node: ast.AST) -> bool:
    if not isinstance(node, ast.stmt) or isinstance(node, (ast.Import, ast.ImportFrom)):
        return False
    return not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def _body(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> list[ast.stmt]:
    return [statement for statement in node.body if _is_statement(statement)]


def _forwards(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is one call that is given each of its arguments unchanged, and nothing else."""
    body = _body(node)
    if len(body) != 1 or not isinstance(body[0], (ast.Return, ast.Expr)):
        return False
    call = body[0].value.value if isinstance(body[0].value, ast.Await) else body[0].value
    if not isinstance(call, ast.Call):
        return False
    arguments = node.args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    names = {name for name in positional if name not in ("self", "cls")}
    names |= {argument.arg for argument in (arguments.vararg, *arguments.kwonlyargs, arguments.kwarg) if argument}
    values = [*map(_unstarred, call.args), *(keyword.value for keyword in call.keywords)]
    passed = [value.id if isinstance(value, ast.Name) else "" for value in values]
    return bool(names) and sorted(passed) == sorted(names)


def _unstarred(value: ast.expr) -> ast.expr:
    return value.value if isinstance(value, ast.Starred) else value


def is_other_record(node: ast.ClassDef) -> bool:
    """Whether a class is a frozen dataclass or a NamedTuple: a record that is no `Struct`."""
    named = any(ast.unparse(base).split(".")[-1] == "NamedTuple" for base in node.bases)
    return named or any(
        _called(decorator) == "dataclass"
        and any(option.arg == "frozen" and ast.unparse(option.value) == "True" for option in decorator.keywords)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call)
    )


def _has_one_method(node: ast.ClassDef) -> bool:
    """Whether a class with an `__init__` has one method beside it: a function would do."""
    methods = [item.name for item in node.body if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return "__init__" in methods and len(methods) == 2


class Recorded(NamedTuple):
    """A line of size.txt."""

    value: float
    reason: str
    """Why it rose the last time; empty where it did not."""


def read_record(path: Path) -> dict[str, Recorded]:
    """The lines `NAME: VALUE  # REASON` of size.txt, by name."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    parts = [line.partition("#") for line in lines if line.strip()]
    pairs = [(figure.rpartition(":"), reason.strip()) for figure, _, reason in parts]
    return {name: Recorded(float(value), reason) for (name, _, value), reason in pairs}


def write_record(path: Path, record: dict[str, Recorded]) -> None:
    """Writes size.txt in the order of `FIGURES`."""
    lines = [
        f"{name}: {_digits(record[name].value)}" + (f"  # {record[name].reason}" if record[name].reason else "")
        for name in FIGURES
        if name in record
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _digits(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def grown(values: Mapping[str, float | None], record: dict[str, Recorded]) -> list[str]:
    """One line for each figure that is more above the recorded one than its margin."""
    return [
        f"{name}: {_digits(value)}, recorded {_digits(record[name].value)}"
        for name, value in values.items()
        if FIGURES[name].ratchet
        and value is not None
        and name in record
        and value > record[name].value * (1 + FIGURES[name].margin)
    ]


def grown_files(root: Path, sizes: Sizes) -> Iterator[str]:
    """The files that grew most in lines since size.txt was written, one line each; nothing outside of a git checkout."""
    try:
        written = _git(root, "log", "-1", "--format=%H", "--", "size.txt").strip()
        changes = _git(root, "diff", "--numstat", "--no-renames", written, "--", "*.py").splitlines() if written else []
    except (OSError, subprocess.CalledProcessError):
        return
    counted = {module.path for module in sizes.modules}
    growth = {path: int(added) - int(removed) for added, removed, path in map(str.split, changes) if path in counted}
    for path in sorted(growth, key=lambda path: -growth[path])[:NAMED]:
        yield f"{path} {growth[path]:+d} lines"


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout


def table(values: Mapping[str, float | None], record: dict[str, Recorded]) -> Iterator[str]:
    """The figures, one line each."""
    for name, value in values.items():
        budget = FIGURES[name].budget
        columns = [f"{name:32}", f"{'not written' if value is None else _digits(value):>12}"]
        columns.append(f"recorded {_digits(record[name].value):>7}" if name in record else " " * 16)
        if budget is not None:
            over = value is None or value > budget
            columns.append(f"budget {_digits(budget):>7}{'  OVER' if over else ''}")
        yield "   ".join(columns).rstrip()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent, help="the checkout")
    parser.add_argument("--plugins", action="store_true", help="lines and files of each plugin")
    parser.add_argument("--path", action="store_true", help="the files of the reading path, in its order")
    parser.add_argument("--list", metavar="NAME", help="the places that a figure counts")
    parser.add_argument("--check", action="store_true", help="fails where a figure rose by more than 0.5 %%")
    parser.add_argument("--record", action="store_true", help="writes the figures that fell")
    parser.add_argument("--allow", nargs=2, action="append", default=[], metavar=("NAME", "REASON"))
    options = parser.parse_args(arguments)
    named = [name for name in (options.list, *(name for name, _ in options.allow)) if name is not None]
    if unknown := [name for name in named if name not in FIGURES]:
        parser.error(f"there is no figure {unknown[0]!r}; the figures are: {', '.join(FIGURES)}")
    if options.allow and not options.record:
        parser.error("--allow belongs to --record")
    sizes = Sizes(options.root)
    path = options.root / "size.txt"
    record = read_record(path)
    if options.path:
        print("\n".join(sizes.places["reading path, files"]))
        print("\n".join(table({name: value for name, value in sizes.values.items() if "path" in name}, record)))
        return 0
    if options.list:
        print("\n".join(sizes.places[options.list]))
        return 0
    if options.record:
        return write_changes(sizes.values, path, dict(options.allow))
    print("\n".join(table(sizes.values, record)))
    if options.plugins:
        for room, (lines, files) in sizes.rooms.items():
            print(f"  {room:32} {lines:>8,d} lines {files:>5,d} files")
    if options.check and (risen := grown(sizes.values, record)):
        print("\nMore than 0.5 % above size.txt:", *risen, sep="\n  ")
        print("Files that grew most since size.txt was written:", *grown_files(options.root, sizes), sep="\n  ")
        print('Remove as much elsewhere, or: python scripts/size.py --record --allow NAME "reason"')
        return 1
    return 0


def write_changes(values: Mapping[str, float | None], path: Path, allowed: Mapping[str, str]) -> int:
    """Write the figures that fell to size.txt, and those that rose with a reason; 1 where one rose without."""
    record, refused = read_record(path), []
    for name, value in values.items():
        before = record.get(name)
        if not FIGURES[name].ratchet or value is None or (before and value == before.value):
            continue
        if before is None or value < before.value:
            record[name] = Recorded(value, "")
        elif name in allowed:
            record[name] = Recorded(value, allowed[name])
        else:
            rise = f"from {_digits(before.value)} to {_digits(value)}"
            refused.append(f'{name} rose {rise}: --allow "{name}" "reason" records it')
    write_record(path, record)
    print("\n".join(refused or [f"written: {path.name}"]))
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
