"""Rules about options of `train`, `rewards` and `tasks` that have no effect in combination with others."""

from __future__ import annotations

from collections.abc import Iterator

from engine.schemas.tasks import PLUGIN_KEYS, TasksSpec, all_sources
from engine.schemas.train import TrainSpec
from engine.spec.added import spec_facts, trains_backend
from engine.spec.text.diagnostic import DataPath
from engine.validate.context import TASKS, CheckContext, each_source
from engine.validate.registry import Finding, rule
from engine.validate.rewards import several_turns

Option = tuple[DataPath, str]
"""The path of an option and the reason why it has no effect."""


@rule("train.no-effect", "warning", "an option of `train` has no effect in this combination")
def train_no_effect(ctx: CheckContext) -> Iterator[Finding]:
    """Options that are set, and that another option or its default makes ineffective."""
    train = ctx.spec.train
    if train is None:
        return
    options = [*_steps(ctx, train), *_memory(train), *_random(ctx, train)]
    if trains_backend(ctx.spec):
        options += _sync(ctx, train)
    if train.samples_episodes:
        options += [*_loss(train), *_batch(train), *_rewards(train)]
    for path, why in options:
        if ctx.written(*path):
            name = ".".join(str(part) for part in path)
            yield Finding(
                f"`{name}` has no effect: {why}", path, "remove it, or change what the message names", key=True
            )


def _loss(train: TrainSpec) -> Iterator[Option]:
    """Options of the loss, the rollout correction and the KL penalty."""
    several = train.update_epochs * train.minibatches > 1
    noisy = train.proximal_logprobs == "recompute" and train.adapter is not None and train.adapter.dropout > 0
    if train.proximal_logprobs != "sampler" and not several and not noisy:
        for key in train.loss.ratio_keys:
            if getattr(train.loss, key) is not None:
                yield (
                    ("train", "loss", key),
                    "with one update per batch every probability ratio is 1; set `train.minibatches` or "
                    "`train.update_epochs`",
                )
    if train.proximal_logprobs == "recompute" and not several and not noisy:
        why = (
            "with one update per batch the current log-probs are already those before it; set "
            "`train.minibatches` or `train.update_epochs`"
        )
        yield ("train", "proximal_logprobs"), why
    elif train.loss.ratio_level is None and train.rollout_correction.kind == "none":
        why = f"the loss `{train.loss.kind}` has no ratio, and `train.rollout_correction.kind` is `none`"
        yield ("train", "proximal_logprobs"), why
    correction: DataPath = ("train", "rollout_correction")
    if train.rollout_correction.kind == "none":
        for key in ("level", "low", "high"):
            yield (*correction, key), "`train.rollout_correction.kind` is `none`"
    elif train.proximal_logprobs == "sampler":
        for key in ("kind", "level", "low", "high"):
            yield (*correction, key), "with `train.proximal_logprobs: sampler` every correction weight is 1"
    if train.kl.coefficient == 0:
        yield ("train", "kl", "estimator"), "`train.kl.coefficient` is 0"
        yield ("train", "kl", "in"), "`train.kl.coefficient` is 0"
    elif train.kl.in_reward:
        yield ("train", "kl", "estimator"), "the penalty in the reward (`train.kl.in: reward`) is always `k1`"
    for index, bonus in enumerate(train.advantage_bonuses):
        if bonus.coefficient == 0:
            yield ("train", "advantage_bonuses", index, "coefficient"), "the function's values are multiplied by 0"


def _batch(train: TrainSpec) -> Iterator[Option]:
    """Options of the batch and of the optimizer."""
    if train.minibatches > train.tasks_per_step:
        why = (
            f"a batch of {train.tasks_per_step} groups has at most {train.tasks_per_step} mini-batches "
            "(`train.tasks_per_step`)"
        )
        yield (
            ("train", "minibatches"),
            f"of {train.minibatches}, {train.minibatches - train.tasks_per_step} are empty: {why}",
        )
    oversample, groups = train.asynchrony.oversample, train.tasks_per_step
    if oversample > 1 and round((oversample - 1) * groups) == 0:
        why = f"{oversample:g} × {groups} groups (`train.tasks_per_step`) is less than half a group more"
        yield ("train", "asynchrony", "oversample"), why


