"""Texts of messages -> the bridge that rendering them gives, from the kept text that the template puts around them.

Invariant: a `Wrapper` gives what the template writes around new messages, and a `ReplyText` what it writes for a reply. Both are made from
renderings of probes: the template must copy texts (or trim and copy them) and write arguments as JSON, whatever is at their
edges and inside them, and the result must equal what is rendered, for new messages id for id.

A wrapper takes only contents without `<`, because a template could look for tags; other contents are rendered. Text beyond an added token
is kept as ids, because a tokenizer splits text at the tokens that `borders` gives before it does anything else. A reply whose texts
contain something that the template's source looks for has no `ReplyText`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from engine.errors import RenderError
from engine.tokens.bridge.kinds import View
from engine.tokens.jinja import to_json
from engine.tokens.renderer import Bridge, Renderer

_PAD = "  First 12 things.\n\n then {mark} (é, \"q\" 'r' & {{x}} [y] \\ 100%) \n"
STYLES: tuple[Callable[[str], str], ...] = (
    lambda mark: _PAD.replace("{mark}", mark),
    str,
    lambda mark: f"({mark}).",
    lambda mark: f"\n{mark}\t",
)


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

    def text(self, contents: Sequence[str]) -> str:
        """The bridge's text for these contents."""
        text = self.pieces[0]
        for content, trim, piece in zip(contents, self.trims, self.pieces[1:], strict=True):
            text += trim(content) + piece
        return text

    def bridge(self, template: Renderer, contents: Sequence[str]) -> Bridge:
        """The bridge for these contents, none of which is blank or has a `<`."""
        ids = [*self.head, *template.encode(self.text(contents)), *self.tail]
        return Bridge(ids[: self.closing], ids[self.closing :])


def make_wrapper(template: Renderer, reply: View, new: Sequence[View], tools: list[View] | None) -> Wrapper | None:
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
        rendered = template.unchecked_bridge(reply, probes, tools)
        if rendered is None:
            return None
        if made is None:
            made = _cut_at_contents(
                template.decode([*rendered.closing, *rendered.bridge]), contents, len(rendered.closing)
            )
            short = _shortened(template, made) if made is not None else None
        if made is None or any(id_ in piece for id_ in ids for piece in made.pieces):
            return None
        if made.bridge(template, contents) != rendered:
            return None
        if short is not None and short.bridge(template, contents) != rendered:
            short = None
    return short or made


def _shortened(template: Renderer, wrapper: Wrapper) -> Wrapper:
    """The wrapper with ids in place of the text beyond the added tokens next to its contents."""
    if len(wrapper.pieces) == 1:  # there are no new messages
        return wrapper
    first, *between, last = wrapper.pieces
    start = max((first.rfind(token) + len(token) for token in template.borders(first)), default=0)
    end = min((last.find(token) for token in template.borders(last)), default=len(last))
    head, tail = template.encode(first[:start]), template.encode(last[end:])
    return msgspec.structs.replace(
        wrapper, pieces=(first[start:], *between, last[:end]), head=tuple(head), tail=tuple(tail)
    )


def _cut_at_contents(text: str, contents: Sequence[str], closing: int) -> Wrapper | None:
    """Cut the text of an extension at its contents."""
    pieces: list[str] = []
    trims: list[Callable[[str], str]] = []
    for content in contents:
        for trim in _TRIMS[:4]:
            before, present, after = text.partition(trim(content))
            if present:
                break
        else:
            return None
        pieces.append(before)
        trims.append(trim)
        text = after
    return Wrapper((*pieces, text), tuple(trims), closing)


Render = Callable[[View], str | None]
"""What the template writes for a reply; None where it does not write the reply between the same texts."""

