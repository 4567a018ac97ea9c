"""Rules for `train.critic`. Imports neither torch nor the trainer."""

from __future__ import annotations

from collections.abc import Iterator

from engine.limits import LIMITS
from engine.plugins.critic.spec import NetworkCritic, ValueCritic
from engine.spec.text.diagnostic import DataPath
from engine.validate.context import CheckContext
from engine.validate.registry import Finding, rule


@rule("train.critic", "error", "the credit method needs a critic, or reads none")
def critic(ctx: CheckContext) -> Iterator[Finding]:
    """A method with `needs_values` without `train.critic`, or the other way round."""
    train, credit = ctx.spec.train, ctx.spec.rewards.credit
    if train is None or not train.samples_episodes:
        return
    if credit.needs_values and train.critic is None:
        yield Finding(
            f"`{credit.method}` needs a critic's values, and `train.critic` is not set",
            ("rewards", "credit", "method"),
            "add `train.critic: {kind: probe}`, or use a method that compares episodes: `turn_return`, `gigpo`, "
            "`mt_grpo`",
        )
    if train.critic is not None and not credit.needs_values:
        yield Finding(
            f"the credit method `{credit.method}` reads no values, so a critic would be trained for nothing",
            ("train", "critic"),
            "remove it, or use `rewards.credit: {method: turn_ppo}`, `bilevel_gae` or `gae`",
            key=True,
        )


@rule("train.critic-option", "warning", "an option of a training with a critic has no effect")
def critic_option(ctx: CheckContext) -> Iterator[Finding]:
    """Written keys that nothing reads in this spec."""
    train = ctx.spec.train
    if train is None or not isinstance(train.critic, ValueCritic) or not train.samples_episodes:
        return
    path: DataPath = ("train", "critic")
    passes = train.critic.update_epochs or train.update_epochs
    if ctx.written(*path, "clip") and train.critic.clip is not None and passes * train.minibatches == 1:
        yield Finding(
            "`clip` bounds how far values move over the updates of a batch, and the critic has one update per batch",
            (*path, "clip"),
            "set `train.critic.update_epochs` or `train.minibatches`, or remove it",
        )
    if train.epochs is None and ctx.written(*path, "warmup_steps") and train.critic.warmup_steps >= train.steps:
        message = (
            f"the critic alone is trained for {train.critic.warmup_steps} steps, and there are {train.steps}: the "
            "policy never"
        )
        yield Finding(f"{message} is", (*path, "warmup_steps"), "set it below `train.steps`")
    if ctx.written(*path, "bootstrap"):
        never = {limit.name for limit in LIMITS if not limit.may_stop(ctx.spec)}
        for index, name in enumerate(train.critic.bootstrap):
            if name in never:
                yield Finding(
                    f"the limit `{name}` is not set, so it ends no episode",
                    (*path, "bootstrap", index),
                    "remove it, or set the limit",
                )
    if ctx.written("train", "dynamic_sampling") and train.dynamic_sampling:
        yield Finding(
            "with a critic no group is dropped, because advantages are known only when the batch is trained on",
            ("train", "dynamic_sampling"),
            "remove it",
        )
    if isinstance(train.critic, NetworkCritic) and ctx.written(*path, "revision") and train.critic.path is None:
        yield Finding(
            "`path` is not set, so the critic begins as the policy's model, and `revision` has no effect",
            (*path, "revision"),
            "set `path`, or remove it",
            key=True,
        )
