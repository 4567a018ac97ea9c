"""The code that a spec names, as rules see it: each entry point is loaded or read once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from pydantic import BaseModel

from engine.actions.facts import SCORERS
from engine.schemas.entry import Entry
from engine.schemas.episode import EpisodeSpec
from engine.schemas.role import UserSpec
from engine.spec.added import AddedCode, added_code
from engine.spec.code.entry import EntryError, load_entry
from engine.spec.load import LoadedSpec
from engine.spec.text.diagnostic import DataPath
from engine.validate.code.code_facts import CodeFacts, ImportedCode, ReadCode, read_code
from engine.validate.code.source import NotImported, Sources
from engine.validate.work import Work, WorkLimitError

MAX_ENTRIES = 100
"""Maximum number of entry points that are imported."""


class NamedEntry(NamedTuple):
    """An entry point of the spec, and its position."""

    path: DataPath
    """Path of the mapping with `use` and `with`."""
    entry: Entry
    role: str
    """`environment`, `user`, `tool`, `tool server`, `scorer`, or the part of a plugin."""
    added: AddedCode | None = None
    """Of a part of a plugin: what its section says."""


@dataclass
class CodeContext:
    """A spec and its code."""

    loaded: LoadedSpec
    work: Work = field(default_factory=Work)
    """Work units left for the current rule; unlimited unless `check_spec` limits them."""
    rule: str = ""
    """The id of the current rule."""
    skipped: dict[str, None] = field(default_factory=dict)
    """Rules that skipped something, because code is not imported."""
    apart: bool = False
    """Do not import code that runs only in worker processes, because this process runs the spec afterwards."""
    calls: bool = False
    """Whether code may be called for checks: objects are built, and the first rows of a function are made."""
    _entries: dict[str, Any] = field(default_factory=dict)

    @property
    def spec(self) -> EpisodeSpec:
        """The spec."""
        return self.loaded.spec

    def written(self, *path: str | int) -> bool:
        """Whether the spec sets this key, so that the default does not apply."""
        return path in self.loaded.origins

    def code(self, use: str) -> CodeFacts | None:
        """Return how an entry point is called and which methods it has; None if it cannot be loaded.

        If code may not be imported, the answers come from its text. If the text leaves open what it is, the result is
        None, and the current rule counts as skipped.
        """
        code = self.described(use)
        if isinstance(code, NotImported):
            if code.definition is None:
                self.skip()
                return None
            return read_code(code.definition, self.sources)
        return None if isinstance(code, EntryError) else ImportedCode(code, self.code_text(use))

    def code_text(self, use: str) -> ReadCode | None:
        """Return the text of an entry point, whether or not it is imported; None if it cannot be read."""
        code = self.described(use)
        if not isinstance(code, NotImported):
            try:
                code = self.sources.entry(use)
            except EntryError:
                return None
        return None if code.definition is None else read_code(code.definition, self.sources)

    def described(self, use: str) -> Any:
        """Return the object of an entry point, the `NotImported` that stands for it, or the EntryError that says what
        is wrong.

        Raises:
            WorkLimitError: the spec names more than `MAX_ENTRIES` entry points.
        """
        if use not in self._entries:
            if len(self._entries) == MAX_ENTRIES:
                raise WorkLimitError
            imports = self.loaded.access.imports and not (self.apart and use in self.isolated)
            try:
                self._entries[use] = load_entry(use, self.loaded.base) if imports else self.sources.entry(use)
            except EntryError as error:
                self._entries[use] = error
        return self._entries[use]

    @cached_property
    def sources(self) -> Sources:
        """Reads the modules of the spec's code as text."""
        return Sources(self.loaded.base, self.loaded.access)

    @cached_property
    def isolated(self) -> frozenset[str]:
        """Entry points that run only in worker processes."""
        spec = self.spec
        in_processes = spec.isolation_of(None).mode != "thread"
        modes = [(item.entry.use, self._mode(item) != "thread") for item in self.spec_code]
        modes += [(str(state.action), in_processes) for state in spec.machine.states.values() if state.action]
        here = {use for use, apart in modes if not apart} | {source.use or "" for source in spec.tasks.sources}
        return frozenset(use for use, apart in modes if apart) - here

    def _mode(self, item: NamedEntry) -> str | None:
        """Where an entry point runs: `thread` or `process`."""
        if item.added is not None:
            return self.spec.isolation_of(item.added.isolation).mode if item.added.isolated else "thread"
        owner: Any = self.spec
        for key in item.path:
            if key == "grader":
                break
            owner = getattr(owner, key) if isinstance(owner, BaseModel) and isinstance(key, str) else owner[key]
        return self.spec.isolation_of(owner.isolation, getattr(owner, "default_mode", "thread")).mode

    def skip(self) -> None:
        """Record that the current rule skipped something because code is not imported."""
        if self.rule:
            self.skipped[self.rule] = None

    def declared(self, use: str) -> tuple[str, ...] | None:
        """Return the `events` of an entry point's object; None if they are not a list of names."""
        thing = self.code(use)
        events = "unknown" if thing is None else thing.events()
        if events == "unknown" and isinstance(thing, ReadCode):
            self.skip()
        return None if isinstance(events, str) else tuple(events)

    @cached_property
    def spec_code(self) -> list[NamedEntry]:
        """The entry points of environment, tools, users, scorer and parts of plugins."""
        spec = self.spec
        entries = [
            NamedEntry(("tools", index), tool.entry, "tool" if tool.facts is None else "tool server")
            for index, tool in enumerate(spec.tools)
        ]
        if spec.environment:
            entries.insert(0, NamedEntry(("environment",), spec.environment.entry, "environment"))
        for path, user in self.users:
            if user.use is not None:
                entries.append(NamedEntry(path, Entry(use=user.use, with_=user.with_), "user"))
            if user.grader is not None:
                entries.append(NamedEntry((*path, "grader"), user.grader, "user"))
        scorer = spec.rewards.scorer
        if scorer is not None and scorer.use is not None:
            entries.append(
                NamedEntry(
                    ("rewards", "scorer"), Entry(use=SCORERS.get(scorer.use, scorer.use), with_=scorer.with_), "scorer"
                )
            )
        return [*entries, *(NamedEntry(code.path, code.entry, code.part, code) for code in added_code(spec))]

    @property
    def users(self) -> list[tuple[DataPath, UserSpec]]:
        """All users with their positions."""
        return [(("users", name) if name else ("user",), user) for name, user in self.spec.users_by_name.items()]
