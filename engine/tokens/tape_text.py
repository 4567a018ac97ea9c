"""A tape as text, and where it ends in what the chat template writes for the whole conversation.

Invariant: `end_in` compares what was not sampled character for character. What was sampled may differ in white space alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.tokens.format import ChatFormat
    from engine.tokens.tape import Tape

Piece = tuple[bool, str]
"""Whether the model wrote it, and the text."""


def pieces_of(form: ChatFormat, tape: Tape) -> list[Piece]:
    """The text of each span of a tape, with one marker for an image; O(tape)."""
    pieces: list[Piece] = []
    in_text = False  # the reply came as text, and stands in the next span
    for span in tape.spans:
        ids = tape.ids[span.start : span.end]
        if form.vision is not None:
            images = [(at, at + len(image.ids)) for image, at in tape.images if span.start <= at < span.end]
            ids = form.vision.compact(ids, [(start - span.start, end - span.start) for start, end in images])
        sampled = span.kind == "generated"
        pieces.append((sampled or in_text, form.decode(ids)))
        in_text = sampled and span.start == span.end
    return pieces


def end_in(pieces: Sequence[Piece], text: str) -> int | None:
    """The index in `text` where the tape ends; None where the tape is no beginning of the text."""
    said = "".join([piece for _, piece in pieces])
    if text.startswith(said):
        return len(said)
    places = {0: 0}
    for sampled, piece in pieces:
        after: dict[int, int] = {}
        for place, spaced in places.items():
            if text.startswith(piece, place):
                after[place + len(piece)] = spaced
            if sampled:
                for end in _spaced_ends(piece, text, place):
                    after.setdefault(end, spaced + 1)
        places = after
    return min(places, key=places.__getitem__, default=None)


def difference(pieces: Sequence[Piece], text: str) -> int:
    """The index of the first character of the tape's text that `text` does not have."""
    said = "".join([piece for _, piece in pieces])
    pairs = enumerate(zip(said, text, strict=False))
    return next((at for at, (ours, theirs) in pairs if ours != theirs), min(len(said), len(text)))


def _spaced_ends(piece: str, text: str, start: int) -> list[int]:
    """Where a sampled piece may end if its white space differs: first the end that has the piece's own last white space."""
    bare = "".join(piece.split())
    end = start + len(bare)
    while end <= len(text) and (missing := len(bare) - len("".join(text[start:end].split()))):
        end += missing
    if end > len(text) or "".join(text[start:end].split()) != bare:
        return []
    last = end
    while last < len(text) and text[last].isspace():
        last += 1
    own = piece[len(piece.rstrip()) :]
    first = end + len(own) if text.startswith(own, end) else last
    return list(dict.fromkeys([first, *range(end, last + 1)]))
