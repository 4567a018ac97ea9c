"""The action and its limit, as the tables of the engine have them. It does not import the action."""

from __future__ import annotations

from engine.actions.action_facts import ActionFacts
from engine.schemas.limits import Limit

ACTION = "check_sums"
SECONDS = 10.0
"""Deadline of one check."""

CHECK_SUMS = ActionFacts(
    use="sum_check.action:CheckSumsAction",
    does="Work out the sums in the newest reply.",
    events=("right", "wrong", "unchecked"),
    seconds=lambda spec, state: SECONDS,
    speaks="user",
    silent_events=("right", "unchecked"),
    writes=("sums",),
)
SUM_CHECKS = Limit(
    "sum_checks",
    "checks",
    "Replies whose sums were checked so far.",
    ACTION,
    lambda episode: episode.performed.get(ACTION, 0),
    per_use="one",
    variable="sums.checks",
    examples=(3,),
)
