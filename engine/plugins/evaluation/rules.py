"""Rules about `train.eval`: its tasks and sampling are checked like those of the spec."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic import Field

from engine.plugins.evaluation.spec import TrainEvalSpec, powers
from engine.schemas.base import Contract
from engine.schemas.generation import SamplingParams
from engine.schemas.tasks import TasksSpec
from engine.spec.code.entry import EntryError
from engine.spec.document import Document, validate
from engine.spec.text.diagnostic import DataPath
from engine.spec.text.near import near_or_known, short
from engine.validate.code.source import NotImported
from engine.validate.context import CheckContext, each_source, without_effect
from engine.validate.prompts import prompt_field
from engine.validate.registry import Finding, rule
from engine.validate.tasks import task_rows, tasks_unreadable

EVAL: DataPath = ("train", "eval")
MEASURE = re.compile(r"success|reward|turns|tokens|reward:.+|success@turn:[0-9]+|pass@[1-9][0-9]*")
MEASURES = ("reward", "success", "turns", "tokens", "success@turn:0", "pass@1", "reward:name")


class _Evaluation(Contract):
    tasks: TasksSpec | None = None
    sampling: SamplingParams = SamplingParams()
    sets: dict[str, _Evaluation] = Field(default_factory=dict)


class _Spec(Contract):
    """The section `eval` at its position in a spec, so that problems have the right path."""

    train: dict[str, _Evaluation]


def _section(ctx: CheckContext) -> TrainEvalSpec | None:
    return None if ctx.spec.train is None else TrainEvalSpec.section_of(ctx.spec.train)


def _read(ctx: CheckContext) -> tuple[dict[DataPath, _Evaluation], list[Finding]]:
    """Each evaluation by its path, read as `tasks` and `sampling`; none if one is not valid."""
    if (section := _section(ctx)) is None:
        return {}, []
    given: dict[str, Any] = {"sampling": section.sampling}
    if section.tasks is not None:
        given["tasks"] = section.tasks
    given["sets"] = {name: {"tasks": one.tasks, "sampling": one.sampling} for name, one in section.sets.items()}
    loaded = ctx.loaded
    document = Document(data={"train": {"eval": given}}, origins=loaded.origins, key_origins=loaded.key_origins)
    whole, problems = validate(document, _Spec)
    found = [Finding(item.message, item.path, item.fix, origin=item.origin) for item in problems]
    if whole is None:
        return {}, found
    evaluation = whole.train["eval"]
    sets: dict[DataPath, _Evaluation] = {(*EVAL, "sets", name): one for name, one in evaluation.sets.items()}
    return sets or {EVAL: evaluation}, found


@rule("train.eval-form", "error", "the evaluation's tasks or sampling are not valid")
def eval_form(ctx: CheckContext) -> Iterator[Finding]:
    """`train.eval.tasks` as `tasks`, `train.eval.sampling` as `sampling`."""
    yield from _read(ctx)[1]


@rule("train.eval-tasks", "error", "the evaluation's tasks cannot be read, or lack a field that the prompt names")
def eval_tasks(ctx: CheckContext) -> Iterator[Finding]:
    """The rules about `tasks`, applied to those of each evaluation."""
    for at, section in _read(ctx)[0].items():
        if section.tasks is None:
            continue
        path: DataPath = (*at, "tasks")
        named = f"in the evaluation `{at[-1]}`" if len(at) > len(EVAL) else "in the evaluation"
        other = ctx.with_tasks(section.tasks, path)
        for below, source in each_source(other):
            tasks = source.spec.tasks
            if tasks.source == "python" and tasks.use is not None:
                thing = other.described(tasks.use)
                if isinstance(thing, EntryError) and not isinstance(thing, NotImported):
                    message, _, fix = str(thing).partition("; ")
                    yield Finding(message, (*at, *below, "use"), fix or None)
        for check in (tasks_unreadable, task_rows, prompt_field):
            for item in check(other):
                place = (*at, *item.path) if item.path[:1] == ("tasks",) else item.path
                yield Finding(f"{named}: {item.message}", place, item.fix, origin=item.origin)


@rule("train.eval-on-training-tasks", "warning", "an evaluation uses the training's own tasks")
def eval_on_training_tasks(ctx: CheckContext) -> Iterator[Finding]:
    """An evaluation without tasks of its own, or with exactly the spec's `tasks`."""
    for at, section in _read(ctx)[0].items():
        own = [_source(one) for one in ctx.spec.tasks.sources]
        if section.tasks is not None and not any(_source(one) in own for one in section.tasks.sources):
            continue
        message = (
            "the policy is evaluated on the tasks that it is trained on: the figures also rise when it only learns "
            "these by heart"
        )
        path: DataPath = (*at, "tasks") if section.tasks is not None else at
        yield Finding(message, path, "give other tasks under `tasks`: another file or split, or other arguments")


def _source(tasks: TasksSpec) -> dict[str, Any]:
    """What decides which rows there are."""
    return tasks.model_dump(include={"source", "rows", "path", "name", "split", "use", "with_"})


@rule("train.metric", "error", "the metric that selects the best checkpoint does not exist")
def metric(ctx: CheckContext) -> Iterator[Finding]:
    """`train.eval.metric` is a metric of `engine eval`."""
    section = _section(ctx)
    if section is None:
        return
    name, path = section.metric, ("train", "eval", "metric")
    where: DataPath = path if ctx.written(*path) else ("train", "eval")
    if len(name) > 80 or not MEASURE.fullmatch(name):
        yield Finding(f"there is no metric `{short(name)}`", where, near_or_known(name, MEASURES))
        return
    kind, _, number = name.partition("@")
    most = ctx.spec.limits.assistant_turns
    samples = section.by_name()[section.best or next(iter(section.sets), "")].samples
    if kind == "pass" and number not in map(str, powers(samples)):
        yield Finding(
            f"`{name}` is not measured with {samples} episodes of each task",
            where,
            f"set `train.eval.samples`, or use one of {', '.join(f'pass@{k}' for k in powers(samples))}",
        )
    elif kind == "success" and number and most is not None and int(number[5:][:9]) >= most:
        yield Finding(
            f"turns are counted from 0, and `limits.assistant_turns` is {most}: `{name}` is never measured",
            where,
            f"use `success@turn:{most - 1}` or `success`",
        )


@rule("train.eval-no-effect", "warning", "a key of `train.eval` that each of its sets replaces")
def eval_no_effect(ctx: CheckContext) -> Iterator[Finding]:
    """Keys beside `sets`."""
    section = _section(ctx)
    if section is None or not section.sets:
        return
    sets = section.sets.values()
    options = [
        (
            all(getattr(one, key) is not None for one in sets),
            f"train.eval.{key}",
            f"each of `train.eval.sets` has its own `{key}`",
        )
        for key in ("every", "limit", "samples")
    ]
    options += [
        (
            all(key in one.sampling for one in sets),
            f"train.eval.sampling.{key}",
            f"each of `train.eval.sets` has its own `sampling.{key}`",
        )
        for key in section.sampling
    ]
    options.append((len(section.sets) == 1, "train.eval.best", "there is one evaluation"))
    yield from without_effect(ctx, options)
