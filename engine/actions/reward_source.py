"""Sources of final rewards: the agent program, the environment, the scorer, the judge, and those of plugins.

Invariant: sources are asked one after another, by `order`; so the order of an episode's rewards follows from its spec.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from engine.plugin import Hook
from engine.schemas.sections import written

if TYPE_CHECKING:
    from engine.actions.action import EpisodeObjects
    from engine.actions.calling.workers import Workers
    from engine.episode.episode import Episode
    from engine.schemas.environment import EpisodeView
    from engine.schemas.journal import ScoreRecord
    from engine.schemas.trajectory import Blame
    from engine.spec.load import LoadedSpec

PROGRAM, ENVIRONMENT, SCORER, JUDGE = 10, 20, 30, 40
"""The order of the engine's own sources. A program ends before anything is scored, so that it cannot change what is scored."""


class RewardSource(ABC):
    """Gives rewards to an episode at its end."""

    order: int
    """Sources with a lower number are asked first."""
    source: str
    """The `source` of its rewards."""
    blame: Blame = "environment"
    """The blame for one of its rewards that cannot be applied."""
    asked_without_turns: bool = False
    """Whether it is asked too, with no effect on rewards, where the model has not replied, so that there is no turn to reward."""

    @abstractmethod
    async def rewards(self, episode: Episode, objects: EpisodeObjects) -> ScoreRecord:
        """Return its rewards, which name their source, and the replies of a model that they were read from. Raises: SpecCodeError."""

    def check(self, episode: Episode) -> None:
        """Called after all final rewards are written, in a replay too. Raises: SpecCodeError: the episode fails."""
        return


REWARD_SOURCE: Hook[Callable[[LoadedSpec, Workers], RewardSource | None]] = Hook("reward_source")
"""Makes a source from the spec and what runs its code; None if the spec needs none. Asked if the spec has a section of the plugin."""


def added_sources(loaded: LoadedSpec, code: Workers) -> list[RewardSource]:
    """The sources that plugins add to a spec."""
    sources = [make(loaded, code) for make in REWARD_SOURCE.all(written(loaded.spec))]
    return [source for source in sources if source is not None]


def graded(view: EpisodeView) -> EpisodeView:
    """Return the view of a grader, whose messages are only the episode's assistant turns."""
    replies = [message for message in view.messages if message.role == "assistant"]
    return replace(view, messages=replies[len(replies) - (view.turn + 1) :])
