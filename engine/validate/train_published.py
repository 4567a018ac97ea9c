"""Rules about a training that extends published settings (`extends: verl-gsm8k-grpo`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from engine.errors import SpecError
from engine.schemas.train import TrainSpec
from engine.spec.published_settings import published_file, published_names
from engine.spec.tasks import count_tasks
from engine.spec.text.diagnostic import DataPath
from engine.validate.context import CheckContext
from engine.validate.registry import Finding, rule


@rule("train.published-steps", "warning", "the training has another length than the published settings that it extends")
def published_steps(ctx: CheckContext) -> Iterator[Finding]:
    """`steps`, `epochs` or `tasks_per_step` of the spec's own, beside `steps` or `epochs` of published settings."""
    train = ctx.spec.train
    if train is None or not train.samples_episodes:
        return
    for name, published in _published(ctx):
        given: dict[str, Any] = {
            key: published[key] for key in ("steps", "epochs", "tasks_per_step") if key in published
        }
        length = next((key for key in ("epochs", "steps") if key in given), None)
        if length is None:
            continue
        own: dict[str, Any] = {key: getattr(train, key) for key in given}
        if train.epochs is not None and length == "steps":
            own["steps"] = _steps(ctx, train)
        changed = [key for key, value in own.items() if value != given[key]]
        if not changed and (train.epochs is None or length == "epochs"):
            continue
        path: DataPath = ("train", next((key for key in ("epochs", *changed) if ctx.written("train", key)), "steps"))
        message = f"`{name}` trains for {_told(given)}, and this spec for {_told(own | _epochs(train))}: results are not comparable"
        fix = f"leave out `train.{path[-1]}` to reproduce the published training, or keep it for another length"
        yield Finding(message, path, fix, key=True)


def _published(ctx: CheckContext) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each of the published settings that the spec extends, by name: its section `train`."""
    files = {Path(file).resolve() for file in ctx.loaded.sources}
    for name in published_names():
        file = Path(published_file(name)).resolve()
        if file in files:
            yield name, dict(yaml.safe_load(file.read_text(encoding="utf-8")).get("train") or {})


def _steps(ctx: CheckContext, train: TrainSpec) -> int | None:
    """The number of steps of `epochs`; None if it is not known without reading all tasks."""
    try:
        tasks = count_tasks(ctx.loaded)
    except (SpecError, OSError):
        return None
    return None if tasks is None or train.epochs is None else math.ceil(train.epochs * tasks / train.tasks_per_step)


def _epochs(train: TrainSpec) -> dict[str, float]:
    return {} if train.epochs is None else {"epochs": train.epochs}


def _told(values: dict[str, Any]) -> str:
    parts = []
    if values.get("epochs") is not None:
        parts.append(f"{values['epochs']:g} epochs")
    if values.get("steps") is not None:
        parts.append(f"{values['steps']} steps")
    told = " = ".join(parts)
    return f"{told} of {values['tasks_per_step']} groups" if values.get("tasks_per_step") is not None else told
