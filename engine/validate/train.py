"""Rules for `train`: whether the model can be trained on the episodes of a spec. Neither torch nor trainer is
imported."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from engine.errors import SpecError
from engine.schemas.backend import kinds_that_train
from engine.schemas.train import OverlongPenalty, TrainSpec
from engine.spec.added import missing_sync, trains_backend
from engine.spec.resolve import published_file, published_names
from engine.spec.tasks import count_tasks
from engine.spec.text.diagnostic import DataPath
from engine.tokens.catalogue import CATALOGUE, MadeEntry
from engine.validate.context import CheckContext
from engine.validate.registry import Finding, rule

_CUTS = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
"""Keys that exclude tokens after the log-probs are computed, and the value that excludes none."""
_SHIFTS = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "min_new_tokens": 0,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
}
"""Keys that change the logits before the log-probs are computed, and the value that changes nothing."""
FLOAT32_ON_GPU = (
    "in `float32` a GPU multiplies matrices without its tensor cores (TF32 is off), several times "
    "slower than in `mixed`"
)


def _train(ctx: CheckContext) -> Iterator[TrainSpec]:
    """The section `train`, if the spec has one."""
    if ctx.spec.train is not None:
        yield ctx.spec.train


def _sampling(ctx: CheckContext) -> Iterator[TrainSpec]:
    """The section `train`, if the training samples episodes."""
    for train in _train(ctx):
        if train.samples_episodes:
            yield train


@rule("train.kl-credit", "error", "the credit method takes no KL penalty in the reward")
def kl_credit(ctx: CheckContext) -> Iterator[Finding]:
    """`train.kl.in: reward` with a credit method that does not subtract penalties of tokens."""
    credit = ctx.spec.rewards.credit
    for train in _sampling(ctx):
        if train.kl.in_reward and not credit.takes_penalties:
            message = (
                "a function of your own gets the ledgers, which do not hold the penalties, so they would have no effect"
            )
            yield Finding(message, ("train", "kl", "in"), "use `in: loss`, or a credit method of the engine", key=True)


@rule("train.backend", "error", "training needs a backend that takes new weights")
def backend(ctx: CheckContext) -> Iterator[Finding]:
    """Training needs exact token ids, their log-probs, and a backend that takes new weights."""
    declared = ctx.spec.backend
    if not trains_backend(ctx.spec):
        return
    if not declared.trains:
        why = "takes no new weights" if declared.exact_ids else "returns text without token ids"
        message = f"the `{declared.kind}` backend {why}, so the model cannot be trained on its replies"
        path: DataPath = ("backend", "kind") if ctx.written("backend", "kind") else ("backend",)
        yield Finding(message, path, f"use {kinds_that_train()}, or remove `train`")
    elif (lacking := missing_sync(declared.kind)) is not None:
        message, _, fix = lacking.partition(": ")
        yield Finding(message, ("backend",), fix)


@rule("train.adapter", "error", "the sampler uses an adapter that the trainer does not have")
def adapter(ctx: CheckContext) -> Iterator[Finding]:
    """`backend.adapter` names an adapter that is loaded in the servers."""
    for train in _sampling(ctx):
        name = ctx.spec.backend.adapter_name
        if name is not None:
            fix = "remove it" + (
                ": `train.lora` trains a new adapter" if train.adapter else "; `train.lora` trains an adapter"
            )
            message = f"replies would be sampled with the adapter `{name}`, but the trainer does not have it"
            yield Finding(message, ("backend", "adapter"), fix)


@rule("train.greedy", "error", "the model would be trained on greedy replies")
def greedy(ctx: CheckContext) -> Iterator[Finding]:
    """At temperature 0 all episodes of a task are the same."""
    for _ in _sampling(ctx):
        if ctx.spec.sampling.temperature == 0:
            message = "at temperature 0 every reply to a prompt is the same, so there is nothing to compare"
            yield Finding(message, ("sampling", "temperature"), "set it to 1.0; `train.eval.sampling` can be greedy")


@rule("train.cut-sampling", "warning", "tokens are sampled from a smaller set than the log-probs cover")
def cut_sampling(ctx: CheckContext) -> Iterator[Finding]:
    """`top_p`, `top_k` and `min_p` exclude tokens after the log-probs are computed."""
    for _ in _sampling(ctx):
        for key, free in _CUTS.items():
            value = getattr(ctx.spec.sampling, key)
            if value not in (None, free) and not (key == "top_k" and value <= 0):
                message = f"`{key}: {value}` excludes tokens that the log-probs include, so gradients are biased"
                yield Finding(message, ("sampling", key), "remove it; `train.eval.sampling` can have it")


@rule("train.shifted-sampling", "error", "the trainer cannot recompute the log-probs of sampled tokens")
def shifted_sampling(ctx: CheckContext) -> Iterator[Finding]:
    """Penalties, a logit bias, a minimum length and grammars change the distribution depending on earlier tokens."""
    for _ in _sampling(ctx):
        for key, free in _SHIFTS.items():
            value = getattr(ctx.spec.sampling, key)
            if value is not None and value != free:
                message = f"`{key}` changes the probabilities of sampled tokens, and the trainer cannot recompute that"
                yield Finding(message, ("sampling", key), "remove it; `train.eval.sampling` can have it")


@rule("train.nothing-to-learn", "error", "every advantage would be 0")
def nothing_to_learn(ctx: CheckContext) -> Iterator[Finding]:
    """The credit method gives 0 in a group of one episode."""
    for train in _sampling(ctx):
        credit = ctx.spec.rewards.credit
        moved = train.entropy_coefficient != 0 or train.kl.in_loss
        if (
            ctx.spec.rollout.samples_per_task > 1
            or not credit.zero_without_group
            or train.advantage_bonuses
            or (moved and not train.dynamic_sampling)
        ):
            continue
        message = f"`{credit.method}` subtracts the mean of the group, and a group is one episode: every advantage is 0"
        written = ctx.written("rollout", "samples_per_task")
        path: DataPath = ("rollout", "samples_per_task") if written else ("train",)
        fix = "set `rollout.samples_per_task` to 4 or more, or `rewards.credit.baseline: none`"
        yield Finding(message, path, fix, key=not written)


@rule("train.random-weights", "warning", "a model with random weights would be trained on its own replies")
def random_weights(ctx: CheckContext) -> Iterator[Finding]:
    """A name of the catalogue whose model is made locally, with random weights."""
    for _ in _sampling(ctx):
        entry = CATALOGUE.get(ctx.spec.model.path)
        if isinstance(entry, MadeEntry):
            message = f"`{entry.name}` has random weights: its replies are noise, and seldom earn rewards that differ"
            fix = f"teach it the format first: `{entry.teach}`, then add `--set model.path={entry.taught}`"
            yield Finding(message, ("model", "path"), fix)


@rule("train.min-group", "error", "no group would be large enough to train on")
def min_group(ctx: CheckContext) -> Iterator[Finding]:
    """`train.min_group` above `rollout.samples_per_task`."""
    for train in _sampling(ctx):
        samples = ctx.spec.rollout.samples_per_task
        if train.min_group is not None and train.min_group > samples:
            message = f"a group has {samples} episodes (`rollout.samples_per_task`), so every group is left out"
            yield Finding(message, ("train", "min_group"), f"set it to {samples} or less", key=True)


@rule("train.precision", "warning", "a GPU computes in float32, which is slow")
def precision(ctx: CheckContext) -> Iterator[Finding]:
    """`train.precision: float32` with a CUDA device, or planned for a GPU."""
    for train in _train(ctx):
        cuda = train.device.startswith("cuda") or (ctx.written("train", "plan") and train.device != "cpu")
        if cuda and train.precision_on("cuda") == "float32":
            yield Finding(FLOAT32_ON_GPU, ("train", "precision"), "remove it, or write `mixed`")


@rule("train.half-precision", "warning", "the sampler computes in 16 bits without rollout correction")
def half_precision(ctx: CheckContext) -> Iterator[Finding]:
    """`backend.dtype` of a local backend, with `train.rollout_correction: {kind: none}`."""
    for train in _sampling(ctx):
        dtype = ctx.spec.backend.half_precision
        if dtype is not None and train.rollout_correction.kind == "none":
            message = f"with `dtype: {dtype}` the sampler's log-probs differ by up to 0.5 from the trainer's"
            yield Finding(
                message, ("backend", "dtype"), "set `dtype: float32`, or `train.rollout_correction: {kind: truncate}`"
            )


@rule("train.freeze", "error", "a pattern in `train.freeze` is not a regular expression")
def freeze(ctx: CheckContext) -> Iterator[Finding]:
    """`train.freeze`."""
    for train in _train(ctx):
        for index, pattern in enumerate(train.freeze):
            try:
                re.compile(pattern)
            except (re.error, OverflowError, RecursionError) as error:
                offset = getattr(error, "pos", None)
                message = f"not a regular expression: {getattr(error, 'msg', error)}"
                fix = "a dot matches any character, `\\.` matches a dot: `embed_tokens`, `layers\\.[0-3]\\.`"
                yield Finding(message, ("train", "freeze", index), fix, offset=offset)


@rule("train.overlong", "warning", "every reply of the model has the penalty for long replies")
def overlong(ctx: CheckContext) -> Iterator[Finding]:
    """`train.overlong.margin` is not below `limits.turn_tokens`."""
    train, most = ctx.spec.train, ctx.spec.limits.turn_tokens
    if (
        train is not None
        and train.samples_episodes
        and isinstance(train.overlong, OverlongPenalty)
        and train.overlong.margin >= most
    ):
        message = (
            f"replies are penalized in the last {train.overlong.margin} tokens before the limit, which is "
            f"{most}: all of them are"
        )
        yield Finding(message, ("train", "overlong", "margin"), "set it to a part of `limits.turn_tokens`")


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
        changed_to: dict[str, Any] = {key: getattr(train, key) for key in given}
        if train.epochs is not None and length == "steps":
            changed_to["steps"] = _steps(ctx, train)
        changed = [key for key, value in changed_to.items() if value != given[key]]
        if not changed and (train.epochs is None or length == "epochs"):
            continue
        path: DataPath = ("train", next((key for key in ("epochs", *changed) if ctx.written("train", key)), "steps"))
        message = (
            f"`{name}` trains for {_told(given)}, and this spec for {_told(changed_to | _epochs(train))}: results "
            "are not comparable"
        )
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
    length = " = ".join(parts)
    return f"{length} of {values['tasks_per_step']} groups" if values.get("tasks_per_step") is not None else length
