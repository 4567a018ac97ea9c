"""One append-only tape of tokens in typed spans. Training rows are derived from it.

Invariants, which `append` checks; there is no other way to add tokens:

- The first span is the `prompt`, and there is only one.
- Sampled tokens are in `generated` spans and nowhere else; each of them has its log-probability, its weight
  version and its assistant turn, and turns only grow.
- Expert choices (`backend.routed_experts`) are those of the first `routed` tokens, without a gap.
- Placeholders of images are inside images and nowhere else, as many as each image has; none is sampled.
- A token is never changed. Prompt tokens with no sampled token after them can be removed (`cut`). A view that `ids` gave
  stays valid.

The tape holds one int32 buffer of ids, one float32 buffer of the sampled tokens' log-probs, and a few integers per
span: about 4 bytes per token, and 4 more per sampled token.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from engine.schemas.generation import VersionSpan
from engine.schemas.trajectory import Branch, ImageSpan, Span, SpanKind
from engine.tokens.images import ProcessedImage

IntVector = npt.NDArray[np.int32]
FloatVector = npt.NDArray[np.float32]

_KINDS: tuple[SpanKind, ...] = ("prompt", "generated", "bridge", "closing")
_CODE: dict[SpanKind, int] = {kind: code for code, kind in enumerate(_KINDS)}
_PROMPT, _GENERATED, _BRIDGE, _CLOSING = range(4)
_FIELDS = 4
"""Integers of one span's record: kind, start, end, turn."""
_SLACK = 32
"""Spare tokens beyond the half by which a buffer grows."""


_Run = tuple[int, int, int]
"""(version, start, end): tokens [start, end) of the tape were sampled with weights `version`."""


def largest(ids: IntVector) -> int:
    """The largest id; a negative id counts as 2**31 or more; -1 where there are no ids.

    Read as unsigned, a negative id is at least 2**31, so one pass checks both bounds.

    Args:
        ids: int32 [tokens].
    """
    return int(np.maximum.reduce(ids.view(np.uint32))) if len(ids) else -1


