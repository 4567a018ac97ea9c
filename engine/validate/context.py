"""What rules share, each loaded once: the spec, its code (`CodeContext`), machine (`MachineContext`), first rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from engine.errors import SpecError
from engine.schemas.environment import Task
from engine.schemas.tasks import MIX, TasksSpec
from engine.spec.rows.row import Row
from engine.spec.tasks import count_tasks, rows_of
from engine.spec.text.diagnostic import DataPath
from engine.spec.text.near import near_or_known
from engine.validate.machine_context import MachineContext
from engine.validate.registry import Finding
from engine.validate.work import deadline

MAX_ROWS_MADE = 8
"""Number of rows of a function that are checked."""
ROWS_SECONDS = 20.0
"""Deadline for making them."""


@dataclass
class CheckContext(MachineContext):
    """One spec that is checked."""

    read_tasks: Sequence[Task] | None = None
    """Tasks that were read, if the rules are about these and not about the source."""
    _with_tasks: dict[DataPath, CheckContext] = field(default_factory=dict)
    _first_rows: list[Row] | SpecError | None = None

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
            loaded = self.loaded.with_tasks_of(tasks, at)
            self._with_tasks[at] = CheckContext(loaded, skipped=self.skipped, apart=self.apart, calls=self.calls)
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
                    place = (*path, *found.path[1:]) if found.path[:1] == TASKS else found.path
                    yield replace(found, message=f"in the source `{path[-1]}`: {found.message}", path=place)

    return of_sources