REPLY_STYLES: tuple[Callable[[str], str], ...] = (
    *STYLES,
    lambda mark: f"\n\n \n{mark}\n \n\n",
    lambda mark: f"e\u0301 {mark} \ufb01\uff21\U00012000",
)
"""The last one shows whether the format changes characters, as tokenizers that normalise texts do."""
_TRIMS: tuple[Callable[[str], str], ...] = (
    str,
    str.strip,
    str.rstrip,
    str.lstrip,
    lambda text: text.strip("\n"),
    lambda text: text.rstrip("\n"),
    lambda text: text.lstrip("\n"),
)
_VALUES: tuple[Any, ...] = (
    "é \"q\" 'r' <&> {{x}} [y] \\ 100%\n\t e\u0301\ufb01\U00012000",
    "",
    {"b": [1, 2.5, -3e-7, 1e22, True, False, None], "a/é c": {"n": [], "m": {}}},
    [{"y": "z"}, "x"],
    7,
    -0.5,
    True,
    None,
)
"""What an argument is in the probes: each type of JSON, keys that are not sorted, characters that JSON or HTML escapes."""


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
    """The parts of a reply that templates copy: its reasoning and content, where there are any, and the arguments of its calls."""
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
        if is_inspected is not None and any(map(is_inspected, _strings(arguments))):
            return None
        shape += ((name, len(call["id"]), *arguments),)
    return None if shape == (False, False) else shape


def make_reply_text(render: Render, reply: View) -> ReplyText | None:
    """The `ReplyText` of replies of the shape of `reply`; None where the template does more than copy their parts.

    Args:
        render: The template.
        reply: A reply that has a shape.
    """
    texts = len(_texts_of(reply))
    parts = parts_of(reply)
    marks = [f"Wr{index}kXyProbe" for index in range(len(parts))]

    def probes(style: Callable[[str], str], value: Callable[[str], Any] | None = None) -> list[Any]:
        given = value or style
        arguments = [
            {key: given(mark) for key in part} for part, mark in zip(parts[texts:], marks[texts:], strict=True)
        ]
        return [*map(style, marks[:texts]), *arguments]

    def rendered(parts: Sequence[Any], ids: str = "") -> str | None:
        try:
            return render(_with_parts(reply, parts, ids))
        except RenderError:
            return None

    plain = probes(str)
    written = rendered(plain)
    made = None if written is None else _cut_at_parts(written, plain, texts)
    if made is None or rendered(plain, "Wr0idProbe") != written:
        return None
    for at in range(texts):
        trials = [[*plain[:at], styled[at], *plain[at + 1 :]] for styled in map(probes, REPLY_STYLES)]
        shown = [rendered(trial) for trial in trials]
        for trim in _TRIMS:
            trimmed = msgspec.structs.replace(made, writers=(*made.writers[:at], trim, *made.writers[at + 1 :]))
            if [trimmed.write(trial) for trial in trials] == shown:
                made = trimmed
                break
        else:
            return None
    trials = [*map(probes, REPLY_STYLES), *[probes(str, partial(_given, value)) for value in _VALUES]]
    if any(made.write(trial) != rendered(trial) for trial in trials):
        return None
    return made


def _given(value: Any, _: str) -> Any:
    return value


def _texts_of(reply: View) -> tuple[str, ...]:
    return tuple([key for key in ("reasoning_content", "content") if reply.get(key)])


def _strings(value: Any) -> Iterator[str]:
    """All texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _with_parts(reply: View, parts: Sequence[Any], ids: str) -> View:
    """The reply with other parts, and other ids of calls where `ids` is not empty."""
    keys = _texts_of(reply)
    view = {**reply, **dict(zip(keys, parts, strict=False))}
    if "tool_calls" in reply:
        view["tool_calls"] = [
            {
                **call,
                "id": (ids or call["id"])[: len(call["id"])],
                "function": {**call["function"], "arguments": arguments},
            }
            for call, arguments in zip(reply["tool_calls"], parts[len(keys) :], strict=True)
        ]
    return view


def _cut_at_parts(written: str, parts: Sequence[Any], texts: int) -> ReplyText | None:
    """Cut a text at its parts, of which the first `texts` are texts; None where it does not contain each of them once."""
    writers: tuple[Callable[[Any], str], ...] = (*[str] * texts, *[to_json] * (len(parts) - texts))
    needles = [write(part) for write, part in zip(writers, parts, strict=True)]
    if any(written.count(needle) != 1 for needle in needles):
        return None
    order = sorted(range(len(needles)), key=lambda at: written.index(needles[at]))
    pieces: list[str] = []
    for at in order:
        before, _, written = written.partition(needles[at])
        pieces.append(before)
    return ReplyText((*pieces, written), tuple(order), writers)
