"""The rewards of one episode. Invariant: a posting is never changed; a transfer conserves the sum; an event is applied
whole or not at all.

    ledger.post(RewardEvent(turn="last", value=1.0, cause="right answer", source="user"), at_turn=2)
    ledger.post(RewardEvent(turn="last", op="transfer", to="previous", share=0.3), at_turn=2)
    ledger.totals(3)                            # [0.0, 0.3, 0.7]
    rules.apply(episode)                        # the spec's `rewards.reassign`, after the action of a state

- What a turn holds is computed from its postings. Sums are exact, and a transfer is pairs of postings, -x and +x of the
  same x.
- Addresses are resolved when an event is written: `last` is the newest turn at that time. Postings have the numbers.
- A reward of a part of a turn is in an account of its own, and in the sum of the turn. An event for the whole turn
  leaves it alone, except `set`, which replaces all that the turn holds under the name.
- Rules are applied in the order in which they are written, and each sees the effects of the earlier ones. One that
  cannot be applied is an error and is never skipped.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from engine.errors import GuardError, LedgerError
from engine.machine.guards import Guard
from engine.rewards.sealed import PartReward, SealedLedger, TurnPart, frozen
from engine.schemas.reward import PartAddress, Posting, RewardChange, RewardEvent, TurnAddress, TurnChoice

if TYPE_CHECKING:
    from engine.episode.episode import Episode
    from engine.schemas.credit import ReassignRule
    from engine.schemas.trajectory import Blame

REWARD = "reward"
"""The name of a reward without a name."""

LARGEST = 1e30
"""Maximum absolute value of a turn's reward and of an event, so that sums are finite in the float32 of training rows
too."""

OWN_BLAMES: Mapping[str, Blame] = {"environment": "environment", "user": "user", "tool": "tool", "score": "environment"}
"""The blame for an event that cannot be applied, by its `source`, for the sources of the engine."""


def blame_of(source: str, blames: Mapping[str, Blame] = OWN_BLAMES) -> Blame:
    """The blame for an event that cannot be applied, by its `source`: the spec, if the source is another one."""
    name = source.partition(":")[0]
    return blames.get(name) or OWN_BLAMES.get(name, "spec")


_Place = tuple[int, str, TurnPart | None]
"""(turn, name, part): where an account is; part None is the turn as a whole."""


Partials = tuple[float, ...]
"""The exact sum of one reward of one turn, as Shewchuk's non-overlapping floats (Discrete & Computational Geometry 18,
1997, fig. 7): the order of postings does not matter, and the sum is rounded only when it is read."""

_NOTHING: Partials = (0.0,)


class Ledger:
    """The rewards of a running episode."""

    __slots__ = ("_accounts", "_parts", "_postings", "_sealed", "_totals")

    def __init__(self) -> None:
        self._accounts: dict[int, dict[str, Partials]] = {}
        self._parts: dict[int, dict[tuple[str, TurnPart], Partials]] = {}
        """By turn: the accounts of its parts. `_accounts` does not contain them."""
        self._totals: dict[int, float] = {}
        self._postings: list[Posting] = []
        self._sealed = False

    @classmethod
    def of(cls, postings: Iterable[Posting]) -> Ledger:
        """Rebuild a ledger from stored postings, oldest first: the sum of the deltas since the last `set`, whose
        `after` is the start."""
        ledger = cls()
        for posting in postings:
            part = None
            if posting.start is not None and posting.end is not None:
                part = TurnPart(start=posting.start, end=posting.end, call=posting.call)
            place, sets = (posting.turn, posting.name, part), posting.op == "set"
            ledger._put(
                place, (posting.after,) if sets else _plus(ledger._account(place), posting.delta), replaces=sets
            )
            ledger._postings.append(posting)
        return ledger

    @property
    def postings(self) -> Sequence[Posting]:
        """All postings so far, oldest first."""
        return tuple(self._postings)

    def post(
        self,
        event: RewardEvent,
        at_turn: int,
        among: Episode | None = None,
        blames: Mapping[str, Blame] = OWN_BLAMES,
    ) -> list[Posting]:
        """Apply an event. Returns its postings, by turn and name; those of a transfer are pairs of payer and receiver.

        Args:
            event: The amount to add, set or transfer.
            at_turn: The newest assistant turn, from 0; -1 before the first.
            among: Finds turns by state or event, and the tokens of a part of a turn, for events that address them.
            blames: See `blame_of`.

        Raises:
            LedgerError: the event cannot be applied; the ledger is unchanged. Blamed on the source of the event.
        """
        try:
            if self._sealed:
                raise LedgerError(
                    "the ledger is sealed: the episode is over. Write rewards before or in the final state"
                )
            changes = (self._transfers if event.op == "transfer" else self._writes)(event, at_turn, among)
            return self._write(changes, event, at_turn)
        except LedgerError as error:
            raise LedgerError(
                f"{event.source or 'a reward event'}: {error}", blame=blame_of(event.source, blames)
            ) from None

    def _writes(self, event: RewardEvent, at_turn: int, among: Episode | None) -> list[tuple[_Place, float]]:
        """`add` and `set`: each place with the amount to add, or the new amount."""
        name = REWARD if event.name is None else event.name
        assert event.value is not None  # RewardEvent holds to it
        turns = resolve_address(event.turn, at_turn, event.discount, among)
        part = _resolve_part(event.part, turns[0][0], among)
        return [((turn, name, part), event.value * weight) for turn, weight in turns]

    def _transfers(self, event: RewardEvent, at_turn: int, among: Episode | None) -> list[tuple[_Place, float]]:
        """`transfer`: from each payer to each receiver, in pairs whose sum is 0."""
        assert event.to is not None  # RewardEvent holds to it
        payers = resolve_address(event.turn, at_turn, event.discount, among)
        receivers = resolve_address(event.to, at_turn, event.discount, among)
        paying = _resolve_part(event.part, payers[0][0], among)
        receiving = _resolve_part(event.to_part, receivers[0][0], among)
        if paying == receiving and [turn for turn, _ in payers] == [turn for turn, _ in receivers] and len(payers) == 1:
            turn = payers[0][0]
            raise LedgerError(f"a transfer from turn {turn} to itself (`{event.turn}` to `{event.to}`); name two turns")
        weights = math.fsum(weight for _, weight in receivers)
        changes: list[tuple[_Place, float]] = []
        for payer, name, amount in self._payments(event, payers, paying):
            for receiver, weight in receivers:
                if (receiver, receiving) != (payer, paying):  # a payment to itself changes nothing
                    moved = amount * (weight / weights)
                    changes += [((payer, name, paying), 0.0 - moved), ((receiver, name, receiving), moved)]
        return changes

    def _payments(
        self, event: RewardEvent, payers: list[tuple[int, float]], part: TurnPart | None
    ) -> list[tuple[int, str, float]]:
        """What each payer pays: (turn, name, amount).

        With `share`, that part of each reward of the turn; with `value`, that amount, even if the rest is negative.
        """
        payments: list[tuple[int, str, float]] = []
        for turn, weight in payers:
            accounts = self._of(turn, part)
            if event.share is None:
                assert event.value is not None  # RewardEvent holds to it
                if event.name is None and len(accounts) > 1:
                    raise LedgerError(
                        f"a transfer of {event.value} without a `name`, and turn {turn} holds {_listed(accounts)}; say "
                        "which"
                    )
                if event.name is None:
                    payments += [(turn, name, event.value * weight) for name in accounts]
                elif any(event.name in self._of(payer, part) for payer, _ in payers):
                    payments.append((turn, event.name, event.value * weight))
                continue
            share = event.share if event.turn == "all" else event.share * weight
            if share > 1.0:
                raise LedgerError(f"`share` {event.share} times its discount is {share}: more than turn {turn} holds")
            for name, partials in accounts.items():
                if event.name in (None, name):
                    # A share of 1 moves the exact sum; its rounded value would leave a remainder.
                    amounts = partials if share == 1.0 else [share * math.fsum(partials)]
                    payments += [(turn, name, amount) for amount in amounts]
        if payments:
            return payments
        who = f"turn {payers[0][0]} has never held" if len(payers) == 1 else "no turn has ever held"
        others = {name: None for turn, _ in payers for name in self._of(turn, part)}
        what = "a reward" if event.name is None else f"`{event.name}`"
        holds = f"; it holds {_listed(others)}" if others else ""
        raise LedgerError(f"{who} {what}{holds}. Add to it before it pays, or transfer another")

    def _of(self, turn: int, part: TurnPart | None) -> dict[str, Partials]:
        """The sums of a turn as a whole, or of one of its parts, by name."""
        if part is None:
            return self._accounts.get(turn, {})
        return {name: partials for (name, of), partials in self._parts.get(turn, {}).items() if of == part}

    def _write(self, changes: list[tuple[_Place, float]], event: RewardEvent, at_turn: int) -> list[Posting]:
        """Write all postings of an event, or none."""
        after: dict[_Place, Partials] = {}
        postings: list[Posting] = []
        sets = event.op == "set"
        for place, value in changes:
            turn, name, part = place
            before = after.get(place) or self._account(place)
            held = math.fsum(before)
            if not abs(value) <= LARGEST or not abs(held + value) <= LARGEST:
                raise LedgerError(f"{value} on top of {held} is beyond {LARGEST}; check the value")
            # After a set the sum is exactly the given value, however its delta was rounded.
            after[place] = (value,) if sets else _plus(before, value)
            replaced = self._held(turn, name) if sets and part is None else held
            postings.append(
                Posting(
                    seq=len(self._postings) + len(postings),
                    turn=turn,
                    name=name,
                    delta=value - replaced if sets else value,
                    after=math.fsum(after[place]),
                    at_turn=at_turn,
                    op=event.op,
                    cause=event.cause,
                    source=event.source,
                    start=None if part is None else part.start,
                    end=None if part is None else part.end,
                    call=None if part is None else part.call,
                )
            )
        for place, partials in after.items():
            self._put(place, partials, replaces=sets)
        self._postings += postings
        return postings

    def _account(self, place: _Place) -> Partials:
        turn, name, part = place
        if part is None:
            return self._accounts.get(turn, {}).get(name, _NOTHING)
        return self._parts.get(turn, {}).get((name, part), _NOTHING)

    def _put(self, place: _Place, partials: Partials, *, replaces: bool) -> None:
        turn, name, part = place
        accounts = self._accounts.setdefault(turn, {})
        if part is None:
            accounts[name] = partials
            if replaces and turn in self._parts:
                self._parts[turn] = {key: of for key, of in self._parts[turn].items() if key[0] != name}
        else:
            accounts.setdefault(name, _NOTHING)
            self._parts.setdefault(turn, {})[name, part] = partials
        self._totals.pop(turn, None)

    def _held(self, turn: int, name: str) -> float:
        held = math.fsum(self._accounts.get(turn, {}).get(name, ()))
        if turn not in self._parts:
            return held
        return math.fsum([held, *(math.fsum(of) for (named, _), of in self._parts[turn].items() if named == name)])

    @property
    def rewarded(self) -> Collection[int]:
        """The turns that hold a reward of some name."""
        return self._accounts.keys()

    def turn(self, turn: int) -> dict[str, float]:
        """The rewards of a turn by name, in the order in which the names were first written."""
        return {name: self._held(turn, name) for name in self._accounts.get(turn, {})}

    def totals(self, turns: int) -> list[float]:
        """The sum over names for each of the first `turns` turns; [turns]."""
        if not self._accounts:
            return [0.0] * turns
        for turn in range(turns):  # computed when it is read, so that writing does not depend on the number of names
            if turn not in self._totals:
                accounts = [*self._accounts.get(turn, {}).values(), *self._parts.get(turn, {}).values()]
                self._totals[turn] = math.fsum(map(math.fsum, accounts))
        return [self._totals[turn] for turn in range(turns)]

    def by_name(self) -> dict[str, float]:
        """The sum over turns of each name, in the order in which the names were first written."""
        return {
            name: math.fsum(self._held(turn, name) for turn, accounts in self._accounts.items() if name in accounts)
            for name in self._names()
        }

    def _names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(posting.name for posting in self._postings))

    def seal(self, turns: int) -> SealedLedger:
        """Close the ledger of an episode of so many assistant turns: nothing can be posted afterwards.

        Raises:
            LedgerError: a later turn has a reward.
        """
        beyond = [turn for turn in self._accounts if turn >= turns]
        if beyond:
            raise LedgerError(f"turn {min(beyond)} holds a reward, but the episode took {turns} turns", blame="engine")
        self._sealed = True
        return SealedLedger(
            turns=turns,
            names=self._names(),
            matrix={name: frozen([self._held(turn, name) for turn in range(turns)]) for name in self._names()},
            totals=frozen(self.totals(turns)),
            postings=tuple(self._postings),
            parts=tuple(
                PartReward(turn=turn, part=part, name=name, value=math.fsum(partials))
                for turn, accounts in sorted(self._parts.items())
                for (name, part), partials in accounts.items()
            ),
        )


class Rules:
    """The spec's `rewards.reassign`, compiled: it writes rewards after the action of a state. Shared by all episodes.

    The postings of rule n, from 0, have the source `rule:<n>`, and the cause `rule <n>` unless the rule has one.
    Raises: GuardError: a `when` is not valid CEL.
    """

    __slots__ = ("_at", "states")

    def __init__(self, rules: Sequence[ReassignRule]) -> None:
        self._at: dict[str, list[tuple[str, Guard | None, RewardEvent]]] = {}
        """State -> (where the rule stands in the spec, its condition, its event)."""
        for index, rule in enumerate(rules):
            guard = Guard(rule.when) if rule.when is not None else None
            change = {name: getattr(rule, name) for name in RewardChange.model_fields}
            event = RewardEvent(**change | {"cause": rule.cause or f"rule {index}", "source": f"rule:{index}"})
            self._at.setdefault(rule.at, []).append((f"rewards.reassign[{index}]", guard, event))
        self.states = frozenset(self._at)
        """States that have rules."""

    def apply(self, episode: Episode) -> list[Posting]:
        """Apply the rules of the episode's state, after its action; the postings that they wrote, in order.

        Raises:
            LedgerError: a rule cannot be applied; blamed on the spec. The postings of earlier rules stay.
            GuardError: a rule's `when` fails on these values.
        """
        postings: list[Posting] = []
        for where, guard, event in self._at.get(episode.state, ()):
            try:
                if guard is None or guard.evaluate(episode.guard_values(guard.names)):
                    postings += episode.ledger.post(event, episode.turn, episode)
            except GuardError as error:
                raise GuardError(f"{where}: {error}") from error
            except LedgerError as error:
                raise LedgerError(f"{where} at {episode.state}: {error}", blame=error.blame) from error
        return postings


def _plus(partials: Partials, delta: float) -> Partials:
    """The sum after one more posting."""
    after = []
    for partial in partials:
        high, low = (delta, partial) if abs(delta) >= abs(partial) else (partial, delta)
        delta = high + low
        rest = low - (delta - high)
        if rest:
            after.append(rest)
    return (*after, delta) if delta or not after else tuple(after)


def resolve_address(
    address: TurnAddress, at_turn: int, discount: float = 1.0, among: Episode | None = None
) -> list[tuple[int, float]]:
    """The turns of an address with their weights, oldest first, where `at_turn` is the newest turn.

    The weight is 1 for a single turn, 1 / turns for `all`, `discount ** distance` from the newest for `each`.

    Raises:
        LedgerError: there is no such turn yet, or a power of `discount` is not finite.
    """
    turns = at_turn + 1
    if address == "all":
        weights = [(turn, 1.0 / turns) for turn in range(turns)]
    elif address == "each":
        try:
            weights = [(turn, discount ** (at_turn - turn)) for turn in range(turns)]
        except OverflowError:
            raise LedgerError(
                f"`discount: {discount}` to the power of {at_turn} is not finite; use a smaller one"
            ) from None
    elif isinstance(address, TurnChoice):
        chosen = None if among is None else among.find(address)
        weights = [] if chosen is None else [(chosen, 1.0)]
    else:
        named = {"first": 0, "second": 1, "previous": at_turn - 1, "last": at_turn}
        turn = address if isinstance(address, int) else named[address]
        weights = [(turn, 1.0)] if 0 <= turn < turns else []
    if not weights:
        there = "no turn yet" if turns == 0 else "only turn 0" if turns == 1 else f"only turns 0 to {at_turn}"
        if isinstance(address, TurnChoice) and turns:
            there = f"none was sampled in or ended with `{address.name}`"
        raise LedgerError(
            f"there is no turn `{address}`: {there}. "
            "Write to a turn that is there, or let the rule wait (`when: turns.assistant > 1`)"
        )
    return weights


def _resolve_part(address: PartAddress | None, turn: int, among: Episode | None) -> TurnPart | None:
    """The tokens of a part of a turn; None for the turn as a whole."""
    if address is None:
        return None
    if among is None:
        raise LedgerError("a part of a turn was addressed, and the tokens of the turn are not known here")
    return among.locate(turn, address)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
