"""Resolves the turns of a reward event when it is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from engine.errors import LedgerError
from engine.schemas.base import Struct
from engine.schemas.reward import PartAddress, TurnAddress


class TurnPart(Struct, frozen=True, kw_only=True):
    """A part of one turn: its tokens [start, end), counted from the first sampled token of the turn."""

    start: int
    end: int
    call: int | None = None
    """Number of the tool call that it is; None: it is no call."""


Locate = Callable[[int, PartAddress], TurnPart]
"""Finds the tokens of a part of a turn. Raises LedgerError if the turn has no such part."""


def resolve_part(address: PartAddress | None, turn: int, locate: Locate | None) -> TurnPart | None:
    """The tokens of a part of a turn; None for the turn as a whole.

    Raises:
        LedgerError: the turn has no such part, or there are no tokens to look in.
    """
    if address is None:
        return None
    if locate is None:
        raise LedgerError("a part of a turn was addressed, and the tokens of the turn are not known here")
    return locate(turn, address)


def resolve_address(address: TurnAddress, at_turn: int, discount: float = 1.0) -> list[tuple[int, float]]:
    """The turns of an address, each with its weight.

    Args:
        address: A turn, by number or by name.
        at_turn: The newest assistant turn; -1 before the first.
        discount: The factor per turn of distance from the newest, for `each`.

    Returns:
        (turn, weight), oldest first: 1 for a single turn, 1 / turns for `all`, `discount ** distance` for `each`.

    Raises:
        LedgerError: there is no such turn yet, or a power of `discount` is not finite.
    """
    turns = at_turn + 1
    if address == "all":
        found = [(turn, 1.0 / turns) for turn in range(turns)]
    elif address == "each":
        found = [(turn, _power(discount, at_turn - turn)) for turn in range(turns)]
    else:
        turn = _turn(address, at_turn)
        found = [(turn, 1.0)] if 0 <= turn < turns else []
    if not found:
        there = "no turn yet" if turns == 0 else "only turn 0" if turns == 1 else f"only turns 0 to {at_turn}"
        raise LedgerError(
            f"there is no turn `{address}`: {there}. "
            "Write to a turn that is there, or let the rule wait (`when: turns.assistant > 1`)"
        )
    return found


def _turn(address: int | Literal["first", "second", "previous", "last"], at_turn: int) -> int:
    if isinstance(address, int):
        return address
    return {"first": 0, "second": 1, "previous": at_turn - 1, "last": at_turn}[address]


def _power(discount: float, distance: int) -> float:
    try:
        return discount**distance
    except OverflowError:
        raise LedgerError(
            f"`discount: {discount}` to the power of {distance} is not finite; use a smaller one"
        ) from None
