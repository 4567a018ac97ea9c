"""The actions that call code of the spec: its environment, tools, users, scorer and own actions.

An answer becomes a record only after its type was checked, so `apply` needs no check; a call of code has a deadline, a
blame and effects (`SpecCodeAction.ask`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from engine.actions.action import Action, EpisodeObjects, bounds_of, first_reached, post_rewards
from engine.actions.action_facts import OWN_ACTION_SECONDS
from engine.actions.calling.code_call import call_spec_code
from engine.actions.calling.host import CodeOrigin, SpecCode, load_function
from engine.actions.facts import owns_conversation
from engine.actions.reward_source import sources_of
from engine.episode.episode import Episode
from engine.errors import SpecCodeError
from engine.schemas.environment import Reset, Step, UserTurn
from engine.schemas.journal import ResetRecord, ScoreRecord, StepRecord, ToolsRecord, UserRecord
from engine.schemas.message import Message
from engine.schemas.reward import RewardEvent
from engine.spec.conversation import conversation_of
from engine.spec.template import fill, fill_words, image_folders, located, own_spans

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping, Sequence
    from pathlib import Path

    from engine.actions.calling.workers import Workers
    from engine.schemas.entry import Effects
    from engine.schemas.machine import StateSpec
    from engine.schemas.trajectory import Blame
    from engine.spec.load import LoadedSpec
    from engine.tokens.template import ChatTemplate

A = TypeVar("A")
_A_LIST = "a list of RewardEvent"
_WANTED: Mapping[type, str] = {Reset: "a Reset", Step: "a Step", UserTurn: "a UserTurn", list: _A_LIST, str: "a text"}


class SpecCodeAction(Action):
    """An action that calls code of the spec."""

    async def ask(
        self,
        function: Callable[..., Any],
        *args: Any,
        gives: type[A],
        seconds: float | None,
        blame: Blame,
        what: str,
        effects: Effects = "pure",
    ) -> A:
        """Call code of the spec, and check the type of its answer.

        Raises:
            SpecCodeError: it failed, or its answer is of another type.
        """
        answer = await call_spec_code(
            self._code, function, *args, seconds=seconds, blame=blame, what=what, effects=effects
        )
        if not isinstance(answer, gives):
            made, wanted = type(answer).__name__, _WANTED[gives]
            if made == gives.__name__:  # a class of the same name, which another module has
                made, wanted = f"{type(answer).__module__}.{made}", f"{wanted} of {gives.__module__}"
            raise _bad_reply(f"{what} returned {made}; it must return {wanted}", blame)
        return answer


def _bad_reply(words: str, blame: Blame) -> SpecCodeError:
    return SpecCodeError(words, blame=blame, kind=f"{blame}_bad_reply")


def first_messages(loaded: LoadedSpec, fields: Mapping[str, Any], folders: Sequence[Path]) -> list[Message]:
    """Return the first messages of a task: its row's own conversation, or the spec's prompt filled in with its fields.

    Args:
        loaded: The spec.
        fields: The task's fields.
        folders: Where the images of rows are; see `image_folders`.
    """
    if (source := loaded.spec.conversation) is not None:
        return [located(message, folders) for message in conversation_of(fields, source)]
    return [
        Message(
            role=message.role,
            content=fill(message.content, fields)
            if isinstance(message.content, str)
            else fill_words(message.content, fields, loaded.base),
        )
        for message in loaded.spec.messages
    ]


class ResetAction(SpecCodeAction):
    """Reset the environment, then begin the conversation with the spec's prompt and the environment's messages."""

    name = "reset"

    def __init__(self, loaded: LoadedSpec, state: StateSpec, template: ChatTemplate, code: Workers) -> None:
        super().__init__(loaded, state, template, code)
        spec = loaded.spec
        self._environment = spec.environment
        self._row_source = spec.conversation
        self._owned: bool | None = None
        """Whether another action of the machine opens the conversation; None until it is known."""
        self._folders = image_folders(spec.tasks.files, loaded.base)
        self._pictured = any(not isinstance(message.content, str) for message in spec.messages)

    async def perform(self, episode: Episode, objects: EpisodeObjects) -> ResetRecord:
        """Return the environment's `Reset`; an empty one if the spec has no environment.

        Raises:
            SpecCodeError: the environment failed, or returned no `Reset`.
        """
        fields, prompt = episode.task.fields, None
        if self._pictured or self._row_source is not None:
            prompt = first_messages(self._loaded, fields, self._folders)
        if prompt is not None and not self._pictured and all(isinstance(message.content, str) for message in prompt):
            prompt = None  # spec and task alone determine it
        if (environment := self._environment) is None:
            return ResetRecord(reset=Reset(), prompt=prompt)
        reset = await self.ask(
            objects.environment.reset,
            episode.task,
            episode.seed,
            gives=Reset,
            seconds=environment.timeout,
            blame="environment",
            what=f"`{environment.use}`.reset",
            effects=environment.effects,
        )
        return ResetRecord(reset=reset, prompt=prompt)

    def apply(self, episode: Episode, record: ResetRecord) -> str:
        """Begin the conversation."""
        fields = episode.task.fields
        prompt = record.prompt
        if prompt is None:
            prompt = first_messages(self._loaded, fields, self._folders)
        episode.facts.update(record.reset.facts)
        messages = [*prompt, *record.reset.messages]
        if self._owned is None:
            self._owned = owns_conversation(episode.compiled.machine.resolved)
        if self._owned:
            episode.opening = messages
        else:
            intended = [own_spans(message.content, fields) for message in self._loaded.spec.messages]
            episode.conversation.open(messages, intended)
        return "ready"

    def effects(self, episode: Episode, objects: EpisodeObjects) -> str:
        """Return the environment's effects."""
        return self._environment.effects if self._environment else "pure"


