"""What an action is, and what it may use.

`perform` talks to the world, may wait, and changes nothing of the episode that `apply` would have to
know. `apply` is pure: the same record always leads to the same event. A replay calls `apply` alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from engine.actions.facts import ACTIONS
from engine.errors import LedgerError
from engine.limits import Limit, limits_of
from engine.rewards.ledger import blame_of

if TYPE_CHECKING:
    from engine.actions.role_models import RoleModels
    from engine.actions.toolbox import Toolbox
    from engine.actions.workers import Workers
    from engine.backends.base import Backend
    from engine.episode import Episode
    from engine.isolation.remote import Cell
    from engine.schemas.episode import EpisodeSpec
    from engine.schemas.journal import Record
    from engine.schemas.role import UserSpec
    from engine.tokens.format import ChatFormat


MAX_EVENTS = 1_000
"""Rewards in one answer of a world: writing them holds up the event loop, some 40 µs each."""
MAX_POSTINGS = 10_000
"""Postings that they may make: a reward of `all` turns makes one for each turn."""


@dataclass(slots=True)
class Services:
    """What all episodes of a run share."""

    spec: EpisodeSpec
    format: ChatFormat
    backend: Backend
    workers: Workers
    slots: asyncio.Semaphore
    """One for each generation that may be in flight."""
    roles: RoleModels
    """Models that play users or judge."""


@dataclass(slots=True)
class World:
    """The objects that belong to one episode alone."""

    environment: Any = None
    user: Any = None
    user_name: str = ""
    """Which of the spec's `users` it is; empty for the one of `user`."""
    toolbox: Toolbox | None = None
    opened: list[Any] = field(default_factory=list)
    """Whatever has a `close`, in the order of construction."""
    cell: Cell | None = None
    """The worker process that all code of the spec runs in, where the episode runs alone."""


class Action(Protocol):
    """What a state does."""

    events: tuple[str, ...]
    """Events that it may end with, beside `limit` and `failed`."""

    def limit(self, episode: Episode) -> tuple[str, float] | None:
        """The limit that forbids it now, and what had been reached; None when it may go ahead."""
        ...

    def prepare(self, episode: Episode) -> Awaitable[object] | None:
        """Work that `limit` needs done first and that would hold up the event loop; None where there is none."""
        return None

    async def perform(self, episode: Episode, world: World) -> Record:
        """Talk to the world. Raises an `EngineError` where that fails."""
        ...

    def apply(self, episode: Episode, record: Any) -> str:
        """Feed the record to the episode; the event that it means."""
        ...

    def pipelined(self, episode: Episode, world: World) -> bool:
        """Whether it may start before the previous record is durable, because nothing outside the engine can see that it did."""
        ...

    def effects(self, episode: Episode, world: World) -> str:
        """What it calls now, where the episode stands before it: `pure`, `replayable` or `external`."""
        ...


class LimitedAction(Action):
    """An action whose limits are those of its name in `engine.limits`."""

    def __init__(self, services: Services, action: str) -> None:
        self._services = services
        self.action = action
        """Its name in the spec."""
        self._bounds = bounds_of(action, services.spec)

    def limit(self, episode: Episode) -> tuple[str, float] | None:
        """Return the first limit that is reached, and its count."""
        for limit, most in self.bounds(episode):
            count = self.count(limit, episode)
            if limit.is_reached(count, most):
                return limit.name, count
        return None

    def bounds(self, episode: Episode) -> Sequence[tuple[Limit, float]]:
        """The limits on it in this episode and their values, in the order in which they are checked."""
        return self._bounds

    def count(self, limit: Limit, episode: Episode) -> int:
        """Return a limit's count so far."""
        assert limit.count is not None  # `bounds_of` leaves the others out
        return limit.count(episode)


class BuiltInAction(LimitedAction):
    """An action that ships with the engine. Its events are in `engine.actions.facts`, its limits in `engine.limits`.

    A subclass sets the `name` that specs use.
    """

    name: ClassVar[str]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.events = ACTIONS[cls.name].events or ()

    def __init__(self, services: Services) -> None:
        super().__init__(services, self.name)


def bounds_of(action: str, spec: EpisodeSpec, user: UserSpec | None = None) -> list[tuple[Limit, float]]:
    """Return the counted limits on an action and their values, in the order in which they are checked."""
    values = ((limit, limit.value(spec, user)) for limit in limits_of(action) if limit.count is not None)
    return [(limit, value) for limit, value in values if value is not None]


def post_rewards(episode: Episode, rewards: list[Any], source: str) -> None:
    """Write what a world returned into the ledger, under the world's name where it gave none.

    Raises:
        LedgerError: an event cannot be carried out, or there are more than MAX_EVENTS events or MAX_POSTINGS postings.
    """
    if len(rewards) > MAX_EVENTS:
        raise LedgerError(
            f"{source}: {len(rewards)} rewards in one answer; at most {MAX_EVENTS} are taken: add them up before",
            blame=blame_of(source),
        )
    written = 0
    for event in rewards:
        named = event if event.source else event.model_copy(update={"source": source})
        written += len(episode.ledger.post(named, episode.turn, episode.locate))
        if written > MAX_POSTINGS:
            raise LedgerError(
                f"{source}: the rewards of one answer touch turns {written} times; at most {MAX_POSTINGS} are taken: "
                "add them up before",
                blame=blame_of(source),
            )
