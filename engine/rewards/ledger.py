"""The ledger of one episode: append-only postings of rewards to turns, each with its source and cause.

Invariants:
- A posting is never changed or removed; what a turn holds is computed from its postings.
- A transfer is written as pairs of postings, -x and +x of the same x, and sums are exact, so a transfer does not change the
  sum over turns.
- An event is applied completely or not at all.
- Addresses are resolved when the event is written: `last` is the newest turn at that time.
- A reward of a part of a turn is in an account of its own, and in the sum of the turn. An event for the whole turn leaves it
  alone, except `set`, which replaces all that the turn holds under the name.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.errors import LedgerError
from engine.rewards.accounts import Account
from engine.rewards.address import Locate, TurnPart, resolve_address, resolve_part
from engine.schemas.base import Struct
from engine.schemas.reward import Posting, RewardEvent

if TYPE_CHECKING:
    from engine.schemas.trajectory import Blame

REWARD = "reward"
"""The name of a reward without a name."""

LARGEST = 1e30
"""Maximum absolute value of a turn's reward and of an event, so that sums are finite in the float32 of training rows too."""

_BLAME: Mapping[str, Blame] = {
    "environment": "environment",
    "user": "user",
    "tool": "tool",
    "score": "environment",
    "agent": "environment",
}


def blame_of(source: str) -> Blame:
    """The blame for an event that cannot be applied, by its `source`: the spec, unless an environment, user or tool wrote it."""
    return _BLAME.get(source.partition(":")[0], "spec")


class _Change(Struct, frozen=True, kw_only=True):
    """One posting before it is written."""

    turn: int
    name: str
    value: float
    """The amount to add; for `set`, the new amount."""
    part: TurnPart | None = None


class PartReward(Struct, frozen=True, kw_only=True):
    """What a part of a turn holds."""

    turn: int
    part: TurnPart
    name: str
    value: float


class SealedLedger(Struct, frozen=True, kw_only=True, eq=False):
    """A closed ledger: the input of credit assignment."""

    turns: int
    """Assistant turns of the episode."""
    names: tuple[str, ...]
    """Names of all rewards, in the order in which they were first written."""
    matrix: Mapping[str, npt.NDArray[np.float64]]
    """Name -> the reward of each turn, float64 [turns], read-only."""
    totals: npt.NDArray[np.float64]
    """The sum over names for each turn, float64 [turns], read-only."""
    postings: tuple[Posting, ...]
    """All postings."""
    parts: tuple[PartReward, ...] = ()
    """Rewards of parts of turns; `matrix` and `totals` contain them."""

    @property
    def total(self) -> float:
        """The episode's reward: the sum over turns and names."""
        return math.fsum(self.totals)

    def without_parts(self, turn: int) -> SealedLedger:
        """The ledger without the rewards of the parts of a turn."""
        taken = [each for each in self.parts if each.turn == turn]
        matrix = dict(self.matrix)
        for each in taken:
            row = matrix[each.name].copy()
            row[turn] -= each.value
            matrix[each.name] = row
        totals = self.totals.copy()
        if taken:
            totals[turn] = math.fsum(row[turn] for row in matrix.values())
        kept = tuple(each for each in self.parts if each.turn != turn)
        return SealedLedger(
            turns=self.turns, names=self.names, matrix=matrix, totals=totals, postings=self.postings, parts=kept
        )

    @classmethod
    def from_postings(cls, postings: Iterable[Posting], turns: int) -> SealedLedger:
        """Rebuild a ledger from stored postings.

        The amount of a (turn, name) is the sum of the deltas since its last `set`, whose `after` is the start.

        Args:
            postings: All postings, oldest first.
            turns: Assistant turns of the episode.

        Raises:
            LedgerError: a posting names a turn that the episode does not have.
        """
        ledger = Ledger()
        for posting in postings:
            ledger.restore(posting)
        return ledger.seal(turns)


