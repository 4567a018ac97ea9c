"""What rules share, each loaded once: the spec, its code, its machine and its first rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from pydantic import BaseModel

from engine.actions.facts import ACTIONS, SCORERS
from engine.errors import SpecError
from engine.limits import COUNTERS, EPISODE_SECONDS, limit_values, limits_of
from engine.machine.machine import ResolvedMachine, ResolvedTransition, resolved_machine
from engine.machine.presets import PRESETS
from engine.schemas.entry import Entry
from engine.schemas.environment import Task
from engine.schemas.episode import EpisodeSpec
from engine.schemas.limits import ALWAYS, OVERFLOW, UNBOUNDED, LimitsSpec
from engine.schemas.machine import ANY, StateSpec
from engine.schemas.role import UserSpec
from engine.schemas.tasks import MIX, TasksSpec
from engine.spec.added import AddedCode, added_code
from engine.spec.code.entry import EntryError, load_entry
from engine.spec.load import LoadedSpec
from engine.spec.rows.row import Row
from engine.spec.tasks import count_tasks, rows_of
from engine.spec.text.diagnostic import DataPath
from engine.spec.text.near import near_or_known
from engine.validate.code.code_facts import CodeFacts, ImportedCode, ReadCode, read_code
from engine.validate.code.source import NotImported, Sources
from engine.validate.explore import Chart, Cycle, Edge, Graph, cycles_of, explore
from engine.validate.logic import ALWAYS as ALWAYS_TRUE
from engine.validate.logic import UNKNOWN, Formula, Ranges, formula
from engine.validate.registry import Finding
from engine.validate.work import Work, WorkLimitError, deadline

MAX_TRANSITIONS = 10_000
"""Maximum number of transitions of a machine that is checked, with every list and `"*"` expanded."""
MAX_WORK = 200_000
"""Work units of one rule."""
MAX_READ = 100_000
"""Maximum number of characters of all conditions that are analysed."""
PRESETS_STATES = frozenset(name for preset in PRESETS.values() for name in preset.machine.states)
MAX_ROWS_MADE = 8
"""Number of rows of a function that are checked."""
ROWS_SECONDS = 20.0
"""Deadline for making them."""
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
class CheckContext:
    """One spec that is checked: its code, what its machine reaches, what an episode may do, its endless cycles."""

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
    read_tasks: Sequence[Task] | None = None
    """Tasks that were read, if the rules are about these and not about the source."""
    _with_tasks: dict[DataPath, CheckContext] = field(default_factory=dict)
    _first_rows: list[Row] | SpecError | None = None
    _read: dict[str, bool] = field(default_factory=dict)
    """Whether each condition is analysed."""
    _characters: int = 0

    # ---- the code

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

    # ---- the tasks

    def task_count(self) -> int | None:
        """The number of tasks; None if it is not known without reading all of them."""
        try:
            return count_tasks(self.loaded)
        except (SpecError, OSError):
            return None  # `tasks.unreadable` reports it

    def with_tasks(self, tasks: TasksSpec, at: DataPath) -> CheckContext:
        """Return the same spec with other tasks of its own, for the current rule.

        Args:
            tasks: The tasks.
            at: Where they are written.
        """
        if at not in self._with_tasks:
            self._with_tasks[at] = CheckContext(
                self.loaded.with_tasks_of(tasks, at), skipped=self.skipped, apart=self.apart, calls=self.calls
            )
        other = self._with_tasks[at]
        other.work, other.rule = self.work, self.rule
        return other

    def first_rows(self) -> list[Row]:
        """Return the rows that are cheap to read: all inline rows, the first row of a file, the first ones of a
        function.

        A function is called only if `calls` is set; otherwise there are no rows, and the current rule counts as
        skipped.

        Raises:
            SpecError: the source cannot be read.
        """
        if self.spec.tasks.source == "python" and not self.calls:
            self.skip()
            return []
        if self._first_rows is None:
            source = self.spec.tasks.source
            most = MAX_ROWS_MADE if source == "python" else None if source == "inline" else 1
            unread = source == MIX or (source != "python" and self.spec.tasks.facts.outside)
            try:
                with deadline(ROWS_SECONDS) if source == "python" else nullcontext():
                    self._first_rows = [] if unread else list(rows_of(self.loaded, most))
            except SpecError as error:
                self._first_rows = error
        if isinstance(self._first_rows, SpecError):
            raise self._first_rows
        return self._first_rows

    # ---- the machine

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
        return resolved_machine(self.spec)

    @property
    def states(self) -> dict[str, StateSpec]:
        """All states, including those of the preset."""
        return self.machine.states

    @cached_property
    def working(self) -> list[str]:
        """The states that are not final."""
        return [name for name, state in self.states.items() if not state.final]

    def events_of(self, state: StateSpec) -> tuple[str, ...] | None:
        """Return the events that a state's action declares; None if they are not known."""
        if state.action is None:
            return ()
        if (facts := ACTIONS.get(state.action)) is not None:
            if facts.events is not None:
                return facts.events
            return self.declared(self.spec.environment.entry.use) if self.spec.environment else None
        if ":" in state.action:
            return self.declared(state.action)
        return None  # `machine.unknown-action` reports it

    def events_in(self, name: str) -> tuple[str, ...] | None:
        """Return the events of a state's action there: `overflow` is one only where a transition handles it."""
        events = self.events_of(self.states[name])
        facts = ACTIONS.get(str(self.states[name].action))
        if events is None or facts is None or not facts.overflows or not self.machine.leaving(name, OVERFLOW):
            return events
        return (*events, OVERFLOW)

    def performing(self, action: str) -> list[str]:
        """The reachable states with an action."""
        return [name for name, state in self.states.items() if name in self.reachable and state.action == action]

    @cached_property
    def calling(self) -> list[str]:
        """The reachable states whose action adds messages of role `tool`."""
        return [
            name
            for name, state in self.states.items()
            if name in self.reachable and (facts := ACTIONS.get(str(state.action))) and facts.speaks == "tool"
        ]

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
        return closure([self.machine.initial], [(edge.source, edge.dest) for edge in self.live])

    @cached_property
    def ending(self) -> frozenset[str]:
        """States from which a final state can be reached, including the final states."""
        return closure(
            [name for name, state in self.states.items() if state.final],
            [(edge.dest, edge.source) for edge in self.live],
        )

    @cached_property
    def live(self) -> list[ResolvedTransition]:
        """The transitions that can be taken: their event can occur, and no unconditional transition precedes them."""
        settled: set[tuple[str, str]] = set()
        live: list[ResolvedTransition] = []
        for edge in self.machine.transitions:
            group = (edge.source, edge.trigger)
            events = self.may_happen.get(edge.source, ())  # none: it is final, or does not exist
            if group not in settled and (events is None or edge.trigger in events):
                live.append(edge)
                if edge.conditions is None:
                    settled.add(group)
        return live

    def formula(self, expression: str, values: tuple[tuple[str, float], ...] | None = None) -> Formula:
        """Return a guard as a function of its quantities, under the spec's limits or others with these values.

        Conditions beyond the first `MAX_READ` characters are not analysed: they may have any result.
        """
        is_read = self._read.get(expression)
        if is_read is None:
            is_read = self._read[expression] = self._characters + len(expression) <= MAX_READ
            self._characters += len(expression)
        if not is_read:
            return UNKNOWN
        return formula(expression, (values or self.limit_values) if "limits" in expression else ())

    def chart(self, limits: LimitsSpec | None = None) -> Chart:
        """Return the machine in the form that `explore` takes, with the spec's limits or others."""
        within = limits or self.spec.limits
        values = _values(within)
        groups: dict[tuple[str, str], list[Edge]] = {}
        for edge in self.machine.transitions:
            guard = ALWAYS_TRUE if edge.conditions is None else self.formula(edge.conditions, values)
            groups.setdefault((edge.source, edge.trigger), []).append((edge.dest, guard))
        triggers: dict[str, list[str]] = {}
        for source, trigger in groups:
            triggers.setdefault(source, []).append(trigger)
        working = [name for name in self.working if self.states[name].action is not None]
        declared = {name: self.events_in(name) for name in working}
        events = {name: triggers.get(name, []) if known is None else known for name, known in declared.items()}
        sampled = self.spec.sampling.max_new_tokens
        spec = self.spec.model_copy(update={"limits": within})
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
            tuple(None if (value := limit.value(spec)) is None else int(min(value, UNBOUNDED)) for limit in COUNTERS),
            EPISODE_SECONDS.may_stop(spec),
            min(within.turn_tokens, UNBOUNDED if sampled is None else sampled, UNBOUNDED),
            frozenset(stoppable),
        )

    @cached_property
    def cycles(self) -> tuple[list[Cycle], bool]:
        """Cycles that nothing bounds, and whether all were found."""
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
            for name, (low, high) in self.graph.ranges(counts).items():
                least, most = hull.get(name, (low, high))
                hull[name] = (min(low, least), max(high, most))
        return hull

    @cached_property
    def own_actions(self) -> list[tuple[str, StateSpec]]:
        """States whose action is an entry point of the spec."""
        return [(name, state) for name, state in self.states.items() if state.action and ":" in state.action]

    def state_path(self, name: str) -> DataPath:
        """Return the position of a state; that of the machine if the state comes from the preset."""
        return ("machine", "states", name) if name in self.spec.machine.states else ("machine",)


