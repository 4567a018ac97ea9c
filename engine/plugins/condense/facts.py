"""The actions of condensing, and their limit: what the tables of the core have. It imports neither the section nor the
actions."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from engine.actions.action_facts import ActionFacts
from engine.schemas.limits import Limit

if TYPE_CHECKING:
    from engine.schemas.episode import EpisodeSpec
    from engine.schemas.machine import StateSpec

_ACTION = "condense"


def _seconds(spec: EpisodeSpec, state: StateSpec) -> float:
    """One summary at a time, in the worst case: as many as the limits allow is not known, so the episode's time bounds
    them."""
    from engine.plugins.condense.spec import CondenseSpec

    return inf if CondenseSpec.or_default(spec).condenser.kind in ("summary", "own") else 0.0


CONDENSE = ActionFacts(
    use="engine.plugins.condense.action:CondenseAction",
    does="Show the model a shorter conversation.",
    events=("condensed", "unchanged"),
    seconds=_seconds,
    rewrites_history=True,
    rewrites_machine="engine.plugins.condense.spec_facts:with_condensing",
    makes_room="engine.plugins.condense.chunks:CondenseRoom",
)
ASK_SUMMARY = ActionFacts(
    use="engine.plugins.condense.action:AskSummaryAction",
    does="Ask the model for a summary of its history, which `condense` then puts in the place of the history.",
    events=("asked",),
    seconds=lambda spec, state: 0.0,
)
CONDENSATIONS = Limit(
    "condensations",
    "condensations",
    "Condensations of the conversation so far.",
    _ACTION,
    lambda episode: episode.performed.get(_ACTION, 0),
    per_use="one",
    variable="condensed.times",
    budget="condensations",
    examples=(4,),
)
