"""One append-only tape of tokens in typed spans. Training rows are derived from it.

    tape = Tape(vocab_size=1000)
    tape.append("prompt", [1, 2, 3])
    tape.append_reply(generation, turn=0)        # of two tokens
    tape.append("bridge", [7, 8])
    tape.branch(0).loss_mask                     # array([0, 0, 0, 1, 1, 0, 0])

Invariants, which `append` and `append_reply` check; there is no other way to add tokens:

- The first span is the `prompt`, and there is only one.
- Sampled tokens are in `generated` spans and nowhere else; each of them has its log-probability, its weight
  version and its assistant turn, and turns only grow.
- Expert choices (`backend.routed_experts`) are those of the first `routed` tokens, without a gap.
- Placeholders of images are inside images and nowhere else, as many as each image has; none is sampled.
- A token is never changed. Prompt tokens with no sampled token after them can be removed (`cut`). A view that `ids`
  gave stays valid.

The tape holds one int32 buffer of ids, one float32 buffer of the sampled tokens' log-probs, and a few integers per
span: about 4 bytes per token, and 4 more per sampled token.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from engine.schemas.generation import Generation
from engine.schemas.message import ImagePart
from engine.schemas.trajectory import Branch, ImageSpan, Span, SpanKind
from engine.tokens.images import ProcessedImage

IntVector = npt.NDArray[np.int32]
FloatVector = npt.NDArray[np.float32]

_KINDS: tuple[SpanKind, ...] = ("prompt", "generated", "bridge", "closing")
_PROMPT, _GENERATED, _BRIDGE, _CLOSING = range(4)
_CODE: dict[str, int] = {"prompt": _PROMPT, "bridge": _BRIDGE, "closing": _CLOSING}
_FIELDS = 4
"""Integers of one span's record: kind, start, end, turn."""
_RUN = 3
"""Integers of one run's record: (version, start, end): tokens [start, end) of the tape were sampled with weights
`version`."""
_SLACK = 32
"""Spare tokens beyond the half by which a buffer grows."""


