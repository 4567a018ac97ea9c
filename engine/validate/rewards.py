"""Rules about rewards: their turns and names exist, the credit method reads them, no reply is better cut off."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from engine.actions.facts import ACTIONS
from engine.schemas.credit import ComparedCredit, ReassignRule
from engine.schemas.limits import ALWAYS, OVERFLOW
from engine.schemas.reward import RewardEvent, TurnAddress, TurnChoice
from engine.schemas.train import OVERLONG_PENALTY, OverlongPenalty
from engine.spec.added import spec_facts
from engine.spec.text.diagnostic import DataPath
from engine.spec.text.near import nearest_name
from engine.validate.code.source import last_name
from engine.validate.code.written_names import WrittenNames, code_names, names_of, names_of_plugins, written_names
from engine.validate.context import CheckContext, closure, nearest
from engine.validate.explore import START, TURNS, Place
from engine.validate.registry import Finding, rule
from engine.validate.worst_case import count_bound

REWARD = "reward"
"""The name of a reward without a name."""


def _rules(ctx: CheckContext) -> list[tuple[DataPath, ReassignRule]]:
    """The reward rules, without those that `rules.unknown-state` reports."""
    return [
        (("rewards", "reassign", index), item)
        for index, item in enumerate(ctx.spec.rewards.reassign)
        if item.at in ctx.states
    ]


_Chosen = tuple[tuple[TurnChoice, int | None], ...]


class _Moment(NamedTuple):
    """What is known when a rule may apply."""

    turns: int
    """The turns of the model so far."""
    chosen: _Chosen = ()
    """The turn of each address by state or event; None: there is none yet. Without those that are not known."""

    def lacks(self, address: TurnAddress) -> bool:
        """Whether there is no such turn yet."""
        if isinstance(address, TurnChoice):
            return (address, None) in self.chosen
        return self.turns < _turns_needed(address)

    def means(self, address: TurnAddress | None) -> int | None:
        """The turn that an address refers to; None if it refers to several or none, or that is not known."""
        if isinstance(address, TurnChoice):
            return dict(self.chosen).get(address)
        if address is None or self.lacks(address):
            return None
        if isinstance(address, int):
            return address
        by_name = {"first": 0, "second": 1, "previous": self.turns - 2, "last": self.turns - 1}
        return by_name.get(address, 0 if self.turns == 1 else None)


def _turns_needed(address: TurnAddress) -> int:
    """The number of turns that must exist before an address refers to one."""
    if isinstance(address, int):
        return address + 1
    return 2 if address in ("second", "previous") else 1


def _moments(ctx: CheckContext, item: ReassignRule) -> list[_Moment]:
    """When a rule may apply, each once. In a final state, only with a turn, if there may be any."""
    when = None if item.when is None else ctx.formula(item.when)
    choices = [address for _, address in _addresses(item) if isinstance(address, TurnChoice)]
    if choices and ctx.graph.exact and ctx.spec.limits.assistant_turns is not None:
        places = _chosen(ctx, item.at, choices)
    else:
        places = [(place, ()) for place in ctx.graph.moments(item.at) if not place.late]
        ctx.work.spend(len(places))
    if ctx.states[item.at].final:
        places = [(place, chosen) for place, chosen in places if place.turns] or places
    return list(
        dict.fromkeys(
            _Moment(place.turns, chosen)
            for place, chosen in places
            if when is None or ctx.graph.truth(when, place, ctx.work) is not False
        )
    )


def _chosen(ctx: CheckContext, state: str, choices: list[TurnChoice]) -> list[tuple[Place, _Chosen]]:
    """The places after the action of a state, with the turns that some addresses mean there, on all paths."""
    start: tuple[Place, _Chosen] = (Place(ctx.machine.initial, START), tuple((choice, None) for choice in choices))
    seen = {start}
    moments: dict[tuple[Place, _Chosen], None] = {}
    waiting = [start]
    while waiting:
        place, chosen = waiting.pop()
        if place.state == state and ctx.states[state].final:
            moments[place, chosen] = None
        for step in ctx.graph.steps[place]:
            ctx.work.spend()
            after = (step.dest, chosen)
            if TURNS in step.used:
                kinds, newest = (place.state, step.event), step.dest.turns - 1
                after = (
                    step.dest,
                    tuple(
                        (choice, newest if choice.name in kinds and (turn is None or choice.last) else turn)
                        for choice, turn in chosen
                    ),
                )
            if place.state == state and step.event not in (*ALWAYS, OVERFLOW):
                moments[after] = None
            if after not in seen and not step.dest.late:
                seen.add(after)
                waiting.append(after)
    return [*moments]


def _addresses(item: ReassignRule) -> list[tuple[str, TurnAddress]]:
    """The turns that a rule names, each with its key."""
    return [("turn", item.turn), *([] if item.to is None else [("to", item.to)])]


@rule("rewards.no-such-turn", "error", "a rule addresses a turn that no episode can have")
def no_such_turn(ctx: CheckContext) -> Iterator[Finding]:
    """The limits end the episode before that turn, the rule's state occurs before it, or no turn is sampled in its
    state or ends with its event."""
    kinds = [name for name, state in ctx.states.items() if state.action == "generate"]
    kinds += ACTIONS["generate"].events or ()
    places: list[tuple[DataPath, ReassignRule | RewardEvent]] = [*_rules(ctx), *_mark_events(ctx)]
    for path, addressed in places:
        for key, address in (("turn", addressed.turn), ("to", addressed.to)):
            if isinstance(address, TurnChoice) and address.name not in kinds:
                yield Finding(
                    f"no turn of the model is sampled in a state `{address.name}` or ends with such an event",
                    (*path, key, "first" if address.first else "last"),
                    nearest(address.name, kinds),
                )
    for path, item in _rules(ctx):
        moments = _moments(ctx, item)
        if not moments or not ctx.graph.exact or ctx.spec.limits.assistant_turns is None:
            continue
        most = max(moment.turns for moment in moments)
        for key, address in _addresses(item):
            if not all(moment.lacks(address) for moment in moments):
                continue
            where = (*path, key) if ctx.written(*path, key) else path
            if not isinstance(address, TurnChoice):
                had = "no turn" if most == 0 else "one turn" if most == 1 else f"{most} turns"
                yield Finding(
                    f"there is no turn `{address}`: after `{item.at}` the model has had at most {had}",
                    where,
                    "use a turn that exists, or raise `limits.assistant_turns`",
                )
            elif address.name in kinds:
                yield Finding(
                    f"there is no turn `{address}` when the rule applies: `{item.at}` comes before it",
                    where,
                    "use a turn that exists, or apply the rule in a later state",
                )


@rule("rewards.turn-may-miss", "warning", "a rule may apply before its turn exists, which fails the episode")
def turn_may_miss(ctx: CheckContext) -> Iterator[Finding]:
    """The same for a transfer from a turn to itself."""
    for path, item in _rules(ctx):
        moments = _moments(ctx, item)
        turns = {moment.turns for moment in moments}
        missing = [address for _, address in _addresses(item) if any(moment.lacks(address) for moment in moments)]
        if not turns or not ctx.graph.exact or any(all(m.lacks(address) for m in moments) for address in missing):
            continue
        if missing:
            address = max(missing, key=lambda one: isinstance(one, TurnChoice) or _turns_needed(one))
            least = min(moment.turns for moment in moments if moment.lacks(address))
            most = max(moment.turns for moment in moments if moment.lacks(address))
            had = "no turn" if least == 0 else "one turn" if least == 1 else f"{least} turns"
            message = f"the rule may apply after {had}, when there is no turn `{address}`: the episode would fail"
            if not isinstance(address, TurnChoice):
                most = _turns_needed(address) - 1
            yield Finding(message, path, _wait(item, most) if most < max(turns) else _LATER)
            continue
        same = {moment.turns for moment in moments if _same_turn(item, moment)}
        if same and not all(_same_turn(item, moment) for moment in moments):
            yield Finding(
                f"after turn {min(same) - 1}, `{item.turn}` and `{item.to}` are the same: the episode would fail",
                path,
                _wait(item, max(same)) if max(same) < max(turns) else _LATER,
            )


_LATER = "apply the rule in a state that comes after that turn alone, or add a `when` with a fact that says so"


def _wait(item: ReassignRule, turns: int) -> str:
    condition = f"turns.assistant > {turns}"
    return f"add `when: {condition}`" if item.when is None else f"add `&& {condition}` to its `when`"


def _same_turn(item: ReassignRule, moment: _Moment) -> bool:
    payer, receiver = moment.means(item.turn), moment.means(item.to)
    same = item.op == "transfer" and item.part == item.to_part
    return same and payer is not None and payer == receiver


@rule("rewards.unpayable", "error", "a transfer that can never move a reward")
def unpayable(ctx: CheckContext) -> Iterator[Finding]:
    """It is from a turn to itself, or nothing writes the reward that it moves."""
    for path, item in _rules(ctx):
        if item.op != "transfer":
            continue
        moments = _moments(ctx, item)
        certain = ctx.graph.exact or item.turn == item.to
        if certain and moments and all(_same_turn(item, moment) for moment in moments):
            yield Finding(
                f"a transfer from `{item.turn}` to `{item.to}` is from a turn to itself", path, "name two turns"
            )
        elif not _code_may_reward(ctx) and not _written(ctx, item.name):
            what = "a reward" if item.name is None else f"`{item.name}`"
            yield Finding(
                f"nothing writes {what}: the spec has no environment, user, tool or scorer, and no rule adds it",
                (*path, "name") if item.name is not None else path,
                "add an environment, user, tool or scorer that writes it, or remove the rule",
            )


@rule("rewards.nothing-to-move", "warning", "a transfer from a turn that cannot hold the reward yet")
def nothing_to_move(ctx: CheckContext) -> Iterator[Finding]:
    """What writes the reward comes after the rule's state on every path, or pays only a later turn."""
    for path, item in _rules(ctx):
        writers = _writers(ctx, item.name) if item.op == "transfer" else None
        moved = item.turn != "last" and sum(other.op == "transfer" for _, other in _rules(ctx)) > 1
        if not writers or moved:
            continue  # `rewards.unpayable` and `rewards.unknown-name` report a reward that nothing writes
        steps = [(edge.source, edge.dest) for edge in ctx.live]
        asks = set(ctx.performing("generate"))
        before = closure(writers, [step for step in steps if step[1] not in asks] if item.turn == "last" else steps)
        if item.turn in ("previous", "first", "second") or isinstance(item.turn, int):
            replies = before & asks
            before = closure([dest for source, dest in steps if source in replies], steps)
        if item.at in before:
            continue
        what = "a reward" if item.name is None else f"`{item.name}`"
        places = " and ".join(sorted(writers))
        yield Finding(
            f"in {item.at} the turn `{item.turn}` cannot hold {what}: it is written in {places}, for the last turn",
            path,
            "move the rule to a state after that (`at`), or name a turn that was paid",
        )