def _steps(ctx: CheckContext, train: TrainSpec) -> Iterator[Option]:
    """Options of the number of steps, of the learning rate and of the seed."""
    warmup = train.optimizer.warmup_steps
    if train.epochs is not None:
        if not _replaced(ctx, ("train", "steps"), ("train", "epochs")):
            yield ("train", "steps"), "`train.epochs` sets the number of steps"
    elif warmup >= train.steps and train.optimizer.schedule != "constant":
        why = f"the warm-up of {warmup} steps does not end before the {train.steps} steps of the training"
        yield ("train", "optimizer", "schedule"), why


def _replaced(ctx: CheckContext, path: DataPath, by: DataPath) -> bool:
    """Whether a key of an extended spec is replaced on purpose by another key of the extending one."""
    first_file = next(iter(ctx.loaded.sources), "")
    file = ctx.loaded.origin(path).file
    return file in ctx.loaded.sources and file not in (first_file, ctx.loaded.origin(by).file)


def _memory(train: TrainSpec) -> Iterator[Option]:
    """Offload from a device that is the CPU."""
    if train.device == "cpu" and train.memory.offload != "none":
        yield ("train", "memory", "offload"), "the training is on the CPU already (`train.device: cpu`)"


def _random(ctx: CheckContext, train: TrainSpec) -> Iterator[Option]:
    """The seed where nothing is random, and prefixes that dropout does not share."""
    train_ = train.effective()
    seeded = any(facts.reads_seed for facts in spec_facts(ctx.spec))
    if not (seeded or train_.shuffle or train_.critic or train_.minibatches > 1):
        yield ("train", "seed"), "`train.shuffle` is false, and there are neither mini-batches nor new weights to draw"
    if train.adapter is not None and train.adapter.dropout > 0:
        why = "with `train.lora.dropout` each row has its own dropout, so no prefix is shared"
        yield ("train", "memory", "share_prefixes"), why


def _sync(ctx: CheckContext, train: TrainSpec) -> Iterator[Option]:
    """Options of weight sync."""
    sync, lora = train.weight_sync, train.adapter is not None
    method = ctx.spec.backend.sync_method(sync.method, lora=lora)
    if not ctx.spec.backend.weights_in_servers:
        yield (
            ("train", "weight_sync", "pause_generation"),
            f"the `{ctx.spec.backend.kind}` backend takes weights in memory",
        )
    elif method == "adapter":
        yield ("train", "weight_sync", "pause_generation"), "sending an adapter pauses nothing"
    if method in ("tensors", "collective"):
        yield ("train", "weight_sync", "folder"), "the weights are sent in memory"
    if method != "collective":
        for key in ("address", "port"):
            yield ("train", "weight_sync", key), "only `method: collective` makes a process group with the servers"


def _rewards(train: TrainSpec) -> Iterator[Option]:
    """Options of `rewards`."""
    if not train.advantage_bonuses:
        why = "training reads `advantages`; `placement` changes only the column `token_rewards` of exported rows"
        yield ("rewards", "placement"), why


@rule("train.kl-estimator", "warning", "the KL penalty in the loss has an expected gradient of 0")
def kl_estimator(ctx: CheckContext) -> Iterator[Finding]:
    """`train.kl.estimator: k1` with a coefficient."""
    train = ctx.spec.train
    if train is not None and train.samples_episodes and train.kl.in_loss and train.kl.estimator == "k1":
        message = (
            "the expected gradient of `k1` is 0: in the loss it adds noise and does not keep the policy "
            "near the reference"
        )
        fix = "use `k2` or `k3`, or `in: reward`; `k1` estimates the value of the KL divergence"
        yield Finding(message, ("train", "kl", "estimator"), fix)


