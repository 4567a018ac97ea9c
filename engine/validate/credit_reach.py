"""Rules about rewards that the credit method does not read."""

from __future__ import annotations

from collections.abc import Iterator

from engine.schemas.reward import RewardEvent
from engine.schemas.train import OVERLONG_PENALTY, OverlongPenalty
from engine.spec.text.diagnostic import DataPath
from engine.validate.code.written_names import written_names
from engine.validate.context import CheckContext
from engine.validate.registry import Finding, rule
from engine.validate.rewards import REWARD
from engine.validate.worst_case import count_bound

_TURN_METHODS = "a method that uses the rewards of turns: `turn_return`, `turn_discount`, `gigpo`"
_NEWEST = ("last", None)


@rule("rewards.credit-ignores", "warning", "the credit method ignores to which turn a reward belongs")
def credit_ignores(ctx: CheckContext) -> Iterator[Finding]:
    """Transfers, a judge of each turn, and rewards of a certain turn, under a method that reads only the episode's sum."""
    credit = ctx.spec.rewards.credit
    if credit.uses_turn_rewards:
        return
    rest = f"`{credit.method}` reads only the sum of the episode's rewards"
    fix = f"use {_TURN_METHODS}, or remove it"
    for index, item in enumerate(ctx.spec.rewards.reassign):
        path: DataPath = ("rewards", "reassign", index)
        if item.op == "transfer":
            yield Finding(f"moving a reward to another turn has no effect: {rest}", path, fix)
        elif item.to not in (*_NEWEST, "each"):
            yield Finding(f"`to: {item.to}` has no effect: {rest}", (*path, "to"), fix)
    scorer = ctx.spec.rewards.scorer
    if scorer is not None and scorer.turns == "each":
        message = f"judging each turn has no effect beyond the sum of the scores: {rest}"
        yield Finding(message, ("rewards", "scorer", "turns"), fix)
    for path, event in _mark_events(ctx):
        if event.op == "transfer" or event.turn not in (*_NEWEST, "each"):
            yield Finding(f"the turn of this reward has no effect: {rest}", path, fix)


@rule("rewards.turns-in-sum", "info", "rewards of turns count only in the episode's sum")
def turns_in_sum(ctx: CheckContext) -> Iterator[Finding]:
    """Code that may write rewards during an episode of several turns, under a method that reads only the episode's sum."""
    credit = ctx.spec.rewards.credit
    if credit.uses_turn_rewards or not ctx.written("rewards", "credit") or not several_turns(ctx):
        return
    for item in ctx.spec_code:
        if item.role == "scorer":
            continue
        text = ctx.code_text(item.entry.use)
        if text is not None and {"rewards", "RewardEvent"} & written_names(text.definition.module.text).texts:
            message = f"`{item.entry.use}` may reward single turns, and `{credit.method}` reads only the sum of the episode's rewards"
            yield Finding(message, ("rewards", "credit"), f"use {_TURN_METHODS}", key=True)
            return


def several_turns(ctx: CheckContext) -> bool:
    """Whether an episode may have more than one turn of the model."""
    if not ctx.graph.exact:  # its counters only tell whether a limit is reached
        most = count_bound(ctx, "assistant_turns").most
        return most is None or most > 1
    places = [place.turns for name in ctx.states for place in ctx.graph.moments(name)]
    ctx.work.spend(len(places))
    return max(places, default=0) > 1


@rule("rewards.outcome-drops", "warning", "the credit method leaves out some rewards of the last turn")
def outcome_drops(ctx: CheckContext) -> Iterator[Finding]:
    """`mt_grpo` with `outcome: [names]`, and another reward that the last turn may get."""
    credit = ctx.spec.rewards.credit
    counted = credit.last_turn_names
    if counted is None:
        return
    left_out = [name for name in dict.fromkeys(_last_turn_rewards(ctx)) if name not in counted]
    if left_out:
        names = " and ".join(f"`{name}`" for name in left_out)
        verb = "reaches" if len(left_out) == 1 else "reach"
        message = f"in the last turn only {_listed(counted)} counts: {names} {verb} no token there"
        fix = "add it to `outcome`, or remove `outcome`: then all rewards of the last turn count"
        yield Finding(message, ("rewards", "credit", "outcome"), fix)


def _last_turn_rewards(ctx: CheckContext) -> Iterator[str]:
    """Names of rewards that the spec itself says are written, and that the last turn may get."""
    rewards = ctx.spec.rewards
    if rewards.scorer is not None and rewards.scorer.model_played:
        yield rewards.scorer.name
    if ctx.spec.train is not None and isinstance(ctx.spec.train.overlong, OverlongPenalty):
        yield OVERLONG_PENALTY
    for item in rewards.reassign:
        if item.op != "transfer" and item.to in ("last", "all", "each"):
            yield item.name or REWARD
    for _, user in ctx.users:
        yield from (mark.reward for mark in user.marks if mark.reward is not None)
    for _, event in _mark_events(ctx):
        if event.op != "transfer":
            yield event.name or REWARD


def _mark_events(ctx: CheckContext) -> Iterator[tuple[DataPath, RewardEvent]]:
    """The rewards in the marks of model-played users."""
    for path, user in ctx.users:
        for index, mark in enumerate(user.marks):
            for number, event in enumerate(mark.rewards):
                yield (*path, "marks", index, "rewards", number), event


def _listed(names: tuple[str, ...]) -> str:
    return " and ".join(f"`{name}`" for name in names)