def _writers(ctx: CheckContext, name: str | None) -> frozenset[str] | None:
    """The states after which a reward may be written for the last turn; None if others may write it."""
    final = [state for state in ctx.states if ctx.states[state].final or ctx.states[state].action == "score"]
    of_role = {"environment": [*ctx.performing("step"), *final], "user": ctx.performing("ask_user"), "scorer": final}
    if any(facts.rewards for facts in spec_facts(ctx.spec)) or names_of_plugins(ctx) or ctx.own_actions:
        return None
    states: set[str] = set()
    for code in ctx.spec_code:
        names = names_of(ctx, code.entry.use, code.role)
        if names.other_rewards or "turn" in names.texts or (code.role not in of_role and code.role != "tool"):
            return None
        if {"rewards", "value"} & names.texts if name is None else name in names.texts:
            states.update(of_role.get(code.role, ctx.calling))
    scorer = ctx.spec.rewards.scorer
    if scorer is not None and scorer.use is None and name in (None, scorer.name):
        states.update(final)
    if any(user.use is None for _, user in ctx.users):
        states.update(of_role["user"])
    for item in ctx.spec.rewards.reassign:
        if item.op != "transfer" and name in (None, item.name or REWARD):
            states.add(item.at)
            if item.turn != "last":
                return None
    return frozenset(states)


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
    scorer = ctx.spec.rewards.scorer
    names = {REWARD, *code.texts, *([scorer.name] if scorer is not None else [])}
    names |= {name for facts in spec_facts(ctx.spec) for name in facts.rewards}
    names |= {mark.reward for _, user in ctx.users for mark in user.marks if mark.reward is not None}
    names |= {event.name for _, event in _mark_events(ctx) if event.name is not None}
    for path, name in named:
        if code.other_rewards or name in names or _written(ctx, name):
            continue
        if _code_may_reward(ctx) or "credit" in path:  # without any such code, `rewards.unpayable` reports a rule
            near = nearest_name(name, sorted(item for item in names if item.isidentifier()))
            yield Finding(
                f"nothing writes a reward `{name}`: no rule does, and the code of environments, users and "
                "tools does not mention it",
                path,
                f"did you mean `{near}`?" if near else "check its name in the code that writes it",
            )