@rule("train.delta", "warning", "`train.loss.delta` is below the upper clip bound")
def delta(ctx: CheckContext) -> Iterator[Finding]:
    """`delta` below `1 + clip_high`."""
    train = ctx.spec.train
    if train is not None and train.samples_episodes and train.loss.too_small_delta is not None:
        bound = 1 + getattr(train.loss, "clip_high", 0.0)
        message = (
            f"`delta: {train.loss.too_small_delta:g}` is below `1 + clip_high` = {bound:g}: negative "
            "advantages are cut earlier than "
            "positive ones, inside of the range that the clip allows"
        )
        yield Finding(message, ("train", "loss", "delta"), f"set it above {bound:g}, such as 4.0, or remove it")


@rule("rewards.no-effect", "warning", "an option of `rewards` has no effect in this combination")
def rewards_no_effect(ctx: CheckContext) -> Iterator[Finding]:
    """Keys of the credit method, and keys and amounts of reward rules, that change nothing."""
    rewards = ctx.spec.rewards
    for key, why in rewards.credit.keys_without_effect.items():
        path: DataPath = ("rewards", "credit", key)
        if ctx.written(*path):
            yield Finding(f"`{key}` has no effect: {why}", path, "remove it", key=True)
    without = rewards.credit.keys_without_effect
    turn_keys = [
        key for key in rewards.credit.turn_keys if ctx.written("rewards", "credit", key) and key not in without
    ]
    for key in turn_keys if turn_keys and _one_turn(ctx) else ():
        message = f"`{key}` has no effect: an episode has one turn of the model, and it acts between turns"
        yield Finding(message, ("rewards", "credit", key), "remove it, or allow more turns", key=True)
    alone = ctx.spec.train is not None and ctx.spec.train.samples_episodes and ctx.spec.rollout.samples_per_task == 1
    if alone and not rewards.credit.needs_state_key and getattr(rewards.credit, "scale", "none") != "none":
        message = "`scale` has no effect: a group of one episode (`rollout.samples_per_task`) has no standard deviation"
        yield Finding(message, ("rewards", "credit", "scale"), "set `rollout.samples_per_task` to 4 or more")
    for index, item in enumerate(rewards.reassign):
        path = ("rewards", "reassign", index)
        if ctx.written(*path, "discount") and "each" not in (item.from_, item.to):
            message = "`discount` has no effect: it belongs to the address `each`"
            yield Finding(message, (*path, "discount"), "remove it, or use `to: each`", key=True)
        for key in ("share", "value"):
            if getattr(item, key) == 0 and item.op != "set":
                yield Finding(f"`{key}: 0` has no effect: nothing is moved or added", (*path, key), "remove the rule")


def _one_turn(ctx: CheckContext) -> bool:
    """Whether no episode has more than one turn of the model."""
    return ctx.spec.limits.assistant_turns == 1 or not several_turns(ctx)


@rule("tasks.no-effect", "warning", "a key of `tasks` is not read with this source")
def tasks_no_effect(ctx: CheckContext) -> Iterator[Finding]:
    """Keys that belong to another `source`."""
    places = [(TASKS, ctx), *(place for place in each_source(ctx) if place[0] != TASKS)]
    for at, source in places:
        yield from _of_other_sources(source, at)
    spec = ctx.spec
    shown = spec.messages or spec.conversation or spec.opening_environment
    if spec.tasks.overlong is not None and spec.environment is not None and not shown:
        message = "`overlong` counts no prompt: what the environment's `reset` shows is not counted"
        fix = "write `prompt: {field: …}`, or give an environment without state `effects: pure`"
        yield Finding(message, (*TASKS, "overlong"), fix)


def _of_other_sources(ctx: CheckContext, at: DataPath) -> Iterator[Finding]:
    tasks: TasksSpec = ctx.spec.tasks
    kinds = all_sources()
    for key in dict.fromkeys([*(name for facts in kinds.values() for name in facts.keys), *PLUGIN_KEYS]):
        path: DataPath = ("tasks", key)
        if key not in tasks.facts.keys and ctx.written(*path):
            readers = ", ".join(f"`{source}`" for source, facts in kinds.items() if key in facts.keys)
            message = f"`{key}` has no effect with `source: {tasks.source}`" + (
                f": it belongs to {readers}" if readers else ""
            )
            yield Finding(message, (*at, key), "remove it, or change `source`", key=True)