class CallToolsAction(SpecCodeAction):
    """Execute the newest turn's calls in parallel, and add the results in the order of the calls.

    Calls beyond the limit `tool_calls` inside one turn get an error result.
    """

    name = "call_tools"

    def __init__(self, loaded: LoadedSpec, state: StateSpec, template: ChatTemplate, code: Workers) -> None:
        super().__init__(loaded, state, template, code)
        self._most = loaded.spec.limits.tool_calls

    def perform(self, episode: Episode, objects: EpisodeObjects) -> Awaitable[ToolsRecord]:
        """Begin the calls; the record has one result per attempted call.

        Raises:
            SpecCodeError: the spec has no tools.
        """
        if objects.toolbox is None:
            raise SpecCodeError("tools are called, but the spec has none", blame="spec", kind="no_tools")
        attempts = episode.reply.attempts
        left = self._most - episode.counts.tool_calls if self._most is not None else len(attempts)
        return objects.toolbox.call_all(attempts, episode.turn, episode.view, budget=left)

    def apply(self, episode: Episode, record: ToolsRecord) -> str:
        """Add the results to the conversation, and write their rewards and facts. A fact `solved: true` marks the
        outcome as solved."""
        messages = []
        for result in record.results:
            if result.error not in ("malformed", "limit"):
                episode.counts.tool_calls += 1
            if result.error is not None:
                episode.counts.tool_errors += 1
            episode.facts.update(result.facts)
            if result.rewards:
                rewards = []
                for event in result.rewards:  # `this` is the tool's own call
                    changed = {
                        key: part.model_copy(update={"call": result.call_id})
                        for key, part in (("part", event.part), ("to_part", event.to_part))
                        if part is not None and part.call == "this"
                    }
                    rewards.append(event.model_copy(update=changed) if changed else event)
                post_rewards(episode, rewards, f"tool:{result.name}")
            episode.solved = episode.solved or result.facts.get("solved") is True
            messages.append(Message(role="tool", content=result.content, tool_call_id=result.call_id, name=result.name))
        episode.conversation.add(messages)
        return "results"

    def pipelined(self, episode: Episode, objects: EpisodeObjects) -> bool:
        """Return whether every called tool is pure: such calls can be repeated without any effect."""
        return self.effects(episode, objects) == "pure"

    def effects(self, episode: Episode, objects: EpisodeObjects) -> str:
        """Return the strongest effects of the called tools."""
        if (toolbox := objects.toolbox) is None:
            return "pure"
        strongest: Effects = "pure"
        for call in episode.reply.calls:
            tool = toolbox.tools.get(call.name)
            if tool is None or tool.effects == "pure":
                continue
            strongest = tool.effects
            if strongest == "external":
                break
        return strongest


