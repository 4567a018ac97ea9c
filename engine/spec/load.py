"""A spec file -> a validated EpisodeSpec that knows where each of its values was written.

    loaded = load_spec("specs/quickstart.yaml", ["limits.user_turns=2"])
    loaded.spec.limits.user_turns                    # 2
    loaded.origin(("model", "path"))                 # Origin("specs/quickstart.yaml", 5, 9)
    loaded.resolve("data/rows.jsonl", ("tasks", "path"))

What a spec may say beside EpisodeSpec's own keys: `extends: base.yaml` (or a list, later ones win) puts other
files beneath this one, where mappings are merged and anything else is replaced; `${NAME}` and
`${NAME:default}` inside values are environment variables, `$${` a literal `${`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from engine.errors import SpecError
from engine.plugin import BELONGS
from engine.schemas.base import Struct
from engine.schemas.episode import EpisodeSpec
from engine.schemas.sections import SpecSection, attach, split
from engine.schemas.tasks import TasksSpec
from engine.spec.access import Access
from engine.spec.code.short_names import write_out
from engine.spec.references import remember_secrets
from engine.spec.resolve import Resolver
from engine.spec.text.diagnostic import SET_FILE, DataPath, Diagnostic, Origin
from engine.spec.text.masking import mask_all
from engine.spec.text.problems import diagnose
from engine.spec.text.tree import Node, Scalar, split_lines
from engine.spec.text.tree import Sequence as SequenceNode

Model = TypeVar("Model", bound=BaseModel)
Place = TypeVar("Place")

UNREADABLE = frozenset({"spec.unreadable", "yaml.syntax"})
"""Rules that mean: this could not be read at all."""


class Document(Struct, frozen=True, kw_only=True):
    """Plain data, and where each part of it was written."""

    data: Any
    origins: Mapping[DataPath, Origin]
    """Of every value, by its path."""
    key_origins: Mapping[DataPath, Origin]
    """Of every key, by the path of its value."""
    rereads: Mapping[DataPath, str] = msgspec.field(default_factory=dict)
    """Text of the values that may be read as strings too."""
    variables: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Environment variables that it was filled from, with their values."""
    references: Mapping[DataPath, str] = msgspec.field(default_factory=dict)
    """What was written where environment variables gave the value."""

    def origin(self, path: Sequence[str | int], *, key: bool = False) -> Origin | None:
        """Where a value (or its key) was written; of what is not there, the nearest that contains it."""
        place = tuple(path)
        if key and place in self.key_origins:
            return self.key_origins[place]
        while place not in self.origins:
            if not place:
                return None
            place = place[:-1]
        return self.origins[place]


class LoadedSpec(Struct, frozen=True, kw_only=True, dict=True):
    """A valid spec."""

    spec: EpisodeSpec
    data: dict[str, Any]
    """The resolved document, as plain data: without `extends`, variables filled in."""
    origins: Mapping[DataPath, Origin]
    """Of every value, by its path in `data`."""
    path: Path
    """The spec's file, absolute."""
    key_origins: Mapping[DataPath, Origin] = msgspec.field(default_factory=dict)
    """Of every key, by the path of its value."""
    sources: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Text of every file that was read, by `Origin.file`."""
    access: Access = msgspec.field(default_factory=Access)
    """Which files that it names may be opened, and whether its code may be imported."""
    variables: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Environment variables that it was filled from, with their values."""
    references: Mapping[DataPath, str] = msgspec.field(default_factory=dict)
    """What was written where environment variables gave the value: `Bearer ${TOKEN}`, by its path in `data`."""

    def __repr__(self) -> str:
        """Without the values of environment variables."""
        return f"{type(self).__name__}({str(self.path)!r})"

    @property
    def base(self) -> Path:
        """The spec's folder."""
        return self.path.parent

    def with_tasks_of(self, tasks: TasksSpec, at: DataPath) -> LoadedSpec:
        """The spec with other tasks of its own for its `tasks`, at the places where they are written.

        Args:
            tasks: They.
            at: Where they stand in the document, such as `("train", "eval", "tasks")`.
        """

        def moved(places: Mapping[DataPath, Place]) -> dict[DataPath, Place]:
            kept = {path: origin for path, origin in places.items() if path[:1] != ("tasks",)}
            return kept | {
                ("tasks", *path[len(at) :]): origin for path, origin in places.items() if path[: len(at)] == at
            }

        written: Any = self.data
        for key in at:
            written = written[key]
        return replace(
            self,
            spec=self.spec.model_copy(update={"tasks": tasks}),
            data={**self.data, "tasks": written},
            origins=moved(self.origins),
            key_origins=moved(self.key_origins),
            references=moved(self.references),
        )

    def resolve(self, relative: str | Path, path: Sequence[str | int] | None = None) -> Path:
        """A file that the spec names, as an absolute path.

        A relative one is relative to the file that it is written in. Give the value's `path` in the spec, so that
        a base file's paths stay relative to the base file, and those of `--set` to the current folder (where the
        shell completes them); without it, the spec's folder is meant. `~` is the home folder.
        """
        named = Path(relative)
        if str(relative).startswith("~"):
            try:
                named = named.expanduser()
            except RuntimeError:
                named = Path(relative)
        origin = self.origin(path) if path is not None else None
        if origin is None or origin.file not in self.sources:
            return Path.cwd() / named if origin and origin.file == SET_FILE else self.base / named
        own = origin.file == next(iter(self.sources))
        return self.base / named if own else Path.cwd() / Path(origin.file).parent / named

    def origin(self, path: Sequence[str | int], *, key: bool = False) -> Origin:
        """Where a value (or its key) was written; of what was left out, the nearest that would contain it."""
        found = Document(data=self.data, origins=self.origins, key_origins=self.key_origins).origin(path, key=key)
        return found or Origin(str(self.path), 1, 1)

    def inside(self, path: Sequence[str | int], offset: int) -> Origin:
        """Where the character at `offset` of a string value was written.

        Exact for plain, quoted and block scalars; an escape inside double quotes moves it by the escape's length.
        """
        start = self.origin(path)
        value: Any = self.data
        for key in path:
            value = value[key]
        lines = [start.via.partition(" ")[2]] if start.file == SET_FILE else self._lines.get(start.file)
        if not isinstance(value, str) or lines is None:
            return start
        return _inside(value, offset, lines, start)

    @cached_property
    def _lines(self) -> dict[str, list[str]]:
        return {file: split_lines(text) for file, text in self.sources.items()}


