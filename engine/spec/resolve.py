"""From files to one tree: `extends`, `--set` and `${ENV}`, in this order.

Invariant: every node of the result knows the file, line and column that it was written at, and what brought it
here. An environment variable is read only where its value is used: one that an override replaced need not be set.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping as AbcMapping
from collections.abc import Sequence as AbcSequence
from collections.abc import Set as AbcSet
from dataclasses import replace
from pathlib import Path

from engine.spec.access import OUTSIDE_FIX, Access, OutsideError
from engine.spec.references import VARIABLE
from engine.spec.text.diagnostic import SET_FILE, Diagnostic, Origin
from engine.spec.text.near import nearest_name, short
from engine.spec.text.tree import MAX_DEPTH, Mapping, Node, Place, Scalar, Sequence, parse, read_scalar

PUBLISHED = Path(__file__).with_name("published")
"""Settings of other projects' examples as spec files, which `extends:` knows by name. Each names the source of its
values, and lists in comments what has no equivalent in a spec."""


def published_names() -> list[str]:
    """Names of the published settings, sorted."""
    return sorted(file.stem for file in PUBLISHED.glob("*.yaml"))


def published_file(name: str) -> str:
    """The file of a published setting."""
    return str(PUBLISHED / f"{name}.yaml")


MAX_EXTENDS = 32
"""Longest chain of files that extend each other."""
MAX_FILES = 64
"""Most files that one spec is put together from."""
MAX_BYTES = 4 * 2**20
"""Most that these files may have together."""
MAX_PROBLEMS = 200
"""Mistakes that are told while a spec is put together."""

DECIDES: dict[tuple[str, ...], tuple[str, frozenset[str]]] = {
    ("backend",): ("kind", frozenset()),
    ("tasks",): ("source", frozenset({"map", "id", "limit"})),
    ("rewards", "credit"): ("method", frozenset()),
    ("train", "loss"): ("kind", frozenset()),
    ("user",): ("use", frozenset({"effects", "timeout"})),
    ("user", "backend"): ("kind", frozenset()),
    ("rewards", "scorer"): ("use", frozenset({"timeout"})),
}
"""Mappings whose other keys depend on one of theirs: another value of that key drops them, but for those named here."""

EITHER: AbcMapping[tuple[str, ...], tuple[str, ...]] = {("backend",): ("urls", "launch")}
"""Keys of a mapping of which a spec gives one: the one that is given drops the base's others."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Resolver:
    """Puts one spec's tree together and gathers what is wrong on the way."""

    def __init__(self, access: Access | None = None) -> None:
        self.problems: list[Diagnostic] = []
        self.variables: dict[str, str] = {}
        """Environment variables that were read."""
        self.sources: dict[str, str] = {}
        """Text of every file that was read, by the name that origins use."""
        self._access = access or Access()
        self._merged: dict[Path, Mapping | None] = {}
        self._bytes = 0
        self._uses = 0

    def resolve(self, path: str | Path, overrides: AbcSequence[str] = ()) -> Mapping | None:
        """The whole tree, or None where a file could not be read; `problems` says what is wrong."""
        file = str(path)
        tree = self._load(file, "", [], Origin(file, 1, 1))
        if tree is None:
            return None
        if isinstance(machine := tree.entries.get("machine"), Scalar):
            tree = Mapping(tree.origin, {**tree.entries, "machine": _preset(machine)}, tree.keys)
        return self.override(tree, overrides)

    def override(self, tree: Mapping | None, overrides: AbcSequence[str]) -> Mapping:
        """A tree (None: an empty one) with the values of `--set`; environment variables are filled in."""
        tree = tree or Mapping(Origin(SET_FILE, 1, 1))
        for override in overrides:
            tree = self._set(tree, override)
        resolved = self._substitute(tree)
        assert isinstance(resolved, Mapping)
        return resolved

    def _problem(self, rule: str, message: str, fix: str | None, at: Origin | None) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(Diagnostic(rule, "error", message, fix, at))
        elif self.problems[-1].rule != "spec.more":
            more = f"and more than {MAX_PROBLEMS} mistakes in all"
            self.problems.append(Diagnostic("spec.more", "error", more, "correct these first", at))

    # ---- files and extends

    def _load(self, file: str, via: str, chain: list[str], asked: Origin) -> Mapping | None:
        real = _real(file)
        if real in self._merged:
            return self._merged[real]
        tree = self._read(file, via, asked)
        if tree is not None:
            tree = self._extend(tree, file, [*chain, file])
        self._merged[real] = tree
        return tree

    def _read(self, file: str, via: str, asked: Origin) -> Mapping | None:
        rule, at = ("spec.extends", asked) if via else ("spec.unreadable", Origin(file, 1, 1))
        try:
            with self._access.below(PUBLISHED).open(Path(file)) as stream:
                data = stream.read(MAX_BYTES + 1 - self._bytes)
            self._bytes += len(data)
            if self._bytes > MAX_BYTES:
                message = f"`{file}` has more than {MAX_BYTES:,} bytes"
                words = message if not via else f"{message}, together with what it extends"
                self._problem(rule, words, "keep rows in a jsonl file", at)
                return None
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            self._problem(rule, f"`{file}` is not UTF-8 (byte {error.start})", "save it as UTF-8", at)
            return None
        except OutsideError as error:
            self._problem("spec.outside", f"`{file}` is not opened: {error.strerror}", OUTSIDE_FIX, at)
            return None
        except (OSError, ValueError) as error:
            words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self._problem(rule, f"`{file}` cannot be read: {words}", _similar_file(file, self._access), at)
            return None
        self.sources[file] = text
        tree, problems = parse(text, Place(file, via))
        self.problems += problems
        if isinstance(tree, Mapping):
            return tree
        if tree is not None:
            self._problem(
                "spec.wrong-type", "a spec is a mapping of keys to values", "begin with `spec: episode/v1`", tree.origin
            )
        elif not problems:
            self._problem("spec.empty", f"`{file}` is empty", "begin with `spec: episode/v1`", Origin(file, 1, 1, via))
        return None

    def _extend(self, tree: Mapping, file: str, chain: list[str]) -> Mapping | None:
        named = tree.entries.get("extends")
        if named is None:
            return tree
        without_extends = _only(tree, tree.entries.keys() - {"extends"})
        merged: Mapping | None = None
        complete = True
        for node in named.items if isinstance(named, Sequence) else [named]:
            node = self._substitute(node)
            if not isinstance(node, Scalar) or not isinstance(node.value, str) or not node.value:
                self._problem(
                    "spec.extends",
                    "`extends` takes a file's name, the name of published settings, or a list of them",
                    "extends: base.yaml",
                    node.origin,
                )
                complete = False
                continue
            loaded = self._base(node.value, file, node.origin, chain)
            complete = complete and loaded is not None
            if loaded is not None:
                merged = loaded if merged is None else _merge(merged, loaded, ())
        if not complete:
            return None
        return without_extends if merged is None else _merge(merged, without_extends, ())

    def _base(self, value: str, file: str, at: Origin, chain: list[str]) -> Mapping | None:
        """What a value of `extends` names: a file beside the spec, else published settings; None: it cannot be read."""
        base = os.path.normpath(Path(file).parent / value)
        if not {"/", "\\", "."} & set(value) and not self._access.is_file(Path(base)):
            names = published_names()
            if value not in names:
                message = f"there is neither a file nor published settings of the name `{short(value)}`"
                fix = f"published settings are {', '.join(names)}; a file has its suffix: `base.yaml`"
                near = nearest_name(value, names)
                self._problem("spec.extends", message, f"did you mean `{near}`? {fix}" if near else fix, at)
                return None
            base = published_file(value)
        real = _real(base)
        self._uses += 1
        if self._uses > MAX_FILES:
            if self._uses == MAX_FILES + 1:
                message = f"more than {MAX_FILES} files are extended"
                self._problem("spec.extends", message, "put what they share into one", at)
            return None
        if any(_real(file) == real for file in chain):
            circle = " -> ".join([*chain, base])
            self._problem("spec.extends-cycle", f"`extends` goes in a circle: {circle}", "remove one of them", at)
            return None
        if len(chain) > MAX_EXTENDS:
            self._problem("spec.extends", f"more than {MAX_EXTENDS} files extend each other", "flatten them", at)
            return None
        return self._load(base, f"extends {value}", chain, at)

    # ---- --set

    def _set(self, tree: Mapping, override: str) -> Mapping:
        name, equals, text = override.partition("=")
        keys = [key.strip() for key in name.split(".")]
        here = Origin(SET_FILE, 1, 1, f"--set {override}")
        if not equals or not all(keys) or len(keys) > MAX_DEPTH:
            self._problem("spec.set", f"`{override}` is no override", "write `--set a.b=value`", here)
            return tree
        value, problems = parse(text, Place(SET_FILE, here.via, shift=len(name) + 1))
        if problems:
            words = problems[0].message
            self._problem("spec.set", f"the value is no YAML: {words}", "quote it", problems[0].origin)
            return tree
        if value is None:
            value = Scalar(None, replace(here, column=len(name) + 2), "")
        if isinstance(value, Scalar) and value.typed:
            value = replace(value, reread=True)
        if keys == ["machine"]:
            value = _preset(value)
        edited = self._put(tree, keys, 0, value, here)
        return edited if isinstance(edited, Mapping) else tree

    def _put(self, node: Node | None, keys: list[str], depth: int, value: Node, here: Origin) -> Node | None:
        """A copy of `node` with the value at keys[depth:]; None where there is no such place."""
        if depth == len(keys):
            return value
        key, rest = keys[depth], ".".join(keys[:depth])
        if node is None or (isinstance(node, Scalar) and node.value is None):
            node = Mapping(here)
        if isinstance(node, Mapping):
            child = self._put(node.entries.get(key), keys, depth + 1, value, here)
            if child is None:
                return None
            decides, shared = DECIDES.get(tuple(keys[:depth]), ("", frozenset()))
            if decides == key and _differ(node.entries.get(key), child):
                set_here = {name for name, entry in node.entries.items() if entry.origin.file == SET_FILE}
                node = _only(node, shared | set_here)
            return Mapping(node.origin, {**node.entries, key: child}, {**node.keys, key: here})
        if isinstance(node, Sequence):
            if not key.isascii() or not key.isdigit() or int(key[:9]) >= len(node.items):
                places = f"its items are 0 to {len(node.items) - 1}" if node.items else "it is empty"
                self._problem(
                    "spec.set", f"`{rest}` is a list and has no item `{key}`", f"{places}; set the list whole", here
                )
                return None
            child = self._put(node.items[int(key)], keys, depth + 1, value, here)
            if child is None:
                return None
            return Sequence(node.origin, [child if i == int(key) else item for i, item in enumerate(node.items)])
        self._problem("spec.set", f"`{rest}` is a single value and has no `{key}`", f"set `{rest}` whole", here)
        return None

    # ---- ${ENV}

    def _substitute(self, node: Node) -> Node:
        if isinstance(node, Sequence):
            return Sequence(node.origin, [self._substitute(item) for item in node.items])
        if isinstance(node, Mapping):
            return Mapping(node.origin, {key: self._substitute(item) for key, item in node.entries.items()}, node.keys)
        if not isinstance(node.value, str) or "${" not in node.value:
            return node
        text = node.value
        used: list[str] = []
        filled = VARIABLE.sub(lambda match: self._variable(match, node.origin, used), text)
        if not used:
            return replace(node, value=filled, text=filled)
        via = ", ".join(dict.fromkeys([node.origin.via, *used] if node.origin.via else used))
        origin = replace(node.origin, via=via)
        is_variable = node.typed and len(used) == 1 and VARIABLE.fullmatch(text) is not None
        return Scalar(
            read_scalar(filled) if is_variable else filled, origin, filled, reread=is_variable, reference=text
        )

    def _variable(self, match: re.Match[str], at: Origin, used: list[str]) -> str:
        escaped, inside, closed = match.groups()
        if escaped:
            return match[0][1:]
        name, colon, default = inside.partition(":")
        if not closed or not _NAME.fullmatch(name):
            message = f"`{match[0][:40]}` names no environment variable"
            self._problem("spec.env", message, "write `${NAME}` or `${NAME:default}`; a literal `${` is `$${`", at)
            return match[0]
        used.append(f"${{{name}}}")
        if name in os.environ:
            self.variables[name] = os.environ[name]
            return os.environ[name]
        if not colon:
            fix = f"set it, or give a default: `${{{name}:default}}`"
            self._problem("spec.env-unset", f"the environment variable `{name}` is not set", fix, at)
        return default


