"""What the rules read of a row: its replies, what follows them, and how the template writes its prompts."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from engine.errors import EngineError
from engine.plugins.audit.rows import ForeignRow, Vector, runs_of
from engine.plugins.audit.template import TemplateMarks
from engine.schemas.message import Message
from engine.schemas.model import PromptField
from engine.spec.conversation import RowError, conversation_of


class Reply(NamedTuple):
    """A part of a trained run that one sampling made; tokens are counted in the response."""

    start: int
    end: int
    run_end: int
    """The end of the trained run."""
    stopped: bool
    """Whether it ends with a stop token."""


class Sampled:
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


class Examined:
    """One row, with what rules need of it. Everything is computed when it is asked for first.

    Args:
        index: Number of the row over all files, from 0.
        row: The row.
        marks: What the template writes.
    """

    def __init__(self, index: int, row: ForeignRow, marks: TemplateMarks) -> None:
        self.index = index
        self.row = row
        self.marks = marks

    @cached_property
    def ids(self) -> Vector:
        """int32 [tokens]: prompt and response."""
        return self.row.ids

    @cached_property
    def start(self) -> int:
        """Where the response begins."""
        return 0 if self.row.prompt_ids is None else len(self.row.prompt_ids)

    @property
    def response(self) -> Vector:
        """int32 [response]."""
        return self.ids[self.start :]

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """The trained runs [start, end) of the response."""
        return runs_of(self.row.mask)

    @cached_property
    def replies(self) -> list[Reply]:
        """The replies in the trained runs. After a stop token, a reply begins only behind a generation prompt."""
        found = []
        generation = np.asarray(self.marks.generation, np.int32)
        for start, end in self.runs:
            at = start
            while at < end:
                stop = next(
                    (place for place in range(at, end) if int(self.response[place]) in self.marks.template.stop_set),
                    None,
                )
                if stop is None:
                    found.append(Reply(at, end, end, False))
                    break
                found.append(Reply(at, stop + 1, end, True))
                opened = _find(self.response, generation, stop + 1, end)
                if opened is None:
                    break
                at = opened + len(generation)
        return found

    @cached_property
    def messages(self) -> list[Message] | None:
        """The messages that the file gives for the prompt; None where it gives none that can be read."""
        if not self.row.messages:
            return None
        try:
            return conversation_of({"messages": self.row.messages}, PromptField(field="messages"))
        except (RowError, EngineError, ValueError):
            return None

    @cached_property
    def prompts(self) -> list[Vector]:
        """The ids, each int32 [tokens], that the first reply may have been sampled from: the prompt, and the prompt with the masked tokens before the first trained one."""
        assert self.row.prompt_ids is not None
        first = self.runs[0][0] if self.runs else 0
        whole = [self.ids[: self.start + first]] if first else []
        return [self.row.prompt_ids, *whole]

    @cached_property
    def read_prompt(self) -> list[Message] | None:
        """The messages that the prompt's ids spell, if they render to exactly these ids."""
        if self.row.prompt_ids is None:
            return None
        return next((found for ids in self.prompts if (found := self.marks.messages(ids)) is not None), None)

    @cached_property
    def prompt_is_rendered(self) -> bool:
        """Whether the prompt's ids are what the template renders: for the file's messages, or for those that the ids spell."""
        if self.messages is not None and any(self.marks.renders(self.messages, ids) for ids in self.prompts):
            return True
        return self.read_prompt is not None

    @cached_property
    def shown_messages(self) -> list[Message]:
        """The prompt as messages, for looking at it: exact where they can be, else the decoded text as one message of a user."""
        if self.row.prompt_ids is None:
            if self.messages is not None:
                return self.messages
            return [Message(role="user", content=self.row.prompt_text or "")]
        if self.messages is not None and (self.row.images or self.marks.renders(self.messages, self.row.prompt_ids)):
            return self.messages
        likely = self.read_prompt or self.messages or self.marks.likely(self.row.prompt_ids)
        return likely or [Message(role="user", content=self.marks.template.decode(self.row.prompt_ids))]

    def text(self, start: int, end: int) -> str:
        """Tokens [start, end) of the response as text."""
        return self.marks.template.decode(self.response[start:end])

    def observations(self, end: int, until: int, *, stopped: bool) -> list[Message] | None:
        """The messages in tokens [end, until) of the response, between two replies."""
        return self.marks.observations(self.response[end:until], stopped=stopped)


def _find(ids: Vector, part: Vector, start: int, end: int) -> int | None:
    """The first place of `part` in ids [start, end)."""
    if not len(part):
        return None
    for at in range(start, end - len(part) + 1):
        if np.array_equal(ids[at : at + len(part)], part):
            return at
    return None
