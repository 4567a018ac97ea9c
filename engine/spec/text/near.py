"""The known name that is nearest to a wrong one, at a bounded cost however long and many the names are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import islice

LONGEST = 80
"""Characters of a name that is compared at all."""
MAX_NAMES = 300
"""Names that it is compared with."""
LISTED = 12
"""Names that are listed where none is near."""


def nearest_name(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The nearest of the known names; None where none is near."""
    if len(name) > LONGEST:
        return None
    matches = get_close_matches(
        name, list(islice((item for item in known if len(item) <= LONGEST), MAX_NAMES)), 1, cutoff
    )
    return matches[0] if matches else None


def near_or_known(name: str, known: Sequence[str], cutoff: float = 0.6, what: str = "known") -> str:
    """`did you mean …?`, or what is known."""
    near = nearest_name(name, known, cutoff)
    return f"did you mean `{near}`?" if near else f"{what}: {listed(known) or 'none'}"


def listed(names: Sequence[str]) -> str:
    """`a, b, c`, the first few of many."""
    shown = ", ".join(short(name) for name in names[:LISTED])
    return f"{shown} and {len(names) - LISTED:,} more" if len(names) > LISTED else shown


def short(text: str) -> str:
    """A text that is fit for a message."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
