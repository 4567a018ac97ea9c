"""Rules about `train.eval`: its tasks and sampling are checked like those of the spec."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from engine.checks.context import CheckContext
from engine.checks.prompts import prompt_field, tasks_unreadable
from engine.checks.registry import Finding, rule
from engine.checks.tasks import task_rows
from engine.schemas.base import Contract
from engine.schemas.generation import SamplingParams
from engine.schemas.tasks import TasksSpec
from engine.spec.diagnostic import DataPath
from engine.spec.entry import EntryError
from engine.spec.load import Document, validate
from engine.spec.source import NotImported

EVAL: DataPath = ("train", "eval")
TASKS: DataPath = (*EVAL, "tasks")
Value = TypeVar("Value")


class _Eval(Contract):
    tasks: TasksSpec | None = None
    sampling: SamplingParams = SamplingParams()


class _Train(Contract):
    eval: _Eval


class _Whole(Contract):
    """The two at their position in a spec, so that problems have the right path."""

    train: _Train


def _read(ctx: CheckContext) -> tuple[_Eval | None, list[Finding]]:
    """The section, read as `tasks` and `sampling`; None if it is not valid."""
    if ctx.spec.train is None or ctx.spec.train.eval is None:
        return None, []
    given: dict[str, Any] = {}
    if ctx.spec.train.eval.tasks is not None:
        given["tasks"] = ctx.spec.train.eval.tasks
    given["sampling"] = ctx.spec.train.eval.sampling
    loaded = ctx.loaded
    document = Document({"train": {"eval": given}}, loaded.origins, loaded.key_origins)
    whole, problems = validate(document, _Whole)
    found = [Finding(item.message, item.path, item.fix, origin=item.origin) for item in problems]
    return None if whole is None else whole.train.eval, found


@rule("train.eval-form", "error", "the evaluation's tasks or sampling are not valid")
def eval_form(ctx: CheckContext) -> Iterator[Finding]:
    """`train.eval.tasks` as `tasks`, `train.eval.sampling` as `sampling`."""
    yield from _read(ctx)[1]


@rule("train.eval-tasks", "error", "the evaluation's tasks cannot be read, or lack a field that the prompt names")
def eval_tasks(ctx: CheckContext) -> Iterator[Finding]:
    """The rules about `tasks`, applied to those of the evaluation."""
    section, _ = _read(ctx)
    if section is None or section.tasks is None:
        return
    other = _with_tasks(ctx, section.tasks)
    if section.tasks.source == "python" and section.tasks.use is not None:
        thing = other.described(section.tasks.use)
        if isinstance(thing, NotImported):
            ctx.skip()
        elif isinstance(thing, EntryError):
            message, _, fix = str(thing).partition("; ")
            yield Finding(message, (*TASKS, "use"), fix or None)
    for check in (tasks_unreadable, task_rows, prompt_field):
        for item in check(other):
            path = (*EVAL, *item.path) if item.path[:1] == ("tasks",) else item.path
            yield Finding(f"in the evaluation: {item.message}", path, item.fix, origin=item.origin)


def _with_tasks(ctx: CheckContext, tasks: TasksSpec) -> CheckContext:
    """The spec with the evaluation's tasks instead of its own, with their positions."""
    return CheckContext(ctx.loaded.with_tasks_of(tasks, TASKS), ctx.work, ctx.rule, ctx.skipped)
