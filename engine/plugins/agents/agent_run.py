"""The program of one episode, with what the episode's objects have of it, and its rewards at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from engine.actions.calling.code_call import on_main_loop
from engine.actions.reward_source import PROGRAM, RewardSource
from engine.actions.services import EpisodeService
from engine.errors import SpecCodeError
from engine.limits import CONTEXT, LIMITS, PROMPT_LIMITS
from engine.plugins.agents.inbox import Inbox
from engine.plugins.agents.prefetch import PrefetchingSampler
from engine.plugins.agents.program import AgentProgram, ProgramBody, ProgramEnd, ServedPrograms
from engine.plugins.agents.rewards import SOURCE, read_end
from engine.plugins.agents.spec import AgentSpec
from engine.plugins.agents.wire.requests import ApiError, Session
from engine.rewards.ledger import REWARD
from engine.schemas.journal import ScoreRecord
from engine.schemas.limits import Limit
from engine.schemas.reward import RewardEvent

if TYPE_CHECKING:
    from engine.actions.action import EpisodeObjects
    from engine.actions.calling.workers import Workers
    from engine.actions.services import ServiceInputs
    from engine.episode.episode import Episode
    from engine.plugins.agents.record import AgentRecord
    from engine.schemas.environment import Task
    from engine.schemas.episode import EpisodeSpec
    from engine.spec.load import LoadedSpec


class AgentRun(AgentProgram):
    """A program, the record of its current request, and the episode's newest turn when that came.

    Args:
        spec: The spec's `agent`.
        body: What runs.
        episode: The episode.
        seconds: Its time.
        bounds: The limits on a turn, and their values.
        logprobs: Whether the backend gives log-probs.
    """

    def __init__(
        self,
        spec: AgentSpec,
        body: ProgramBody,
        episode: Episode,
        seconds: float,
        bounds: Sequence[tuple[Limit, float]],
        *,
        logprobs: bool,
    ) -> None:
        session = Session(allow=frozenset(spec.allow), ignore=frozenset(spec.ignore), logprobs=logprobs)
        super().__init__(body, seconds, Inbox(session, episode.id, spec.reward_names), spec.idle or inf)
        self._spec, self._episode, self._bounds = spec, episode, bounds
        self.record: AgentRecord | None = None
        self.asked_at = -1
        self.ended = False

    def end_rewards(self, end: ProgramEnd) -> list[RewardEvent]:
        """The rewards that are in no record yet, and those of the program's end.

        Raises:
            SpecCodeError: The reward of its end cannot be read.
        """
        rewards = self.inbox.take_rewards()
        if self._spec.reward == "file":
            return rewards if end.reward is None else [*rewards, *read_end(end.reward, self._spec.reward_names)]
        if end.status is None or end.status < 0:
            return rewards
        cause = f"exit status {end.status}"
        value = float(end.status == 0)
        return [*rewards, RewardEvent(turn="last", name=REWARD, value=value, source=SOURCE, cause=cause)]

    def fault(self) -> ApiError | None:
        """See `AgentProgram.fault`."""
        name, count = self._episode.limit, self._episode.limit_count
        if name is None:
            return None
        limit = next(limit for limit in LIMITS if limit.name == name)
        most = next((most for bound, most in self._bounds if bound is limit), None)
        if name not in PROMPT_LIMITS:
            of = "" if most is None else f" ({most:g})"
            return ApiError(f"the episode has ended at its limit `{limit.key}`{of}", code="episode_over")
        keys = f"`{limit.key}` of the spec" + (
            ", or the context of the model or its server" if limit is CONTEXT else ""
        )
        text = f"the prompt is too long: it has at least {count:g} tokens"
        if most is not None:
            text += f", and this model's maximum context length is {most:g} tokens"
        text += f" ({keys}). The episode has ended"
        return ApiError(text, param="messages", code="context_length_exceeded")

    @on_main_loop
    async def close(self) -> None:
        """Stop the program; a second call does nothing."""
        await self.stop()


@dataclass(slots=True)
class ProgramObjects:
    """The part of an episode's objects that belongs to its program."""

    run: AgentRun | None = None
    """The program, once it has been started."""
    sampler: PrefetchingSampler | None = None
    """The episode's sampler."""
    elsewhere: ServedPrograms | None = None
    """The programs that run elsewhere; None: the spec's own program is started."""