@rule("rewards.credit-needs", "warning", "the credit method needs values or states that the spec does not give")
def credit_needs(ctx: CheckContext) -> Iterator[Finding]:
    """A critic's values, or a `state_key`."""
    credit = ctx.spec.rewards.credit
    path: DataPath = ("rewards", "credit")
    if not ctx.written(*path):
        return
    method = credit.method
    if credit.needs_values and ctx.spec.train is None:
        yield Finding(
            f"`{method}` needs a critic's value before every sampled token, and a run without training has no critic",
            (*path, "method"),
            "give values with `engine export --values`, or use a method without a critic: `turn_return`, `gigpo`",
        )
    if credit.default_state is not None and credit.declared_state_key is None:
        yield Finding(
            f"`{method}` has no `state_key`: two turns began in the same state only if {credit.default_state}",
            (*path, "method"),
            "add `state_key`: the name of a fact, or a CEL expression",
        )


@rule(
    "rewards.credit-group", "info", "the credit method compares the episodes of a task, and there is only one per task"
)
def credit_group(ctx: CheckContext) -> Iterator[Finding]:
    """In a group of one, the group's mean leaves no advantage, and there are no others whose mean is a baseline."""
    credit, written = ctx.spec.rewards.credit, ctx.written("rewards", "credit")
    if ctx.spec.rollout.samples_per_task > 1 or not (written or ctx.spec.train):
        return
    without_baseline = isinstance(credit, ComparedCredit) and credit.baseline == "leave_one_out"
    if not (credit.zero_without_group or without_baseline):
        return
    effect = "every advantage is 0" if credit.zero_without_group else "no baseline is subtracted"
    yield Finding(
        f"`{credit.method}` compares episodes of one task, and `rollout.samples_per_task` is 1: {effect}",
        ("rewards", "credit", "method") if written else ("train",),
        "set `rollout.samples_per_task` to 4 or more, or `rewards.credit.baseline: none`",
        key=not written,
    )


