"""YAML text -> a tree of nodes that know where they were written.

The tree is built from the parser's events, so depth, size and aliases are bounded while reading.
Every problem is a `Diagnostic`; nothing here raises on bad input. Trees are never changed once built: what edits one
copies the nodes on the way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from engine.spec.text.diagnostic import Diagnostic, Origin
from engine.spec.text.yaml_causes import likely_cause

ScalarValue = str | int | float | bool | None

_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_INF = re.compile(r"([-+]?)\.(?:inf|Inf|INF)")
_NAN = frozenset({".nan", ".NaN", ".NAN"})
_FIRST = frozenset("0123456789-+.")

MAX_DIGITS = 4000
"""Python refuses to read longer integers by default."""
MAX_HEX = 3000
"""As many digits of base 16 are fewer of base 10 than Python refuses to write."""


def read_scalar(text: str) -> ScalarValue:
    """What an unquoted scalar means in the core schema of YAML 1.2. An integer of more than `MAX_DIGITS` digits stays a
    string.

    `yes`, `no`, `on`, `off`, `1:30`, `1_000` and dates are strings; `1e-5` is a float; `010` is ten.
    """
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if text[0] not in _FIRST or len(text) > MAX_DIGITS:
        return text
    if _INT.fullmatch(text):
        return int(text)
    if _OCTAL.fullmatch(text):
        return int(text[2:], 8)
    if _HEX.fullmatch(text):
        return int(text[2:], 16) if len(text) <= MAX_HEX else text
    if _FLOAT.fullmatch(text):
        return float(text)
    if sign := _INF.fullmatch(text):
        return float(f"{sign[1]}inf")
    return float("nan") if text in _NAN else text


MAX_DEPTH = 64
"""Deepest nesting of mappings and lists."""
MAX_NODES = 200_000
"""Most nodes of one document, each use of an alias counted in full."""

MAX_PROBLEMS = 200
"""Of one document that are told."""

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_CORE = "tag:yaml.org,2002:"
_COLLECTION_TAGS = {"mapping": f"{_CORE}map", "list": f"{_CORE}seq"}


@dataclass(slots=True)
class Scalar:
    """A single value."""

    value: ScalarValue
    origin: Origin
    text: str
    """As it was written, without quotes."""
    typed: bool = True
    """False where the text must stay a string (`!!str`, block scalars)."""
    reread: bool = False
    """The value came from `${ENV}` or `--set` as text: where a string is wanted, `text` serves."""
    reference: str = ""
    """What was written in place of a value that environment variables gave: `Bearer ${TOKEN}`."""


@dataclass(slots=True)
class Sequence:
    """A list."""

    origin: Origin
    items: list[Node] = field(default_factory=list)


@dataclass(slots=True)
class Mapping:
    """A mapping: its keys are strings, in the order in which they were written."""

    origin: Origin
    entries: dict[str, Node] = field(default_factory=dict)
    keys: dict[str, Origin] = field(default_factory=dict)
    """Where each key was written."""


Node = Scalar | Sequence | Mapping


@dataclass(slots=True)
class Place:
    """Turns the parser's marks into origins."""

    file: str
    via: str = ""
    shift: int = 0
    """Added to columns of the first line: a value inside a longer argument."""

    def __call__(self, mark: Any) -> Origin:
        """The origin of a mark."""
        column = mark.column + 1 + (self.shift if mark.line == 0 else 0)
        return Origin(self.file, mark.line + 1, column, self.via)


split_lines = re.compile("\r\n|[\r\n\x85\u2028\u2029]").split
"""The lines of a text as the parser counts them."""


def parse(text: str, place: Place) -> tuple[Node | None, list[Diagnostic]]:
    """Read one YAML document.

    Returns the tree, or None where the text is no YAML at all (or empty), and every problem that was met:
    rules `yaml.*`, of which `yaml.syntax` means that reading stopped.
    """
    try:
        loader = _LOADER(text)
    except (yaml.YAMLError, UnicodeError) as error:
        return None, [_unreadable(error, text, place)]
    builder = _Builder(place, text, loader)
    try:
        return builder.document(), builder.problems
    except _Stopped:
        return None, builder.problems
    except (yaml.YAMLError, UnicodeError) as error:
        mark = getattr(error, "problem_mark", None)
        if mark is not None and "maximum nesting depth" in str(error):  # libyaml from 0.2.6 looks ahead of its events
            return parse(text[: mark.index], place)
        return None, [*builder.problems, _unreadable(error, text, place)]
    finally:
        loader.dispose()