class AskUserAction(SpecCodeAction):
    """Ask the user; if the newest reply cannot be parsed, answer in the user's place with an error text."""

    name = "ask_user"

    def __init__(self, loaded: LoadedSpec, state: StateSpec, template: ChatTemplate, code: Workers) -> None:
        super().__init__(loaded, state, template, code)
        self._users = loaded.spec.users_by_name
        self._recover = loaded.spec.recover
        self._bounds_with = {name: bounds_of(self.name, loaded.spec, user) for name, user in self._users.items()}

    def limit(self, episode: Episode) -> tuple[str, float] | None:
        """Return the first limit that is reached: of the spec, then of the episode's user."""
        return first_reached(episode, self._bounds_with.get(episode.task.user or "", self.bounds))

    async def perform(self, episode: Episode, objects: EpisodeObjects) -> UserRecord:
        """Return the user's answer, or the engine's own answer to a reply that cannot be parsed.

        Raises:
            SpecCodeError: the spec has no user, or the user failed or returned an invalid answer.
        """
        if attempts := episode.reply.malformed:
            fields = {
                "problem": " ".join(attempt.problem for attempt in attempts),
                "raw": "\n".join(attempt.raw for attempt in attempts),
                "task": episode.task.fields,
            }
            content = fill_words(self._recover.malformed, fields, self._loaded.base)
            return UserRecord(turn=UserTurn(content=content), canned=True)
        user = self._users.get(objects.user_name)
        if user is None:
            raise SpecCodeError("the user is asked, but the spec has none", blame="spec", kind="no_user")
        who = f"`{user.use}`.respond" if user.use else "the model that plays the user"
        turn = await self.ask(
            objects.user.respond,
            episode.view(),
            gives=UserTurn,
            seconds=None if user.model_played else user.seconds,  # the deadline of a model begins with its request
            blame="user",
            what=who,
            effects=user.effects,
        )
        if not isinstance(turn.content, str | list):  # built without validation
            kind = type(turn.content).__name__
            raise _bad_reply(f"{who} returned content of type {kind}; it must be a string or a list of parts", "user")
        if not turn.satisfied and not turn.content:
            raise _bad_reply(
                f"{who} returned neither content nor `satisfied`; the policy would be shown nothing", "user"
            )
        words = getattr(self._recover, turn.recover) if turn.recover and not turn.satisfied else None
        if words is not None:  # the spec has a text for the problem of the reply
            content = fill_words(words, {**turn.fields, "task": episode.task.fields}, self._loaded.base)
            turn = turn.model_copy(update={"content": content})
        return UserRecord(turn=turn)

    def apply(self, episode: Episode, record: UserRecord) -> str:
        """Add the user's message to the conversation, and write its rewards and facts."""
        turn = record.turn
        episode.counts.user_turns += 1
        episode.counts.user_tokens += turn.tokens
        episode.feedback = {
            **turn.facts,
            "solved": turn.solved,
            "satisfied": turn.satisfied,
            "malformed": record.canned,
        }
        episode.facts.update(turn.facts)
        episode.solved = episode.solved or turn.solved
        if turn.content:
            episode.conversation.add([Message(role="user", content=turn.content)])
        post_rewards(episode, turn.rewards, "user")
        return "satisfied" if turn.satisfied else "feedback"

    def effects(self, episode: Episode, objects: EpisodeObjects) -> str:
        """Return the user's effects; `pure` if the reply cannot be parsed, because the user is not called."""
        user = self._users.get(objects.user_name)
        return "pure" if episode.reply.malformed or user is None else user.effects