_TURN_METHODS = "a method that uses the rewards of turns: `turn_return`, `turn_discount`, `gigpo`"
_NEWEST = ("last", None)


@rule("rewards.credit-ignores", "warning", "the credit method ignores to which turn a reward belongs")
def credit_ignores(ctx: CheckContext) -> Iterator[Finding]:
    """Transfers, a judge of each turn, and rewards of one turn, under a method that reads only the episode's sum."""
    credit = ctx.spec.rewards.credit
    if credit.uses_turn_rewards:
        return
    rest = f"`{credit.method}` reads only the sum of the episode's rewards"
    fix = f"use {_TURN_METHODS}, or remove it"
    for index, item in enumerate(ctx.spec.rewards.reassign):
        path: DataPath = ("rewards", "reassign", index)
        if item.op == "transfer":
            yield Finding(f"moving a reward to another turn has no effect: {rest}", path, fix)
        elif item.turn not in (*_NEWEST, "each"):
            yield Finding(f"`turn: {item.turn}` has no effect: {rest}", (*path, "turn"), fix)
    scorer = ctx.spec.rewards.scorer
    if scorer is not None and scorer.turns == "each":
        yield Finding(
            f"judging each turn has no effect beyond the sum of the scores: {rest}", ("rewards", "scorer", "turns"), fix
        )
    for path, event in _mark_events(ctx):
        if event.op == "transfer" or event.turn not in (*_NEWEST, "each"):
            yield Finding(f"the turn of this reward has no effect: {rest}", path, fix)


