"""A closed ledger, the input of credit assignment: its arrays are read-only, and hold what its postings add up to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from engine.schemas.base import Struct
from engine.schemas.reward import Posting


class TurnPart(Struct, frozen=True, kw_only=True):
    """A part of one turn: its tokens [start, end), counted from the first sampled token of the turn."""

    start: int
    end: int
    call: int | None = None
    """Number of the tool call that it is; None: it is no call."""


class PartReward(Struct, frozen=True, kw_only=True):
    """What a part of a turn holds."""

    turn: int
    part: TurnPart
    name: str
    value: float


class SealedLedger(Struct, frozen=True, kw_only=True, eq=False):
    """A closed ledger, made by `Ledger.seal`."""

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


def frozen(values: Sequence[float]) -> npt.NDArray[np.float64]:
    """The values as a read-only array of the same shape."""
    array = np.array(values, dtype=np.float64)
    array.flags.writeable = False
    return array
