"""What a chat template writes around messages, learnt by rendering marks, and messages read back from ids.

    marks = TemplateMarks(template)
    marks.messages(prompt_ids)             # the messages that a prompt spells; None where they do not render to these ids
    marks.observations(ids, stopped=True)  # the messages between two replies

What is read back is never trusted: the caller renders it and compares ids.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from engine.errors import EngineError
from engine.plugins.audit.rows import Vector
from engine.schemas.message import Message, Role
from engine.tokens.template import ChatTemplate

_MARK = re.compile(r"qzq([0-9])qzq")
_ORDERS: tuple[tuple[Role, ...], ...] = (
    ("system", "user"),
    ("user",),
    ("user", "assistant", "user"),
    ("user", "assistant", "user", "user"),
    ("user", "assistant", "tool"),
    ("user", "assistant", "tool", "tool"),
    ("user", "assistant", "tool", "user"),
    ("user", "assistant", "tool", "assistant", "user"),
)
"""Conversations that are rendered once to learn what stands between two messages."""
MAX_MESSAGES = 2_000
"""Maximum number of messages that are read from one row."""


class TemplateMarks:
    """The texts that a chat template writes before, between and after messages.

    Args:
        template: The chat template.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.openings: dict[Role, str] = {}
        """Text before a conversation's first message, by its role."""
        self.between: dict[tuple[Role, Role], str] = {}
        """Text between two messages, by their roles."""
        self.tails: dict[Role, str] = {}
        """Text after the last message, up to the reply, by its role."""
        self._read: dict[bytes, list[Message] | None] = {}
        for order in _ORDERS:
            self._learn(order)

    def _learn(self, order: tuple[Role, ...]) -> None:
        messages = [Message(role=role, content=f"qzq{at}qzq") for at, role in enumerate(order)]
        try:
            text = self.template.text([self.template.views.of(message) for message in messages], None)
        except EngineError:
            return  # this template refuses such a conversation, so no prompt of it has one
        found = list(_MARK.finditer(text))
        if [int(match[1]) for match in found] != list(range(len(order))):
            return  # a message is left out or shown twice
        self.openings.setdefault(order[0], text[: found[0].start()])
        self.tails.setdefault(order[-1], text[found[-1].end() :])
        for at in range(len(order) - 1):
            self.between.setdefault((order[at], order[at + 1]), text[found[at].end() : found[at + 1].start()])

    @cached_property
    def closing(self) -> list[int]:
        """The ids that the template writes after a reply's stop token, before the next message begins: `\\n` in ChatML."""
        text = self.between.get(("assistant", "user"), "")
        ids = self.template.encode(text)
        if not ids or ids[0] not in self.template.stop_set:
            return []
        end = next((at for at, id_ in enumerate(ids[1:], 1) if id_ in self._added), len(ids))
        return ids[1:end]

    @cached_property
    def generation(self) -> list[int]:
        """The ids of the generation prompt: what follows the closing of the newest message, up to the reply."""
        between = self.between.get(("assistant", "user"), "")
        opened = self.between.get(("user", "assistant"), "")
        tail = self.tails.get("user", opened)
        ids, reference = self.template.encode(tail), self.template.encode(between)
        shared = 0
        while shared < min(len(ids), len(reference)) and ids[shared] == reference[shared]:
            shared += 1
        while shared > 0 and shared < len(ids) and ids[shared] not in self._added:
            shared -= 1  # begin at the mark that opens a message, which both texts share
        return ids[shared:]

    def has_mark(self, ids: Sequence[int] | Vector) -> bool:
        """Whether ids [tokens] hold a token that the template writes around messages."""
        return not self._marks.isdisjoint(np.asarray(ids).tolist())

    @cached_property
    def _marks(self) -> frozenset[int]:
        texts = [*self.openings.values(), *self.between.values(), *self.tails.values()]
        return self._added & {id_ for text in texts for id_ in self.template.encode(text)}

    @cached_property
    def _added(self) -> frozenset[int]:
        """Added tokens other than white space, which some tokenizers (Gemma's) add too."""
        return frozenset(id_ for text, id_ in self.template.fast.added.items() if text.strip())

    # --- ids -> messages ----------------------------------------------------------------------------------

    def messages(self, ids: Sequence[int] | Vector) -> list[Message] | None:
        """The messages that a prompt [tokens] spells, if they render to exactly these ids; None otherwise. Rows of a group share the answer."""
        key = np.asarray(ids, np.int32).tobytes()
        if key not in self._read:
            readings = self._readings(self.template.decode(np.asarray(ids, np.int32)))
            self._read[key] = next((messages for messages in readings if self.renders(messages, ids)), None)
        return self._read[key]

    def renders(self, messages: Sequence[Message], ids: Sequence[int] | Vector) -> bool:
        """Whether messages render to exactly these ids [tokens]."""
        try:
            return np.array_equal(np.asarray(self.template.render(messages), np.int32), np.asarray(ids, np.int32))
        except EngineError:
            return False

    def likely(self, ids: Sequence[int] | Vector) -> list[Message] | None:
        """The messages that a prompt [tokens] seems to spell, which may render to other ids; None where it has no known form."""
        return next(iter(self._readings(self.template.decode(np.asarray(ids, np.int32)))), None)

    def observations(self, ids: Sequence[int] | Vector, *, stopped: bool) -> list[Message] | None:
        """The messages between two replies; None where the ids are not of the template's form. What the template writes at the end of a reply may be missing.

        Args:
            ids: The ids [tokens] after a reply, up to the next one.
            stopped: Whether the reply ended with a stop token, which is then not in `ids`.
        """
        text = self.template.decode(np.asarray(ids, np.int32))
        closing = self.template.decode(self.closing)
        starts = [*self.template.stops] if stopped else ["", *self.template.stops]
        for start in dict.fromkeys([*starts, *(stop + closing for stop in self.template.stops)]):
            for (before, role), mark in self._after_reply():
                if before == "assistant" and (start + text).startswith(mark):
                    found = self._rest(start + text, len(mark), role)
                    if found is not None:
                        return found
        return None

    def _after_reply(self) -> list[tuple[tuple[Role, Role], str]]:
        return sorted(self.between.items(), key=lambda item: -len(item[1]))

    def _readings(self, text: str) -> list[list[Message]]:
        found = []
        for role, opening in sorted(self.openings.items(), key=lambda item: -len(item[1])):
            if text.startswith(opening):
                messages = self._rest(text, len(opening), role)
                if messages is not None:
                    found.append(messages)
        return found

    def _rest(self, text: str, at: int, role: Role) -> list[Message] | None:
        """The messages from a position on, the first of which has a role; None where the text does not end as a prompt does."""
        messages: list[Message] = []
        for _ in range(MAX_MESSAGES):
            tail = self.tails.get(role)
            ends = tail is not None and text.endswith(tail) and len(text) - len(tail) >= at
            end = len(text) - len(tail or "") if ends else -1
            nexts = [
                (place, -len(mark), other, mark)
                for (before, other), mark in self.between.items()
                if before == role and mark and (place := text.find(mark, at)) >= 0
            ]
            if nexts:
                place, _, other, mark = min(nexts)
                if not ends or place < end:
                    messages.append(Message(role=role, content=text[at:place]))
                    at, role = place + len(mark), other
                    continue
            if not ends:
                return None
            messages.append(Message(role=role, content=text[at:end]))
            return messages
        return None
