"""The header of a run: what is needed to explain its results and to resume it.

Invariant: it is written once, before the first episode, and never changed.
"""

from __future__ import annotations

import platform
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError

import engine
from engine.errors import StoreError
from engine.given import gone
from engine.plugin import REINSTALL, installed, leave_out_unusable, names_of
from engine.schemas.backend import backend_classes
from engine.schemas.base import Contract
from engine.schemas.model import ModelSpec
from engine.schemas.sections import dump, read_stored, used_plugins
from engine.spec.references import (
    Reference,
    digests,
    filled,
    kept_by_reference,
    value_at,
    with_references,
)

if TYPE_CHECKING:
    from engine.schemas.episode import EpisodeSpec
    from engine.spec.load import LoadedSpec

_PACKAGES = (
    "numpy",
    "orjson",
    "pydantic",
    "renderers",
    "sglang",
    "tokenizers",
    "torch",
    "transformers",
    "transitions",
)
"""Packages whose version may change a run's results."""


class Fork(Contract):
    """The run and turn from which the first journal entries of a forked run were copied."""

    run: str
    """The other run's id."""
    turn: int
    """Episodes share the entries before this assistant turn, from 0; episodes without this turn are copied
    completely."""


class RunPlugin(Contract):
    """A plugin that was installed when a run was created."""

    package: str
    version: str
    used: bool
    """Whether the spec has a section, a class or a name of it. Without such a plugin the run can be read, but no
    episode can be run."""
    sections: list[str] = Field(default_factory=list)
    """Paths of the keys that a plugin of another package adds to the spec."""
    install: str = ""
    """The command that installs a plugin of another package."""