def _real(file: str) -> Path:
    """One path for one file, however it is named; the name itself where it cannot be resolved."""
    try:
        return Path(file).resolve()
    except (OSError, ValueError, RuntimeError):
        return Path(file)


def _preset(node: Node) -> Node:
    """`machine: tools` is `machine: {preset: tools}`, so that it can be merged and overridden like one."""
    if isinstance(node, Scalar) and isinstance(node.value, str):
        return Mapping(node.origin, {"preset": node}, {"preset": node.origin})
    return node


def _only(node: Mapping, names: AbcSet[str]) -> Mapping:
    entries = {name: entry for name, entry in node.entries.items() if name in names}
    return Mapping(node.origin, entries, {name: origin for name, origin in node.keys.items() if name in names})


def _differ(one: Node | None, other: Node | None) -> bool:
    return isinstance(one, Scalar) and isinstance(other, Scalar) and one.value != other.value


def _merge(base: Mapping, own: Mapping, path: tuple[str, ...]) -> Mapping:
    """`own` over `base`: mappings are merged, anything else is replaced."""
    decides, shared = DECIDES.get(path, ("", frozenset()))
    if decides and _differ(base.entries.get(decides), own.entries.get(decides)):
        base = _only(base, shared)
    either = EITHER.get(path, ())
    if any(key in own.entries for key in either):
        base = _only(base, frozenset(base.entries) - set(either))
    entries, keys = dict(base.entries), dict(base.keys)
    for key, node in own.entries.items():
        below = entries.get(key)
        if not path and key == "machine" and isinstance(node, Mapping) and below is not None:
            below = _preset(below)
        both = isinstance(below, Mapping) and isinstance(node, Mapping)
        entries[key] = _merge(below, node, (*path, key)) if both else node  # type: ignore[arg-type]
        keys[key] = own.keys[key]
    return Mapping(own.origin, entries, keys)


def _similar_file(file: str, access: Access) -> str | None:
    folder = Path(file).parent
    try:
        if not access.is_dir(folder):
            return None
        near = nearest_name(
            Path(file).name, (item.name for item in folder.iterdir() if item.suffix in (".yaml", ".yml"))
        )
    except (OSError, ValueError):
        return None
    return f"did you mean `{folder / near}`?" if near and near != Path(file).name else None