def _inside(value: str, offset: int, lines: list[str], start: Origin) -> Origin:
    """Walk the source beside the value; blanks and breaks of one match any of the other."""
    row, column = start.line - 1, start.column - 1
    if row < len(lines) and lines[row][column : column + 1] in ("|", ">"):
        row, column = row + 1, 0
    elif row < len(lines) and lines[row][column : column + 1] in ("'", '"'):
        column += 1
    for character in value[: offset + 1].rstrip() if offset < len(value) else value:
        if character.isspace():
            continue
        while row < len(lines):
            found = lines[row].find(character, column)
            if found >= 0 and not lines[row][column:found].strip():
                column = found
                break
            if found < 0 and lines[row][column:].strip():
                return start  # the source says something else: a variable, an escape
            if found >= 0:
                return start
            row, column = row + 1, 0
        if row >= len(lines):
            return start
        column += 1
    at_end = offset >= len(value)
    return Origin(start.file, row + 1, column + (1 if at_end else 0) or 1, start.via)


def flatten(tree: Node) -> Document:
    """A tree -> plain data and the places of its parts."""
    origins: dict[DataPath, Origin] = {}
    key_origins: dict[DataPath, Origin] = {}
    rereads: dict[DataPath, str] = {}
    references: dict[DataPath, str] = {}

    def visit(node: Node, path: DataPath) -> Any:
        origins[path] = node.origin
        if isinstance(node, Scalar):
            if node.reread and not isinstance(node.value, str):
                rereads[path] = node.text
            if node.reference:
                references[path] = node.reference
            return node.value
        if isinstance(node, SequenceNode):
            return [visit(item, (*path, index)) for index, item in enumerate(node.items)]
        for key, origin in node.keys.items():
            key_origins[(*path, key)] = origin
        return {key: visit(value, (*path, key)) for key, value in node.entries.items()}

    data = visit(tree, ())
    return Document(data=data, origins=origins, key_origins=key_origins, rereads=rereads, references=references)


def validate(document: Document, model: type[Model]) -> tuple[Model | None, list[Diagnostic]]:
    """Check a document against a contract, strictly: `"5"` is no number and `yes` no boolean.

    Where a string is wanted and `${ENV}` or `--set` gave something that reads as a number, its text is taken.
    """
    rest, parts = split(document.data, model)
    value, problems, as_text = _part(document, model, rest, (), model)
    sections: list[tuple[DataPath, SpecSection]] = []
    for part in parts:
        if part.is_null:
            continue
        section, wrong, texts = _part(document, part.model, part.body, part.path, model)
        problems, as_text = [*problems, *wrong], [*as_text, *texts]
        if section is not None:
            sections.append((part.owner, section))
    if value is not None and not problems:
        attach(value, sections)
        return value, []
    if not as_text:
        return None, _one_for_each_plugin(sorted(problems, key=_place))
    for path in as_text:
        owner = document.data
        for key in path[:-1]:
            owner = owner[key]
        owner[path[-1]] = document.rereads[path]
    rest = {path: text for path, text in document.rereads.items() if path not in as_text}
    return validate(replace(document, rereads=rest), model)


def _part(
    document: Document, model: type[Model], body: Any, at: DataPath, root: type[BaseModel]
) -> tuple[Model | None, list[Diagnostic], list[DataPath]]:
    """Validate the part of a document at `at`: value, problems, and the values that are to be read as text."""
    try:
        return _validated(model, body), [], []
    except ValidationError as error:
        return None, *diagnose(error, model, document, at, root)


def _place(problem: Diagnostic) -> tuple[str, int, int]:
    return (problem.origin.file, problem.origin.line, problem.origin.column) if problem.origin else ("", 0, 0)


