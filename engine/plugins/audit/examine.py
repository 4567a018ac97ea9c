"""What the rules read of a row: its replies, what follows them, and how the template writes its prompts.

`TemplateMarks` learns what a chat template writes around messages by rendering marks, and reads messages back from ids.
What is read back is never trusted: the caller renders it and compares ids.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from engine.errors import EngineError
from engine.plugins.audit.rows import ForeignRow, Vector, runs_of
from engine.schemas.base import Struct
from engine.schemas.message import Message, Role
from engine.schemas.model import PromptField
from engine.spec.conversation import RowError, conversation_of
from engine.tokens.bridge.wrapper import common_length
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
        texts: Strings that ended replies without a stop token.
    """

    def __init__(self, template: ChatTemplate, texts: Sequence[str] = ()) -> None:
        self.template = template
        self.texts = tuple(texts)
        self.openings: dict[Role, str] = {}
        """Text before a conversation's first message, by its role."""
        self.between: dict[tuple[Role, Role], str] = {}
        """Text between two messages, by their roles."""
        self.tails: dict[Role, str] = {}
        """Text after the last message, up to the reply, by its role."""
        self._read: dict[bytes, list[Message] | None] = {}
        for order in _ORDERS:
            messages = [Message(role=role, content=f"qzq{at}qzq") for at, role in enumerate(order)]
            try:
                text = template.text([template.views.of(message) for message in messages], None)
            except EngineError:
                continue  # this template refuses such a conversation, so no prompt of it has one
            found = list(_MARK.finditer(text))
            if [int(match[1]) for match in found] != list(range(len(order))):
                continue  # a message is left out or shown twice
            self.openings.setdefault(order[0], text[: found[0].start()])
            self.tails.setdefault(order[-1], text[found[-1].end() :])
            for at, roles in enumerate(pairwise(order)):
                self.between.setdefault(roles, text[found[at].end() : found[at + 1].start()])

    @cached_property
    def closing(self) -> list[int]:
        """The ids that the template writes after a reply's stop token, before the next message begins: `\\n` in
        ChatML."""
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
        shared = common_length(ids, reference)
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
        """The messages that a prompt [tokens] spells, if they render to exactly these ids; None otherwise. Rows of a
        group share the answer."""
        key = np.asarray(ids, np.int32).tobytes()
        if key not in self._read:
            self._read[key] = next((messages for messages in self._readings(ids) if self.renders(messages, ids)), None)
        return self._read[key]

    def renders(self, messages: Sequence[Message], ids: Sequence[int] | Vector) -> bool:
        """Whether messages render to exactly these ids [tokens]."""
        try:
            return np.array_equal(np.asarray(self.template.render(messages), np.int32), np.asarray(ids, np.int32))
        except EngineError:
            return False

    def likely(self, ids: Sequence[int] | Vector) -> list[Message] | None:
        """The messages that a prompt [tokens] seems to spell, which may render to other ids; None where it has no known
        form."""
        return next(self._readings(ids), None)

    def observations(self, ids: Sequence[int] | Vector, *, stopped: bool) -> list[Message] | None:
        """The messages between two replies; None where the ids are not of the template's form. What the template writes
        at the end of a reply may be missing.

        Args:
            ids: The ids [tokens] after a reply, up to the next one.
            stopped: Whether the reply ended with a stop token, which is then not in `ids`.
        """
        text = self.template.decode(np.asarray(ids, np.int32))
        closing = self.template.decode(self.closing)
        starts = [*self.template.stops] if stopped else ["", *self.template.stops]
        for start in dict.fromkeys([*starts, *(stop + closing for stop in self.template.stops)]):
            for (before, role), mark in sorted(self.between.items(), key=lambda item: -len(item[1])):
                if before == "assistant" and (start + text).startswith(mark):
                    messages = self._rest(start + text, len(mark), role)
                    if messages is not None:
                        return messages
        return None

    def _readings(self, ids: Sequence[int] | Vector) -> Iterator[list[Message]]:
        text = self.template.decode(np.asarray(ids, np.int32))
        for role, opening in sorted(self.openings.items(), key=lambda item: -len(item[1])):
            if text.startswith(opening) and (messages := self._rest(text, len(opening), role)) is not None:
                yield messages

    def _rest(self, text: str, at: int, role: Role) -> list[Message] | None:
        """The messages from a position on, the first of which has a role; None where the text does not end as a prompt
        does."""
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


class ForeignReply(NamedTuple):
    """A part of a trained run that one sampling made; tokens are counted in the response."""

    start: int
    end: int
    run_end: int
    """The end of the trained run."""
    stopped: bool
    """Whether it ends with a stop token."""
    ids: tuple[int, ...]
    """Its tokens."""


class SamplerRecord:
    """The sampler's own record: the ids of each reply.

    Args:
        replies: int32 [tokens] of each reply, with its stop token.
        marks: What the template writes.
    """

    def __init__(self, replies: Sequence[Vector], marks: TemplateMarks) -> None:
        self.replies = {tuple(reply.tolist()) for reply in replies}
        self._ordered = sorted(self.replies)
        self._lengths = sorted({len(reply) for reply in self.replies}, reverse=True)
        self.by_text: dict[str, set[tuple[int, ...]]] = defaultdict(set)
        """The replies by their text."""
        for reply in self.replies:
            self.by_text[marks.template.decode(list(reply))].add(reply)

    def has(self, ids: tuple[int, ...]) -> bool:
        """Whether `ids` are a recorded reply or the beginning of one, as of a reply that was cut."""
        at = bisect_left(self._ordered, ids)
        return at < len(self._ordered) and self._ordered[at][: len(ids)] == ids

    def longest_at(self, ids: tuple[int, ...]) -> int:
        """The length of the longest recorded reply that `ids` begin with and go on after; 0 if there is none."""
        return next((size for size in self._lengths if 0 < size < len(ids) and ids[:size] in self.replies), 0)


