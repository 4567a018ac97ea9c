"""`entry`: a function of the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine.errors import LedgerError
from engine.rewards.credit.base import Member, Values
from engine.schemas.credit import EntryCredit
from engine.spec.code.entry import load_entry


def entry(spec: EntryCredit, group: Sequence[Member], base: Path | None = None) -> list[Values]:
    """Call `package.module:function(group, **with)` and check that it returns float64 [turns] for each episode.

    Raises:
        EntryError: there is no such function.
        LedgerError: a member has penalties of tokens, or the function raised, or did not return one finite number for each turn.
    """
    if any(member.penalties is not None for member in group):
        raise LedgerError(
            f"`{spec.use}` gets no penalties of tokens; use `train.kl.in: loss`, or a method of the engine"
        )
    function = load_entry(spec.use, base)
    try:
        answer = function(list(group), **spec.with_)
        found = [np.asarray(values, np.float64) for values in answer]
    except Exception as error:  # the user's code
        raise LedgerError(f"`{spec.use}` failed: {type(error).__name__}: {error}") from error
    if len(found) != len(group):
        raise LedgerError(f"`{spec.use}` returned arrays for {len(found)} episodes; the group has {len(group)}")
    for number, (member, values) in enumerate(zip(group, found, strict=True)):
        if values.shape != (member.ledger.turns,) or not np.isfinite(values).all():
            raise LedgerError(
                f"`{spec.use}` must return {member.ledger.turns} finite numbers for episode {number} of the group, "
                f"one for each turn; it returned {values.tolist()}"
            )
    return found