class StepAction(SpecCodeAction):
    """Call code that returns a `Step`, which names the next event: the environment's `step`, or an action of the spec's
    own.

    Raises:
        SpecCodeError: the spec has no environment, or its own action declares no events.
    """

    name = "step"
    blame: Blame
    declared: Effects
    """Its declared effects."""

    def __init__(self, loaded: LoadedSpec, state: StateSpec, template: ChatTemplate, code: Workers) -> None:
        super().__init__(loaded, state, template, code)
        self._function: SpecCode | None = None
        """The spec's own action; None for the environment's `step`."""
        if (use := str(state.action)) == self.name:
            environment = loaded.spec.environment
            if environment is None:
                words = "a state's action is `step`, but the spec has no environment"
                raise SpecCodeError(words, blame="spec", kind="no_environment")
            origin = CodeOrigin(use=environment.entry.use, base=loaded.base, role="environment")
            self.events = tuple(code.load(origin, loaded.spec.environment_isolation).events)
            self.blame, self.what = "environment", f"`{environment.use}`.step"
            self.seconds, self.declared = environment.timeout, environment.effects
            return
        self._function = declared = load_function(loaded, code, use, state.with_, None)
        if not declared.events:
            words = f'`{use}` declares no events; decorate it with `@action("done", …)` from engine.schemas.environment'
            raise SpecCodeError(words, blame="spec", kind="bad_action")
        self.events = tuple(declared.events)
        self.blame, self.what = "spec", f"`{use}`"
        self.seconds, self.declared = state.timeout or OWN_ACTION_SECONDS, declared.effects

    def target(self, objects: EpisodeObjects) -> Callable[..., Any]:
        """Return what is called for an episode."""
        function = self._function
        step: Callable[..., Any] = objects.environment.step if function is None else function.of(objects, "step")
        return step

    async def perform(self, episode: Episode, objects: EpisodeObjects) -> StepRecord:
        """Return the answer, after checking that its event is declared and that it has no message of role assistant.

        Raises:
            SpecCodeError: it failed, or returned no `Step`, an undeclared event, or a message of role assistant.
        """
        step = await self.ask(
            self.target(objects),
            episode.view(),
            gives=Step,
            seconds=self.seconds,
            blame=self.blame,
            what=self.what,
            effects=self.declared,
        )
        if step.event not in self.events:
            words = f"{self.what} returned the event `{step.event}`; it declares {', '.join(self.events)}"
            raise _bad_reply(words, self.blame)
        if any(message.role == "assistant" for message in step.messages):
            words = f"{self.what} returned a message of role assistant; only the model's replies have this role"
            raise _bad_reply(words, self.blame)
        return StepRecord(step=step)

    def apply(self, episode: Episode, record: StepRecord) -> str:
        """Add its messages to the conversation, and write its rewards and facts."""
        episode.facts.update(record.step.facts)
        if record.step.messages:
            episode.conversation.add(list(record.step.messages))
        post_rewards(episode, record.step.rewards, "environment")
        episode.solved = episode.solved or bool(episode.facts.get("solved"))
        return record.step.event

    def effects(self, episode: Episode, objects: EpisodeObjects) -> str:
        """Return the declared effects."""
        return self.declared


class ScoreAction(SpecCodeAction):
    """Write the final rewards of an episode: those of its sources, in their order."""

    name = "score"

    def __init__(self, loaded: LoadedSpec, state: StateSpec, template: ChatTemplate, code: Workers) -> None:
        super().__init__(loaded, state, template, code)
        self._environment = loaded.spec.environment
        self.sources = sources_of(loaded, code)

    async def perform(self, episode: Episode, objects: EpisodeObjects) -> ScoreRecord:
        """Return the rewards of all sources."""
        rewards: list[RewardEvent] = []
        replies: list[str] = []
        for source in self.sources:
            if episode.turn >= 0:
                record = await source.rewards(episode, objects)
                rewards += record.rewards
                replies += record.replies
            elif source.asked_without_turns:
                await source.rewards(episode, objects)
        return ScoreRecord(rewards=rewards, replies=replies)

    def pipelined(self, episode: Episode, objects: EpisodeObjects) -> bool:
        """Return whether there is no source, so that nothing outside is called."""
        return not self.sources

    def apply(self, episode: Episode, record: ScoreRecord) -> str:
        """Write the rewards. Raises: SpecCodeError: see `RewardSource.check`."""
        post_rewards(episode, record.rewards, "score", {source.source: source.blame for source in self.sources})
        for source in self.sources:
            source.check(episode)
        return ""

    def effects(self, episode: Episode, objects: EpisodeObjects) -> str:
        """Return the environment's effects, if it has a `score`."""
        asked = episode.turn >= 0 and callable(getattr(objects.environment, "score", None))
        return self._environment.effects if self._environment is not None and asked else "pure"