@rule("rewards.turns-in-sum", "info", "rewards of turns count only in the episode's sum")
def turns_in_sum(ctx: CheckContext) -> Iterator[Finding]:
    """Code that may reward turns of an episode of several, under a method that reads only the episode's sum."""
    credit = ctx.spec.rewards.credit
    if credit.uses_turn_rewards or not ctx.written("rewards", "credit") or not several_turns(ctx):
        return
    for item in ctx.spec_code:
        if item.role == "scorer":
            continue
        text = ctx.code_text(item.entry.use)
        if text is not None and {"rewards", "RewardEvent"} & written_names(text.definition.module).texts:
            yield Finding(
                f"`{item.entry.use}` may reward single turns, and `{credit.method}` reads only the sum of the "
                "episode's rewards",
                ("rewards", "credit"),
                f"use {_TURN_METHODS}",
                key=True,
            )
            return


def several_turns(ctx: CheckContext) -> bool:
    """Whether an episode may have more than one turn of the model."""
    if ctx.spec.limits.assistant_turns == 1:
        return False
    if not ctx.graph.exact:  # its counters only tell whether a limit is reached
        most = count_bound(ctx, "assistant_turns").most
        return most is None or most > 1
    places = [place.turns for name in ctx.states for place in ctx.graph.moments(name)]
    ctx.work.spend(len(places))
    return max(places, default=0) > 1


@rule("rewards.outcome-drops", "warning", "the credit method leaves out some rewards of the last turn")
def outcome_drops(ctx: CheckContext) -> Iterator[Finding]:
    """`mt_grpo` with `outcome: [names]`, and another reward that the last turn may get."""
    counted = ctx.spec.rewards.credit.last_turn_names
    if counted is None:
        return
    rewards, train = ctx.spec.rewards, ctx.spec.train
    written = [rewards.scorer.name] if rewards.scorer is not None and rewards.scorer.model_played else []
    if train is not None and isinstance(train.overlong, OverlongPenalty):
        written.append(OVERLONG_PENALTY)
    written += [
        item.name or REWARD
        for item in rewards.reassign
        if item.op != "transfer" and (item.turn in ("last", "all", "each") or isinstance(item.turn, TurnChoice))
    ]
    written += [mark.reward for _, user in ctx.users for mark in user.marks if mark.reward is not None]
    written += [event.name or REWARD for _, event in _mark_events(ctx) if event.op != "transfer"]
    left_out = [name for name in dict.fromkeys(written) if name not in counted]
    if left_out:
        names = " and ".join(f"`{name}`" for name in left_out)
        verb = "reaches" if len(left_out) == 1 else "reach"
        only = " and ".join(f"`{name}`" for name in counted)
        yield Finding(
            f"in the last turn only {only} counts: {names} {verb} no token there",
            ("rewards", "credit", "outcome"),
            "add it to `outcome`, or remove `outcome`: then all rewards of the last turn count",
        )


def _mark_events(ctx: CheckContext) -> list[tuple[DataPath, RewardEvent]]:
    """The rewards in the marks of model-played users."""
    return [
        ((*path, "marks", index, "rewards", number), event)
        for path, user in ctx.users
        for index, mark in enumerate(user.marks)
        for number, event in enumerate(mark.rewards)
    ]


