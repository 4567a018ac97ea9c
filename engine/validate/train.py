"""Rules for `train`: whether the model can be trained on the episodes of a spec. Neither torch nor trainer is
imported."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from engine.schemas.backend import changes_distribution, cuts_distribution, kinds_that_train
from engine.schemas.loss import ClippedLoss
from engine.schemas.train import OverlongPenalty, TrainSpec
from engine.spec.added import missing_sync, spec_facts, trains_backend
from engine.spec.resolve import published_file, published_names
from engine.spec.text.diagnostic import DataPath
from engine.tokens.catalogue import MadeEntry, named_models
from engine.validate.context import CheckContext, Option, without_effect
from engine.validate.registry import Finding, rule

_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
"""Keys of `sampling` whose constraints change the log-probs of tokens."""
FLOAT32_ON_GPU = (
    "in `float32` a GPU multiplies matrices without its tensor cores (TF32 is off), several times "
    "slower than in `mixed`"
)


def _train(ctx: CheckContext) -> list[TrainSpec]:
    """The section `train`, if the spec has one."""
    return [] if ctx.spec.train is None else [ctx.spec.train]


def _sampling(ctx: CheckContext) -> list[TrainSpec]:
    """The section `train`, if the training samples episodes."""
    return [train for train in _train(ctx) if train.samples_episodes]


@rule("train.kl-credit", "error", "the credit method takes no KL penalty in the reward")
def kl_credit(ctx: CheckContext) -> Iterator[Finding]:
    """`train.kl.in: reward` with a credit method that does not subtract penalties of tokens."""
    credit = ctx.spec.rewards.credit
    for train in _sampling(ctx):
        if train.kl.in_reward and not credit.takes_penalties:
            yield Finding(
                "a function of your own gets the ledgers, which do not hold the penalties, so they would have "
                "no effect",
                ("train", "kl", "in"),
                "use `in: loss`, or a credit method of the engine",
                key=True,
            )


@rule("train.backend", "error", "training needs a backend that takes new weights")
def backend(ctx: CheckContext) -> Iterator[Finding]:
    """Training needs exact token ids, their log-probs, and a backend that takes new weights."""
    declared = ctx.spec.backend
    if not trains_backend(ctx.spec):
        return
    if not declared.trains:
        why = "takes no new weights" if declared.exact_ids else "returns text without token ids"
        yield Finding(
            f"the `{declared.kind}` backend {why}, so the model cannot be trained on its replies",
            ("backend", "kind") if ctx.written("backend", "kind") else ("backend",),
            f"use {kinds_that_train()}, or remove `train`",
        )
    elif (lacking := missing_sync(declared.kind)) is not None:
        message, _, fix = lacking.partition(": ")
        yield Finding(message, ("backend",), fix)


@rule("train.adapter", "error", "the sampler uses an adapter that the trainer does not have")
def adapter(ctx: CheckContext) -> Iterator[Finding]:
    """`backend.adapter` names an adapter that is loaded in the servers."""
    for train in _sampling(ctx):
        name = ctx.spec.backend.adapter_name
        if name is not None:
            yield Finding(
                f"replies would be sampled with the adapter `{name}`, but the trainer does not have it",
                ("backend", "adapter"),
                "remove it"
                + (": `train.lora` trains a new adapter" if train.adapter else "; `train.lora` trains an adapter"),
            )


@rule("train.greedy", "error", "the model would be trained on greedy replies")
def greedy(ctx: CheckContext) -> Iterator[Finding]:
    """At temperature 0 all episodes of a task are the same."""
    for _ in _sampling(ctx):
        if ctx.spec.sampling.temperature == 0:
            yield Finding(
                "at temperature 0 every reply to a prompt is the same, so there is nothing to compare",
                ("sampling", "temperature"),
                "set it to 1.0; `train.eval.sampling` can be greedy",
            )


@rule("train.cut-sampling", "warning", "tokens are sampled from a smaller set than the log-probs cover")
def cut_sampling(ctx: CheckContext) -> Iterator[Finding]:
    """`top_p`, `top_k` and `min_p` exclude tokens after the log-probs are computed."""
    for _ in _sampling(ctx):
        for key in cuts_distribution(ctx.spec.sampling):
            value = getattr(ctx.spec.sampling, key)
            yield Finding(
                f"`{key}: {value}` excludes tokens that the log-probs include, so gradients are biased",
                ("sampling", key),
                "remove it; `train.eval.sampling` can have it",
            )


@rule("train.shifted-sampling", "error", "the trainer cannot recompute the log-probs of sampled tokens")
def shifted_sampling(ctx: CheckContext) -> Iterator[Finding]:
    """Penalties, a logit bias, a minimum length and grammars change the distribution depending on earlier tokens."""
    for _ in _sampling(ctx):
        sampling = ctx.spec.sampling
        shifts = [key for key in changes_distribution(sampling) if key != "temperature"]
        for key in (*shifts, *(key for key in _GRAMMARS if getattr(sampling, key) is not None)):
            yield Finding(
                f"`{key}` changes the probabilities of sampled tokens, and the trainer cannot recompute that",
                ("sampling", key),
                "remove it; `train.eval.sampling` can have it",
            )


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
        written = ctx.written("rollout", "samples_per_task")
        yield Finding(
            f"`{credit.method}` subtracts the mean of the group, and a group is one episode: every advantage is 0",
            ("rollout", "samples_per_task") if written else ("train",),
            "set `rollout.samples_per_task` to 4 or more, or `rewards.credit.baseline: none`",
            key=not written,
        )


@rule("train.random-weights", "warning", "a model with random weights would be trained on its own replies")
def random_weights(ctx: CheckContext) -> Iterator[Finding]:
    """A name of the catalogue whose model is made locally, with random weights."""
    for _ in _sampling(ctx):
        entry = named_models().get(ctx.spec.model.path)
        if isinstance(entry, MadeEntry):
            yield Finding(
                f"`{entry.name}` has random weights: its replies are noise, and seldom earn rewards that differ",
                ("model", "path"),
                f"teach it the format first: `{entry.teach}`, then add `--set model.path={entry.taught}`",
            )


@rule("train.min-group", "error", "no group would be large enough to train on")
def min_group(ctx: CheckContext) -> Iterator[Finding]:
    """`train.min_group` above `rollout.samples_per_task`."""
    for train in _sampling(ctx):
        samples = ctx.spec.rollout.samples_per_task
        if train.min_group is not None and train.min_group > samples:
            yield Finding(
                f"a group has {samples} episodes (`rollout.samples_per_task`), so every group is left out",
                ("train", "min_group"),
                f"set it to {samples} or less",
                key=True,
            )


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
            yield Finding(
                f"with `dtype: {dtype}` the sampler's log-probs differ by up to 0.5 from the trainer's",
                ("backend", "dtype"),
                "set `dtype: float32`, or `train.rollout_correction: {kind: truncate}`",
            )


@rule("train.freeze", "error", "a pattern in `train.freeze` is not a regular expression")
def freeze(ctx: CheckContext) -> Iterator[Finding]:
    """`train.freeze`."""
    for train in _train(ctx):
        for index, pattern in enumerate(train.freeze):
            try:
                re.compile(pattern)
            except (re.error, OverflowError, RecursionError) as error:
                yield Finding(
                    f"not a regular expression: {getattr(error, 'msg', error)}",
                    ("train", "freeze", index),
                    "a dot matches any character, `\\.` matches a dot: `embed_tokens`, `layers\\.[0-3]\\.`",
                    offset=getattr(error, "pos", None),
                )


@rule("train.overlong", "warning", "every reply of the model has the penalty for long replies")
def overlong(ctx: CheckContext) -> Iterator[Finding]:
    """`train.overlong.margin` is not below `limits.turn_tokens`."""
    most = ctx.spec.limits.turn_tokens
    for train in _sampling(ctx):
        if isinstance(train.overlong, OverlongPenalty) and train.overlong.margin >= most:
            yield Finding(
                f"replies are penalized in the last {train.overlong.margin} tokens before the limit, which is "
                f"{most}: all of them are",
                ("train", "overlong", "margin"),
                "set it to a part of `limits.turn_tokens`",
            )


@rule("train.published-steps", "warning", "the training has another length than the published settings that it extends")
def published_steps(ctx: CheckContext) -> Iterator[Finding]:
    """`steps`, `epochs` or `tasks_per_step` of the spec's own, beside `steps` or `epochs` of published settings."""
    files = {Path(file).resolve() for file in ctx.loaded.sources}
    for train in _sampling(ctx):
        for name in published_names():
            file = Path(published_file(name)).resolve()
            if file in files:
                published = yaml.safe_load(file.read_text(encoding="utf-8")).get("train") or {}
                yield from _of_another_length(ctx, train, name, published)