def _grown(buffer: np.ndarray, used: int, more: int) -> np.ndarray:
    """A copy of a buffer, half as large again as `more` elements after the first `used` need."""
    room = used + more
    larger = np.empty(room + room // 2 + _SLACK, buffer.dtype)
    larger[:used] = buffer[:used]
    return larger


class Tape:
    """An append-only tape.

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
        "_placed",
        "_placeholder",
        "_spans",
        "_turn",
        "_versions",
        "_view",
        "_vocab",
        "images",
        "inherited",
        "reason",
        "routed",
        "sampled",
        "texts",
    )

    def __init__(self, vocab_size: int | None = None, placeholder: int | None = None, reason: str = "") -> None:
        self.reason = reason
        self._vocab = vocab_size if vocab_size is not None else 1 << 31
        self._placeholder = placeholder
        self.images: list[tuple[ProcessedImage, int]] = []
        """Its images in order, each with the position of its first token."""
        self._placed: list[tuple[ImagePart, tuple[int, int]]] = []
        """What `placed_images` gave of them."""
        self._ids: IntVector = np.empty(0, np.int32)
        self._length = 0
        self._view: IntVector | None = None
        """The view that `ids` gave since the last append."""
        self._logprobs: FloatVector = np.empty(0, np.float32)
        self.sampled = 0
        """How many tokens were sampled."""
        self._spans = array("i")
        self._versions = array("i")
        self._turn = -1
        self._forked = False
        """The prompt ends with a reply of another tape, which a closing may follow."""
        self.texts: list[tuple[int, int]] = []
        """Tokens [start, end) of replies that came as text."""
        self.inherited: list[tuple[int, int]] = []
        """Tokens [start, end) of the prompt that are replies of another tape, in order."""
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

    def newest_logprobs(self, count: int) -> FloatVector:
        """The log-probs of the last sampled tokens, float32 [count]."""
        return self._logprobs[self.sampled - count : self.sampled]

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
        kind: Literal["prompt", "closing", "bridge"],
        ids: Sequence[int] | IntVector,
        images: Sequence[tuple[ProcessedImage, int]] = (),
    ) -> None:
        """Append a span of tokens that were not sampled. An empty one leaves no record.

        Args:
            kind: The span's kind.
            ids: Its ids, int32 [tokens].
            images: The images in `ids`, in order, each with the position of its first token in `ids`.

        Raises:
            ValueError: The span would break one of the tape's invariants. The tape is unchanged.
        """
        tokens, code = np.asarray(ids, dtype=np.int32), _CODE[kind]
        last = self._spans[-_FIELDS] if self._spans else None
        if (code == _PROMPT) != (last is None):
            raise ValueError("a tape begins with its one prompt span")
        if code == _PROMPT and not len(tokens):
            raise ValueError("the prompt is empty")
        if code == _CLOSING and last == _PROMPT and not self._forked:
            raise ValueError("a closing span follows a turn; there is no turn yet")
        if tokens.ndim != 1:
            raise ValueError(f"ids must be a flat list; their shape is {tokens.shape}")
        unsigned = tokens.view(np.uint32)  # a negative id is the largest
        if len(tokens) and unsigned.item(unsigned.argmax()) >= self._vocab:
            raise ValueError(f"ids must be in [0, {self._vocab}); found {int(tokens.min())} to {int(tokens.max())}")
        if images or self._placeholder is not None:
            self._admit_images(tokens, images)
            self.images.extend((picture, self._length + at) for picture, at in images)
        if len(tokens):
            self._put(code, tokens, -1)

    def append_reply(self, generation: Generation, turn: int) -> tuple[int, int]:
        """Append the tokens of a reply, which `Conversation.check` has admitted: those of the vocabulary, and no
        placeholders.

        Args:
            generation: The reply. Its experts are those of the tokens from number `routed` up to the last but one of
                the tape after it.
            turn: The assistant turn, from 0, above every earlier one.

        Returns:
            The span's (start, end). An empty reply leaves a record, too.

        Raises:
            ValueError: The span would break one of the tape's invariants. The tape is unchanged.
        """
        count, start, experts = len(generation.output_ids), self._length, generation.routed_experts
        if turn <= self._turn:
            raise ValueError(f"turn {turn} does not follow turn {self._turn}")
        if self._spans[-_FIELDS] == _GENERATED:
            raise ValueError("there must be a bridge between two turns")
        if len(generation.logprobs) != count:
            raise ValueError(f"{count} sampled ids need as many log-probs, not {len(generation.logprobs)}")
        versions, end = array("i"), 0
        for run in generation.versions:
            if run.start != end:
                raise ValueError(f"weight versions leave a gap or overlap at token {end}")
            end = run.end
            if end > run.start:
                versions.extend((run.version, start + run.start, start + end))
        if not generation.versions and count:
            versions.extend((0, start, start + count))
        elif end != count:
            raise ValueError(f"weight versions cover {end} of {count} tokens")
        if experts is not None:
            self.admit_experts(count, experts)
            self._experts.append(experts)
            self.routed += len(experts)
        self._versions += versions
        end = self.sampled + count
        if end > len(self._logprobs):
            self._logprobs = _grown(self._logprobs, self.sampled, count)
        self._logprobs[self.sampled : end] = generation.logprobs
        self.sampled, self._turn = end, turn
        self._put(_GENERATED, generation.output_ids, turn)
        return start, start + count

    def _put(self, code: int, tokens: IntVector, turn: int) -> None:
        start, end = self._length, self._length + len(tokens)
        if end > len(self._ids):
            self._ids = _grown(self._ids, start, len(tokens))
        self._ids[start:end] = tokens
        self._length, self._view = end, None
        self._spans.extend((code, start, end, turn))

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
                f"experts [layers, top_k] of shape {experts.shape[1:]} follow those of shape "
                f"{self._experts[0].shape[1:]}"
            )

    def placed_images(self) -> tuple[list[ImagePart], list[tuple[int, int]]]:
        """Its images, in order, and the tokens [start, end) of each."""
        for picture, start in self.images[len(self._placed) :]:
            self._placed.append((ImagePart(image=picture.digest), (start, start + len(picture.ids))))
        return [part for part, _ in self._placed], [span for _, span in self._placed]

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
        if length == self._length:
            return
        if any(code == _GENERATED for code in self._spans[spans::_FIELDS]):
            raise ValueError("a turn was appended since then; sampled tokens are never removed")
        self._ids = self._ids[:length].copy()
        self._length, self._view = length, None
        del self._spans[spans:], self.images[images:], self._placed[images:]

    def fork(self, end: int, reason: str) -> Tape:
        """A tape whose prompt is this tape's first `end` tokens. They are not trained there: each sampled token is
        trained once.

        Their experts come again with the first reply on the new tape.

        Args:
            end: The end of a span.
            reason: Why it begins.
        """
        fresh = Tape(self._vocab, self._placeholder, reason)
        fresh._forked = True
        replies = [(first, last) for kind, first, last, _ in self._records() if kind == _GENERATED]
        fresh.inherited = sorted(
            [*self.inherited, *((first, last) for first, last in [*replies, *self.texts] if last <= end)]
        )
        fresh.append("prompt", self._ids[:end], [(picture, at) for picture, at in self.images if at < end])
        return fresh

    def branch(self, index: int, *, as_seen: bool = False, untrained: Collection[int] = ()) -> Branch:
        """The training row of this tape; everything is derived from its spans.

        Args:
            index: The branch's number in the trajectory.
            as_seen: End with the last sampled token, if there is one: no model has read a bridge after it.
            untrained: Turns that are not trained: their spans are `unreceived`. Those of other tapes have no effect.
        """
        records = list(self._records())
        while as_seen and self.has_turns and records[-1][0] != _GENERATED:
            records.pop()
        n = records[-1][2]
        mask, turn_ids, versions = np.zeros(n, np.int32), np.full(n, -1, np.int32), np.full(n, -1, np.int32)
        logprobs = np.zeros(n, np.float32)
        run = iter(self._versions)
        for version, start, end in zip(run, run, run, strict=True):
            versions[start:end] = version
        spans, sampled = [], 0
        for kind, start, end, turn in records:
            name, first = _KINDS[kind], sampled
            if kind == _GENERATED:
                turn_ids[start:end] = turn
                sampled += end - start
                if turn in untrained:
                    name, versions[start:end] = "unreceived", -1
                else:
                    mask[start:end], logprobs[start:end] = 1, self._logprobs[first:sampled]
            spans.append(Span(kind=name, start=start, end=end, turn=turn))
        return Branch(
            index=index,
            reason=self.reason,
            spans=spans,
            input_ids=self._ids[:n].copy(),
            loss_mask=mask,
            logprobs=logprobs,
            weight_versions=versions,
            turn_ids=turn_ids,
            images=[
                ImageSpan(image=picture.digest, start=start, end=start + len(picture.ids), grid=list(picture.grid))
                for picture, start in self.images
                if start < n
            ],
            routed_experts=np.concatenate(self._experts)[:n] if self._experts else None,
        )

    def _records(self) -> Iterable[tuple[int, int, int, int]]:
        record = iter(self._spans)
        return zip(record, record, record, record, strict=True)

    def _admit_images(self, tokens: IntVector, images: Sequence[tuple[ProcessedImage, int]]) -> None:
        """Checks that the placeholders are those of the images, and that each image is complete and at its position."""
        placeholders = int(np.count_nonzero(tokens == self._placeholder)) if self._placeholder is not None else 0
        wanted, end = 0, 0
        for picture, at in images:
            if at < end or not np.array_equal(tokens[at : at + len(picture.ids)], picture.ids):
                raise ValueError(f"the tokens at {at} are not those of the image {picture.digest}")
            end = at + len(picture.ids)
            wanted += picture.placeholders
        if placeholders != wanted:
            raise ValueError(f"{placeholders} placeholders where {len(images)} images have {wanted}")
