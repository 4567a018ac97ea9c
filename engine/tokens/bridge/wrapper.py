"""What a template writes around texts, kept: new messages or a reply -> what the template writes for them, without
rendering them.

A `Wrapper` gives what it writes around new messages, and a `ReplyText` what it writes for a reply. Both are made in
check.py, once probes have shown that the template copies these texts.

A wrapper takes only contents without `<`, because a template could look for tags. Text beyond an added token is kept as
ids, because a tokenizer splits text at the tokens that `FastTokenizer.borders` gives before it does anything else. A
reply with a text that the template's source looks for has no `ReplyText`.

The reply's sampled tokens are kept as they are, canonical or not. White space in what was sampled may differ from what
the template would write (it trims contents, and spaces its JSON); any other difference begins a branch (`remainder`;
for a whole tape `end_in`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from operator import eq
from typing import TYPE_CHECKING, Any

import msgspec

from engine.tokens.bridge.kinds import View
from engine.tokens.tokenizer import texts_in

if TYPE_CHECKING:
    from engine.tokens.tape import Tape
    from engine.tokens.template import ChatTemplate


TRIMS: tuple[Callable[[str], str], ...] = (
    str,
    str.strip,
    str.rstrip,
    str.lstrip,
    lambda text: text.strip("\n"),
    lambda text: text.rstrip("\n"),
    lambda text: text.lstrip("\n"),
)
"""How a template may trim a text that it copies; a wrapper trims in one of the first four ways."""


class Bridge(msgspec.Struct, frozen=True):
    """What follows a reply: the token that ends it, where the template writes one, and the tokens up to the next
    reply."""

    closing: list[int]
    bridge: list[int]


class Wrapper(msgspec.Struct, frozen=True):
    """Text around contents: pieces[0] + content 0 + pieces[1] + …"""

    pieces: tuple[str, ...]
    trims: tuple[Callable[[str], str], ...]
    closing: int
    """How many of the first ids close the reply."""
    head: tuple[int, ...] = ()
    """Ids of the text before `pieces`, up to an added token: text is split there before it is tokenised."""
    tail: tuple[int, ...] = ()
    """Ids of the text after `pieces`, from an added token on."""

    def bridge(self, template: ChatTemplate, contents: Sequence[str]) -> Bridge:
        """The bridge for these contents, none of which is blank or has a `<`."""
        text = self.pieces[0]
        for content, trim, piece in zip(contents, self.trims, self.pieces[1:], strict=True):
            text += trim(content) + piece
        ids = [*self.head, *template.encode(text), *self.tail]
        return Bridge(ids[: self.closing], ids[self.closing :])


class ReplyText(msgspec.Struct, frozen=True):
    """Text around parts: pieces[0] + part order[0] + pieces[1] + …"""

    pieces: tuple[str, ...]
    order: tuple[int, ...]
    writers: tuple[Callable[[Any], str], ...]
    """Of each part: what trims a text, or writes arguments."""

    def write(self, parts: Sequence[Any]) -> str:
        """What the template writes for a reply with these parts (`parts_of`)."""
        written = self.pieces[0]
        for at, piece in zip(self.order, self.pieces[1:], strict=True):
            written += self.writers[at](parts[at]) + piece
        return written


def parts_of(reply: View) -> list[Any]:
    """The parts of a reply that templates copy: its reasoning and content, where there are any, and the arguments of
    its calls."""
    parts: list[Any] = []
    for text in (reply.get("reasoning_content"), reply["content"]):
        if text:
            parts.append(text)
    for call in reply.get("tool_calls", ()):
        parts.append(call["function"]["arguments"])
    return parts


def shape_of(reply: View, is_inspected: Callable[[str], bool] | None) -> tuple[Any, ...] | None:
    """What the replies that share one `ReplyText` have in common; None where a reply is to be rendered.

    Args:
        reply: The reply.
        is_inspected: Whether a text has something that the template may look for; None where no text of this reply has.
    """
    reasoning, content = reply.get("reasoning_content"), reply["content"]
    shape: tuple[Any, ...] = (bool(reasoning), bool(content))
    for text in (reasoning, content):
        if text and (text.isspace() or (is_inspected is not None and is_inspected(text))):
            return None
    for call in reply.get("tool_calls", ()):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if not (isinstance(arguments, dict) and arguments):
            return None
        if is_inspected is not None and any(map(is_inspected, texts_in(arguments))):
            return None
        shape += ((name, len(call["id"]), *arguments),)
    return None if shape == (False, False) else shape


def remainder(said: str, shown: str) -> str | None:
    """What a template writes after the text that was sampled; None where it shows this text differently.

    White space inside the sampled text may differ: it stays as it was sampled.

    Args:
        said: The sampled text, the token that ended it included.
        shown: What the template writes for the reply, its end token included.
    """
    if shown.startswith(said):
        return shown[len(said) :]
    said_words, shown_words = "".join(said.split()), "".join(shown.split())
    if said_words == shown_words:
        rest = shown[len(shown.rstrip()) :]
    elif shown_words.startswith(said_words):
        ends = [at + 1 for at, character in enumerate(shown) if not character.isspace()]
        rest = shown[ends[len(said_words) - 1] :] if said_words else shown
    else:
        return None
    space = said[len(said.rstrip()) :]
    written = rest[: len(rest) - len(rest.lstrip())]
    return rest[len(space) :] if written.startswith(space) else rest.lstrip()


Piece = tuple[bool, str]
"""Whether the model wrote it, and the text."""


def pieces_of(template: ChatTemplate, tape: Tape) -> list[Piece]:
    """The text of each span of a tape, with one marker for an image, and of each reply in a prompt that another tape
    gave; O(tape)."""
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


def _text(template: ChatTemplate, tape: Tape, start: int, end: int) -> str:
    ids = tape.ids[start:end]
    if template.vision is not None:
        images = [(at - start, at - start + len(image.ids)) for image, at in tape.images if start <= at < end]
        ids = template.vision.compact(ids, images)
    return template.decode(ids)


def end_in(pieces: Sequence[Piece], text: str) -> int | None:
    """The index in `text` where the tape ends; None where the text does not begin with the tape. Only the white space
    of what was sampled may differ."""
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


def common_length(said: Iterable[object], text: Iterable[object]) -> int:
    """How many characters, or ids, two texts or lists of ids have in common at their beginnings."""
    return len(list(takewhile(bool, map(eq, said, text))))


def _spaced_ends(piece: str, text: str, start: int) -> list[int]:
    """Where a sampled piece may end if its white space differs: first the end that has the piece's own last white
    space."""
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
