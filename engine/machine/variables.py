"""A table: every variable that a guard may read, with its fields and their types.

Invariant: `VARIABLES` is the one list of them. The episode builds exactly these, the checks know exactly these, and
docs/spec.md prints them. The counts of limits come from `engine.limits`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import UnionType
from typing import Union, get_args, get_origin

import msgspec
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from engine.limits import FIELDS, LIMITS
from engine.schemas.base import Struct, description_of
from engine.schemas.limits import LimitsSpec
from engine.schemas.sections import section_fields

Types = frozenset[str]
"""The CEL types that a value may have: usually one, several for a limit that may be unset, `DYN` for any."""

BOOL: Types = frozenset({"bool"})
INT: Types = frozenset({"int"})
DOUBLE: Types = frozenset({"double"})
STRING: Types = frozenset({"string"})
DYN: Types = frozenset({"dyn"})
"""A type that is known only when the guard runs."""


class VariableField(Struct, frozen=True, kw_only=True):
    """One field of a variable."""

    types: Types
    doc: str


class Variable(Struct, frozen=True, kw_only=True):
    """One name at the top of a guard. Always a map."""

    doc: str
    fields: Mapping[str, VariableField] = msgspec.field(default_factory=dict)
    open: bool = False
    """Whether it may hold fields that are not listed: facts, or the fields of a task."""


def _limits() -> dict[str, VariableField]:
    """The fields of `limits`. One that is not set reads as the int 9007199254740991."""
    fields: dict[str, VariableField] = {}
    core: list[tuple[str, FieldInfo, type[BaseModel]]]
    core = [(name, info, LimitsSpec) for name, info in LimitsSpec.model_fields.items()]
    for name, info, model in (*core, *section_fields(LimitsSpec)):
        if name in FIELDS:
            is_union = get_origin(info.annotation) in (Union, UnionType)
            kinds = get_args(info.annotation) if is_union else (info.annotation,)
            types = frozenset("int" if kind in (int, type(None)) else "double" for kind in kinds)
            fields[name] = VariableField(types=types, doc=description_of(model, name) or "")
    return fields


def _with_counts(variables: Mapping[str, Variable]) -> dict[str, Variable]:
    """Add the counts of the limits to the other variables."""
    counted = dict(variables)
    for limit in LIMITS:
        if limit.variable is not None:
            name, _, field = limit.variable.partition(".")
            variable = counted.get(name, Variable(doc="Counts so far."))
            counted[name] = replace(
                variable, fields={**variable.fields, field: VariableField(types=INT, doc=limit.counted)}
            )
    return counted


VARIABLES: Mapping[str, Variable] = _with_counts(
    {
        "turns": Variable(doc="Turns so far."),
        "tools": Variable(
            doc="Tool calls so far.",
            fields={"errors": VariableField(types=INT, doc="Tool calls whose result is an error.")},
        ),
        "tokens": Variable(
            doc="Tokens so far.",
            fields={
                "sampled": VariableField(types=INT, doc="Tokens that the model has sampled in all turns."),
                "context": VariableField(types=INT, doc="Length of the current branch, prompt included."),
            },
        ),
        "images": Variable(doc="Images so far."),
        "limits": Variable(doc="The spec's limits; one that is not set reads as 9007199254740991.", fields=_limits()),
        "rewards": Variable(
            doc="The rewards in the ledger, all names summed.",
            fields={
                "total": VariableField(types=DOUBLE, doc="Rewards of all turns."),
                "last": VariableField(types=DOUBLE, doc="Rewards of the newest turn; 0.0 before the first."),
                "previous": VariableField(types=DOUBLE, doc="Rewards of the turn before it; 0.0 if there is none."),
            },
        ),
        "last": Variable(
            doc="The newest turn of the model.",
            fields={
                "finish": VariableField(types=STRING, doc="`stop`, `length` or `abort`; empty before the first turn."),
                "tokens": VariableField(types=INT, doc="Sampled tokens."),
                "calls": VariableField(types=INT, doc="Tool calls that could be read."),
                "malformed": VariableField(types=BOOL, doc="Whether it contains a tool call that could not be read."),
                "text": VariableField(types=STRING, doc="Its text."),
            },
        ),
        "feedback": Variable(
            doc="The newest turn of the user, with the facts that it reported.",
            fields={
                "solved": VariableField(types=BOOL, doc="Whether the user called the task solved."),
                "satisfied": VariableField(types=BOOL, doc="Whether the user wants nothing more."),
                "malformed": VariableField(
                    types=BOOL,
                    doc="Whether the engine answered in the user's place, because the reply could not be read.",
                ),
            },
            open=True,
        ),
        "facts": Variable(doc="The facts so far; newer values replace older ones.", open=True),
        "task": Variable(doc="The fields of the task.", open=True),
    }
)
"""Every variable of guards and of the rules' `when`."""
