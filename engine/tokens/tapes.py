"""The tapes of one conversation: which one is current, why each began, and where each turn's sampled tokens are.

Invariant: each turn is on exactly one tape. Only a tape without a turn is ever removed or replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from engine.schemas.message import Message
from engine.schemas.trajectory import Branch
from engine.tokens.proof import View
from engine.tokens.tape import FloatVector, IntVector, Tape

TAIL = 64
"""Ids before a reply that its parser may look at."""


class TurnPlace(NamedTuple):
    """Position of one turn's sampled tokens."""

    branch: int
    start: int
    end: int


Asked = tuple[
    list[Message], Sequence[int | None] | None, int, dict[int, View], list[dict[str, Any]] | None, bool, float
]
"""The conversation before a reply: the thread's messages, the number of each in the episode (None: they are its first ones; None for
one that stands for others), how many there were (the lists grow on), its verbatim views, the tools, `Prompts.whole`, and when the prompt was made."""


class TapesMark(NamedTuple):
    """The tapes at one moment, for `restore`."""

    tapes: list[tuple[Tape, str]]
    at: int
    end: tuple[int, int, int]
    """The end of the current tape (`Tape.mark`)."""


class Tapes:
    """The tapes of one conversation, in the order in which they began; at first there is none."""

    __slots__ = ("all", "asked", "at", "places")

    def __init__(self) -> None:
        self.all: list[tuple[Tape, str]] = []
        """Each tape, and why it began."""
        self.at = -1
        """Number of the current tape; -1 before the first."""
        self.asked: dict[int, Asked] = {}
        """By number of a tape: the conversation before its newest reply."""
        self.places: list[TurnPlace] = []
        """By turn: its position."""

    @property
    def current(self) -> Tape | None:
        """The current tape; None before the first."""
        return self.all[self.at][0] if self.all else None

    @property
    def ids(self) -> IntVector:
        """Ids of the current tape, which must exist. int32 [tokens], read-only."""
        return self.all[self.at][0].ids

    @property
    def length(self) -> int:
        """Tokens of the current tape; 0 before the first."""
        return len(self.all[self.at][0]) if self.all else 0

    def sampled(self, turn: int) -> tuple[IntVector, IntVector]:
        """Up to `TAIL` ids before a turn's sampled ids, and these; int32 [tokens] each, read-only."""
        branch, start, end = self.places[turn]
        ids = self.all[branch][0].ids
        return ids[max(0, start - TAIL) : start], ids[start:end]

    def newest(self) -> tuple[IntVector, FloatVector]:
        """The sampled ids of the newest turn, int32 [tokens], and their log-probs, float32 [tokens]."""
        branch, start, end = self.places[-1]
        tape = self.all[branch][0]
        return tape.ids[start:end], tape.newest_logprobs(end - start)

    def begin(self, tape: Tape, reason: str) -> None:
        """Make a new tape the current one. It replaces the current one if that has no turn, with its reason."""
        if self.all and not self.all[self.at][0].has_turns:
            self.all[self.at] = (tape, self.all[self.at][1])
        else:
            self.all.append((tape, reason))
            self.at = len(self.all) - 1

    def resume(self, at: int, end: int, reason: str) -> None:
        """Continue tape number `at` after its first `end` tokens: itself if it ends there, else a new tape that begins with them."""
        self.at = at
        tape = self.all[at][0]
        if len(tape) != end:
            self.all.append((tape.fork(end), reason))
            self.at = len(self.all) - 1

    def drop_unanswered(self) -> None:
        """Remove the newest tape if it has no turn."""
        if self.all and not self.all[-1][0].has_turns:
            self.all.pop()
            self.at = len(self.all) - 1

    def mark(self) -> TapesMark:
        """The current state, for `restore`."""
        return TapesMark([*self.all], self.at, self.all[self.at][0].mark() if self.all else (0, 0, 0))

    def restore(self, mark: TapesMark) -> None:
        """Undo what happened since `mark`, which no turn may have followed."""
        self.all, self.at = mark.tapes, mark.at
        if self.all:
            self.all[self.at][0].cut(mark.end)

    def branches(self) -> list[Branch]:
        """One training row for each tape that has a turn (or the first tape, where none has)."""
        taken = [pair for pair in self.all if pair[0].has_turns] or self.all[:1]
        return [tape.branch(index, reason) for index, (tape, reason) in enumerate(taken)]