_FINISH = "last.finish"
Cost = tuple[float, str]
"""A cost, more than 0, and the key or code that states it."""


@rule("rewards.truncated-pays", "info", "a reply that is cut off costs less than a wrong reply")
def truncated_pays(ctx: CheckContext) -> Iterator[Finding]:
    """`truncated` leads to a final state that nothing judges, and the spec or its code punishes wrong replies."""
    for name in ctx.performing("generate"):
        ends = [edge.dest for edge in ctx.live if edge.source == name and edge.trigger == "truncated"]
        end = next((dest for dest in ends if dest in ctx.states and ctx.states[dest].final), None)
        paid = None if end is None else _cut_off(ctx, name, end)
        wrong = max(_wrong(ctx), default=None)
        if end is None or paid is None or wrong is None or wrong[0] <= paid:
            continue
        judge = _judges(ctx)[0]
        yield Finding(
            f"a reply that is cut off ends the episode and costs {paid:g}; a wrong reply may cost {wrong[0]:g} "
            f"({wrong[1]}), so long replies without an answer pay",
            ctx.state_path(name),
            f"let `{judge}` judge it: add the transition `{{trigger: truncated, source: {name}, dest: "
            f"{judge}}}`; or take as much "
            f"by `rewards.reassign: [{{at: {end}, when: \"{_FINISH} == 'length'\", op: add, value: {-wrong[0]:g}}}]`",
            key=True,
        )


def _judges(ctx: CheckContext) -> list[str]:
    """Reachable states in which the environment or a user judges a reply."""
    asking = (*ctx.performing("step"), *ctx.performing("ask_user"))
    return [name for name in ctx.states if name in asking]


def _cut_off(ctx: CheckContext, state: str, end: str) -> float | None:
    """What a cut-off reply costs that leads from `state` to the final state `end`; None: it is judged or not trained
    on."""
    train, scorer, environment = ctx.spec.train, ctx.spec.rewards.scorer, ctx.spec.environment
    if scorer is not None or (train is not None and train.overlong == "mask"):
        return None
    if environment is not None:
        text = ctx.code_text(environment.entry.use)
        node = None if text is None else text.definition.node
        inherits = isinstance(node, ast.ClassDef) and bool(node.bases)
        if node is None or inherits or any(getattr(item, "name", "") == "score" for item in node.body):
            return None  # its `score` judges, or may be inherited
    cost = 0.0
    for item in _takes(ctx):
        if item.at in (state, end):
            if item.when is not None and _FINISH not in item.when:
                return None
            cost -= item.value or 0.0
    if train is not None and isinstance(train.overlong, OverlongPenalty):
        cost += train.overlong.coefficient
    return cost


def _takes(ctx: CheckContext) -> list[ReassignRule]:
    """Rules that take a reward."""
    return [item for item in ctx.spec.rewards.reassign if item.op != "transfer" and (item.value or 0.0) < 0]


def _wrong(ctx: CheckContext) -> Iterator[Cost]:
    """What a wrong reply may cost, by each key and line of code that says it."""
    judges = set(_judges(ctx))
    for item in _takes(ctx):
        if item.at in judges and item.value is not None:
            yield -item.value, f"`rewards.reassign` at `{item.at}`"
    actions = {ctx.states[name].action for name in judges}
    environment = ctx.spec.environment
    if environment is not None and environment.facts is None and "step" in actions:
        yield from _in_code(ctx, ("environment",), environment.use, environment.with_)
    if "ask_user" not in actions:
        return
    for path, user in ctx.users:
        for index, mark in enumerate(user.marks):
            for event in mark.rewards:
                if event.op != "transfer" and (value := event.value or 0.0) < 0:
                    yield -value, f"`{'.'.join(map(str, (*path, 'marks', index)))}`"
        code = user.grader if user.model_played else user
        if code is not None and code.use is not None:
            yield from _in_code(ctx, (*path, "grader") if user.model_played else path, code.use, code.with_)