def _of_another_length(
    ctx: CheckContext, train: TrainSpec, name: str, published: Mapping[str, Any]
) -> Iterator[Finding]:
    """What is wrong with the length of a training beside that of the published settings `name`."""
    settings: dict[str, Any] = {
        key: published[key] for key in ("steps", "epochs", "tasks_per_step") if key in published
    }
    if not {"epochs", "steps"} & set(settings):
        return
    changed_to: dict[str, Any] = {key: getattr(train, key) for key in settings}
    if train.epochs is not None:
        changed_to["epochs"] = train.epochs
        if "epochs" not in settings:
            tasks = ctx.task_count()
            changed_to["steps"] = None if tasks is None else math.ceil(train.epochs * tasks / train.tasks_per_step)
    changed = [key for key, value in changed_to.items() if value != settings.get(key)]
    if not changed:
        return
    path: DataPath = ("train", next((key for key in ("epochs", *changed) if ctx.written("train", key)), "steps"))
    yield Finding(
        f"`{name}` trains for {_length(settings)}, and this spec for {_length(changed_to)}: results are not comparable",
        path,
        f"leave out `train.{path[-1]}` to reproduce the published training, or keep it for another length",
        key=True,
    )


def _length(values: Mapping[str, Any]) -> str:
    parts = []
    if values.get("epochs") is not None:
        parts.append(f"{values['epochs']:g} epochs")
    if values.get("steps") is not None:
        parts.append(f"{values['steps']} steps")
    length = " = ".join(parts)
    return f"{length} of {values['tasks_per_step']} groups" if values.get("tasks_per_step") is not None else length