class AgentService(EpisodeService):
    """Opens the episodes of one spec.

    Args:
        agent: The spec's `agent`.
        elsewhere: The programs that run elsewhere, instead of the spec's.
    """

    def __init__(self, agent: AgentSpec, elsewhere: ServedPrograms | None) -> None:
        self._agent, self._elsewhere = agent, elsewhere

    def check(self) -> None:
        """Refuse a spec without a program where none runs elsewhere. Raises: SpecCodeError."""
        if self._agent.elsewhere and self._elsewhere is None:
            raise SpecCodeError(
                "`agent` has neither `run` nor `use`, so its programs run elsewhere: open episodes with "
                "`engine serve --api`",
                blame="spec",
                kind="agent_elsewhere",
            )

    async def open(self, task: Task | None, objects: EpisodeObjects) -> None:
        """Let the program's requests be sampled ahead."""
        program = objects.part(ProgramObjects)
        program.elsewhere = self._elsewhere
        if objects.sampler is not None:
            objects.sampler = program.sampler = PrefetchingSampler(objects.sampler)


def open_service(inputs: ServiceInputs) -> AgentService | None:
    """The hook `open_service`."""
    agent = AgentSpec.section_of(inputs.loaded.spec)
    if agent is None:
        return None
    return AgentService(agent, next((item for item in inputs.given if isinstance(item, ServedPrograms)), None))


class AgentRewards(RewardSource):
    """The rewards that a program gives at its end. It is ended here, if it still runs."""

    order, source = PROGRAM, SOURCE
    asked_without_turns = True

    def __init__(self, spec: EpisodeSpec) -> None:
        self._is_only_source = only_source(spec)

    async def rewards(self, episode: Episode, objects: EpisodeObjects) -> ScoreRecord:
        """End the program if it still runs, for example after a limit; return the rewards that are in no record yet.

        Raises:
            SpecCodeError: The reward of its end cannot be read.
        """
        run = objects.part(ProgramObjects).run
        if run is None:
            return ScoreRecord(rewards=[])
        end = None if run.ended else await run.end()
        run.ended = True
        await run.close()
        return ScoreRecord(rewards=[] if end is None else run.end_rewards(end))

    def check(self, episode: Episode) -> None:
        """Raise if a limit ended an episode to which only its program gives rewards, and it gave none."""
        if self._is_only_source and episode.turn >= 0 and episode.failure is None:
            require_reward(episode, f"the episode ended by {episode.limit or episode.event}")


def reward_source(loaded: LoadedSpec, code: Workers) -> AgentRewards:
    """The hook `reward_source`."""
    return AgentRewards(loaded.spec)


def only_source(spec: EpisodeSpec) -> bool:
    """Whether nothing but the program of a spec gives rewards."""
    return AgentSpec.section_of(spec) is not None and not (
        spec.rewards.scorer or spec.environment or spec.rewards.reassign
    )


def require_reward(episode: Episode, what: str, tail: str = "") -> None:
    """Raise if nothing gave a reward to an episode with a program.

    Args:
        episode: The episode, at its end.
        what: What ended it, for the message.
        tail: More for the message.

    Raises:
        SpecCodeError: The ledger is empty.
    """
    if not episode.ledger.postings:
        raise SpecCodeError(
            f"{what} and nothing gave a reward: write one to EPISODE_REWARD_FILE, POST one to EPISODE_REWARD_URL, "
            f"return one (`use`), or set agent.reward or rewards.scorer{tail}",
            blame="environment",
            kind="no_reward",
        )