class _Stopped(Exception):
    """Reading ends with the newest problem."""


@dataclass(slots=True)
class _Builder:
    place: Place
    text: str
    loader: Any
    problems: list[Diagnostic] = field(default_factory=list)
    _nodes: int = 0
    _open: list[str | None] = field(default_factory=list)
    """The anchors of the collections whose ends have not come yet."""
    _anchors: dict[str, tuple[Node, int, int]] = field(default_factory=dict)
    """Anchor -> the node, its size in nodes and its height in levels."""

    def problem(self, rule: str, message: str, fix: str | None, at: Origin, *, stop: bool = False) -> None:
        if len(self.problems) < MAX_PROBLEMS or stop:
            self.problems.append(Diagnostic(rule, "error", message, fix, at))
        if stop:
            raise _Stopped

    def document(self) -> Node | None:
        """The tree of the one document; None: there is none."""
        root: Node | None = None
        documents = 0
        while self.loader.check_event():
            event = self.loader.get_event()
            if isinstance(event, yaml.NodeEvent):
                root, _ = self._node(event)
            elif isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    at = self.place(event.start_mark)
                    message, fix = "a second document begins here", "keep one document in a file"
                    self.problem("yaml.documents", message, fix, at, stop=True)
        return root

    def _node(self, event: Any) -> tuple[Node, int]:
        """A node with all below it, and its height in levels."""
        origin = self.place(event.start_mark)
        if isinstance(event, yaml.AliasEvent):
            name = str(event.anchor)
            anchored = self._anchors.get(name)
            if anchored is None:
                inside = name in self._open
                words = "stands inside what it names" if inside else "names nothing above it"
                fix = "write the value out" if inside else f"mark a value with `&{name}` first"
                self.problem("yaml.alias", f"the alias `*{name}` {words}", fix, origin)
                anchored = Scalar(None, origin, ""), 1, 0
            named, size, height = anchored
            self._count(size, origin)
            self._check_depth(height, origin)
            return named, height
        before = self._nodes
        if isinstance(event, yaml.ScalarEvent):
            self._count(1, origin)
            node: Node = self._read(event, origin)
            height = 0
        else:
            node, height = self._collection(event, origin)
        if event.anchor:
            self._anchors[event.anchor] = (node, self._nodes - before, height)
        return node, height

    def _collection(self, event: Any, origin: Origin) -> tuple[Node, int]:
        node: Mapping | Sequence = Mapping(origin) if isinstance(event, yaml.MappingStartEvent) else Sequence(origin)
        kind = "mapping" if isinstance(node, Mapping) else "list"
        if event.tag not in (None, "!", _COLLECTION_TAGS[kind]):
            message = f"the tag `{_show_tag(event.tag)}` is not known on a {kind}"
            self.problem("yaml.tag", message, "remove the tag", origin)
        self._check_depth(1, origin)
        self._count(1, origin)
        self._open.append(event.anchor)
        self._anchors.pop(event.anchor, None)
        heights = [0]
        while not isinstance(inner := self.loader.get_event(), yaml.CollectionEndEvent):
            child, height = self._node(inner)
            heights.append(height)
            if isinstance(node, Sequence):
                node.items.append(child)
                continue
            plain = not isinstance(inner, yaml.ScalarEvent) or (inner.implicit[0] and not inner.style)
            key = self._key(child, node, plain)
            value, height = self._node(self.loader.get_event())
            heights.append(height)
            if key is not None:
                node.entries[key] = value
        self._open.pop()
        return node, max(heights) + 1

    def _check_depth(self, levels: int, origin: Origin) -> None:
        if len(self._open) + levels > MAX_DEPTH:
            self.problem("yaml.depth", f"nested more than {MAX_DEPTH} deep", "flatten it", origin, stop=True)

    def _count(self, nodes: int, origin: Origin) -> None:
        self._nodes += nodes
        if self._nodes > MAX_NODES:
            fix = "keep rows in a file of their own (`source: jsonl`), and do not nest aliases"
            message = f"more than {MAX_NODES:,} values, aliases written out"
            self.problem("yaml.size", message, fix, origin, stop=True)

    def _key(self, node: Node, mapping: Mapping, plain: bool) -> str | None:
        """The key that a node stands for; None where it was refused, which is reported."""
        if not isinstance(node, Scalar):
            kind = "mapping" if isinstance(node, Mapping) else "list"
            line = split_lines(self.text)[mapping.origin.line - 1]
            template = re.search(r"\{\{.*?\}\}", line)
            fix = f'quote the text: "{template[0]}"' if template else "write a name"
            self.problem("yaml.key", f"a {kind} cannot be a key", fix, node.origin)
        elif not isinstance(node.value, str):
            fix = f'quote it: "{node.text}"' if node.text else "write a name before the colon"
            self.problem("yaml.key", f"the key `{node.text}` is no string", fix, node.origin)
        elif node.value == "<<" and plain:
            fix = "write the keys out, or put them in a file of their own and name it under `extends:`"
            self.problem("yaml.merge-key", "merge keys (`<<`) are not supported", fix, node.origin)
        elif node.value in mapping.keys:
            first = mapping.keys[node.value]
            message = f"the key `{node.value}` is written twice, first in line {first.line}"
            self.problem("yaml.duplicate-key", message, "remove one of them", node.origin)
        else:
            mapping.keys[node.value] = node.origin
            return node.value
        return None

    def _read(self, event: Any, origin: Origin) -> Scalar:
        text: str = event.value
        tag: str | None = event.tag
        block = event.style in ("|", ">")
        if tag is None:
            plain = event.implicit[0]
            return Scalar(read_scalar(text) if plain else text, origin, text, typed=not block)
        if tag in ("!", f"{_CORE}str"):
            return Scalar(text, origin, text, typed=False)
        wanted: dict[str, tuple[type, ...]] = {
            "int": (int,),
            "float": (float, int),
            "bool": (bool,),
            "null": (type(None),),
        }
        name = tag.removeprefix(_CORE)
        if name not in wanted:
            self.problem("yaml.tag", f"the tag `{_show_tag(tag)}` is not known", "remove the tag", origin)
            return Scalar(text, origin, text)
        value = read_scalar(text)
        if not isinstance(value, wanted[name]) or (isinstance(value, bool) and name != "bool"):
            self.problem("yaml.tag", f"`{text}` is no !!{name}", "correct the value or remove the tag", origin)
        elif name == "float" and isinstance(value, int):
            value = float(str(value))  # infinity where it is too large
        return Scalar(value, origin, text)