def _in_code(ctx: CheckContext, path: DataPath, use: str, with_: Mapping[str, Any]) -> Iterator[Cost]:
    """Negative rewards that the code of `use` writes: literals, and parameters that `with` or their defaults set."""
    code = ctx.code_text(use)
    if code is None:
        return
    ctx.work.spend(100)
    node, signature = code.definition.node, code.signature
    settings: dict[str, tuple[Any, str]] = {}
    for name, parameter in signature.parameters.items() if signature is not None else ():
        if isinstance(parameter.default, ast.expr) and (number := _number(parameter.default)) is not None:
            settings[name] = number, f"{node.name}({name}={number:g})"
    settings |= {key: (value, ".".join(map(str, (*path, "with", key)))) for key, value in with_.items()}
    for value in _reward_values(node):
        for part in ast.walk(value):
            if isinstance(part, ast.UnaryOp) and (cost := _number(part)) is not None and cost < 0:
                yield -cost, f"`{use}`"
            name = (last_name(part) or "") if isinstance(part, ast.Name | ast.Attribute) else ""
            setting, where = settings.get(name.lstrip("_"), (None, ""))
            if isinstance(setting, int | float) and setting < 0:
                yield -float(setting), f"`{where}`"


def _reward_values(node: ast.AST) -> Iterator[ast.expr]:
    """Amounts of rewards: `RewardEvent(value=…)`, and the values of `rewards={…: …}`."""
    for call in ast.walk(node):
        if not isinstance(call, ast.Call):
            continue
        name = last_name(call.func)
        for keyword in call.keywords:
            if name == "RewardEvent" and keyword.arg == "value":
                yield keyword.value
            elif keyword.arg == "rewards" and isinstance(keyword.value, ast.Dict):
                yield from keyword.value.values


def _number(node: ast.expr) -> float | None:
    """The value of a number that is written out."""
    sign = 1.0
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        sign, node = -1.0, node.operand
    is_number = isinstance(node, ast.Constant) and type(node.value) in (int, float)
    return sign * float(node.value) if is_number else None  # type: ignore[attr-defined]


@rule("rewards.no-effect", "warning", "an option of `rewards` has no effect in this combination")
def no_effect(ctx: CheckContext) -> Iterator[Finding]:
    """Keys of the credit method, and keys and amounts of reward rules, that change nothing."""
    rewards = ctx.spec.rewards
    useless = rewards.credit.keys_without_effect
    for key, why in useless.items():
        path: DataPath = ("rewards", "credit", key)
        if ctx.written(*path):
            yield Finding(f"`{key}` has no effect: {why}", path, "remove it", key=True)
    for key in rewards.credit.turn_keys:
        path = ("rewards", "credit", key)
        if key not in useless and ctx.written(*path) and not several_turns(ctx):
            yield Finding(
                f"`{key}` has no effect: an episode has one turn of the model, and it acts between turns",
                path,
                "remove it, or allow more turns",
                key=True,
            )
    alone = ctx.spec.train is not None and ctx.spec.train.samples_episodes and ctx.spec.rollout.samples_per_task == 1
    if alone and not rewards.credit.needs_state_key and getattr(rewards.credit, "scale", "none") != "none":
        yield Finding(
            "`scale` has no effect: a group of one episode (`rollout.samples_per_task`) has no standard deviation",
            ("rewards", "credit", "scale"),
            "set `rollout.samples_per_task` to 4 or more",
        )
    for index, item in enumerate(rewards.reassign):
        path = ("rewards", "reassign", index)
        if ctx.written(*path, "discount") and "each" not in (item.turn, item.to):
            yield Finding(
                "`discount` has no effect: it belongs to the address `each`",
                (*path, "discount"),
                "remove it, or use `turn: each`",
                key=True,
            )
        for key in ("share", "value"):
            if getattr(item, key) == 0 and item.op != "set":
                yield Finding(f"`{key}: 0` has no effect: nothing is moved or added", (*path, key), "remove the rule")