class RunHeader(Contract):
    """The header of a run.

    RunHeader.of(load_spec("specs/quickstart.yaml"), overrides=["limits.user_turns=2"])
    """

    run_id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Its folder's name: `<name>-<YYYYmmdd>-<HHMMSS>-<4 hex>`, in UTC, so that runs of one name sort by time."""
    name: str
    """The spec's name."""
    created: float
    """Unix time."""
    engine_version: str
    packages: dict[str, str] = Field(default_factory=dict)
    """Versions of Python and of the packages that may change a run's results."""
    spec: dict[str, Any]
    """The resolved spec with all defaults; `engine.schemas.sections.read_stored` reads it."""
    plugins: dict[str, RunPlugin] = Field(default_factory=dict)
    """The plugins that were installed."""
    spec_path: str = ""
    """The spec's file. Relative paths in the spec are relative to its folder."""
    sources: dict[str, str] = Field(default_factory=dict)
    """The original text of every spec file that was read, by its path."""
    overrides: list[str] = Field(default_factory=list)
    """The values of `--set`, in order."""
    data: dict[str, Any] = Field(default_factory=dict)
    """The resolved document without defaults."""
    origins: list[tuple[list[str | int], str, int, int, str]] = Field(default_factory=list)
    """Where each value of `data` was written: path, file, line, column, and `via` (an override, a variable)."""
    evaluation: bool = False
    """Whether the run is an evaluation: then none of its rows is trainable."""
    fork: Fork | None = None
    """The run from which this one was forked; None if it was not."""
    references: list[tuple[list[str | int], str, bool]] = Field(default_factory=list)
    """Values that are not stored because they may be secret: path, the text in their place (`Bearer ${TOKEN}`), and
    whether the variable's value is read as YAML."""
    variables: dict[str, str] = Field(default_factory=dict)
    """The variables that these texts name, each with a digest of its value; an empty digest for a variable that was not
    set."""
    salt: str = ""
    """Salt of the digests, in hex."""

    @classmethod
    def of(
        cls,
        loaded: LoadedSpec,
        *,
        overrides: Sequence[str] = (),
        run_id: str | None = None,
        evaluation: bool = False,
        fork: Fork | None = None,
    ) -> RunHeader:
        """Make the header of a new run of a spec. By default `run_id` is made from the spec's name."""
        spec = loaded.spec
        now = time.time()
        references = [
            Reference(path=path, text=text, typed=not isinstance(value_at(loaded.data, path), str))
            for path, text in loaded.references.items()
            if kept_by_reference(path, text)
        ]
        salt = secrets.token_hex(16) if references else ""
        absolute = {file: str(Path(file).absolute()) for file in loaded.sources}
        return cls(
            run_id=run_id or new_run_id(spec.name, now),
            name=spec.name,
            created=now,
            engine_version=engine.__version__,
            packages=package_versions(),
            plugins=_plugins(spec),
            spec=with_references(dump(spec), references),
            spec_path=str(loaded.path),
            sources={absolute[file]: text for file, text in loaded.sources.items()},
            overrides=list(overrides),
            data=with_references(loaded.data, references),
            origins=[
                (list(path), absolute.get(origin.file, origin.file), origin.line, origin.column, origin.via)
                for path, origin in loaded.origins.items()
            ],
            evaluation=evaluation,
            fork=fork,
            references=[(list(reference.path), reference.text, reference.typed) for reference in references],
            variables=digests([reference.text for reference in references], salt),
            salt=salt,
        )

    @property
    def rewards(self) -> dict[str, Any]:
        """The spec's section `rewards`."""
        return dict(self._filled(self.spec, strict=False).get("rewards") or {})

    @property
    def model(self) -> ModelSpec:
        """The spec's section `model`, which can be read without the plugins that the spec uses."""
        return ModelSpec.model_validate(self._filled(self.spec, strict=False)["model"])

    @property
    def base(self) -> Path:
        """The folder of the spec's file."""
        return Path(self.spec_path).parent

    @property
    def _gone(self) -> dict[str, RunPlugin]:
        """Those of `plugins` that are not installed."""
        return {name: plugin for name, plugin in self.plugins.items() if name not in installed().plugins}

    def need_plugins(self) -> None:
        """Refuse to go on without a plugin that the spec uses, or with one that cannot be used. Raises: StoreError."""
        leave_out_unusable([name for name, plugin in self.plugins.items() if plugin.used])
        for name, plugin in self._gone.items():
            if plugin.used:
                why = installed().broken.get(name)
                state = f"cannot be used ({why})" if why else "is not installed"
                fix = plugin.install or REINSTALL
                raise StoreError(f"{self.run_id}: its spec uses the plugin `{name}`, which {state}: {fix}")

    def need_objects(self) -> None:
        """Refuse a spec with objects that a program gave, also in the process that gave them. Raises: StoreError."""
        for problem in gone(self.data, stored=True):
            raise StoreError(f"{self.run_id} cannot go on: {problem}")

    def _filled(self, document: dict[str, Any], *, strict: bool) -> dict[str, Any]:
        """Return a document of this header with the values of its variables filled in."""
        references = [Reference(path=tuple(path), text=text, typed=typed) for path, text, typed in self.references]
        complete: dict[str, Any] = filled(document, references, self.variables, self.salt, strict=strict)
        return complete

    def loaded_spec(self, *, strict: bool = False) -> LoadedSpec:
        """Return the run's spec as it was loaded when the run was created; its file may have changed since.

        Relative paths in it are relative to its file's folder, and those of `--set` to the current folder.

        Args:
            strict: The spec is used to run episodes: each variable in a value must have the value that it had. By
                default, other values stay `${NAME}`: reading a run needs none of them.

        Raises:
            StoreError: a plugin that the spec uses is not installed, and the spec cannot be read without it; with
                `strict` any such plugin, or a variable that is not set or holds something else. The message names it.
        """
        from engine.schemas.episode import EpisodeSpec
        from engine.spec.load import LoadedSpec
        from engine.spec.text.diagnostic import Origin
        from engine.spec.text.problems import renamed_keys

        if strict:
            self.need_plugins()
            self.need_objects()
        stored = self._filled(self.spec, strict=strict)
        try:
            spec = read_stored(
                stored, EpisodeSpec, gone=[key for plugin in self._gone.values() for key in plugin.sections]
            )
        except (ValueError, TypeError) as error:
            self.need_plugins()
            renamed = renamed_keys(error, EpisodeSpec) if isinstance(error, ValidationError) else []
            if renamed:
                raise StoreError(
                    f"{self.run_id}: its spec has keys that were renamed: {', '.join(renamed)}; read it with engine "
                    f"{self.engine_version}, which wrote it"
                ) from error
            raise StoreError(
                f"the spec of run {self.run_id} cannot be read: {error}; was it written by engine "
                f"{self.engine_version}, or damaged?"
            ) from error
        return LoadedSpec(
            spec=spec,
            data=self._filled(self.data, strict=strict),
            references={tuple(path): text for path, text, _ in self.references},
            key_origins={},
            origins={tuple(path): Origin(file, line, column, via) for path, file, line, column, via in self.origins},
            path=Path(self.spec_path),
            sources=self.sources,
        )


