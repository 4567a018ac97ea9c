"""A sorting office: each turn has one parcel for a town, and the model names the gate for it.

`problems` makes the tasks, `ParcelEnvironment` shows the first parcel, `ParcelUser` judges each reply and shows the
next parcel. The model is not told the gate of a town: it learns it from rewards. A lost parcel costs as much as a sent
parcel earns. The task tests credit per turn: each turn is right or wrong independently of the others, so the sum of an
episode's rewards says little about one turn.

Invariant: a task's parcels are a pure function of (count, seed, parcels), and a town's gate is always the same.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

from engine.schemas.environment import EpisodeView, Reset, Task, UserTurn
from engine.schemas.message import Message
from engine.schemas.reward import RewardEvent

GATES: dict[str, str] = {
    "Bern": "C",
    "Cork": "A",
    "Graz": "D",
    "Lyon": "B",
    "Oslo": "D",
    "Pisa": "A",
    "Riga": "B",
    "Turku": "C",
}
"""The gate of each town."""

_REPLY = re.compile(r"\s*(?P<town>[A-Z][a-z]+) (?P<gate>[A-D])\s*")


def problems(count: int = 64, seed: int = 0, parcels: int = 4) -> Iterator[dict[str, Any]]:
    """Rows with `id` and `towns`, the same for the same arguments.

    Args:
        count: How many.
        seed: Seeds the towns.
        parcels: Number of towns in each row, one per turn.
    """
    rng = random.Random(f"parcels/{seed}")
    for index in range(count):
        yield {"id": f"parcels-{seed}-{index:04d}", "towns": [rng.choice(list(GATES)) for _ in range(parcels)]}


def towns_of(task: Task) -> list[str]:
    """The towns of a task, one for each turn.

    Raises:
        ValueError: The list is empty or missing, or a town is not in `GATES`.
    """
    towns = task.fields.get("towns")
    if not isinstance(towns, list) or not towns or not all(town in GATES for town in towns):
        raise ValueError(
            f"task {task.id!r}: `towns` is {towns!r}; write a list of some of {', '.join(GATES)}, "
            "or take `engine.environments.parcels:problems`"
        )
    return towns


def said(town: str) -> str:
    """The message about a parcel."""
    return f"Parcel for {town}."


class ParcelEnvironment:
    """Shows the first parcel."""

    def reset(self, task: Task, seed: int) -> Reset:
        """The first parcel, as the user's first message."""
        return Reset(messages=[Message(role="user", content=said(towns_of(task)[0]))])


class ParcelUser:
    """A user who sends each parcel whose gate is right, loses the others, and shows the next one.

    Args:
        sent: Reward `parcel` of a turn that names the parcel's town and its gate: `Lyon B`.
        lost: Reward `parcel` of any other turn.
    """

    def __init__(self, sent: float = 1.0, lost: float = -1.0) -> None:
        self._sent = sent
        self._lost = lost

    def respond(self, view: EpisodeView) -> UserTurn:
        """Judge the parcel that was shown last. The facts `judged` and `sent` count parcels; solved: none was lost."""
        towns = towns_of(view.task)
        brought = int(view.facts.get("judged", 0))
        town = towns[brought]
        match = _REPLY.fullmatch(view.reply)
        right = match is not None and (match["town"], match["gate"]) == (town, GATES[town])
        reward = RewardEvent(
            name="parcel",
            value=self._sent if right else self._lost,
            cause=f"{town} goes through {GATES[town]}" + ("" if right else f", not {view.reply.strip()!r}"),
        )
        facts = {"judged": brought + 1, "sent": int(view.facts.get("sent", 0)) + int(right)}
        if brought + 1 == len(towns):
            return UserTurn(satisfied=True, solved=facts["sent"] == len(towns), rewards=[reward], facts=facts)
        words = f"{'Sent' if right else 'Lost'}. {said(towns[brought + 1])}"
        return UserTurn(content=words, rewards=[reward], facts=facts)
