"""`condense`: shows the model a shorter thread. `ask_summary`: asks the policy to summarise its own history first.

Invariant: `perform` finds the shorter texts, and its record holds the whole new thread, so `apply`, resume and replay
condense nothing again. A thread that would not be shorter is not used (event `unchanged`). Replies that were sampled
are not rewritten.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from engine.actions.action import Action, EpisodeObjects
from engine.actions.calling.host import SpecCode, load_function
from engine.actions.record_filters import in_memory
from engine.actions.spec_code import SpecCodeAction
from engine.episode.episode import Episode, derive_seed
from engine.errors import SpecCodeError
from engine.plugins.condense.chunks import (
    ConversationChunk,
    block_text,
    chunks_of,
    history_of,
    history_text,
    keywords,
    older_images,
    replaced,
    slid,
)
from engine.plugins.condense.record import Block, CondenseRecord
from engine.plugins.condense.spec import (
    ByHistory,
    CondenseSpec,
    DropSpec,
    KeywordsSpec,
    OwnCondenserSpec,
    PolicySummarySpec,
    SummarySpec,
)
from engine.plugins.condense.spec_facts import SUMMARY_ROLE
from engine.plugins.roles.models import RoleModels
from engine.schemas.environment import Step
from engine.schemas.journal import StepRecord
from engine.schemas.message import Message
from engine.schemas.trajectory import Condensation
from engine.spec.template import fill, own_spans

if TYPE_CHECKING:
    from engine.actions.calling.workers import Workers
    from engine.schemas.machine import StateSpec
    from engine.spec.load import LoadedSpec
    from engine.tokens.template import ChatTemplate


class CondenseAction(SpecCodeAction):
    """Put shorter texts in the place of the oldest chunks, until the prompt is short enough."""

    name = "condense"

    def __init__(self, loaded: LoadedSpec, state: StateSpec, template: ChatTemplate, code: Workers) -> None:
        """Find the room that a prompt has, and load a condenser of the spec's own.

        Raises:
            EntryError: it cannot be imported.
        """
        super().__init__(loaded, state, template, code)
        self._spec = CondenseSpec.or_default(loaded.spec)
        spec = loaded.spec
        self._room = min((value for value in (spec.limits.episode_tokens, spec.model.context) if value), default=None)
        condenser = self._spec.condenser
        self._function: SpecCode | None = None
        if isinstance(condenser, OwnCondenserSpec):
            self._function = load_function(loaded, code, condenser.use, condenser.with_, condenser.isolation)

    async def perform(self, episode: Episode, objects: EpisodeObjects) -> CondenseRecord:
        """Return the shorter thread; a record without a thread if nothing is shorter.

        Raises:
            EngineError: the condenser failed, or its package is not installed.
        """
        conversation = episode.conversation
        before = conversation.measure(conversation.thread.messages)
        blocks: list[Block] = []
        sampled = 0
        new: list[Message] = []
        vision, said = self._template.vision, conversation.thread.messages
        if self._spec.keep is not None:
            older = older_images(self._spec, said, conversation.opening)
            if vision is not None and older:
                new = await asyncio.to_thread(slid, self._spec.keep, said, older, vision.bank)
        elif isinstance(self._spec.chunks, ByHistory):
            new, blocks, sampled = await self._history(episode, objects)
        else:
            new, blocks, sampled = await self._chunks(episode, objects, before)
        after = conversation.measure(new if vision is None else in_memory(new, vision)) if new else before
        if not new or (after >= before and self._spec.keep is None):  # a window limits the number of images
            return CondenseRecord(before=before, after=before, sampled=sampled)
        numbers = {id(message): at for message, at in zip(said, conversation.thread.places, strict=True)}
        thread = [message if (at := numbers.get(id(message))) is None else at for message in new]
        return CondenseRecord(thread=thread, blocks=blocks, before=before, after=after, sampled=sampled)

    async def _chunks(
        self, episode: Episode, objects: EpisodeObjects, before: int
    ) -> tuple[list[Message], list[Block], int]:
        """Condense chunks, oldest first, until the prompt has the target's length: (thread, blocks, sampled tokens)."""
        conversation = episode.conversation
        waiting = chunks_of(self._spec, conversation.thread.messages, conversation.opening, self._count)
        target = self._spec.target_tokens or (self._room or before) // 2
        over = before - target
        condenser = self._spec.condenser
        # Maximum number of tokens of what stands for a chunk.
        budget = self._count(condenser.text) if isinstance(condenser, DropSpec) else condenser.tokens
        done: dict[ConversationChunk, str] = {}
        sampled = 0
        while waiting and over > 0:
            batch: list[ConversationChunk] = []
            expected = 0
            while waiting and expected < over:
                chunk = waiting.pop(0)
                pictured = chunk.part < 0 and bool(conversation.thread.messages[chunk.place].images)
                if pictured or chunk.tokens > budget:
                    batch.append(chunk)
                    expected += max(1, chunk.tokens - budget)
                if pictured:  # how many tokens its images have, the new thread shows
                    break
            answers = await asyncio.gather(
                *(self._condensed(chunk.text, episode, objects, len(done) + at) for at, chunk in enumerate(batch))
            )
            for chunk, (text, used) in zip(batch, answers, strict=True):
                sampled += used
                pictured = chunk.part < 0 and bool(conversation.thread.messages[chunk.place].images)
                shorter = chunk.tokens - self._count(block_text(len(episode.blocks) + 1, text))
                if text and (shorter > 0 or pictured):
                    done[chunk] = text
            over = conversation.measure(self._rebuilt(episode, done)[0]) - target
        return *self._rebuilt(episode, done), sampled

    def _rebuilt(self, episode: Episode, done: dict[ConversationChunk, str]) -> tuple[list[Message], list[Block]]:
        blocks: list[Block] = []
        by_place: dict[int, list[tuple[ConversationChunk, str]]] = {}
        for chunk in sorted(done, key=lambda chunk: (chunk.place, chunk.part, chunk.start)):
            number = len(episode.blocks) + len(blocks) + 1
            blocks.append(Block(number=number, text=done[chunk], original=chunk.text))
            by_place.setdefault(chunk.place, []).append((chunk, block_text(number, done[chunk])))
        thread = [
            replaced(message, by_place[place]) if place in by_place else message
            for place, message in enumerate(episode.conversation.thread.messages)
        ]
        return thread, blocks

    async def _history(self, episode: Episode, objects: EpisodeObjects) -> tuple[list[Message], list[Block], int]:
        """One message stands for the history: (thread, blocks, sampled tokens)."""
        conversation = episode.conversation
        by_policy = isinstance(self._spec.condenser, PolicySummarySpec)
        thread = conversation.thread.messages
        said = thread[:-2] if by_policy else thread  # without the request for a summary, and the summary
        start, end = history_of(said, conversation.opening, self._spec.keep_last)
        if start == end:
            return [], [], 0
        text = history_text(said[start:end])
        summary, sampled = (episode.reply.text, 0) if by_policy else await self._condensed(text, episode, objects, 0)
        if not summary.strip():
            return [], [], sampled
        number = len(episode.blocks) + 1
        stands = Message(role="user", content=block_text(number, summary.strip()))
        blocks = [Block(number=number, text=summary.strip(), original=text)]
        return [*said[:start], stands, *said[end:]], blocks, sampled

    async def _condensed(self, text: str, episode: Episode, objects: EpisodeObjects, index: int) -> tuple[str, int]:
        """What stands for a text, and how many tokens a model sampled for it; an empty text if it is over the
        budget."""
        condenser = self._spec.condenser
        if isinstance(condenser, DropSpec):
            return condenser.text, 0
        if isinstance(condenser, KeywordsSpec):
            return await asyncio.to_thread(keywords, text, condenser, self._count), 0
        if isinstance(condenser, SummarySpec):
            fields = {"text": text, "tokens": condenser.tokens, "task": episode.task.fields}
            reply = (
                await objects.part(RoleModels)
                .model("condense", "condenser")
                .reply(
                    [Message(role=item.role, content=fill(item.content, fields)) for item in condenser.messages],
                    episode_id=episode.id,
                    turn=len(episode.blocks) + index,
                    seed=derive_seed(episode.seed, SUMMARY_ROLE, episode.performed.get(self.name, 0), index),
                    intended=[own_spans(item.content, fields) for item in condenser.messages],
                )
            )
            return "" if reply.cut else reply.text, reply.tokens
        assert isinstance(condenser, OwnCondenserSpec)
        assert self._function is not None
        answer = await self.ask(
            self._function.of(objects, "text"),
            text,
            condenser.tokens,
            episode.view(),
            gives=str,
            seconds=condenser.timeout,
            blame="environment",
            what=f"`{condenser.use}`",
        )
        return answer if self._count(answer) <= condenser.tokens else "", 0

    def _count(self, text: str) -> int:
        """Tokens of a text as a conversation has it: special tokens that it spells are plain text."""
        template = self._template
        return len(template.encode(text if template.allow_special else template.fast.quoting.quote(text)))

    def apply(self, episode: Episode, record: CondenseRecord) -> str:
        """Show the new thread from the next prompt on."""
        episode.made_room_at = episode.turn
        if record.thread is None:
            return "unchanged"
        blocks = [block.number for block in record.blocks]
        saved = record.before - record.after
        conversation = episode.conversation
        count, what = len(older_images(self._spec, conversation.thread.messages, conversation.opening)), "image"
        if self._spec.keep is None:
            count, what = len(blocks), "block"
        reason = f"condensed: {count} {what}{'s' * (count > 1)}, {saved} tokens fewer"
        conversation.show(record.thread, reason, record.after)
        episode.blocks |= {block.number: block.original for block in record.blocks}
        episode.condensations.append(
            Condensation(
                turn=episode.turn,
                reason=reason,
                thread=record.thread,
                blocks=blocks,
                before=record.before,
                after=record.after,
                said=len(episode.conversation.messages),
            )
        )
        return "condensed"

    def pipelined(self, episode: Episode, objects: EpisodeObjects) -> bool:
        """Return whether it calls no code outside of the engine."""
        return self._function is None


class AskSummaryAction(Action):
    """Add the message that asks the policy for a summary of its history."""

    name = "ask_summary"

    def __init__(self, loaded: LoadedSpec, state: StateSpec, template: ChatTemplate, code: Workers) -> None:
        """Read the request from the spec.

        Raises:
            SpecCodeError: the policy does not summarise (kind `bad_action`).
        """
        super().__init__(loaded, state, template, code)
        condenser = CondenseSpec.or_default(loaded.spec).condenser
        if not isinstance(condenser, PolicySummarySpec):
            raise SpecCodeError(
                "a state's action is `ask_summary`, which needs `condense: {chunks: history, condenser: policy}`",
                blame="spec",
                kind="bad_action",
            )
        self._step = Step(event="asked", messages=[Message(role="user", content=condenser.prompt)])

    async def perform(self, episode: Episode, objects: EpisodeObjects) -> StepRecord:
        """Return the request."""
        return StepRecord(step=self._step)

    def apply(self, episode: Episode, record: StepRecord) -> str:
        """Add the request."""
        episode.conversation.add(list(record.step.messages))
        return record.step.event

    def pipelined(self, episode: Episode, objects: EpisodeObjects) -> bool:
        """True: it has no effect outside the engine."""
        return True
