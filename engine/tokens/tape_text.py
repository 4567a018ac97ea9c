"""A tape as text, and where it ends in what the chat template writes for the whole conversation.

Invariant: `end_in` compares what was not sampled character for character. What was sampled may differ in white space alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.tokens.renderer import Renderer

if TYPE_CHECKING:
    from engine.tokens.tape import Tape

Piece = tuple[bool, str]
"""Whether the model wrote it, and the text."""


def pieces_of(template: Renderer, tape: Tape) -> list[Piece]:
    """The text of each span of a tape, with one marker for an image, and of each reply in a prompt that another tape gave; O(tape)."""
    pieces: list[Piece] = []
    for span in tape.spans:
        sampled = span.kind == "generated" or (span.start, span.end) in tape.texts
        if span.kind != "prompt":
            pieces.append((sampled, _text(template, tape, span.start, span.end)))
            continue
        at = 0
        for start, end in tape.inherited:
            pieces += [(False, _text(template, tape, at, start)), (True, _text(template, tape, start, end))]
            at = end
        pieces.append((False, _text(template, tape, at, span.end)))
    return pieces


def _text(template: Renderer, tape: Tape, start: int, end: int) -> str:
    ids = tape.ids[start:end]
    if template.vision is not None:
        images = [(at - start, at - start + len(image.ids)) for image, at in tape.images if start <= at < end]
        ids = template.vision.compact(ids, images)
    return template.decode(ids)


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
    space = piece[len(piece.rstrip()) :]
    first = end + len(space) if text.startswith(space, end) else last
    return list(dict.fromkeys([first, *range(end, last + 1)]))