Severity = Literal["error", "warning", "info"]
"""`error`: the loss is not the one that the rewards and samples mean. `warning`: it may be intended. `info`: something
that the rows do not tell."""


class RowFinding(Struct, frozen=True, kw_only=True):
    """One thing that is wrong with a row."""

    rule: str
    severity: Severity
    row: int
    """The row, from 0, over all files; -1 for all rows."""
    place: str
    """The row, as its file counts."""
    token: int | None = None
    """The first token, from 0, counted from the row's first prompt token; None for the row as a whole."""
    message: str

    def __str__(self) -> str:
        token = "" if self.token is None else f" token {self.token}"
        return f"{self.place}{token}: {self.severity}[{self.rule}] {self.message}"


class ExaminedRow:
    """One row, with what rules need of it. Everything is computed when it is asked for first.

    Args:
        index: Number of the row over all files, from 0.
        foreign: The row.
        marks: What the template writes.
    """

    def __init__(self, index: int, foreign: ForeignRow, marks: TemplateMarks) -> None:
        self.index = index
        self.foreign = foreign
        self.marks = marks

    @cached_property
    def ids(self) -> Vector:
        """int32 [tokens]: prompt and response."""
        return self.foreign.ids

    @cached_property
    def start(self) -> int:
        """Where the response begins."""
        return 0 if self.foreign.prompt_ids is None else len(self.foreign.prompt_ids)

    @property
    def response(self) -> Vector:
        """int32 [response]."""
        return self.ids[self.start :]

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """The trained runs [start, end) of the response."""
        return runs_of(self.foreign.mask)

    @cached_property
    def replies(self) -> list[ForeignReply]:
        """The replies in the trained runs. After a stop token, a reply begins only behind a generation prompt."""
        replies = []
        response, generation = self.response.tolist(), self.marks.generation
        size = len(generation)
        for start, end in self.runs:
            at: int | None = start
            while at is not None and at < end:
                stop = next(
                    (place for place in range(at, end) if response[place] in self.marks.template.stop_set), None
                )
                until = end if stop is None else stop + 1
                replies.append(ForeignReply(at, until, end, stop is not None, tuple(response[at:until])))
                openings = range(until, end - size + 1) if stop is not None and size else ()
                at = next((place + size for place in openings if response[place : place + size] == generation), None)
        return replies

    @cached_property
    def messages(self) -> list[Message] | None:
        """The messages that the file gives for the prompt; None where it gives none that can be read."""
        if not self.foreign.messages:
            return None
        try:
            return conversation_of({"messages": self.foreign.messages}, PromptField(field="messages"))
        except (RowError, EngineError, ValueError):
            return None

    @cached_property
    def prompts(self) -> list[Vector]:
        """The ids, each int32 [tokens], that the first reply may have been sampled from: the prompt, and the prompt
        with the masked tokens before the first trained one."""
        assert self.foreign.prompt_ids is not None
        first = self.runs[0][0] if self.runs else 0
        return [self.foreign.prompt_ids, *([self.ids[: self.start + first]] if first else [])]

    @cached_property
    def read_prompt(self) -> list[Message] | None:
        """The messages that the prompt's ids spell, if they render to exactly these ids."""
        if self.foreign.prompt_ids is None:
            return None
        return next((found for ids in self.prompts if (found := self.marks.messages(ids)) is not None), None)

    @cached_property
    def shown_messages(self) -> list[Message]:
        """The prompt as messages, for looking at it: exact where they can be, else the decoded text as one message of a
        user."""
        if self.foreign.prompt_ids is None:
            if self.messages is not None:
                return self.messages
            return [Message(role="user", content=self.foreign.prompt_text or "")]
        if self.messages is not None and (
            self.foreign.images or self.marks.renders(self.messages, self.foreign.prompt_ids)
        ):
            return self.messages
        likely = self.read_prompt or self.messages or self.marks.likely(self.foreign.prompt_ids)
        return likely or [Message(role="user", content=self.marks.template.decode(self.foreign.prompt_ids))]

    def text(self, start: int, end: int) -> str:
        """Tokens [start, end) of the response as text."""
        return self.marks.template.decode(self.response[start:end])

    def quoted(self, start: int, end: int) -> str:
        """Tokens [start, end) of the response as text in quotes; a long one with its middle left out."""
        text = self.text(start, end)
        return repr(text if len(text) <= 60 else f"{text[:40]}…{text[-19:]}")

    def finding(
        self, rule: str, severity: Severity, message: str, token: int | None = None, *, response: bool = True
    ) -> RowFinding:
        """A finding of this row. `token` is counted in the response unless `response` is False."""
        at = None if token is None else token + (self.start if response else 0)
        if at is not None and at >= len(self.ids):  # something is missing at the row's end
            at = len(self.ids) - 1 if len(self.ids) else None
        return RowFinding(
            rule=rule, severity=severity, row=self.index, place=self.foreign.place, token=at, message=message
        )
