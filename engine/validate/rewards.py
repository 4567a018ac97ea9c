"""Rules about rewards: the turns and names in reward rules exist, and the credit method has what it needs."""

from __future__ import annotations

from collections.abc import Iterator

from engine.schemas.credit import ReassignRule
from engine.schemas.reward import TurnAddress
from engine.spec.added import spec_facts
from engine.spec.text.diagnostic import DataPath
from engine.spec.text.near import nearest_name
from engine.validate.chart import Place
from engine.validate.code.code_names import code_names, names_of_plugins
from engine.validate.code.written_names import WrittenNames
from engine.validate.context import CheckContext
from engine.validate.registry import Finding, rule

REWARD = "reward"
"""The name of a reward without a name."""


def _rules(ctx: CheckContext) -> Iterator[tuple[DataPath, ReassignRule]]:
    for index, item in enumerate(ctx.spec.rewards.reassign):
        if item.at in ctx.states:  # otherwise `rules.unknown-state` reports it
            yield ("rewards", "reassign", index), item


def _turns_needed(address: TurnAddress | None) -> int:
    """The number of turns that must exist before an address refers to one."""
    if isinstance(address, int):
        return address + 1
    return 0 if address is None else 2 if address in ("second", "previous") else 1


def _means(address: TurnAddress | None, turns: int) -> int | None:
    """The turn that an address refers to after `turns` turns; None if it refers to several or none."""
    if address is None or turns < _turns_needed(address):
        return None
    if isinstance(address, int):
        return address
    return {"first": 0, "second": 1, "previous": turns - 2, "last": turns - 1}.get(address, 0 if turns == 1 else None)


def _moments(ctx: CheckContext, item: ReassignRule) -> list[Place]:
    """The places in which a rule may apply. In a final state, only places with a turn count, if there are any."""
    when = None if item.when is None else ctx.formula(item.when)
    moments = ctx.graph.moments(item.at)
    ctx.work.spend(len(moments))
    found = [place for place in moments if not place.late]
    if ctx.states[item.at].final:
        found = [place for place in found if place.turns] or found
    return [place for place in found if when is None or ctx.graph.truth(when, place, ctx.work) is not False]


def _addresses(item: ReassignRule) -> list[tuple[str, TurnAddress]]:
    found: list[tuple[str, TurnAddress]] = [] if item.from_ is None else [("from", item.from_)]
    return [*found, ("to", item.to)]


@rule("rewards.no-such-turn", "error", "a rule addresses a turn that no episode can have")
def no_such_turn(ctx: CheckContext) -> Iterator[Finding]:
    """The limits end the episode before that turn, or the rule's state occurs before it."""
    for path, item in _rules(ctx):
        moments = _moments(ctx, item)
        if not moments or not ctx.graph.exact or ctx.spec.limits.assistant_turns is None:
            continue
        most = max(place.turns for place in moments)
        for key, address in _addresses(item):
            if most < _turns_needed(address):
                had = "no turn" if most == 0 else "one turn" if most == 1 else f"{most} turns"
                message = f"there is no turn `{address}`: after `{item.at}` the model has had at most {had}"
                where = (*path, key) if ctx.written(*path, key) else path
                yield Finding(message, where, "use a turn that exists, or raise `limits.assistant_turns`")


@rule("rewards.turn-may-miss", "warning", "a rule may apply before its turn exists, which fails the episode")
def turn_may_miss(ctx: CheckContext) -> Iterator[Finding]:
    """The same for a transfer from a turn to itself."""
    for path, item in _rules(ctx):
        moments = _moments(ctx, item)
        turns = {place.turns for place in moments}
        if not turns or not ctx.graph.exact:
            continue
        least, most = min(turns), max(turns)
        needed = max(_turns_needed(address) for _, address in _addresses(item))
        if least < needed <= most:
            address = next(address for _, address in _addresses(item) if _turns_needed(address) == needed)
            had = "no turn" if least == 0 else "one turn" if least == 1 else f"{least} turns"
            message = f"the rule may apply after {had}, when there is no turn `{address}`: the episode would fail"
            yield Finding(message, path, _wait(item, needed - 1))
            continue
        same = [count for count in turns if _same_turn(item, count)]
        if same and len(same) < len(turns):
            message = f"after turn {min(same) - 1}, `{item.from_}` and `{item.to}` are the same: the episode would fail"
            yield Finding(message, path, _wait(item, max(same)))


def _wait(item: ReassignRule, turns: int) -> str:
    condition = f"turns.assistant > {turns}"
    return f"add `when: {condition}`" if item.when is None else f"add `&& {condition}` to its `when`"


def _same_turn(item: ReassignRule, turns: int) -> bool:
    payer, receiver = _means(item.from_, turns), _means(item.to, turns)
    same = item.op == "transfer" and item.part == item.to_part
    return same and payer is not None and payer == receiver