def _plugins(spec: EpisodeSpec) -> dict[str, RunPlugin]:
    """The installed plugins."""
    present, used = installed(), used_plugins(spec)
    plugins: dict[str, RunPlugin] = {}
    for name, face in present.plugins.items():
        package, _, number = present.packages[name].partition(" ")
        adds, shipped = names_of(face), package == "episode-engine"
        plugins[name] = RunPlugin(
            package=package,
            version=number,
            used=name in used,
            sections=list(adds.get("sections", ())) if not shipped else [],
            install=face.install if not shipped else "",
        )
    return plugins


def new_run_id(name: str, now: float | None = None) -> str:
    """Make a new run id: `<name>-<YYYYmmdd>-<HHMMSS>-<4 hex>`, in UTC."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
    return f"{re.sub(r'[^A-Za-z0-9._-]', '-', name)}-{stamp}-{secrets.token_hex(2)}"


@cache
def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages in `_PACKAGES` that are installed, by name."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def differences(before: Any, after: Any, path: str = "", *, in_lists: bool = False) -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, value before, value after) for each value that differs in two documents.

    A key that one document does not have has the value None there. A list is one value; with `in_lists` its entries are
    compared, if both lists have as many.
    """
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in {**before, **after}:
            inner = f"{path}.{key}" if path else key
            yield from differences(before.get(key), after.get(key), inner, in_lists=in_lists)
    elif in_lists and isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, f"{path}[{index}]", in_lists=True)
    elif before != after:
        yield path, before, after


def resumable_keys() -> tuple[str, ...]:
    """Paths of values that a resume may change: those that a section or a backend names; `*` stands for any
    characters."""
    sections = (section for plugin in installed().plugins.values() for section in plugin.sections)
    keys = [section.path(key) for section in sections for key in section.resumable]
    of_backends = dict.fromkeys(key for backend in backend_classes() for key in backend.resumable)
    keys += [f"{place}backend.{key}" for key in of_backends for place in ("", "*.")]
    return tuple(pattern for key in keys for pattern in (key, f"{key}.*"))


def changes_of(before: EpisodeSpec, after: EpisodeSpec, allowed: Sequence[str]) -> tuple[list[str], list[str]]:
    """The paths of values that differ, and those of them that a resume may not change.

    Args:
        before: The spec with which it began.
        after: The spec of the resume.
        allowed: Paths that may change; `*` stands for any characters. One that begins with `*` allows nothing in a
            `with`, whose keys are those of the spec's code.
    """
    changed = sorted({path for path, _, _ in differences(dump(before), dump(after))})
    patterns = {
        path: [pattern for pattern in allowed if not (pattern.startswith("*") and "with" in path.split("."))]
        for path in changed
    }
    return changed, [path for path in changed if not any(fnmatchcase(path, pattern) for pattern in patterns[path])]