def _grown(buffer: np.ndarray, used: int, more: int) -> np.ndarray:
    """`buffer` with room for `more` elements after the first `used`: itself, or a copy that is half as large again."""
    if used + more <= len(buffer):
        return buffer
    room = used + more
    larger = np.empty(room + room // 2 + _SLACK, buffer.dtype)
    larger[:used] = buffer[:used]
    return larger


class Tape:
    """An append-only tape.

        tape = Tape(vocab_size=1000)
        tape.append("prompt", [1, 2, 3])
        tape.append("generated", [4, 5], turn=0, logprobs=[-0.1, -0.2])
        tape.append("closing", [6])
        tape.append("bridge", [7, 8])
        tape.branch(0).loss_mask            # array([0, 0, 0, 1, 1, 0, 0, 0])

    Args:
        vocab_size: Ids must be below it; None checks only that they are not negative.
        placeholder: The id that images are made of; None for a model without images.
        reason: Why it began; empty for the first of a conversation.
    """

    __slots__ = (
        "_experts",
        "_forked",
        "_ids",
        "_length",
        "_logprobs",
        "_placeholder",
        "_sampled",
        "_spans",
        "_turn",
        "_versions",
        "_view",
        "_vocab",
        "images",
        "inherited",
        "reason",
        "routed",
    )

    def __init__(self, vocab_size: int | None = None, placeholder: int | None = None, reason: str = "") -> None:
        self.reason = reason
        self._vocab = vocab_size if vocab_size is not None else 1 << 31
        self._placeholder = placeholder
        self.images: list[tuple[ProcessedImage, int]] = []
        """Its images in order, each with the position of its first token."""
        self._ids: IntVector = np.empty(0, np.int32)
        self._length = 0
        self._view: IntVector | None = None
        """The view that `ids` gave since the last append."""
        self._logprobs: FloatVector = np.empty(0, np.float32)
        self._sampled = 0
        self._spans = array("i")
        self._versions: list[_Run] = []
        self._turn = -1
        self._forked = False
        """The prompt ends with a reply of another tape, which a closing may follow."""
        self.inherited: list[tuple[int, int]] = []
        """Tokens [start, end) of the prompt that were sampled on another tape."""
        self._experts: list[np.ndarray] = []
        self.routed = 0
        """How many tokens, from the first one on, have known experts."""

    def __len__(self) -> int:
        return self._length

    @property
    def ids(self) -> IntVector:
        """All ids: a read-only view, int32 [tokens], in constant time."""
        if self._view is None:
            self._view = self._ids[: self._length]
            self._view.flags.writeable = False
        return self._view

    @property
    def sampled(self) -> int:
        """How many tokens were sampled."""
        return self._sampled

    def newest_logprobs(self, count: int) -> FloatVector:
        """The log-probs of the last sampled tokens, float32 [count]."""
        return self._logprobs[self._sampled - count : self._sampled]

    @property
    def spans(self) -> list[Span]:
        """The spans, in order; they cover the tape without a gap."""
        return [Span(kind=_KINDS[kind], start=start, end=end, turn=turn) for kind, start, end, turn in self._records()]

    @property
    def has_turns(self) -> bool:
        """Whether an assistant turn is on this tape, even an empty one."""
        return self._turn >= 0

    def append(
        self,
        kind: SpanKind,
        ids: Sequence[int] | IntVector,
        *,
        turn: int = -1,
        logprobs: Sequence[float] | FloatVector | None = None,
        versions: Iterable[VersionSpan] = (),
        images: Sequence[tuple[ProcessedImage, int]] = (),
        experts: np.ndarray | None = None,
        checked: bool = False,
    ) -> tuple[int, int]:
        """Append one span.

        Args:
            kind: The span's kind.
            ids: Its ids, int32 [tokens]. An empty span leaves a record only if it is `generated`.
            turn: For `generated`: the assistant turn, from 0, above every earlier one.
            logprobs: For `generated`: one for each id, float32 [tokens].
            versions: For `generated`: weight versions that cover [0, tokens); none means version 0.
            images: The images in `ids`, in order, each with the position of its first token in `ids`.
            experts: For `generated`: the experts of the tokens from number `routed` up to the last but one of the tape after
                this span, [tokens, layers, top_k].
            checked: The caller has checked that the ids are in the vocabulary and have no placeholders except those of `images`.

        Returns:
            The span's (start, end).

        Raises:
            ValueError: The span would break one of the tape's invariants. The tape is unchanged.
        """
        tokens = np.asarray(ids, dtype=np.int32)
        count = len(tokens)
        code = _CODE[kind]
        if not checked:
            self._admit_ids(tokens)
        self._admit(code, count, turn)
        if images or (self._placeholder is not None and not checked):
            self._admit_images(tokens, images)
        start, end = self._length, self._length + count
        if code == _GENERATED:
            self._admit_sampled(count, turn, logprobs)
            runs = [(run.version, start + run.start, start + run.end) for run in versions] or [(0, start, end)]
            gap = any(one[2] != next_[1] for one, next_ in pairwise(runs))
            if gap or runs[0][1] != start or runs[-1][2] != end:
                raise ValueError(
                    f"weight versions cover [{runs[0][1] - start}, {runs[-1][2] - start}) of {count} tokens"
                    f"{', with gaps' if gap else ''}"
                )
            if experts is not None:
                self.admit_experts(count, experts)
                self._experts.append(experts)
                self.routed += len(experts)
            self._keep_sampled(count, logprobs, runs)
            self._turn = turn
        elif not count:
            return start, end
        if end > len(self._ids):
            self._ids = _grown(self._ids, start, count)
        self._ids[start:end] = tokens
        self._length = end
        self._view = None
        self._spans.extend((code, start, end, turn))
        if images:
            self.images.extend((picture, start + at) for picture, at in images)
        return start, end

    def admit_experts(self, count: int, experts: np.ndarray) -> None:
        """Check the experts [tokens, layers, top_k] of a reply of `count` tokens; see `append`.

        Raises:
            ValueError: They are those of another number of tokens, or of another model than those before them.
        """
        due = self._length + count - 1 - self.routed
        if len(experts) != due:
            raise ValueError(f"the experts of {len(experts)} tokens came with a reply; {due} were due")
        if self._experts and experts.shape[1:] != self._experts[0].shape[1:]:
            raise ValueError(
                f"experts [layers, top_k] of shape {experts.shape[1:]} follow those of shape {self._experts[0].shape[1:]}"
            )

    def mark(self) -> tuple[int, int, int]:
        """The end of the tape, for `cut`: tokens, integers of spans, images."""
        return self._length, len(self._spans), len(self.images)

    def cut(self, mark: tuple[int, int, int]) -> None:
        """Remove the spans that were appended since `mark`; none may be `generated`.

        The ids are copied to a new buffer, so views that `ids` gave before stay valid.

        Raises:
            ValueError: A `generated` span was appended since.
        """
        length, spans, images = mark
        if any(code == _GENERATED for code in self._spans[spans::_FIELDS]):
            raise ValueError("a turn was appended since then; sampled tokens are never removed")
        self._ids = self._ids[:length].copy()
        self._length, self._view = length, None
        del self._spans[spans:], self.images[images:]

    def fork(self, end: int, reason: str) -> Tape:
        """A tape whose prompt is this tape's first `end` tokens. They are not trained there: each sampled token is trained once.

        Their experts come again with the first reply on the new tape.

        Args:
            end: The end of a span.
            reason: Why it begins.
        """
        fresh = Tape(self._vocab, self._placeholder, reason)
        fresh._forked = True
        own = [(first, last) for kind, first, last, _ in self._records() if kind == _GENERATED and last <= end]
        fresh.inherited = [*self.inherited, *own]
        fresh.append("prompt", self._ids[:end], images=[(picture, at) for picture, at in self.images if at < end])
        return fresh

    def branch(self, index: int) -> Branch:
        """The training row of this tape; everything is derived from its spans.

        Args:
            index: The branch's number in the trajectory.
        """
        n = self._length
        kinds, starts, ends, turns_of = np.array(self._spans, np.int32).reshape(-1, _FIELDS).T
        lengths = ends - starts
        sampled = np.repeat(kinds == _GENERATED, lengths)
        logprobs = np.zeros(n, np.float32)
        logprobs[sampled] = self._logprobs[: self._sampled]
        versions = np.full(n, -1, np.int32)
        for version, start, end in self._versions:
            versions[start:end] = version
        return Branch(
            index=index,
            reason=self.reason,
            spans=self.spans,
            input_ids=self._ids[:n].copy(),
            loss_mask=sampled.astype(np.int32),
            logprobs=logprobs,
            weight_versions=versions,
            turn_ids=np.repeat(turns_of, lengths),
            images=[
                ImageSpan(image=picture.digest, start=start, end=start + len(picture.ids), grid=list(picture.grid))
                for picture, start in self.images
            ],
            routed_experts=np.concatenate(self._experts) if self._experts else None,
        )

    def _records(self) -> Iterable[tuple[int, int, int, int]]:
        record = iter(self._spans)
        return zip(record, record, record, record, strict=True)

    def _admit_ids(self, tokens: IntVector) -> None:
        if tokens.ndim != 1:
            raise ValueError(f"ids must be a flat list; their shape is {tokens.shape}")
        if largest(tokens) >= self._vocab:
            raise ValueError(f"ids must be in [0, {self._vocab}); found {int(tokens.min())} to {int(tokens.max())}")

    def _admit(self, code: int, count: int, turn: int) -> None:
        last = self._spans[-_FIELDS] if self._spans else None
        if (code == _PROMPT) != (last is None):
            raise ValueError("a tape begins with its one prompt span")
        if code == _PROMPT and not count:
            raise ValueError("the prompt is empty")
        if code == _CLOSING and last == _PROMPT and not self._forked:
            raise ValueError("a closing span follows a turn; there is no turn yet")
        if code != _GENERATED and turn != -1:
            raise ValueError(f"a {_KINDS[code]} span belongs to no turn")

    def _admit_images(self, tokens: IntVector, images: Sequence[tuple[ProcessedImage, int]]) -> None:
        """Checks that the placeholders are those of the images, and that each image is complete and at its position."""
        found = int(np.count_nonzero(tokens == self._placeholder)) if self._placeholder is not None else 0
        wanted, end = 0, 0
        for picture, at in images:
            if at < end or not np.array_equal(tokens[at : at + len(picture.ids)], picture.ids):
                raise ValueError(f"the tokens at {at} are not those of the image {picture.digest}")
            end = at + len(picture.ids)
            wanted += picture.placeholders
        if found != wanted:
            raise ValueError(f"{found} placeholders where {len(images)} images have {wanted}")

    def _admit_sampled(self, count: int, turn: int, logprobs: Sequence[float] | FloatVector | None) -> None:
        if turn <= self._turn:
            raise ValueError(f"turn {turn} does not follow turn {self._turn}")
        if self._spans[-_FIELDS] == _GENERATED:
            raise ValueError("there must be a bridge between two turns")
        if logprobs is None or len(logprobs) != count:
            raise ValueError(
                f"{count} sampled ids need as many log-probs, not {'none' if logprobs is None else len(logprobs)}"
            )

    def _keep_sampled(self, count: int, logprobs: Sequence[float] | FloatVector | None, runs: list[_Run]) -> None:
        start, end = self._sampled, self._sampled + count
        if end > len(self._logprobs):
            self._logprobs = _grown(self._logprobs, start, count)
        self._logprobs[start:end] = logprobs
        self._sampled = end
        self._versions += [run for run in runs if run[2] > run[1]]


def as_seen(branch: Branch) -> Branch:
    """A branch up to its last sampled token: no model has read a bridge after it.

    A branch without sampled tokens is returned whole.
    """
    # The cut is after sampled tokens, and images hold none: it is never inside an image.
    end = max((span.end for span in branch.spans if span.kind == "generated"), default=len(branch.input_ids))
    if end == len(branch.input_ids):
        return branch
    return Branch(
        index=branch.index,
        reason=branch.reason,
        spans=[span for span in branch.spans if span.end <= end],
        input_ids=branch.input_ids[:end],
        loss_mask=branch.loss_mask[:end],
        logprobs=branch.logprobs[:end],
        weight_versions=branch.weight_versions[:end],
        turn_ids=branch.turn_ids[:end],
        images=[image for image in branch.images if image.end <= end],
        routed_experts=None if branch.routed_experts is None else branch.routed_experts[:end],
    )


def untrained(branch: Branch, turns: Collection[int]) -> Branch:
    """A branch in which some turns are not trained: their spans are `unreceived`.

    Args:
        branch: The branch.
        turns: The turns; those of other branches have no effect.
    """
    if not any(span.turn in turns for span in branch.spans if span.kind == "generated"):
        return branch
    left_out = np.isin(branch.turn_ids, list(turns))
    return replace(
        branch,
        spans=[
            replace(span, kind="unreceived") if span.kind == "generated" and span.turn in turns else span
            for span in branch.spans
        ],
        loss_mask=np.where(left_out, 0, branch.loss_mask).astype(np.int32),
        logprobs=np.where(left_out, 0, branch.logprobs).astype(np.float32),
        weight_versions=np.where(left_out, -1, branch.weight_versions).astype(np.int32),
    )