@rule("rewards.unpayable", "error", "a transfer that can never move a reward")
def unpayable(ctx: CheckContext) -> Iterator[Finding]:
    """It is from a turn to itself, or nothing writes the reward that it moves."""
    for path, item in _rules(ctx):
        if item.op != "transfer":
            continue
        turns = {place.turns for place in _moments(ctx, item)}
        certain = ctx.graph.exact or item.from_ == item.to
        if certain and turns and all(_same_turn(item, count) for count in turns):
            fix = "name two turns"
            yield Finding(f"a transfer from `{item.from_}` to `{item.to}` is from a turn to itself", path, fix)
        elif not _code_may_reward(ctx) and not _written(ctx, item.name):
            what = "a reward" if item.name is None else f"`{item.name}`"
            where = (*path, "name") if item.name is not None else path
            message = f"nothing writes {what}: the spec has no environment, user, tool or scorer, and no rule adds it"
            yield Finding(message, where, "add an environment, user, tool or scorer that writes it, or remove the rule")


def _code_may_reward(ctx: CheckContext) -> bool:
    """Whether anything other than reward rules may write rewards."""
    return bool(
        ctx.spec.environment
        or ctx.spec.users_by_name
        or ctx.spec.tools
        or ctx.spec.rewards.scorer
        or any(facts.rewards for facts in spec_facts(ctx.spec))
        or ctx.own_actions
        or names_of_plugins(ctx)
    )


def _written(ctx: CheckContext, name: str | None) -> bool:
    """Whether some rule adds or sets a name; for None, any name."""
    names = {item.name or REWARD for item in ctx.spec.rewards.reassign if item.op != "transfer"}
    return bool(names) if name is None else name in names


@rule("rewards.unknown-name", "warning", "a reward name that nothing writes")
def unknown_name(ctx: CheckContext) -> Iterator[Finding]:
    """No rule writes it, and the code of environments, users and tools does not mention it."""
    named: list[tuple[DataPath, str]] = [
        ((*path, "name"), item.name) for path, item in _rules(ctx) if item.op == "transfer" and item.name
    ]
    credit = ctx.spec.rewards.credit
    for key in credit.reward_keys:
        value = getattr(credit, key)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        named += [
            (("rewards", "credit", key, *((index,) if isinstance(value, list) else ())), name)
            for index, name in enumerate(listed)
        ]
    code = code_names(ctx) if named and _code_may_reward(ctx) else WrittenNames()
    known = _spec_rewards(ctx) | code.texts
    for path, name in named:
        if code.other_rewards or name in known or name == REWARD or _written(ctx, name):
            continue
        if _code_may_reward(ctx) or "credit" in path:  # without any such code, `rewards.unpayable` reports a rule
            message = f"nothing writes a reward `{name}`: no rule does, and the code of environments, users and tools does not mention it"
            near = nearest_name(name, sorted(item for item in known if item.isidentifier()))
            yield Finding(
                message, path, f"did you mean `{near}`?" if near else "check its name in the code that writes it"
            )


def _spec_rewards(ctx: CheckContext) -> set[str]:
    """The names of rewards that the spec's scorer and marks write."""
    scorer = ctx.spec.rewards.scorer
    found = {REWARD, *([scorer.name] if scorer is not None else [])}
    found |= {name for facts in spec_facts(ctx.spec) for name in facts.rewards}
    for _, user in ctx.users:
        found |= {mark.reward for mark in user.marks if mark.reward is not None}
        found |= {event.name for mark in user.marks for event in mark.rewards if event.name is not None}
    return found


@rule("rewards.credit-needs", "warning", "the credit method needs values or states that the spec does not give")
def credit_needs(ctx: CheckContext) -> Iterator[Finding]:
    """A critic's values, or a `state_key`."""
    credit = ctx.spec.rewards.credit
    path: DataPath = ("rewards", "credit")
    if not ctx.written(*path):
        return
    method = credit.method
    if credit.needs_values and ctx.spec.train is None:
        message = (
            f"`{method}` needs a critic's value before every sampled token, and a run without training has no critic"
        )
        fix = "give values with `engine export --values`, or use a method without a critic: `turn_return`, `gigpo`"
        yield Finding(message, (*path, "method"), fix)
    if credit.default_state is not None and credit.declared_state_key is None:
        message = f"`{method}` has no `state_key`: two turns began in the same state only if {credit.default_state}"
        yield Finding(message, (*path, "method"), "add `state_key`: the name of a fact, or a CEL expression")


@rule(
    "rewards.credit-group", "info", "the credit method compares the episodes of a task, and there is only one per task"
)
def credit_group(ctx: CheckContext) -> Iterator[Finding]:
    """In a group of one, the group's mean leaves no advantage, and there are no others whose mean is a baseline."""
    credit, written = ctx.spec.rewards.credit, ctx.written("rewards", "credit")
    if ctx.spec.rollout.samples_per_task > 1 or not (written or ctx.spec.train):
        return
    if credit.zero_without_group:
        effect = "every advantage is 0"
    elif credit.no_baseline_without_group:
        effect = "no baseline is subtracted"
    else:
        return
    message = f"`{credit.method}` compares episodes of one task, and `rollout.samples_per_task` is 1: {effect}"
    path: DataPath = ("rewards", "credit", "method") if written else ("train",)
    fix = "set `rollout.samples_per_task` to 4 or more, or `rewards.credit.baseline: none`"
    yield Finding(message, path, fix, key=not written)