class Ledger:
    """The rewards of a running episode.

    ledger = Ledger()
    ledger.post(RewardEvent(turn="last", value=1.0, cause="right answer", source="user"), at_turn=2)
    ledger.post(RewardEvent(turn="last", op="transfer", to="previous", share=0.3), at_turn=2)
    ledger.totals(3)                                        # [0.0, 0.3, 0.7]
    """

    __slots__ = ("_accounts", "_parts", "_postings", "_sealed", "_totals")

    def __init__(self) -> None:
        self._accounts: dict[int, dict[str, Account]] = {}
        self._parts: dict[int, dict[tuple[str, TurnPart], Account]] = {}
        """By turn: the accounts of its parts. `_accounts` does not contain them."""
        self._totals: dict[int, float] = {}
        self._postings: list[Posting] = []
        self._sealed = False

    @property
    def postings(self) -> Sequence[Posting]:
        """All postings so far, oldest first."""
        return tuple(self._postings)

    def post(self, event: RewardEvent, at_turn: int, locate: Locate | None = None) -> list[Posting]:
        """Apply an event.

        Args:
            event: The amount to add, set or transfer.
            at_turn: The newest assistant turn, from 0.
            locate: Finds the tokens of a part of a turn, for events that address one.

        Returns:
            The new postings: one for each turn and name; for a transfer, a pair for each payer, receiver and name (more than
            one pair if a share of 1 is not a single float).

        Raises:
            LedgerError: the event cannot be applied; the ledger is unchanged. Blamed on the source of the event.
        """
        try:
            if self._sealed:
                raise LedgerError(
                    "the ledger is sealed: the episode is over. Write rewards before or in the final state"
                )
            changes = (
                self._transfers(event, at_turn, locate)
                if event.op == "transfer"
                else self._writes(event, at_turn, locate)
            )
            return self._write(changes, event, at_turn)
        except LedgerError as error:
            who = event.source or "a reward event"
            raise LedgerError(f"{who}: {error}", blame=blame_of(event.source)) from None

    def _writes(self, event: RewardEvent, at_turn: int, locate: Locate | None) -> list[_Change]:
        """`add` and `set`."""
        name = REWARD if event.name is None else event.name
        assert event.value is not None  # RewardEvent holds to it
        turns = resolve_address(event.turn, at_turn, event.discount)
        part = resolve_part(event.part, turns[0][0], locate)
        return [_Change(turn=turn, name=name, value=event.value * weight, part=part) for turn, weight in turns]

    def _transfers(self, event: RewardEvent, at_turn: int, locate: Locate | None) -> list[_Change]:
        """`transfer`: from each payer to each receiver, in pairs whose sum is 0."""
        assert event.to is not None  # RewardEvent holds to it
        payers = resolve_address(event.turn, at_turn, event.discount)
        receivers = resolve_address(event.to, at_turn, event.discount)
        paying = resolve_part(event.part, payers[0][0], locate)
        receiving = resolve_part(event.to_part, receivers[0][0], locate)
        if paying == receiving and [turn for turn, _ in payers] == [turn for turn, _ in receivers] and len(payers) == 1:
            turn = payers[0][0]
            raise LedgerError(f"a transfer from turn {turn} to itself (`{event.turn}` to `{event.to}`); name two turns")
        whole = math.fsum(weight for _, weight in receivers)
        changes: list[_Change] = []
        for payer, name, amount in self._payments(event, payers, paying):
            for receiver, weight in receivers:
                if (receiver, receiving) != (payer, paying):  # a payment to itself changes nothing
                    moved = amount * (weight / whole)
                    changes += [
                        _Change(turn=payer, name=name, value=0.0 - moved, part=paying),
                        _Change(turn=receiver, name=name, value=moved, part=receiving),
                    ]
        return changes

    def _payments(
        self, event: RewardEvent, payers: list[tuple[int, float]], part: TurnPart | None
    ) -> list[tuple[int, str, float]]:
        """What each payer pays: (turn, name, amount).

        With `share`, that part of each reward of the turn; with `value`, that amount, even if the rest is negative.
        """
        payments: list[tuple[int, str, float]] = []
        for turn, weight in payers:
            held = self._of(turn, part)
            if event.share is None:
                assert event.value is not None  # RewardEvent holds to it
                if event.name is None and len(held) > 1:
                    raise LedgerError(
                        f"a transfer of {event.value} without a `name`, and turn {turn} holds {_listed(held)}; say which"
                    )
                names = (
                    held if event.name is None else {event.name: None} if self._ever(event.name, payers, part) else {}
                )
                payments += [(turn, name, event.value * weight) for name in names]
                continue
            share = event.share if event.turn == "all" else event.share * weight
            if share > 1.0:
                raise LedgerError(f"`share` {event.share} times its discount is {share}: more than turn {turn} holds")
            names_held = [event.name] if event.name in held else held if event.name is None else []
            for name in names_held:
                # A share of 1 moves the exact sum; its rounded value would leave a remainder.
                amounts = held[name].partials if share == 1.0 else [share * held[name].held]
                payments += [(turn, name, amount) for amount in amounts]
        if not payments:
            who = f"turn {payers[0][0]}" if len(payers) == 1 else "no turn"
            verb = "has never held" if len(payers) == 1 else "has ever held"
            others = {name: None for turn, _ in payers for name in self._of(turn, part)}
            what = "a reward" if event.name is None else f"`{event.name}`"
            there = f"; it holds {_listed(others)}" if others else ""
            raise LedgerError(f"{who} {verb} {what}{there}. Add to it before it pays, or transfer another")
        return payments

    def _of(self, turn: int, part: TurnPart | None) -> dict[str, Account]:
        """The accounts of a turn as a whole, or of one of its parts, by name."""
        if part is None:
            return self._accounts.get(turn, {})
        return {name: account for (name, own), account in self._parts.get(turn, {}).items() if own == part}

    def _ever(self, name: str, payers: list[tuple[int, float]], part: TurnPart | None) -> bool:
        return any(name in self._of(turn, part) for turn, _ in payers)

    def _write(self, changes: list[_Change], event: RewardEvent, at_turn: int) -> list[Posting]:
        """Write all postings of an event, or none."""
        after: dict[tuple[int, str, TurnPart | None], Account] = {}
        postings: list[Posting] = []
        for change in changes:
            key = (change.turn, change.name, change.part)
            before = after.get(key) or self._account(*key)
            if not abs(change.value) <= LARGEST or not abs(before.held + change.value) <= LARGEST:
                raise LedgerError(f"{change.value} on top of {before.held} is beyond {LARGEST}; check the value")
            # After a set the sum is exactly the given value, however its delta was rounded.
            account = Account([change.value]) if event.op == "set" else before.plus(change.value)
            after[key] = account
            postings.append(
                Posting(
                    seq=len(self._postings) + len(postings),
                    turn=change.turn,
                    name=change.name,
                    delta=self._set_delta(change, before) if event.op == "set" else change.value,
                    after=account.held,
                    at_turn=at_turn,
                    op=event.op,
                    cause=event.cause,
                    source=event.source,
                    start=None if change.part is None else change.part.start,
                    end=None if change.part is None else change.part.end,
                    call=None if change.part is None else change.part.call,
                )
            )
        for (turn, name, part), account in after.items():
            self._put(turn, name, part, account, replaces=event.op == "set")
        self._postings += postings
        return postings

    def _account(self, turn: int, name: str, part: TurnPart | None) -> Account:
        if part is None:
            return self._accounts.get(turn, {}).get(name) or Account()
        return self._parts.get(turn, {}).get((name, part)) or Account()

    def _set_delta(self, change: _Change, before: Account) -> float:
        """What a `set` adds to what the turn holds under the name: without a part it replaces the rewards of parts too."""
        if change.part is None and change.turn in self._parts:
            return change.value - self._held(change.turn, change.name)
        return change.value - before.held

    def _put(self, turn: int, name: str, part: TurnPart | None, account: Account, *, replaces: bool) -> None:
        accounts = self._accounts.setdefault(turn, {})
        if part is None:
            accounts[name] = account
            if replaces and turn in self._parts:
                self._parts[turn] = {key: held for key, held in self._parts[turn].items() if key[0] != name}
        else:
            accounts.setdefault(name, Account())
            self._parts.setdefault(turn, {})[name, part] = account
        self._totals.pop(turn, None)

    def restore(self, posting: Posting) -> None:
        """Append a posting of another ledger."""
        whole = posting.start is None or posting.end is None
        part = None if whole else TurnPart(start=posting.start or 0, end=posting.end or 0, call=posting.call)
        before = self._account(posting.turn, posting.name, part)
        account = Account([posting.after]) if posting.op == "set" else before.plus(posting.delta)
        self._put(posting.turn, posting.name, part, account, replaces=posting.op == "set")
        self._postings.append(posting)

    def _held(self, turn: int, name: str) -> float:
        account = self._accounts.get(turn, {}).get(name)
        held = account.held if account else 0.0
        if turn not in self._parts:
            return held
        return math.fsum([held, *(of.held for (own, _), of in self._parts[turn].items() if own == name)])

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
        return [self._total(turn) for turn in range(turns)]

    def _total(self, turn: int) -> float:
        """The sum over names for a turn, computed when it is read, so that writing does not depend on the number of names."""
        total = self._totals.get(turn)
        if total is None:
            held = [each.held for each in self._accounts.get(turn, {}).values()]
            held += [each.held for each in self._parts.get(turn, {}).values()]
            total = self._totals[turn] = math.fsum(held)
        return total

    def by_name(self) -> dict[str, float]:
        """The sum over turns of each name, in the order in which the names were first written."""
        return {
            name: math.fsum(self._held(turn, name) for turn, accounts in self._accounts.items() if name in accounts)
            for name in self._names()
        }

    def _names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(posting.name for posting in self._postings))

    def seal(self, turns: int) -> SealedLedger:
        """Close the ledger: nothing can be posted afterwards.

        Args:
            turns: Assistant turns of the episode.

        Raises:
            LedgerError: a later turn has a reward.
        """
        beyond = [turn for turn in self._accounts if turn >= turns]
        if beyond:
            raise LedgerError(f"turn {min(beyond)} holds a reward, but the episode took {turns} turns", blame="engine")
        self._sealed = True
        matrix = {name: _frozen([self._held(turn, name) for turn in range(turns)]) for name in self._names()}
        return SealedLedger(
            turns=turns,
            names=self._names(),
            matrix=matrix,
            totals=_frozen(self.totals(turns)),
            postings=tuple(self._postings),
            parts=self._part_rewards(),
        )

    def _part_rewards(self) -> tuple[PartReward, ...]:
        return tuple(
            PartReward(turn=turn, part=part, name=name, value=account.held)
            for turn, accounts in sorted(self._parts.items())
            for (name, part), account in accounts.items()
        )


def _frozen(values: Sequence[float]) -> npt.NDArray[np.float64]:
    array = np.array(values, dtype=np.float64)
    array.flags.writeable = False
    return array


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
