"""`score`: writes an episode's final rewards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.actions.action import BuiltInAction, EpisodeObjects, post_rewards
from engine.actions.agent_run import only_source, require_reward
from engine.actions.calling.workers import call_spec_code
from engine.actions.facts import SCORERS
from engine.actions.judge import Judge
from engine.episode.episode import Episode
from engine.errors import SpecCodeError
from engine.isolation.pool import RemoteFunction
from engine.isolation.remote import Origin, function_in
from engine.schemas.environment import EpisodeView
from engine.schemas.journal import ScoreRecord
from engine.schemas.reward import RewardEvent
from engine.spec.code.entry import load_entry

if TYPE_CHECKING:
    from engine.actions.calling.workers import Workers
    from engine.schemas.entry import Effects
    from engine.schemas.machine import StateSpec
    from engine.spec.load import LoadedSpec
    from engine.tokens.template import ChatTemplate


class ScoreAction(BuiltInAction):
    """Call the environment's `score` and the spec's scorer, if they exist."""

    name = "score"

    def __init__(self, loaded: LoadedSpec, state: StateSpec, template: ChatTemplate, code: Workers) -> None:
        super().__init__(loaded, state, template, code)
        self._environment = loaded.spec.environment
        self._only_program = only_source(loaded.spec)
        scorer = loaded.spec.rewards.scorer
        self._spec = scorer
        self._judge = Judge(scorer) if scorer is not None and scorer.model_played else None
        self._scorer: Callable[..., Any] | None = None
        self._origin: Origin | None = None
        if scorer is not None and scorer.use is not None:
            use = SCORERS.get(scorer.use, scorer.use)
            self._origin = Origin(use, loaded.base, scorer.with_, "function")
            isolation = loaded.spec.isolation_of(scorer.isolation)
            if isolation.mode == "process":
                code.isolation.describe(use, loaded.base, isolation)
                pool = code.isolation.pool(isolation, functions=True)
                self._scorer = RemoteFunction(self._origin, pool, "rewards")
            else:
                self._scorer = partial(load_entry(use, loaded.base), **scorer.with_)

    async def perform(self, episode: Episode, objects: EpisodeObjects) -> ScoreRecord:
        """Return their rewards, in that order."""
        rewards: list[RewardEvent] = []
        if objects.agent is not None:
            rewards = await objects.agent.final_rewards()  # a program must not change what is scored
        if episode.turn < 0:
            return ScoreRecord(rewards=[])  # no turn to reward
        score = getattr(objects.environment, "score", None)
        if callable(score):
            assert self._environment is not None
            what = f"`{self._environment.use}`.score"
            seconds, effects = self._environment.timeout, self._environment.effects
            rewards += await self._ask(score, episode.view(), what, "environment", seconds, effects)
        final = await self.final(episode, objects)
        return ScoreRecord(rewards=[*rewards, *final.rewards], replies=final.replies)

    async def final(self, episode: Episode, objects: EpisodeObjects) -> ScoreRecord:
        """Return the rewards of the spec's scorer, or of its judge; none if it has neither."""
        rewards: list[RewardEvent] = []
        replies: list[str] = []
        if self._scorer is not None:
            assert self._spec is not None
            assert self._origin is not None
            scorer = self._scorer if objects.cell is None else function_in(objects.cell, self._origin, "rewards")
            rewards += await self._ask(
                scorer, graded(episode.view()), f"`{self._spec.use}`", "score", self._spec.seconds
            )
        if self._judge is not None:
            model = objects.model("rewards", "scorer")
            for judgement in await self._judge.score(graded(episode.view()), model):
                rewards.append(judgement.reward)
                replies.append(judgement.said)
        return ScoreRecord(rewards=rewards, replies=replies)

    async def _ask(
        self,
        function: Any,
        view: EpisodeView,
        what: str,
        source: str,
        seconds: float,
        effects: Effects = "pure",
    ) -> list[RewardEvent]:
        answer = await call_spec_code(
            self._code,
            function,
            view,
            seconds=seconds,
            blame="environment",
            what=what,
            effects=effects,
        )
        if not isinstance(answer, list) or not all(isinstance(item, RewardEvent) for item in answer):
            raise SpecCodeError(
                f"{what} must return a list of RewardEvent, not {type(answer).__name__}",
                blame="environment",
                kind="environment_bad_reply",
            )
        return [item if item.source else item.model_copy(update={"source": source}) for item in answer]

    def apply(self, episode: Episode, record: ScoreRecord) -> str:
        """Write the rewards.

        Raises:
            SpecCodeError: A limit ended an episode to which only its program gives rewards, and it gave none.
        """
        post_rewards(episode, record.rewards, "score")
        if self._only_program and episode.turn >= 0 and episode.failure is None:
            require_reward(episode, f"the episode ended by {episode.limit or episode.event}")
        return ""

    def effects(self, episode: Episode, objects: EpisodeObjects) -> str:
        """Return the environment's effects, if it has a `score`."""
        asked = episode.turn >= 0 and callable(getattr(objects.environment, "score", None))
        return self._environment.effects if self._environment is not None and asked else "pure"


def graded(view: EpisodeView) -> EpisodeView:
    """Return the view of a grader, whose messages are only the episode's assistant turns."""
    replies = [message for message in view.messages if message.role == "assistant"]
    return replace(view, messages=replies[len(replies) - (view.turn + 1) :])