def _values(limits: LimitsSpec) -> tuple[tuple[str, float], ...]:
    return tuple((name, float(min(value, UNBOUNDED))) for name, value in limit_values(limits).items())


def closure(starts: Iterable[str], steps: Iterable[tuple[str, str]]) -> frozenset[str]:
    """The states that can be reached from some states, including these."""
    ahead: dict[str, set[str]] = {}
    for source, dest in steps:
        ahead.setdefault(source, set()).add(dest)
    reached = set(starts)
    waiting = list(reached)
    while waiting:
        new = ahead.get(waiting.pop(), set()) - reached
        reached |= new
        waiting += new
    return frozenset(reached)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `did you mean …?`, or the list of known names."""
    return near_or_known(name, sorted(known), cutoff=0.5)


Option = tuple[bool, str, str]
"""Whether an option has no effect, its path in the spec with dots, and why."""


def without_effect(
    ctx: CheckContext, options: Iterable[Option], fix: str = "remove it, or change what the message names"
) -> Iterator[Finding]:
    """Report the options of a table that have no effect, if the spec sets them."""
    for useless, name, why in options:
        path: DataPath = tuple(int(key) if key.isdecimal() else key for key in name.split("."))
        if useless and ctx.written(*path):
            yield Finding(f"`{name}` has no effect: {why}", path, fix, key=True)


Find = Callable[[CheckContext], Iterator[Finding]]
TASKS: DataPath = ("tasks",)


def each_source(ctx: CheckContext) -> Iterator[tuple[DataPath, CheckContext]]:
    """The path of each source of the tasks, and the spec with it as `tasks`; without a mix, `tasks` itself."""
    mixed = ctx.spec.tasks.mixed()
    if not mixed:
        yield TASKS, ctx
    for name, tasks in mixed.items():
        path = (*TASKS, "mix", name)
        yield path, ctx.with_tasks(tasks, path)


def for_each_source(find: Find) -> Find:
    """Make a rule about `tasks` examine each source of a mix; its findings name the source."""

    @functools.wraps(find)
    def of_sources(ctx: CheckContext) -> Iterator[Finding]:
        for path, source in each_source(ctx):
            for found in find(source):
                if path == TASKS:
                    yield found
                else:
                    yield replace(
                        found,
                        message=f"in the source `{path[-1]}`: {found.message}",
                        path=(*path, *found.path[1:]) if found.path[:1] == TASKS else found.path,
                    )

    return of_sources
