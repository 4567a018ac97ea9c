"""`reset`: resets the environment and builds the prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine.actions.action import BuiltInAction, EpisodeObjects
from engine.actions.calling.workers import call_spec_code
from engine.agents.echo import EchoIndex
from engine.agents.threads import AgentThreads
from engine.episode.episode import Episode
from engine.errors import SpecCodeError
from engine.schemas.environment import Reset
from engine.schemas.journal import ResetRecord
from engine.schemas.message import ContentPart, Message, TextPart
from engine.spec.conversation import conversation_of
from engine.spec.template import fill, fill_words, found_image, image_folders, own_spans

if TYPE_CHECKING:
    from engine.actions.calling.workers import Workers
    from engine.schemas.machine import StateSpec
    from engine.spec.load import LoadedSpec
    from engine.tokens.template import ChatTemplate


class ResetAction(BuiltInAction):
    """Reset the environment, then begin the conversation with the spec's prompt and the environment's messages."""

    name = "reset"

    def __init__(self, loaded: LoadedSpec, state: StateSpec, template: ChatTemplate, code: Workers) -> None:
        super().__init__(loaded, state, template, code)
        self._environment = loaded.spec.environment
        self._own = loaded.spec.conversation
        self._agent = loaded.spec.agent is not None
        self._stop_texts = tuple(template.decode([stop]) for stop in template.stop_token_ids)
        self._folders = image_folders(loaded.spec.tasks.files, loaded.base)
        self._pictured = any(not isinstance(message.content, str) for message in loaded.spec.messages)

    async def perform(self, episode: Episode, objects: EpisodeObjects) -> ResetRecord:
        """Return the environment's `Reset`; an empty one if the spec has no environment.

        Raises:
            SpecCodeError: the environment failed, or returned no `Reset`.
        """
        prompt = self._prompt(episode) if self._pictured or self._own is not None else None
        if prompt is not None and not self._pictured and all(isinstance(message.content, str) for message in prompt):
            prompt = None  # spec and task alone determine it
        if self._environment is None:
            return ResetRecord(reset=Reset(), prompt=prompt)
        reset = await call_spec_code(
            self._code,
            objects.environment.reset,
            episode.task,
            episode.seed,
            seconds=self._environment.timeout,
            blame="environment",
            what=f"`{self._environment.use}`.reset",
            effects=self._environment.effects,
        )
        if not isinstance(reset, Reset):
            raise SpecCodeError(
                f"`{self._environment.use}`.reset returned {type(reset).__name__}; it must return a Reset",
                blame="environment",
                kind="environment_bad_reply",
            )
        return ResetRecord(reset=reset, prompt=prompt)

    def _prompt(self, episode: Episode) -> list[Message]:
        """Return the first messages: the task's own conversation, or the spec's prompt filled in with the task's fields."""
        if self._own is not None:
            return [self._located(message) for message in conversation_of(episode.task.fields, self._own)]
        return [
            Message(
                role=message.role,
                content=fill(message.content, episode.task.fields)
                if isinstance(message.content, str)
                else fill_words(message.content, episode.task.fields, self._loaded.base),
            )
            for message in self._loaded.spec.messages
        ]

    def _located(self, message: Message) -> Message:
        """Return a message whose images have absolute paths."""
        if isinstance(message.content, str):
            return message
        parts: list[ContentPart] = [
            part
            if isinstance(part, TextPart)
            else part.model_copy(update={"image": found_image(part.image, self._folders)})
            for part in message.content
        ]
        return replace(message, content=parts)

    def apply(self, episode: Episode, record: ResetRecord) -> str:
        """Begin the conversation."""
        fields = episode.task.fields
        prompt = self._prompt(episode) if record.prompt is None else record.prompt
        if self._agent:  # its requests are the conversation
            episode.facts.update(record.reset.facts)
            episode.agent = AgentThreads([*prompt, *record.reset.messages], EchoIndex(self._stop_texts))
            return "ready"
        intended = [own_spans(message.content, fields) for message in self._loaded.spec.messages]
        episode.facts.update(record.reset.facts)
        episode.conversation.open([*prompt, *record.reset.messages], intended)
        return "ready"

    def effects(self, episode: Episode, objects: EpisodeObjects) -> str:
        """Return the environment's effects."""
        return self._environment.effects if self._environment else "pure"
