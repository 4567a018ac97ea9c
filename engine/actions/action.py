"""The base class of actions, and the objects of an episode that they call.

`perform` does the I/O, may wait, and changes nothing of the episode that `apply` would have to
know. `apply` is pure: the same record always leads to the same event. A replay calls `apply` alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from engine.actions.facts import ACTIONS
from engine.errors import LedgerError
from engine.limits import limits_of
from engine.rewards.ledger import OWN_BLAMES, blame_of
from engine.schemas.limits import Limit

if TYPE_CHECKING:
    from engine.actions.calling.host import EpisodeHost
    from engine.actions.calling.workers import Workers
    from engine.actions.toolbox import Toolbox
    from engine.backends.backend import Sampler
    from engine.episode.episode import Episode
    from engine.schemas.episode import EpisodeSpec
    from engine.schemas.journal import Record
    from engine.schemas.machine import StateSpec
    from engine.schemas.role import UserSpec
    from engine.schemas.trajectory import Blame
    from engine.spec.load import LoadedSpec
    from engine.tokens.template import ChatTemplate


P = TypeVar("P")
MAX_EVENTS = 1_000
"""Maximum number of rewards in one answer: writing one blocks the event loop for about 40 µs."""
MAX_POSTINGS = 10_000
"""Maximum number of postings that they make: a reward of `all` turns makes one per turn."""


@dataclass(slots=True)
class EpisodeObjects:
    """What `perform` may call for one episode. Nothing of it is needed to apply a record."""

    environment: Any = None
    user: Any = None
    user_name: str = ""
    """The name of the user among the spec's `users`; empty for the user of `user`."""
    toolbox: Toolbox | None = None
    parts: dict[type, Any] = field(default_factory=dict)
    """See `part`."""
    opened: list[Any] = field(default_factory=list)
    """The objects with a `close` method, in the order of construction."""
    repeating: Record | None = None
    """While a resume repeats a call: the record that the call gave before."""
    host: EpisodeHost | None = None
    """What runs all code of the spec for this episode, if the engine died during it."""
    sampler: Sampler | None = None
    """Samples the policy's replies; None where nothing is sampled."""

    def part(self, cls: type[P]) -> P:
        """What a service or an action of a plugin keeps here, made when it is first asked for."""
        part: P | None = self.parts.get(cls)
        if part is None:
            part = self.parts[cls] = cls()
        return part


class Action(ABC):
    """The action of a state. A subclass that ships with the engine or a plugin sets the `name` that specs use, by which
    its events (`engine.actions.facts`) and limits (`engine.limits`) are looked up.

    Args:
        loaded: The spec.
        state: The state that has the action.
        template: The policy's chat format.
        code: Runs the spec's code.
    """

    name: ClassVar[str] = ""
    events: tuple[str, ...] = ()
    """The events with which it may end, other than `limit` and `failed`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" in vars(cls):
            cls.events = ACTIONS[cls.name].events or ()

    def __init__(self, loaded: LoadedSpec, state: StateSpec, template: ChatTemplate, code: Workers) -> None:
        self._loaded, self._template, self._code = loaded, template, code
        self.state = state
        self.bounds = bounds_of(str(state.action), loaded.spec)
        """The limits on it and their values, in the order in which they are checked."""

    def limit(self, episode: Episode) -> tuple[str, float] | None:
        """Return the first limit that is reached, and its count; None if it may start."""
        return first_reached(episode, self.bounds) if self.bounds else None

    def prepare(self, episode: Episode) -> Awaitable[object] | None:
        """Return work that `limit` needs first and that would block the event loop; None if there is none."""
        return None

    def overflow(self, episode: Episode) -> tuple[str, float] | None:
        """Return the limit that leaves no room for the action, and the count; asked only in states that handle
        `overflow`."""
        return None

    @abstractmethod
    def perform(self, episode: Episode, objects: EpisodeObjects) -> Record | Awaitable[Record]:
        """Do the I/O of the action: the record, if it is there at once. Raises an `EngineError` if it fails."""

    @abstractmethod
    def apply(self, episode: Episode, record: Any) -> str:
        """Apply the record to the episode, and return the event."""

    def pipelined(self, episode: Episode, objects: EpisodeObjects) -> bool:
        """Return whether it may start before the previous record is durable, because it has no effect outside the
        engine."""
        return False

    def effects(self, episode: Episode, objects: EpisodeObjects) -> str:
        """Return the effects of the code that it would call now: `pure`, `replayable` or `external`. `pure`: its record
        is enough, and nothing is called again."""
        return "pure"


def bounds_of(action: str, spec: EpisodeSpec, user: UserSpec | None = None) -> list[tuple[Limit, float]]:
    """Return the counted limits on an action and their values, in the order in which they are checked."""
    values = ((limit, limit.value(spec, user)) for limit in limits_of(action) if limit.count is not None)
    return [(limit, value) for limit, value in values if value is not None]


def first_reached(episode: Episode, bounds: Sequence[tuple[Limit, float]]) -> tuple[str, float] | None:
    """Return the first of some limits that an episode has reached, and its count."""
    for limit, most in bounds:
        assert limit.count is not None  # `bounds_of` returns only counted limits
        count = limit.count(episode)
        if count > most or (count == most and not limit.inclusive):
            return limit.name, count
    return None


def post_rewards(episode: Episode, rewards: list[Any], source: str, blames: Mapping[str, Blame] = OWN_BLAMES) -> None:
    """Write the rewards of an answer into the ledger. Those without a source get the given one; `blames`: see
    `Ledger.post`.

    Raises: LedgerError: an event cannot be applied, or there are more than MAX_EVENTS events or MAX_POSTINGS postings.
    """
    if len(rewards) > MAX_EVENTS:
        raise LedgerError(
            f"{source}: {len(rewards)} rewards in one answer; at most {MAX_EVENTS} are allowed: add them up first",
            blame=blame_of(source, blames),
        )
    written = 0
    for event in rewards:
        named = event if event.source else event.model_copy(update={"source": source})
        written += len(episode.ledger.post(named, episode.turn, episode, blames))
        if written > MAX_POSTINGS:
            raise LedgerError(
                f"{source}: the rewards of one answer touch turns {written} times; at most {MAX_POSTINGS} are allowed: "
                "add them up first",
                blame=blame_of(source, blames),
            )
