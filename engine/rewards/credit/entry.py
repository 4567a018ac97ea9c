"""`entry`: a method of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine.errors import LedgerError
from engine.rewards.credit.base import Member, Values
from engine.schemas.credit import EntryCredit
from engine.spec.entry import load_entry


def entry(spec: EntryCredit, group: Sequence[Member], base: Path | None = None) -> list[Values]:
    """`package.module:function(group, **with)`, held to the form that every method's answer has.

    Raises:
        EntryError: there is no such function.
        LedgerError: it raised, or its answer is not one finite number for each turn.
    """
    function = load_entry(spec.use, base)
    try:
        answer = function(list(group), **spec.with_)
        found = [np.asarray(values, np.float64) for values in answer]
    except Exception as error:  # whatever it raises is its own fault
        raise LedgerError(f"`{spec.use}` failed: {type(error).__name__}: {error}") from error
    if len(found) != len(group):
        raise LedgerError(f"`{spec.use}` answered for {len(found)} episodes; the group has {len(group)}")
    for number, (member, values) in enumerate(zip(group, found, strict=True)):
        if values.shape != (member.ledger.turns,) or not np.isfinite(values).all():
            raise LedgerError(
                f"`{spec.use}` must answer {member.ledger.turns} finite numbers for episode {number} of the group, "
                f"one for each turn; it answered {values.tolist()}"
            )
    return found