@rule("train.no-effect", "warning", "an option of `train` has no effect in this combination")
def no_effect(ctx: CheckContext) -> Iterator[Finding]:
    """Options that are set, and that another option or its default makes ineffective."""
    for train in _train(ctx):
        options = _of_updates(ctx, train)
        if trains_backend(ctx.spec):
            options += _of_weight_sync(ctx, train)
        if train.samples_episodes:
            options += _of_loss(train) + _of_batch(train)
        yield from without_effect(ctx, options)


def _of_updates(ctx: CheckContext, train: TrainSpec) -> list[Option]:
    """Options of the number of steps, the learning rate, the seed and the memory."""
    warmup, dropout = train.optimizer.warmup_steps, train.adapter is not None and train.adapter.dropout > 0
    late = train.epochs is None and warmup >= train.steps and train.optimizer.schedule != "constant"
    effective = train.effective()
    seeded = any(facts.reads_seed for facts in spec_facts(ctx.spec))
    random = seeded or effective.shuffle or effective.critic or effective.minibatches > 1
    file = ctx.loaded.origin(("train", "steps")).file
    from_own_file = file in (next(iter(ctx.loaded.sources), ""), ctx.loaded.origin(("train", "epochs")).file)
    replaced = file in ctx.loaded.sources and not from_own_file  # on purpose, by the spec that extends that file
    return [
        (
            train.epochs is not None and not replaced,
            "train.steps",
            "`train.epochs` sets the number of steps",
        ),
        (
            late,
            "train.optimizer.schedule",
            f"the warm-up of {warmup} steps does not end before the {train.steps} steps of the training",
        ),
        (
            train.device == "cpu" and train.memory.offload != "none",
            "train.memory.offload",
            "the training is on the CPU already (`train.device: cpu`)",
        ),
        (
            not random,
            "train.seed",
            "`train.shuffle` is false, and there are neither mini-batches nor new weights to draw",
        ),
        (
            dropout,
            "train.memory.share_prefixes",
            "with `train.lora.dropout` each row has its own dropout, so no prefix is shared",
        ),
    ]


def _of_weight_sync(ctx: CheckContext, train: TrainSpec) -> list[Option]:
    """Options of how new weights are sent."""
    backend = ctx.spec.backend
    method = backend.sync_method(train.weight_sync.method, lora=train.adapter is not None)
    in_memory = not backend.weights_in_servers
    alone = "only `method: collective` makes a process group with the servers"
    pause, folder, address, port = (
        f"train.weight_sync.{key}" for key in ("pause_generation", "folder", "address", "port")
    )
    return [
        (in_memory, pause, f"the `{backend.kind}` backend takes weights in memory"),
        (not in_memory and method == "adapter", pause, "sending an adapter pauses nothing"),
        (method in ("tensors", "collective"), folder, "the weights are sent in memory"),
        (method != "collective", address, alone),
        (method != "collective", port, alone),
    ]


