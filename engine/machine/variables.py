"""What a guard may read: every variable, its fields and their types.

Invariant: `VARIABLES` is the one list of them. The episode builds exactly these, the checks know exactly these, and
the documentation prints them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Union, get_args, get_origin

from engine.schemas.limits import LimitsSpec

UNBOUNDED = 2**53 - 1
"""What a guard reads for a limit that is not set: the largest integer that a double holds exactly."""

Types = frozenset[str]
"""CEL types that a value may have: one most often; several for a limit that may be unset; `DYN` for any."""

BOOL: Types = frozenset({"bool"})
INT: Types = frozenset({"int"})
DOUBLE: Types = frozenset({"double"})
STRING: Types = frozenset({"string"})
DYN: Types = frozenset({"dyn"})
"""Known only when the guard runs."""


@dataclass(frozen=True, slots=True)
class Member:
    """One field of a variable."""

    types: Types
    doc: str


@dataclass(frozen=True, slots=True)
class Variable:
    """One name at the top of a guard. Always a map."""

    doc: str
    fields: Mapping[str, Member] = field(default_factory=dict)
    open: bool = False
    """Whether it may hold fields that are not listed: what a world told, or a row of the task source."""


def _limit_types(annotation: Any) -> Types:
    """Types of a limit: an unset one reads as the int 9007199254740991."""
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    kinds = {"int" if part in (int, type(None)) else "double" for part in parts}
    return frozenset(kinds)


def _limits() -> dict[str, Member]:
    return {
        name: Member(_limit_types(info.annotation), info.description or "")
        for name, info in LimitsSpec.model_fields.items()
    }


VARIABLES: Mapping[str, Variable] = {
    "turns": Variable(
        "Turns taken so far.",
        {"assistant": Member(INT, "By the model."), "user": Member(INT, "By the user.")},
    ),
    "tools": Variable(
        "Tool calls so far.",
        {"calls": Member(INT, "All of them."), "errors": Member(INT, "Those whose result is an error.")},
    ),
    "tokens": Variable(
        "Tokens so far.",
        {
            "sampled": Member(INT, "Sampled by the model, over all turns."),
            "context": Member(INT, "Length of the current branch, prompt included."),
        },
    ),
    "images": Variable("Images so far.", {"shown": Member(INT, "In the conversation, however often the same one.")}),
    "limits": Variable("The spec's limits; one that is not set reads as 9007199254740991.", _limits()),
    "rewards": Variable(
        "What the ledger holds now, all names summed.",
        {
            "total": Member(DOUBLE, "Of all turns."),
            "last": Member(DOUBLE, "Of the newest turn; 0.0 before the first."),
            "previous": Member(DOUBLE, "Of the turn before it; 0.0 where there is none."),
        },
    ),
    "last": Variable(
        "The newest turn of the model.",
        {
            "finish": Member(STRING, "`stop`, `length` or `abort`; empty before the first turn."),
            "tokens": Member(INT, "Tokens that were sampled in it."),
            "calls": Member(INT, "Tool calls in it that could be read."),
            "malformed": Member(BOOL, "Whether it holds an attempt at a call that could not be read."),
            "text": Member(STRING, "What it says."),
        },
    ),
    "feedback": Variable(
        "The newest turn of the user, and whatever facts it told.",
        {
            "solved": Member(BOOL, "The user called the task solved."),
            "satisfied": Member(BOOL, "The user wants nothing more."),
            "malformed": Member(BOOL, "The engine spoke in the user's place, because the reply could not be read."),
        },
        open=True,
    ),
    "facts": Variable("What the worlds have told so far; newer values replace older ones.", open=True),
    "task": Variable("The fields of the task.", open=True),
}
"""Every variable of guards and of the rules' `when`."""
