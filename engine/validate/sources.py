"""Rules about `tasks` applied to each source of a mix (`tasks.source: mix`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

from engine.spec.text.diagnostic import DataPath
from engine.validate.context import CheckContext
from engine.validate.registry import Finding

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
