"""Data that rules share: the spec, its resolved machine, and its entry points, each loaded once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel

from engine.actions.facts import ACTIONS, ALWAYS, OVERFLOW, SCORERS
from engine.checks.alarm import deadline
from engine.checks.chart import Chart, Edge
from engine.checks.code_facts import CodeFacts, ImportedCode, ReadCode
from engine.checks.explore import Graph, explore
from engine.checks.function_code import read_code
from engine.checks.logic import ALWAYS as ALWAYS_TRUE
from engine.checks.logic import UNKNOWN, Formula, Ranges, formula
from engine.checks.loops import Cycles, cycles_of
from engine.checks.work import Work, WorkLimitError
from engine.errors import SpecError
from engine.limits import COUNTERS, EPISODE_SECONDS, FIELDS, UNBOUNDED, limits_of
from engine.machine.presets import ANY, PRESETS, ResolvedMachine, ResolvedTransition, machine_of
from engine.schemas.condense import OwnCondenserSpec
from engine.schemas.entry import Entry
from engine.schemas.environment import Task
from engine.schemas.episode import EpisodeSpec
from engine.schemas.limits import LimitsSpec
from engine.schemas.machine import StateSpec
from engine.schemas.role import UserSpec
from engine.schemas.tasks import TasksSpec
from engine.spec.diagnostic import DataPath
from engine.spec.entry import EntryError, load_entry
from engine.spec.load import LoadedSpec
from engine.spec.near import near_or_known
from engine.spec.source import NotImported, Sources
from engine.spec.sources import Row
from engine.spec.tasks import rows_of

MAX_TRANSITIONS = 10_000
"""Maximum number of transitions of a machine that is checked, with every list and `"*"` expanded."""
MAX_WORK = 200_000
"""Work units of one rule."""
MAX_ENTRIES = 100
"""Maximum number of entry points that are imported."""
MAX_READ = 100_000
"""Maximum number of characters of all conditions that are analysed."""
MAX_ROWS_MADE = 8
"""Number of rows of a function that are checked."""
ROWS_SECONDS = 20.0
"""Deadline for making them."""
PRESETS_STATES = frozenset(name for preset in PRESETS.values() for name in preset.states)


class NamedEntry(NamedTuple):
    """An entry point of the spec, and its position."""

    path: DataPath
    """Path of the mapping with `use` and `with`."""
    entry: Entry
    role: str
    """`environment`, `user`, `tool`, `tool server`, `scorer`, `condenser`."""


@dataclass
class CheckContext:
    """One spec that is checked."""

    loaded: LoadedSpec
    work: Work = field(default_factory=Work)
    """Work units left for the current rule; unlimited unless `check_spec` limits them."""
    rule: str = ""
    """The id of the current rule."""
    skipped: dict[str, None] = field(default_factory=dict)
    """Rules that skipped something, because code is not imported."""
    apart: bool = False
    """Whether code that runs only in worker processes is not imported, because this process runs the spec afterwards."""
    calls: bool = False
    """Whether code may be called for checks: objects are built, and the first rows of a function are made."""
    read_tasks: Sequence[Task] | None = None
    """Tasks that were read, if the rules are about these and not about the source."""
    _with_tasks: dict[DataPath, CheckContext] = field(default_factory=dict)
    _first_rows: list[Row] | SpecError | None = None
    _entries: dict[str, Any] = field(default_factory=dict)
    _read: dict[str, bool] = field(default_factory=dict)
    """Whether each condition is analysed."""
    _characters: int = 0

    @property
    def spec(self) -> EpisodeSpec:
        """The spec."""
        return self.loaded.spec

    @cached_property
    def written_out(self) -> int:
        """Number of the spec's own transitions with every list and `"*"` expanded."""
        most = len({*self.spec.machine.states, *PRESETS_STATES})
        return sum(
            len(item.triggers) * (most if ANY in item.sources else len(item.sources))
            for item in self.spec.machine.transitions
        )

    @cached_property
    def machine(self) -> ResolvedMachine:
        """The machine with its preset, and with `"*"` expanded; names are not checked.

        Raises:
            WorkLimitError: it would have more than `MAX_TRANSITIONS` transitions.
        """
        if self.written_out > MAX_TRANSITIONS:
            raise WorkLimitError(
                f"the machine has more than {MAX_TRANSITIONS:,} transitions, with lists and `*` expanded"
            )
        return machine_of(self.spec)

    @property
    def states(self) -> dict[str, StateSpec]:
        """All states, including those of the preset."""
        return self.machine.states

    @cached_property
    def working(self) -> list[str]:
        """The states that are not final."""
        return [name for name, state in self.states.items() if not state.final]

    def code(self, use: str) -> CodeFacts | None:
        """Return how an entry point is called and which methods it has; None if it cannot be loaded.

        If code may not be imported, the answers come from its text. If the text leaves open what it is, the result is None, and the
        current rule counts as skipped.
        """
        found = self.described(use)
        if isinstance(found, NotImported):
            if found.definition is None:
                self.skip()
                return None
            return read_code(found.definition, self.sources)
        return None if isinstance(found, EntryError) else ImportedCode(found, self.code_text(use))

    def code_text(self, use: str) -> ReadCode | None:
        """Return the text of an entry point, whether or not it is imported; None if it cannot be read."""
        found = self.described(use)
        if not isinstance(found, NotImported):
            try:
                found = self.sources.entry(use)
            except EntryError:
                return None
        return None if found.definition is None else read_code(found.definition, self.sources)

    def described(self, use: str) -> Any:
        """Return the object of an entry point, the `NotImported` that stands for it, or the EntryError that says what is wrong.

        Raises:
            WorkLimitError: the spec names more than `MAX_ENTRIES` entry points.
        """
        if use not in self._entries:
            if len(self._entries) == MAX_ENTRIES:
                raise WorkLimitError
            try:
                self._entries[use] = self._find(use)
            except EntryError as error:
                self._entries[use] = error
        return self._entries[use]

    def _find(self, use: str) -> Any:
        if self.loaded.access.imports and not (self.apart and use in self.isolated):
            return load_entry(use, self.loaded.base)
        return self.sources.entry(use)

    @cached_property
    def sources(self) -> Sources:
        """Reads the modules of the spec's code as text."""
        return Sources(self.loaded.base, self.loaded.access)

    @cached_property
    def isolated(self) -> frozenset[str]:
        """Entry points that run only in worker processes."""
        spec = self.spec
        whole = spec.isolation_of(None).mode == "process"
        modes = [(item.entry.use, self._mode(item) == "process") for item in self.spec_code]
        modes += [(str(state.action), whole) for state in spec.machine.states.values() if state.action]
        here = {use for use, apart in modes if not apart} | {source.use or "" for source in spec.tasks.sources}
        return frozenset(use for use, apart in modes if apart) - here

    def _mode(self, item: NamedEntry) -> str | None:
        """Where an entry point runs: `thread` or `process`."""
        owner: Any = self.spec
        for key in item.path:
            if key == "grader":
                break
            owner = getattr(owner, key) if isinstance(owner, BaseModel) and isinstance(key, str) else owner[key]
        return self.spec.isolation_of(owner.isolation, getattr(owner, "default_mode", "thread")).mode

    def with_tasks(self, tasks: TasksSpec, at: DataPath) -> CheckContext:
        """Return the same spec with other tasks of its own, for the current rule.

        Args:
            tasks: The tasks.
            at: Where they are written.
        """
        if at not in self._with_tasks:
            loaded = self.loaded.with_tasks_of(tasks, at)
            self._with_tasks[at] = CheckContext(loaded, skipped=self.skipped, apart=self.apart, calls=self.calls)
        other = self._with_tasks[at]
        other.work, other.rule = self.work, self.rule
        return other

    def first_rows(self) -> list[Row]:
        """Return the rows that are cheap to read: all inline rows, the first row of a file, the first ones of a function.

        A function is called only if `calls` is set; otherwise there are no rows, and the current rule counts as skipped.

        Raises:
            SpecError: the source cannot be read.
        """
        if self.spec.tasks.source == "python" and not self.calls:
            self.skip()
            return []
        if self._first_rows is None:
            try:
                self._first_rows = self._read_rows()
            except SpecError as error:
                self._first_rows = error
        if isinstance(self._first_rows, SpecError):
            raise self._first_rows
        return self._first_rows

    def _read_rows(self) -> list[Row]:
        source = self.spec.tasks.source
        if source == "python":
            with deadline(ROWS_SECONDS):
                return list(rows_of(self.loaded, MAX_ROWS_MADE))
        if source not in ("inline", "jsonl", "csv", "parquet"):
            return []
        return list(rows_of(self.loaded, None if source == "inline" else 1))

    def skip(self) -> None:
        """Record that the current rule skipped something because code is not imported."""
        if self.rule:
            self.skipped[self.rule] = None

    def events_of(self, state: StateSpec) -> tuple[str, ...] | None:
        """Return the events that a state's action declares; None if they are not known."""
        if state.action is None:
            return ()
        if (facts := ACTIONS.get(state.action)) is not None:
            if facts.events is not None:
                return facts.events
            return self.declared(self.spec.environment.entry.use) if self.spec.environment else None
        return self.declared(state.action) if ":" in state.action else ()

    def events_in(self, name: str) -> tuple[str, ...] | None:
        """Return the events of a state's action there: `overflow` is one only where a transition handles it."""
        events = self.events_of(self.states[name])
        facts = ACTIONS.get(str(self.states[name].action))
        if events is None or facts is None or not facts.overflows or not self.machine.leaving(name, OVERFLOW):
            return events
        return (*events, OVERFLOW)

    def speaking(self, role: Literal["user", "tool"]) -> list[str]:
        """The reachable states whose action adds a message of a role."""
        return [
            name
            for name, state in self.states.items()
            if name in self.reachable and (facts := ACTIONS.get(str(state.action))) and facts.speaks == role
        ]

    def declared(self, use: str) -> tuple[str, ...] | None:
        """Return the `events` of an entry point's object; None if they are not a list of names."""
        thing = self.code(use)
        found = "unknown" if thing is None else thing.events()
        if found == "unknown" and isinstance(thing, ReadCode):
            self.skip()
        return None if isinstance(found, str) else tuple(found)

    @cached_property
    def may_happen(self) -> Mapping[str, frozenset[str] | None]:
        """All events that may occur in each state that is not final; None if those of its action are not known."""
        events = {name: self.events_in(name) for name in self.working}
        return {name: None if known is None else frozenset((*known, *ALWAYS)) for name, known in events.items()}

    @cached_property
    def reachable(self) -> frozenset[str]:
        """States that can be reached if guards are ignored; all states if `initial` does not exist."""
        if self.machine.initial not in self.states:
            return frozenset(self.states)
        return _closure([self.machine.initial], [(edge.source, edge.dest) for edge in self.live])

    @cached_property
    def ending(self) -> frozenset[str]:
        """States from which a final state can be reached, including the final states."""
        final = [name for name, state in self.states.items() if state.final]
        return _closure(final, [(edge.dest, edge.source) for edge in self.live])

    @cached_property
    def live(self) -> list[ResolvedTransition]:
        """The transitions that can be taken: their event can occur, and no unconditional transition precedes them."""
        settled: set[tuple[str, str]] = set()
        live: list[ResolvedTransition] = []
        for edge in self.machine.transitions:
            group = (edge.source, edge.trigger)
            if group not in settled and _can_happen(edge, self.may_happen):
                live.append(edge)
                if edge.conditions is None:
                    settled.add(group)
        return live

    def formula(self, expression: str) -> Formula:
        """Return a guard as a function of its quantities, under the spec's limits."""
        return self._formula(expression, self.limit_values)

    def _formula(self, expression: str, values: tuple[tuple[str, float], ...]) -> Formula:
        """Conditions beyond the first `MAX_READ` characters are not analysed: they may have any result."""
        known = self._read.get(expression)
        if known is None:
            known = self._read[expression] = self._characters + len(expression) <= MAX_READ
            self._characters += len(expression)
        return formula(expression, values if "limits" in expression else ()) if known else UNKNOWN

    def chart(self, limits: LimitsSpec | None = None) -> Chart:
        """Return the machine in the form that `explore` takes, with the spec's limits or others."""
        within = limits or self.spec.limits
        values = _values(within)
        groups: dict[tuple[str, str], list[Edge]] = {}
        for edge in self.machine.transitions:
            guard = ALWAYS_TRUE if edge.conditions is None else self._formula(edge.conditions, values)
            groups.setdefault((edge.source, edge.trigger), []).append(Edge(edge.dest, guard))
        triggers: dict[str, list[str]] = {}
        for source, trigger in groups:
            triggers.setdefault(source, []).append(trigger)
        working = [name for name in self.working if self.states[name].action is not None]
        own = {name: self.events_in(name) for name in working}
        events = {name: triggers.get(name, []) if known is None else known for name, known in own.items()}
        sampled = self.spec.sampling.max_new_tokens
        spec = self.spec.model_copy(update={"limits": within})
        counted = [limit.value(spec) for limit in COUNTERS]
        stoppable = [
            name
            for name in working
            for limit in limits_of(self.states[name].action)
            if limit.per_use is None and limit is not EPISODE_SECONDS and limit.may_stop(spec)
        ]
        return Chart(
            self.machine.initial,
            tuple((name, str(self.states[name].action)) for name in working),
            tuple((name, tuple(event for event in events[name] if event not in ALWAYS)) for name in working),
            tuple((key, tuple(group)) for key, group in groups.items()),
            tuple(None if value is None else int(min(value, UNBOUNDED)) for value in counted),
            EPISODE_SECONDS.may_stop(spec),
            min(within.turn_tokens, UNBOUNDED if sampled is None else sampled, UNBOUNDED),
            frozenset(stoppable),
        )

    @cached_property
    def cycles(self) -> Cycles:
        """Cycles that nothing bounds."""
        return cycles_of(self.graph, Work(MAX_WORK))

    @cached_property
    def graph(self) -> Graph:
        """Everything that an episode may do within the spec's limits."""
        return explore(self.chart())

    @cached_property
    def limit_values(self) -> tuple[tuple[str, float], ...]:
        """The values of `limits.*` in guards."""
        return _values(self.spec.limits)

    @cached_property
    def hull(self) -> Ranges:
        """The range of each quantity over all reachable places."""
        hull: dict[str, tuple[float, float]] = {}
        for counts in {place.counts for place in self.graph.steps if not place.late}:
            for name, (low, high) in self.graph.walk.ranges(counts).items():
                least, most = hull.get(name, (low, high))
                hull[name] = (min(low, least), max(high, most))
        return hull

    def written(self, *path: str | int) -> bool:
        """Whether the spec sets this key, so that the default does not apply."""
        return path in self.loaded.origins

    @cached_property
    def spec_code(self) -> list[NamedEntry]:
        """The entry points of environment, tools, users and scorer."""
        spec = self.spec
        found = [
            NamedEntry(("tools", index), tool.entry, "tool" if tool.facts is None else "tool server")
            for index, tool in enumerate(spec.tools)
        ]
        if spec.environment:
            found.insert(0, NamedEntry(("environment",), spec.environment.entry, "environment"))
        for path, user in self.users:
            if user.use is not None:
                found.append(NamedEntry(path, Entry(use=user.use, with_=user.with_), "user"))
            if user.grader is not None:
                found.append(NamedEntry((*path, "grader"), user.grader, "user"))
        scorer = spec.rewards.scorer
        if scorer is not None and scorer.use is not None:
            entry = Entry(use=SCORERS.get(scorer.use, scorer.use), with_=scorer.with_)
            found.append(NamedEntry(("rewards", "scorer"), entry, "scorer"))
        if spec.condense is not None and isinstance(own := spec.condense.condenser, OwnCondenserSpec):
            found.append(NamedEntry(("condense", "condenser"), Entry(use=own.use, with_=own.with_), "condenser"))
        return found

    @property
    def users(self) -> list[tuple[DataPath, UserSpec]]:
        """All users with their positions."""
        users = self.spec.users_by_name.items()
        return [(("users", name) if name else ("user",), user) for name, user in users]

    @cached_property
    def own_actions(self) -> list[tuple[str, StateSpec]]:
        """States whose action is an entry point of the spec."""
        return [(name, state) for name, state in self.states.items() if state.action and ":" in state.action]

    def state_path(self, name: str) -> DataPath:
        """Return the position of a state; that of the machine if the state comes from the preset."""
        return ("machine", "states", name) if name in self.spec.machine.states else ("machine",)


def _values(limits: LimitsSpec) -> tuple[tuple[str, float], ...]:
    return tuple(
        (name, float(UNBOUNDED if value is None else min(value, UNBOUNDED))) for name, value in limits if name in FIELDS
    )


def _closure(starts: Iterable[str], steps: Iterable[tuple[str, str]]) -> frozenset[str]:
    """The states that can be reached from some states, including these."""
    ahead: dict[str, set[str]] = {}
    for source, dest in steps:
        ahead.setdefault(source, set()).add(dest)
    found = set(starts)
    waiting = list(found)
    while waiting:
        new = ahead.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return frozenset(found)


def _can_happen(edge: ResolvedTransition, events: Mapping[str, frozenset[str] | None]) -> bool:
    if edge.source not in events:
        return False  # a final state, or one that does not exist
    known = events[edge.source]
    return known is None or edge.trigger in known


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `did you mean …?`, or the list of known names."""
    return near_or_known(name, sorted(known), cutoff=0.5)