_ONE_UPDATE = "set `train.minibatches` or `train.update_epochs`"


def _of_loss(train: TrainSpec) -> list[Option]:
    """Options of the loss, the rollout correction and the KL penalty."""
    dropout = train.adapter is not None and train.adapter.dropout > 0
    recomputed = train.proximal_logprobs == "recompute"
    one_update = train.update_epochs * train.minibatches == 1 and not (recomputed and dropout)
    by_sampler = train.proximal_logprobs == "sampler"
    loss, correction, kl = train.loss, train.rollout_correction.kind, train.kl
    return [
        *(
            (
                one_update and not by_sampler and getattr(loss, key) is not None,
                f"train.loss.{key}",
                f"with one update per batch every probability ratio is 1; {_ONE_UPDATE}",
            )
            for key in loss.ratio_keys
        ),
        (
            recomputed and one_update,
            "train.proximal_logprobs",
            f"with one update per batch the current log-probs are already those before it; {_ONE_UPDATE}",
        ),
        (
            not (recomputed and one_update) and loss.ratio_level is None and correction == "none",
            "train.proximal_logprobs",
            f"the loss `{loss.kind}` has no ratio, and `train.rollout_correction.kind` is `none`",
        ),
        *(
            (correction == "none", f"train.rollout_correction.{key}", "`train.rollout_correction.kind` is `none`")
            for key in ("level", "low", "high")
        ),
        *(
            (
                correction != "none" and by_sampler,
                f"train.rollout_correction.{key}",
                "with `train.proximal_logprobs: sampler` every correction weight is 1",
            )
            for key in ("kind", "level", "low", "high")
        ),
        (kl.coefficient == 0, "train.kl.estimator", "`train.kl.coefficient` is 0"),
        (kl.coefficient == 0, "train.kl.in", "`train.kl.coefficient` is 0"),
        (kl.in_reward, "train.kl.estimator", "the penalty in the reward (`train.kl.in: reward`) is always `k1`"),
    ]


def _of_batch(train: TrainSpec) -> list[Option]:
    """Options of the batch, its advantages and its rewards."""
    groups, oversample = train.tasks_per_step, train.asynchrony.oversample
    return [
        *(
            (
                bonus.coefficient == 0,
                f"train.advantage_bonuses.{index}.coefficient",
                "the function's values are multiplied by 0",
            )
            for index, bonus in enumerate(train.advantage_bonuses)
        ),
        (
            train.minibatches > groups,
            "train.minibatches",
            f"of {train.minibatches}, {train.minibatches - groups} are empty: a batch of {groups} groups has at most "
            f"{groups} mini-batches (`train.tasks_per_step`)",
        ),
        (
            oversample > 1 and round((oversample - 1) * groups) == 0,
            "train.asynchrony.oversample",
            f"{oversample:g} × {groups} groups (`train.tasks_per_step`) is less than half a group more",
        ),
        (
            not train.advantage_bonuses,
            "rewards.placement",
            "training reads `advantages`; `placement` changes only the column `token_rewards` of exported rows",
        ),
    ]


@rule("train.kl-estimator", "warning", "the KL penalty in the loss has an expected gradient of 0")
def kl_estimator(ctx: CheckContext) -> Iterator[Finding]:
    """`train.kl.estimator: k1` with a coefficient."""
    for train in _sampling(ctx):
        if train.kl.in_loss and train.kl.estimator == "k1":
            yield Finding(
                "the expected gradient of `k1` is 0: in the loss it adds noise and does not keep the policy "
                "near the reference",
                ("train", "kl", "estimator"),
                "use `k2` or `k3`, or `in: reward`; `k1` estimates the value of the KL divergence",
            )


@rule("train.delta", "warning", "`train.loss.delta` is below the upper clip bound")
def delta(ctx: CheckContext) -> Iterator[Finding]:
    """`delta` below `1 + clip_high`."""
    for train in _sampling(ctx):
        loss = train.loss
        if isinstance(loss, ClippedLoss) and loss.delta is not None and loss.delta < (bound := 1 + loss.clip_high):
            yield Finding(
                f"`delta: {loss.delta:g}` is below `1 + clip_high` = {bound:g}: negative advantages are cut earlier "
                "than positive ones, inside of the range that the clip allows",
                ("train", "loss", "delta"),
                f"set it above {bound:g}, such as 4.0, or remove it",
            )
