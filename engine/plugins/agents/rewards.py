"""Rewards that an agent program gives: at its end (a file, a returned value, its exit status), or for a reply by
`POST /v1/reward`."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from math import isfinite
from typing import Any, TypeGuard

from engine.errors import SpecCodeError
from engine.plugins.agents.wire.requests import ApiError
from engine.rewards.ledger import LARGEST, REWARD
from engine.schemas.reward import RewardEvent

SOURCE = "agent"
"""Source of these rewards in the ledger."""
PATH = "/v1/reward"
_FIELDS = ("response_id", "choice", "name", "value")


def read_end(text: str, names: Collection[str]) -> list[RewardEvent]:
    """The rewards that a program gave at its end; they belong to the last turn.

    Args:
        text: JSON: a number, or an object of numbers by name.
        names: Names that rewards may have.

    Raises:
        SpecCodeError: It is something else, or has another name.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    named = value if isinstance(value, dict) else {REWARD: value}
    problem = (
        "" if named and all(map(_is_amount, named.values())) else "write a number, or an object of numbers by name"
    )
    unknown = [name for name in named if name not in names]
    if not problem and unknown:
        problem = f"no reward is named `{unknown[0]}`; add it to agent.reward_names ({_listed(names)})"
    if problem:
        raise SpecCodeError(f"the program's reward is {text[:80]!r}: {problem}", blame="environment", kind="bad_reward")
    return [RewardEvent(turn="last", name=name, value=float(item), source=SOURCE) for name, item in named.items()]


def read_posted(body: Any, names: Collection[str], sent: Mapping[str, Sequence[int]], episode: str) -> RewardEvent:
    """The reward of one `POST`.

    Args:
        body: Its JSON value: `value`, and optionally `response_id` (default: the newest reply), `choice` (of a request
            for several replies) and `name`.
        names: Names that rewards may have.
        sent: The turns of each reply that was sent, by the part of its id that all model APIs share.
        episode: The episode's id, with which that part begins.

    Raises:
        ApiError: A field is missing, invalid or not known.
    """
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object")
    for field in body:
        if field not in _FIELDS:
            raise ApiError(f"`{field}` is not supported: leave it out", param=field)
    value, name, response_id = body.get("value"), body.get("name", REWARD), body.get("response_id")
    if not _is_amount(value):
        raise ApiError(f"`value` must be a finite number of at most {LARGEST:g}", param="value")
    if name not in names:
        raise ApiError(f"no reward is named {name!r}; the spec's agent.reward_names are {_listed(names)}", param="name")
    if response_id is None:
        turns = list(sent.values())[-1] if sent else None
    else:
        reply_id = f"{episode}-{response_id.rpartition('-')[2]}" if isinstance(response_id, str) else ""
        turns = sent.get(reply_id) if reply_id and response_id.endswith(reply_id) else None
    if turns is None:
        what = "no reply was sent yet" if response_id is None else f"no reply has the id {response_id!r}"
        raise ApiError(what, param="response_id", status=404, code="not_found")
    choice = body.get("choice", 0 if len(turns) == 1 else None)
    if type(choice) is not int or not 0 <= choice < len(turns):
        raise ApiError(f"`choice` must be the index of one of the {len(turns)} replies", param="choice")
    return RewardEvent(turn=turns[choice], name=name, value=float(value), source=SOURCE)


def _is_amount(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and abs(value) <= LARGEST


def _listed(names: Collection[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
