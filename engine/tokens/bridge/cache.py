"""Keeps the text that a template puts around new messages, so that a bridge costs one pass of the tokenizer.

Invariant: a wrapper gives what `ChatFormat.extension` gives. It is made from extensions of probes: the template must copy
contents (trimmed, where it trims), and the wrapper's result for four styles of content, with white space, punctuation and
quotes at their edges, must equal the extension id for id. Only contents without `<` are used, because a template could look for
tags; other contents go through the extension itself. Text beyond an added token is kept as ids, because a tokenizer splits
text at the tokens that `borders` gives before it does anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from engine.tokens.bridge.check import Extension, View

_PAD = "  First 12 things.\n\n then {mark} (é, \"q\" 'r' & {{x}} [y] \\ 100%) \n"
STYLES: tuple[Callable[[str], str], ...] = (
    lambda mark: _PAD.replace("{mark}", mark),
    str,
    lambda mark: f"({mark}).",
    lambda mark: f"\n{mark}\t",
)
_TRIMS: tuple[Callable[[str], str], ...] = (str, str.rstrip, str.lstrip, str.strip)


class Wrappable(Protocol):
    """The part of a chat format that a wrapper uses."""

    def extension(self, reply: View, new: Sequence[View], tools: list[View] | None) -> Extension | None: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def borders(self, text: str) -> Sequence[str]: ...


class Wrapper(NamedTuple):
    """Text around contents: pieces[0] + content 0 + pieces[1] + …"""

    pieces: tuple[str, ...]
    trims: tuple[Callable[[str], str], ...]
    closing: int
    """How many of the first ids close the reply."""
    head: tuple[int, ...] = ()
    """Ids of the text before `pieces`, up to an added token: text is split there before it is tokenised."""
    tail: tuple[int, ...] = ()
    """Ids of the text after `pieces`, from an added token on."""

    def text(self, contents: Sequence[str]) -> str:
        """The extension's text for these contents."""
        parts = [self.pieces[0]]
        for content, trim, piece in zip(contents, self.trims, self.pieces[1:], strict=True):
            parts.append(trim(content))
            parts.append(piece)
        return "".join(parts)

    def ids(self, form: Wrappable, contents: Sequence[str]) -> tuple[list[int], list[int]]:
        """The ids that close the reply, and those of the bridge.

        Args:
            form: The chat format.
            contents: Contents of the new messages; `is_plain` must hold of each.
        """
        ids = [*self.head, *form.encode(self.text(contents)), *self.tail]
        return ids[: self.closing], ids[self.closing :]


def is_plain(view: View) -> bool:
    """Whether a wrapper can take a message's content: text that is not blank and has no tag."""
    content = view["content"]
    return isinstance(content, str) and "<" not in content and bool(content.strip())


def make_wrapper(form: Wrappable, reply: View, new: Sequence[View], tools: list[View] | None) -> Wrapper | None:
    """The wrapper of messages like `new`, whatever their contents; None where the template does more than copy them.

    Raises:
        RenderError: The template refuses these messages.
    """
    made: Wrapper | None = None
    short: Wrapper | None = None
    ids = {str(view["tool_call_id"]) for view in new if "tool_call_id" in view}
    ids |= {call["id"] for call in reply.get("tool_calls", ())}
    for style in STYLES:
        probes = [{**view, "content": style(f"Wq{index}jZyProbe")} for index, view in enumerate(new)]
        contents = [view["content"] for view in probes]
        found = form.extension(reply, probes, tools)
        if found is None:
            return None
        whole = [*found.closing, *found.bridge]
        if made is None:
            made = _cut(form.decode(whole), contents, len(found.closing))
            short = _shortened(form, made) if made is not None else None
        if made is None or any(id_ in piece for id_ in ids for piece in made.pieces):
            return None
        if form.encode(made.text(contents)) != whole:
            return None
        if short is not None and short.ids(form, contents) != (found.closing, found.bridge):
            short = None
    return short or made


def _shortened(form: Wrappable, whole: Wrapper) -> Wrapper:
    """The wrapper with ids in place of the text beyond the added tokens next to its contents."""
    if len(whole.pieces) == 1:  # there are no new messages
        return whole
    first, *between, last = whole.pieces
    start = max((first.rfind(token) + len(token) for token in form.borders(first)), default=0)
    end = min((last.find(token) for token in form.borders(last)), default=len(last))
    head, tail = form.encode(first[:start]), form.encode(last[end:])
    return whole._replace(pieces=(first[start:], *between, last[:end]), head=tuple(head), tail=tuple(tail))


def _cut(text: str, contents: Sequence[str], closing: int) -> Wrapper | None:
    """Cut the text of an extension at its contents."""
    pieces: list[str] = []
    trims: list[Callable[[str], str]] = []
    for content in contents:
        for trim in _TRIMS:
            before, found, after = text.partition(trim(content))
            if found:
                break
        else:
            return None
        pieces.append(before)
        trims.append(trim)
        text = after
    return Wrapper((*pieces, text), tuple(trims), closing)
