"""Sources of final rewards: the agent program, the environment, the scorer, the judge, and those of plugins.

Invariant: sources are asked one after another, by `order`; so the order of an episode's rewards follows from its spec.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from engine.actions.calling.code_call import call_spec_code
from engine.actions.calling.host import load_function
from engine.actions.facts import SCORERS
from engine.errors import SpecCodeError
from engine.plugin import Hook
from engine.schemas.journal import ScoreRecord
from engine.schemas.reward import RewardEvent
from engine.schemas.sections import written

if TYPE_CHECKING:
    from engine.actions.action import EpisodeObjects
    from engine.actions.calling.workers import Workers
    from engine.episode.episode import Episode
    from engine.schemas.entry import Effects
    from engine.schemas.environment import EpisodeView
    from engine.schemas.trajectory import Blame
    from engine.spec.load import LoadedSpec

PROGRAM, ENVIRONMENT, SCORER, JUDGE = 10, 20, 30, 40
"""The order of the engine's own sources. A program ends before anything is scored, so that it cannot change what is
scored."""


class RewardSource(ABC):
    """Gives rewards to an episode at its end."""

    order: int
    """Sources with a lower number are asked first."""
    source: str
    """The `source` of its rewards."""
    blame: Blame = "environment"
    """The blame for one of its rewards that cannot be applied."""
    asked_without_turns: bool = False
    """Whether it is asked too, with no effect on rewards, where the model has not replied, so that there is no turn to
    reward."""

    @abstractmethod
    async def rewards(self, episode: Episode, objects: EpisodeObjects) -> ScoreRecord:
        """Return its rewards, which name their source, and the replies of a model that they were read from. Raises:
        SpecCodeError."""

    def check(self, episode: Episode) -> None:
        """Called after all final rewards are written, in a replay too. Raises: SpecCodeError: the episode fails."""
        return


REWARD_SOURCE: Hook[Callable[[LoadedSpec, Workers], RewardSource | None]] = Hook("reward_source")
"""Makes a source from the spec and what runs its code; None if the spec needs none. Asked if the spec has a section of
the plugin."""


def sources_of(loaded: LoadedSpec, code: Workers) -> list[RewardSource]:
    """The sources of a spec, in their order: its environment, its scorer, and those of plugins."""
    environment, scorer = loaded.spec.environment, loaded.spec.rewards.scorer
    sources = REWARD_SOURCE.made(written(loaded.spec), loaded, code)
    if environment is not None:
        sources.append(
            CodeRewards(
                code,
                lambda objects: getattr(objects.environment, "score", None),
                order=ENVIRONMENT,
                source="environment",
                what=f"`{environment.use}`.score",
                seconds=environment.timeout,
                effects=environment.effects,
            )
        )
    if scorer is not None and scorer.use is not None:
        use = SCORERS.get(str(scorer.use), str(scorer.use))
        function = load_function(loaded, code, use, scorer.with_, scorer.isolation)
        sources.append(
            CodeRewards(
                code,
                partial(function.of, answer="rewards"),
                order=SCORER,
                source="score",
                what=f"`{scorer.use}`",
                seconds=scorer.seconds,
                view=graded,
            )
        )
    return sorted(sources, key=lambda source: source.order)


class CodeRewards(RewardSource):
    """The rewards that code of the spec gives: the environment's `score`, if it has one, or `rewards.scorer`.

    Args:
        code: Runs it.
        function: Returns what is called for an episode; anything that cannot be called gives no rewards.
        what: What it is, for messages.
        view: What it is shown of the episode's view.
    """

    def __init__(
        self,
        code: Workers,
        function: Callable[[EpisodeObjects], Any],
        *,
        order: int,
        source: str,
        what: str,
        seconds: float,
        effects: Effects = "pure",
        view: Callable[[EpisodeView], EpisodeView] = lambda view: view,
    ) -> None:
        self._code, self._function, self._view = code, function, view
        self.order, self.source = order, source
        self._what, self._seconds, self._effects = what, seconds, effects

    async def rewards(self, episode: Episode, objects: EpisodeObjects) -> ScoreRecord:
        """Ask it; rewards without a source get its own.

        Raises:
            SpecCodeError: it failed, or its answer is not a list of rewards.
        """
        function = self._function(objects)
        if not callable(function):
            return ScoreRecord(rewards=[])
        rewards = await call_spec_code(
            self._code,
            function,
            self._view(episode.view()),
            seconds=self._seconds,
            blame="environment",
            what=self._what,
            effects=self._effects,
        )
        wrong: str | None = type(rewards).__name__
        if isinstance(rewards, list):
            others = (f"a list with {type(item).__name__}" for item in rewards if not isinstance(item, RewardEvent))
            wrong = next(others, None)
        if wrong is not None:
            words = f"{self._what} returned {wrong}; it must return a list of RewardEvent"
            raise SpecCodeError(words, blame="environment", kind="environment_bad_reply")
        return ScoreRecord(
            rewards=[item if item.source else item.model_copy(update={"source": self.source}) for item in rewards]
        )


def graded(view: EpisodeView) -> EpisodeView:
    """Return the view of a grader, whose messages are only the episode's assistant turns."""
    replies = [message for message in view.messages if message.role == "assistant"]
    return replace(view, messages=replies[len(replies) - (view.turn + 1) :])
