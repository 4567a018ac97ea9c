"""Keeps the text that a template puts around the parts of a reply, so that a reply is compared without rendering it.

Invariant: `ReplyText.write` gives what the template writes for a reply. It is made from renderings of probes with the same parts:
the template must copy texts (or trim and copy them) and write arguments as JSON, whatever is at their edges and inside
them. A reply whose texts contain something that the template's source looks for has no `ReplyText`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.errors import RenderError
from engine.tokens.bridge.cache import STYLES
from engine.tokens.jinja import to_json

if TYPE_CHECKING:
    from engine.tokens.bridge.check import View

Render = Callable[["View"], str | None]
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


class ReplyText(NamedTuple):
    """Text around parts: pieces[0] + part order[0] + pieces[1] + …"""

    pieces: tuple[str, ...]
    order: tuple[int, ...]
    writers: tuple[Callable[[Any], str], ...]
    """Of each part: what trims a text, or writes arguments."""

    def write(self, parts: Sequence[Any]) -> str:
        """What the template writes for a reply with these parts (`parts_of`)."""
        written = [self.pieces[0]]
        for at, piece in zip(self.order, self.pieces[1:], strict=True):
            written.append(self.writers[at](parts[at]))
            written.append(piece)
        return "".join(written)


def parts_of(reply: View) -> list[Any]:
    """The parts of a reply that templates copy: its reasoning and content, where there are any, and the arguments of its calls."""
    texts = [reply[key] for key in _texts_of(reply)]
    return texts + [call["function"]["arguments"] for call in reply.get("tool_calls", ())]


def shape_of(reply: View, is_inspected: Callable[[str], bool]) -> tuple[Any, ...] | None:
    """What the replies that share one `ReplyText` have in common; None where a reply is to be rendered.

    Args:
        reply: The reply.
        is_inspected: Whether a text has something that the template may look for.
    """
    calls = reply.get("tool_calls", ())
    keys = _texts_of(reply)
    texts = [reply[key] for key in keys]
    if not (texts or calls) or any(text.isspace() for text in texts):
        return None
    for call in calls:
        arguments = call["function"]["arguments"]
        if not (isinstance(arguments, dict) and arguments):
            return None
        texts += _strings(arguments)
    if any(map(is_inspected, texts)):
        return None
    return keys, *[(call["function"]["name"], len(call["id"]), *call["function"]["arguments"]) for call in calls]


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
    made = None if written is None else _cut(written, plain, texts)
    if made is None or rendered(plain, "Wr0idProbe") != written:
        return None
    for at in range(texts):
        trials = [[*plain[:at], styled[at], *plain[at + 1 :]] for styled in map(probes, REPLY_STYLES)]
        shown = [rendered(trial) for trial in trials]
        for trim in _TRIMS:
            trimmed = made._replace(writers=(*made.writers[:at], trim, *made.writers[at + 1 :]))
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


def _cut(written: str, parts: Sequence[Any], texts: int) -> ReplyText | None:
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
