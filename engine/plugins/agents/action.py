"""`run_agent`: runs an agent program until its next request, or its end.

A request is a record, whose event leads to a state that generates. When the machine comes back, that turn's record is
durable, and the reply is sent. On a resume the program runs again, and gets the recorded replies while its requests are
the recorded ones.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from engine.actions.action import Action, EpisodeObjects, post_rewards
from engine.actions.calling.code_call import LoopReplacedError, call_spec_code, is_async
from engine.actions.generate import GenerateAction
from engine.episode.episode import UNRECEIVED, Episode
from engine.errors import ImageError, RenderError, SpecCodeError
from engine.plugins.agents.agent_run import (
    AgentRewards,
    AgentRun,
    ProgramObjects,
    only_source,
    require_reward,
)
from engine.plugins.agents.command import CommandProgram
from engine.plugins.agents.inbox import Exchange
from engine.plugins.agents.program import CoroutineProgram, ProgramBody, ProgramEnd
from engine.plugins.agents.record import AgentRecord
from engine.plugins.agents.rewards import SOURCE
from engine.plugins.agents.spec import AgentSpec
from engine.plugins.agents.threads import AgentThreads, newest_reply, tools_key
from engine.plugins.agents.wire.requests import ApiError, Replies
from engine.schemas.environment import ProgramSettings
from engine.schemas.machine import StateSpec
from engine.spec.added import spec_facts
from engine.spec.code.entry import load_entry

if TYPE_CHECKING:
    from engine.actions.calling.workers import Workers
    from engine.schemas.episode import EpisodeSpec
    from engine.spec.load import LoadedSpec
    from engine.tokens.template import ChatTemplate

_GRACE = 5.0
"""Seconds after its time after which a coroutine that cannot be cancelled is given up."""


class RunAgentAction(Action):
    """Give the program the newest reply, and wait for its next request or its end."""

    name = "run_agent"

    def __init__(self, loaded: LoadedSpec, state: StateSpec, template: ChatTemplate, code: Workers) -> None:
        """Read the program's settings.

        Raises:
            SpecCodeError: The spec has no `agent`, or `agent.use` is not a coroutine function.
            EntryError: It cannot be imported.
        """
        super().__init__(loaded, state, template, code)
        agent = AgentSpec.section_of(loaded.spec)
        if agent is None:
            raise SpecCodeError(
                "a state's action is `run_agent`, but the spec has no `agent`", blame="spec", kind="no_agent"
            )
        self._spec = agent
        self._stop_texts = tuple(template.decode([stop]) for stop in template.stop_token_ids)
        self._answers = _answers(loaded.spec, loaded.base)
        self._function = None if agent.use is None else load_entry(agent.use, loaded.base)
        if self._function is not None and not is_async(self._function):
            raise SpecCodeError(
                f"agent.use: `{agent.use}` must be a coroutine function: write `async def`, or start it with `run`",
                blame="spec",
                kind="agent_not_async",
            )
        self._generate = GenerateAction(loaded, StateSpec(action="generate"), template, code)
        self._only_source = only_source(loaded.spec)

    async def perform(self, episode: Episode, objects: EpisodeObjects) -> AgentRecord:
        """Return the next request, or the end of the program.

        Raises:
            SpecCodeError: The program cannot be started, has ended before, or wrote a reward that cannot be read.
        """
        threads = AgentThreads.of(episode, self._stop_texts)
        threads.note_reply(episode)
        program = objects.part(ProgramObjects)
        run = program.run
        if run is None:
            run = await self._start(episode, objects, threads)
        elif run.ended:
            raise SpecCodeError(
                f"the program has ended; no transition may lead to {episode.state} again",
                blame="spec",
                kind="agent_ended",
            )
        elif run.current is not None and (again := self._reply(run, run.current, episode)) is not None:
            return again
        repeated = objects.repeating
        if repeated is None and run.ahead is None and (sampler := program.sampler) is not None:
            sampler.follow(episode, threads, self._generate, run.inbox)
            run.ahead = sampler
        recorded = partial(threads.is_recorded, repeated) if isinstance(repeated, AgentRecord) else None
        while isinstance(exchange := await run.next(recorded), Exchange):
            asked = exchange.request
            place = threads.find(asked.messages, tools_key(asked.tools))
            new = asked.messages[place.covered :]
            try:
                episode.conversation.admit(new, asked.tools)
            except (RenderError, ImageError) as error:
                run.refuse(ApiError(str(error), param="messages"))
                continue
            run.asked_at = episode.turn
            if run.ahead is not None:
                run.ahead.answers(exchange)
            run.record = AgentRecord(
                event="request",
                messages=new,
                parent=place.parent,
                reason=place.reason,
                tools=asked.tools,
                sampling=asked.sampling,
                overruled=asked.overruled,
                rewards=run.inbox.take_rewards(),
                unreceived=run.inbox.unreceived,
            )
            return run.record
        run.ended = True
        return self._ended(exchange, run, episode)

    async def _start(self, episode: Episode, objects: EpisodeObjects, threads: AgentThreads) -> AgentRun:
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
        run = AgentRun(self._spec, body, episode, seconds, self._generate.bounds, logprobs=logprobs)
        run.inbox.counter = lambda request: len(
            threads.conversation_for(episode, request, self._generate.vision).prompt()
        )
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

    @staticmethod
    def _reply(run: AgentRun, exchange: Exchange, episode: Episode) -> AgentRecord | None:
        """Send the newest reply; return the request's record again if it asks for one more."""
        if episode.turn == run.asked_at:
            run.refuse(ApiError("no reply could be sampled", code="no_reply"))
            if run.ahead is not None:
                run.ahead.answers(None)
            return None
        run.asked_at = episode.turn
        exchange.turns.append(episode.turn)
        exchange.replies.append(newest_reply(episode, logprobs=exchange.request.logprobs))
        count = len(exchange.replies)
        if count < exchange.request.replies:
            assert run.record is not None
            record = run.record
            return AgentRecord(
                event="request",
                messages=record.messages,
                parent=record.parent,
                reason="sibling",
                tools=record.tools,
                sample=count,
                sampling=record.sampling,
                rewards=run.inbox.take_rewards(),
                unreceived=run.inbox.unreceived,
            )
        run.answer(Replies(id=f"{episode.id}-{exchange.turns[0]}", created=int(time.time()), replies=exchange.replies))
        if run.ahead is not None:
            run.ahead.answers(None)
        return None

    def _ended(self, end: ProgramEnd, run: AgentRun, episode: Episode) -> AgentRecord:
        event: Literal["exited", "died", "timeout"] = "exited" if end.status == 0 else "died"
        return AgentRecord(
            event="timeout" if end.status is None else event,
            status=end.status,
            output=end.output,
            reason=run.inbox.refused if episode.turn < 0 else "",
            rewards=run.end_rewards(end),
            unreceived=run.inbox.unreceived,
        )

    def apply(self, episode: Episode, record: AgentRecord) -> str:
        """Make the request the next prompt, or write the program's rewards.

        Raises:
            SpecCodeError: The program ended without a request, or nothing gave a reward.
        """
        threads = AgentThreads.of(episode, self._stop_texts)
        threads.note_reply(episode)
        others = {turn: why for turn, why in episode.untrained.items() if why != UNRECEIVED}
        episode.untrained = others | dict.fromkeys(record.unreceived, UNRECEIVED)
        if episode.turn >= 0:
            post_rewards(episode, record.rewards, SOURCE, {SOURCE: AgentRewards.blame})
        if record.event == "request":
            threads.attach(episode, record)
            episode.sampling = record.sampling
            return record.event
        how = {"exited": "ended", "died": f"ended with status {record.status}", "timeout": "ran out of time"}[
            record.event
        ]
        tail = f"; it printed: …{record.output[-500:]}" if record.output else ""
        if episode.turn < 0:
            why = "without one request to OPENAI_BASE_URL"
            if record.reason:
                why = f"without a reply: its requests were refused, the newest because {record.reason}"
            raise SpecCodeError(
                f"the program {how} {why}{tail}",
                blame="environment",
                kind="agent_no_request",
            )
        if self._only_source:
            require_reward(episode, f"the program {how}", tail)
        return record.event

    def pipelined(self, episode: Episode, objects: EpisodeObjects) -> bool:
        """False: a reply leaves only when its record is durable."""
        return False

    def effects(self, episode: Episode, objects: EpisodeObjects) -> str:
        """Return the effects of the spec's `agent`; `external` for a program elsewhere, which cannot run again."""
        return self._spec.effects if objects.part(ProgramObjects).elsewhere is None else "external"


def _answers(spec: EpisodeSpec, base: Path) -> list[Path]:
    """The files and folders with the tasks of a spec and of its evaluations, and the folder of its runs."""
    named = [*spec.tasks.files]
    for tasks in (tasks for facts in spec_facts(spec) for tasks in facts.tasks):
        named += [str(part["path"]) for part in (tasks, *tasks.get("mix", {}).values()) if "path" in part]
    return [*(base / path for path in named), Path.cwd() / spec.rollout.out]
