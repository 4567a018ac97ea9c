"""Starts the program of one episode, as a process or a coroutine, with what an episode's objects have of it; its
rewards at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.actions.calling.code_call import LoopReplacedError, call_spec_code, is_async, on_main_loop
from engine.actions.record_filters import in_memory
from engine.actions.reward_source import PROGRAM, RewardSource
from engine.actions.services import EpisodeService
from engine.errors import SpecCodeError
from engine.limits import CONTEXT, LIMITS, PROMPT_LIMITS
from engine.plugins.agents.command import CommandProgram
from engine.plugins.agents.inbox import Inbox
from engine.plugins.agents.prefetch import PrefetchingSampler
from engine.plugins.agents.program import AgentProgram, CoroutineProgram, ProgramBody, ProgramEnd, ServedPrograms
from engine.plugins.agents.rewards import SOURCE, read_end
from engine.plugins.agents.spec import AgentSpec
from engine.plugins.agents.wire.requests import ApiError, ModelRequest, Session
from engine.rewards.ledger import REWARD
from engine.schemas.environment import ProgramSettings
from engine.schemas.journal import ScoreRecord
from engine.schemas.limits import Limit
from engine.schemas.reward import RewardEvent
from engine.spec.added import spec_facts
from engine.spec.code.entry import load_entry

if TYPE_CHECKING:
    from engine.actions.action import EpisodeObjects
    from engine.actions.calling.workers import Workers
    from engine.actions.services import ServiceInputs
    from engine.episode.episode import Episode
    from engine.plugins.agents.record import AgentRecord
    from engine.plugins.agents.threads import AgentThreads
    from engine.schemas.environment import Task
    from engine.schemas.episode import EpisodeSpec
    from engine.spec.load import LoadedSpec
    from engine.tokens.template import ChatTemplate

_GRACE = 5.0
"""Seconds after its time after which a coroutine that cannot be cancelled is given up."""


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

    async def final_rewards(self) -> list[RewardEvent]:
        """Stop the program if it still runs, for example after a limit; return the rewards that are in no record yet.

        Raises:
            SpecCodeError: The reward of its end cannot be read.
        """
        end = None if self.ended else await self.end()
        self.ended = True
        await self.close()
        return [] if end is None else self.end_rewards(end)

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


class AgentStarter:
    """Starts the programs of one spec.

    Args:
        loaded: The spec.
        template: The policy's chat format.
        code: Runs the spec's code.

    Raises:
        SpecCodeError: `agent.use` is not a coroutine function.
        EntryError: It cannot be imported.
    """

    def __init__(self, loaded: LoadedSpec, template: ChatTemplate, code: Workers) -> None:
        agent = AgentSpec.section_of(loaded.spec)
        assert agent is not None
        self._spec, self._loaded, self._template, self._code = agent, loaded, template, code
        self._answers = _answers(loaded.spec, loaded.base)
        self._function = None if self._spec.use is None else load_entry(self._spec.use, loaded.base)
        if self._function is not None and not is_async(self._function):
            raise SpecCodeError(
                f"agent.use: `{self._spec.use}` must be a coroutine function: write `async def`, or start it with "
                "`run`",
                blame="spec",
                kind="agent_not_async",
            )

    async def start(
        self,
        episode: Episode,
        objects: EpisodeObjects,
        threads: AgentThreads,
        bounds: Sequence[tuple[Limit, float]],
    ) -> AgentRun:
        """Start the program of an episode, with the limits on its turns.

        Raises:
            SpecCodeError: It cannot be started.
        """
        task: dict[str, Any] = {
            "id": episode.task.id,
            "fields": episode.task.fields,
            "messages": [
                {"role": message.role, "content": message.plain()["content"]} for message in episode.opening or ()
            ],
            "seed": episode.seed,
        }
        added = await self._settings(objects)
        body: ProgramBody
        program = objects.part(ProgramObjects)
        if (elsewhere := program.elsewhere) is not None:
            body = elsewhere.body(episode.id, task | ({"env": added.env} if added.env else {}))
        elif self._spec.run is not None:
            if self._spec.sandbox is not None and added.env:
                raise SpecCodeError(
                    "the environment gives its program commands that run outside of a sandbox: remove `agent.sandbox`",
                    blame="spec",
                    kind="agent_sandboxed",
                )
            env = self._spec.env | added.env
            body = CommandProgram(
                self._spec.run, self._loaded.base, env, task, episode.id, self._spec.sandbox, self._answers
            )
        elif self._function is None:
            raise SpecCodeError(
                "`agent` has neither `run` nor `use`: its programs run elsewhere; open episodes with "
                "`engine serve --api`",
                blame="spec",
                kind="agent_elsewhere",
            )
        elif added.env:
            raise SpecCodeError(
                f"the environment gives its program the variables {', '.join(added.env)}, and `agent.use` has none: "
                "use `agent.run`",
                blame="spec",
                kind="agent_without_variables",
            )
        else:
            body = CoroutineProgram(self._call, task, LoopReplacedError)
        seconds = min(self._spec.timeout, added.seconds or self._spec.timeout)
        logprobs = not self._loaded.spec.backend.takes_messages
        run = AgentRun(self._spec, body, episode, seconds, bounds, logprobs=logprobs)
        run.inbox.counter = lambda request: self._count(episode, threads, request)
        program.run = run
        objects.opened.append(run)
        try:
            await run.start()
        except OSError as error:
            raise SpecCodeError(
                f"the program `{self._spec.run}` cannot be started: {error}", blame="spec", kind="agent_not_started"
            ) from error
        return run

    async def _settings(self, objects: EpisodeObjects) -> ProgramSettings:
        """Return what the environment adds to the program."""
        environment = self._loaded.spec.environment
        program = getattr(objects.environment, "program", None)
        if environment is None or not callable(program):
            return ProgramSettings()
        settings = await call_spec_code(
            self._code,
            program,
            seconds=environment.timeout,
            blame="environment",
            what=f"`{environment.use}`.program",
        )
        if not isinstance(settings, ProgramSettings):
            raise SpecCodeError(
                f"`{environment.use}`.program returned {type(settings).__name__}; it must return ProgramSettings",
                blame="environment",
                kind="environment_bad_reply",
            )
        return settings

    def _count(self, episode: Episode, threads: AgentThreads, request: ModelRequest) -> int:
        """The tokens of the prompt that a request leads to.

        Raises:
            RenderError: The model cannot be shown it.
            ImageError: An image cannot be read.
        """
        if (vision := self._template.vision) is not None:
            request = replace(request, messages=in_memory(request.messages, vision))
        return len(threads.conversation_for(episode, request).prompt())

    async def _call(self, arguments: Mapping[str, Any]) -> Any:
        assert self._function is not None
        return await call_spec_code(
            self._code,
            partial(self._function, **self._spec.with_, **arguments),
            seconds=self._spec.timeout + _GRACE,
            blame="environment",
            what=f"`{self._spec.use}`",
            effects=self._spec.effects,
        )


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
        """End the program, and return what it gives. Raises: SpecCodeError: the reward cannot be read."""
        run = objects.part(ProgramObjects).run
        return ScoreRecord(rewards=[] if run is None else await run.final_rewards())

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


def _answers(spec: EpisodeSpec, base: Path) -> list[Path]:
    """The files and folders with the tasks of a spec and of its evaluations, and the folder of its runs."""
    named = [*spec.tasks.files]
    for tasks in (tasks for facts in spec_facts(spec) for tasks in facts.tasks):
        named += [str(part["path"]) for part in (tasks, *tasks.get("mix", {}).values()) if "path" in part]
    return [*(base / path for path in named), Path.cwd() / spec.rollout.out]