def _show_tag(tag: str | None) -> str:
    return (tag or "").replace(_CORE, "!!")


def _unreadable(error: yaml.YAMLError | UnicodeError, text: str, place: Place) -> Diagnostic:
    """The parser's own error, with its position and, where one is known, a fix."""
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        words = error.problem or error.context or "this is no YAML"
        if error.context and error.problem:
            words = f"{error.context}: {error.problem}"
        origin = place(mark) if mark else Origin(place.file, 1, 1, place.via)
        fix = _syntax_fix(words, text, origin.line)
        lines = split_lines(text)
        cause = likely_cause(lines, mark.line) if mark and fix is None and len(lines) > 1 else None
        if cause is not None:
            said = "" if cause.line == origin.line else f" (the parser stops in line {origin.line})"
            at = replace(origin, line=cause.line, column=cause.column)
            return Diagnostic("yaml.syntax", "error", f"{cause.message}{said}", cause.fix, at)
        if fix is None and "mapping values are not allowed" in words:
            fix = "quote the value if it contains `: `, or check the indentation"
        return Diagnostic("yaml.syntax", "error", words, fix, origin)
    if isinstance(error, yaml.reader.ReaderError):
        code = error.character if isinstance(error.character, int) else ord(str(error.character)[:1] or "\0")
        before = text.encode("utf-8", "replace")[: error.position].decode("utf-8", "ignore")
        words, fix = f"the character U+{code:04X} may not stand in YAML", 'remove it, or write it as "\\u…"'
        lines = split_lines(before)
        origin = Origin(place.file, len(lines), len(lines[-1]) + 1 + (place.shift if len(lines) == 1 else 0), place.via)
        return Diagnostic("yaml.syntax", "error", words, fix, origin)
    return Diagnostic(
        "yaml.syntax", "error", f"this is no text: {error}", "write UTF-8", Origin(place.file, 1, 1, place.via)
    )


def _syntax_fix(words: str, text: str, line: int) -> str | None:
    lines = split_lines(text)
    near = "\n".join(lines[max(0, line - 2) : line])
    if "${" in near and ("flow" in words or "'}'" in words or "mapping values" in words):
        return 'inside {…} or […] quote it: "${NAME:default}"'
    if "\\t" in words or (0 < line <= len(lines) and lines[line - 1].lstrip(" ").startswith("\t")):
        return "indent with spaces, not tabs"
    return None