def _one_for_each_plugin(problems: Sequence[Diagnostic]) -> list[Diagnostic]:
    """Of the keys of a plugin that is not installed, only the first is reported."""
    by_plugin: dict[str | Diagnostic, Diagnostic] = {}
    for problem in problems:
        names_plugin = problem.fix is not None and problem.fix.startswith(BELONGS)
        by_plugin.setdefault(problem.fix if names_plugin and problem.fix else problem, problem)
    return list(by_plugin.values())


def _validated(model: type[Model], data: Any) -> Model:
    """Validate strictly, as JSON: there a mapping may stand for a data class."""
    try:
        text = json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # bytes of an environment variable that are no text; JSON cannot hold them
        return model.model_validate(data, strict=True, by_alias=True, by_name=False)
    return model.model_validate_json(text, strict=True, by_alias=True, by_name=False)


def read_spec(
    path: str | Path, overrides: Sequence[str] = (), access: Access | None = None
) -> tuple[LoadedSpec | None, list[Diagnostic]]:
    """Read a spec and say everything that is wrong with its form.

    Args:
        path: The YAML file.
        overrides: `a.b=value` each, as `--set` takes them; the value is YAML, `tools.0.timeout=5s` reaches into lists.
        access: What may be opened and imported for it; everything when left out.

    Returns:
        The spec, or None where it is not valid, and the diagnostics, in which values of environment variables are
        masked. Rules in `UNREADABLE` mean that the file
        could not be read as YAML.
    """
    access = access or Access()
    resolver = Resolver(access=access)
    tree = resolver.resolve(path, overrides)
    if tree is None:
        return None, mask_all(resolver.problems, resolver.variables)
    document = flatten(tree)
    remember_secrets(document.references)
    problems = _named(document)
    spec, wrong = validate(document, EpisodeSpec)
    problems = mask_all([*resolver.problems, *problems, *wrong], resolver.variables)
    if spec is None or any(problem.severity == "error" for problem in problems):
        return None, problems
    loaded = LoadedSpec(
        spec=spec,
        data=document.data,
        origins=document.origins,
        path=Path(path).absolute(),
        key_origins=document.key_origins,
        sources=resolver.sources,
        access=access,
        variables=resolver.variables,
        references=document.references,
    )
    return loaded, problems


def _named(document: Document) -> list[Diagnostic]:
    """Write the short names of a spec out as entry points, and say what is wrong with them."""
    return [
        Diagnostic("code.import", "error", message, None, document.origin(path))
        for path, message in write_out(document.data)
    ]


def load_spec(path: str | Path, overrides: Sequence[str] = (), access: Access | None = None) -> LoadedSpec:
    """Read a spec.

    Raises:
        SpecError: with every diagnostic.
    """
    loaded, problems = read_spec(path, overrides, access)
    if loaded is None:
        raise SpecError(problems)
    return loaded


def override_spec(loaded: LoadedSpec, overrides: Sequence[str]) -> LoadedSpec:
    """A loaded spec with other values for some of its keys.

    Args:
        loaded: The spec.
        overrides: `a.b=value` each, as `--set` takes them. They reach into mappings; a list is set as a whole.

    Raises:
        SpecError: with every diagnostic.
    """
    resolver = Resolver(access=loaded.access)
    changes = flatten(resolver.resolve_overrides(overrides))
    remember_secrets(changes.references)
    merged = Document(
        data=_merged(loaded.data, changes.data),
        origins={**loaded.origins, **{path: origin for path, origin in changes.origins.items() if path}},
        key_origins={**loaded.key_origins, **changes.key_origins},
        rereads=changes.rereads,
        references={**loaded.references, **changes.references},
    )
    named = _named(merged)
    spec, problems = validate(merged, EpisodeSpec)
    problems = mask_all([*resolver.problems, *named, *problems], resolver.variables)
    if spec is None or problems:
        raise SpecError(problems)
    return replace(
        loaded,
        spec=spec,
        data=merged.data,
        origins=merged.origins,
        key_origins=merged.key_origins,
        variables={**loaded.variables, **resolver.variables},
        references=merged.references,
    )


def _merged(base: Any, changes: Any) -> Any:
    """`changes` over `base`: mappings are merged, anything else is replaced."""
    if not isinstance(base, dict) or not isinstance(changes, dict):
        return changes
    return {**base, **{key: _merged(base.get(key), value) for key, value in changes.items()}}


def load_document(path: str | Path, model: type[Model], access: Access | None = None) -> tuple[Model, Document]:
    """Read any other YAML file (scripts, scenarios) by the same rules, against a contract of its own.

    Raises:
        SpecError: with every diagnostic.
    """
    resolver = Resolver(access=access)
    tree = resolver.resolve(path)
    document = replace(flatten(tree), variables=resolver.variables) if tree is not None else None
    value, problems = validate(document, model) if document is not None else (None, [])
    problems = mask_all([*resolver.problems, *problems], resolver.variables)
    if value is None or document is None or problems:
        raise SpecError(problems)
    return value, document


__all__ = [
    "UNREADABLE",
    "Document",
    "LoadedSpec",
    "flatten",
    "load_document",
    "load_spec",
    "override_spec",
    "read_spec",
    "validate",
]
