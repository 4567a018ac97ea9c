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

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from engine.errors import SpecError
from engine.schemas.episode import EpisodeSpec
from engine.schemas.tasks import TasksSpec
from engine.spec.access import Access
from engine.spec.code.entry import write_out
from engine.spec.document import Document, Model, flatten, place_inside, validate
from engine.spec.references import mask_all, remember_secrets, value_at
from engine.spec.resolve import Resolver
from engine.spec.text.diagnostic import SET_FILE, DataPath, Diagnostic, Origin
from engine.spec.text.tree import split_lines

Place = TypeVar("Place")

UNREADABLE = frozenset({"spec.unreadable", "yaml.syntax"})
"""Rules that mean: this could not be read at all."""


class LoadedSpec(Document, frozen=True, kw_only=True, dict=True):
    """A valid spec, and its document: plain data without `extends`, with environment variables filled in."""

    spec: EpisodeSpec
    path: Path
    """The spec's file, absolute."""
    sources: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Text of every file that was read, by `Origin.file`."""
    access: Access = msgspec.field(default_factory=Access)
    """Which files that it names may be opened, and whether its code may be imported."""

    def __repr__(self) -> str:
        """Without the values of environment variables."""
        return f"{type(self).__name__}({str(self.path)!r})"

    @property
    def base(self) -> Path:
        """The spec's folder."""
        return self.path.parent

    def with_tasks_of(self, tasks: TasksSpec, at: DataPath) -> LoadedSpec:
        """The spec with other tasks of its own for its `tasks`, at the places where they are written: `at`, such as
        `("train", "eval", "tasks")`.
        """

        def moved(places: Mapping[DataPath, Place]) -> dict[DataPath, Place]:
            others = {path: origin for path, origin in places.items() if path[:1] != ("tasks",)}
            return others | {
                ("tasks", *path[len(at) :]): origin for path, origin in places.items() if path[: len(at)] == at
            }

        return replace(
            self,
            spec=self.spec.model_copy(update={"tasks": tasks}),
            data={**self.data, "tasks": value_at(self.data, at)},
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
        named = Path(os.path.expanduser(relative))  # noqa: PTH111  (a folder of nobody's stays as it is)
        origin = self.origin(path) if path is not None else None
        if origin is None or origin.file not in self.sources:
            return Path.cwd() / named if origin and origin.file == SET_FILE else self.base / named
        in_the_spec = origin.file == next(iter(self.sources))
        return self.base / named if in_the_spec else Path.cwd() / Path(origin.file).parent / named

    def origin(self, path: Sequence[str | int], *, key: bool = False) -> Origin:
        """Where a value (or its key) was written; of what was left out, the nearest that would contain it."""
        return super().origin(path, key=key) or Origin(str(self.path), 1, 1)

    def inside(self, path: Sequence[str | int], offset: int) -> Origin:
        """Where the character at `offset` of a string value was written.

        Exact for plain, quoted and block scalars; an escape inside double quotes moves it by the escape's length.
        """
        start, value = self.origin(path), value_at(self.data, tuple(path))
        lines = [start.via.partition(" ")[2]] if start.file == SET_FILE else self._lines.get(start.file)
        if not isinstance(value, str) or lines is None:
            return start
        return place_inside(value, offset, lines, start)

    @cached_property
    def _lines(self) -> dict[str, list[str]]:
        return {file: split_lines(text) for file, text in self.sources.items()}


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
    """Read a spec. Raises: SpecError: with every diagnostic."""
    loaded, problems = read_spec(path, overrides, access)
    if loaded is None:
        raise SpecError(problems)
    return loaded


def override_spec(loaded: LoadedSpec, overrides: Sequence[str]) -> LoadedSpec:
    """A loaded spec with other values for some keys: `a.b=value` each, as `--set` takes them. Lists are set whole.

    Raises: SpecError: with every diagnostic.
    """
    resolver = Resolver(access=loaded.access)
    changes = flatten(resolver.override(None, overrides))
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
    """Read another YAML file (a script, scenarios) by the same rules, against a contract of its own.

    Raises:
        SpecError: as `load_spec`.
    """
    resolver = Resolver(access=access)
    tree = resolver.resolve(path)
    document = replace(flatten(tree), variables=resolver.variables) if tree is not None else None
    value, problems = validate(document, model) if document is not None else (None, [])
    problems = mask_all([*resolver.problems, *problems], resolver.variables)
    if value is None or document is None or problems:
        raise SpecError(problems)
    return value, document
