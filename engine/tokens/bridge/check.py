"""The kinds of a conversation's messages -> whether a bridge may continue it, tested on probes of the same kinds.

A bridge continues a tape after a reply without rendering the conversation again: next prompt = tape + closing + bridge.
That is correct exactly when the template, shown the whole conversation, (1) writes everything up to the reply as it did
before, (2) shows the reply itself, and (3) writes after it something that depends on the new messages alone. For a
conversation of n messages and new messages N, `check_bridge` renders *probes*, messages of the same kinds in the same
order whose contents are unique marks, in two styles, and checks

  1. text: render(before the reply) is a prefix of render(all with N): nothing said earlier is shown differently;
  2. text: a reply without reasoning or calls is shown as it was said, with its end token and nothing around it;
  3. tokens: the ids of render(all with N) end with the ids of the bridge, which hold all of N and were made from a
     stand-in for the reply and N alone, and which begin at an added token (text is split there before it is tokenised,
     so no merge crosses it).

If (1) fails, the template rewrites history. If (3) fails, there is no bridge. (2) holds for every reply that is plain
text in which the template's source looks for nothing. Any other reply (reasoning, calls, tags, blank, ended by another
token) is checked by itself: the template writes it in a *frame*, a conversation of one question in which the probe is
shown as it is in the whole one, or else in the whole conversation. What the template writes must begin with what was
sampled; the rest of it, up to its end token, is the closing. Otherwise a branch begins, which says where they differ.

A verdict on probes holds for messages of the same kinds if a template tests of a message what its kind tells, and
copies contents, trimmed at most. Kinds tell a message's role, whether it has reasoning (or has it in its content,
between its markers), whether it calls none, one or several tools, whether it holds images and one of them comes first,
and whether its content is blank, wrapped as a tool's response, or has a text that the template looks for. What a
template tests is not assumed: keys.py reads it from the template's syntax tree. A template that tests anything else, or
that this reading does not understand, has no bridges by probes: every conversation is rendered whole at each turn
(`Bridges.whole`).

The verdict for a sequence of kinds is that of its *signature*: the kinds before the first reply, which kind ever
followed which, and which did since the newest user message, the last kinds, and the new ones. A template that counts
messages, or keeps states of them, is one that is rendered whole, so no other one can tell two sequences of one
signature apart. Verdicts are kept per signature, so a proof costs O(conversation) once for a signature and process, and
a turn costs O(new messages).

Two kinds of messages make only their own conversation be rendered whole, from then on: a reply with reasoning markers
in odd places (several of them, unclosed, not at its beginning), and a message with a text that the template looks for.

Once probes have shown it, what the template puts around texts is kept (wrapper.py). The template must copy texts (or
trim and copy them) and write arguments as JSON, for any characters at their edges and inside them. The result must
equal what is rendered; for new messages, id for id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from engine.errors import RenderError
from engine.tokens.bridge.kinds import ASSISTANT, USER, View, has_mark, mark, probe
from engine.tokens.bridge.wrapper import TRIMS, ReplyText, Wrapper, parts_of, remainder
from engine.tokens.jinja import plain_json

if TYPE_CHECKING:
    from engine.tokens.template import ChatTemplate


STYLES: tuple[Callable[[str], str], ...] = (str, lambda mark: f"First 12 things.\n\n  then {mark}")
_ASKED = 800
"""Index of the question at the beginning of a frame."""


class ReplyFrame(msgspec.Struct, frozen=True):
    """A short conversation in which the template writes a reply as in the real one."""

    before: list[View]
    """Messages before the reply."""
    text: str
    """What the template writes for them, generation prompt included."""
    new: list[View]
    """Messages after the reply, of the kinds that were checked."""
    tail: str
    """What the template writes after the reply and its end token."""
    replies: dict[Any, ReplyText | None]
    """By shape of a reply: what the template writes around its parts here; None where a reply of this shape has to be
    rendered."""


class BridgeVerdict(msgspec.Struct, frozen=True):
    """The result of the checks for one signature."""

    bridged: bool
    """(3) holds: there is a bridge, and it depends on the new messages alone."""
    rewrites: bool
    """(1) or (2) fails: the template would show earlier messages or the reply differently."""
    with_tools: bool = False
    """The bridge is made with the tools in view."""
    why: str = ""
    """What failed."""
    history: bool = False
    """(1) holds: messages before the reply are shown as before."""
    frame: ReplyFrame | None = None
    """In which an actual reply is rendered; None where only the whole conversation is possible."""


def check_bridge(template: ChatTemplate, kinds: bytes, new: bytes, tools: list[View] | None) -> BridgeVerdict:
    """The verdict on continuing with messages of the kinds `new` after those of `kinds`.

    Args:
        template: The chat template.
        kinds: The kinds of the conversation's messages; the last is the reply.
        new: The kinds of the messages that follow.
        tools: The conversation's tools.
    """
    verdict = _check_styles(template, kinds, new, tools, None)
    return verdict if verdict.bridged or not tools else _check_styles(template, kinds, new, tools, tools)


def _check_styles(
    template: ChatTemplate, kinds: bytes, new: bytes, tools: list[View] | None, shown: list[View] | None
) -> BridgeVerdict:
    verdicts: list[BridgeVerdict] = []
    for style in STYLES:
        try:
            verdict = _check_style(template, kinds, new, tools, shown, style)
        except RenderError as error:
            return BridgeVerdict(False, False, why=str(error))
        if not verdict.bridged:
            return verdict
        verdicts.append(verdict)
    return BridgeVerdict(
        True,
        any(verdict.rewrites for verdict in verdicts),
        bool(shown),
        next((verdict.why for verdict in verdicts if verdict.why), ""),
        all(verdict.history for verdict in verdicts),
        verdicts[0].frame if all(verdict.frame for verdict in verdicts) else None,
    )


def _check_style(
    template: ChatTemplate,
    kinds: bytes,
    new: bytes,
    tools: list[View] | None,
    shown: list[View] | None,
    style: Callable[[str], str],
) -> BridgeVerdict:
    at = len(kinds) - 1
    views = [probe(kind, index, style) for index, kind in enumerate(kinds + new)]
    reply = views[at]
    bridge = template.unchecked_bridge(reply, views[at + 1 :], shown)
    if bridge is None:
        return BridgeVerdict(False, False, why="these messages have no continuation apart from the conversation")
    before = template.render_views(views[:at], tools)
    after = template.render_views(views, tools)
    ids = [*bridge.closing, *bridge.bridge]
    cut = len(after) - len(bridge.bridge)
    if after[len(after) - len(ids) :] != ids:
        return BridgeVerdict(
            False, False, why="what the template writes after a reply depends on more than the new messages"
        )
    said, coming = template.decode(after[:cut]), template.decode(after[cut:])
    for index in range(at + 1, len(views)):
        if mark(index) in said or (has_mark(views[index]) and mark(index) not in coming):
            return BridgeVerdict(
                False, False, why=f"the template does not show a message of role `{views[index]['role']}` here"
            )
    earlier = template.decode(before)
    if not said.startswith(earlier):
        return BridgeVerdict(True, True, why="the template shows what was said before the reply differently")
    region = said[len(earlier) :]
    why = _judge_reply(reply, kinds[-1], region, template.decode(bridge.closing))
    return BridgeVerdict(
        True, bool(why), why=why, history=True, frame=_frame(template, reply, views[at + 1 :], region, coming)
    )


def _judge_reply(reply: View, kind: int, region: str, close: str) -> str:
    """(2): why the reply itself is not shown as it was sampled; empty where it is."""
    if kind == ASSISTANT:
        if remainder(reply["content"] + close, region) == "":
            return ""
        return f"the template writes {region.replace(reply['content'], '…', 1)!r} for a reply without reasoning"
    reasoning, _, content = reply["content"].rpartition("</think>\n\n")
    marked = reply.get("reasoning_content") or reasoning.removeprefix("<think>\n").rstrip("\n")
    parts = [text for text in (marked, content) if text]
    parts += [call["function"]["arguments"]["x"] for call in reply.get("tool_calls", ())]
    if any(part.strip() not in region for part in parts):
        return "the template leaves out a part of the reply, its reasoning most likely"
    return ""


def _frame(template: ChatTemplate, reply: View, new: list[View], region: str, coming: str) -> ReplyFrame | None:
    """A conversation of one question in which the reply is shown as in the whole one; None where it is not."""
    before = [probe(USER, _ASKED, str)]
    try:
        text, written = template.text(before, None), template.text([*before, reply, *new], None)
    except RenderError:
        return None
    same = written == text + region + coming
    return ReplyFrame(before, text, new, coming, {}) if same else None


_PAD = "  First 12 things.\n\n then {mark} (é, \"q\" 'r' & {{x}} [y] \\ 100%) \n"
WRAPPER_STYLES: tuple[Callable[[str], str], ...] = (
    lambda mark: _PAD.replace("{mark}", mark),
    str,
    lambda mark: f"({mark}).",
    lambda mark: f"\n{mark}\t",
)


def make_wrapper(template: ChatTemplate, reply: View, new: Sequence[View], tools: list[View] | None) -> Wrapper | None:
    """The wrapper of messages like `new`, whatever their contents; None where the template does more than copy them.

    Raises:
        RenderError: The template refuses these messages.
    """
    made: Wrapper | None = None
    short: Wrapper | None = None
    ids = {str(view["tool_call_id"]) for view in new if "tool_call_id" in view}
    ids |= {call["id"] for call in reply.get("tool_calls", ())}
    for style in WRAPPER_STYLES:
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


def _shortened(template: ChatTemplate, wrapper: Wrapper) -> Wrapper:
    """The wrapper with ids in place of the text beyond the added tokens next to its contents."""
    if len(wrapper.pieces) == 1:  # there are no new messages
        return wrapper
    first, *between, last = wrapper.pieces
    start = max((first.rfind(token) + len(token) for token in template.fast.borders(first)), default=0)
    end = min((last.find(token) for token in template.fast.borders(last)), default=len(last))
    head, tail = template.encode(first[:start]), template.encode(last[end:])
    return msgspec.structs.replace(
        wrapper, pieces=(first[start:], *between, last[:end]), head=tuple(head), tail=tuple(tail)
    )


def _cut_at_contents(text: str, contents: Sequence[str], closing: int) -> Wrapper | None:
    """Cut the text of an extension at its contents."""
    pieces: list[str] = []
    trims: list[Callable[[str], str]] = []
    for content in contents:
        for trim in TRIMS[:4]:
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
    *WRAPPER_STYLES,
    lambda mark: f"\n\n \n{mark}\n \n\n",
    lambda mark: f"e\u0301 {mark} \ufb01\uff21\U00012000",
)
"""The last one shows whether the format changes characters, as tokenizers that normalise texts do."""
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
"""What an argument is in the probes: each type of JSON, keys that are not sorted, characters that JSON or HTML
escapes."""


def make_reply_text(render: Render, reply: View) -> ReplyText | None:
    """The `ReplyText` of replies of the shape of `reply`; None where the template does more than copy their parts.

    Args:
        render: The template.
        reply: A reply that has a shape.
    """
    texts = len(_texts_of(reply))
    parts = parts_of(reply)
    marks = [f"Wr{index}kXyProbe" for index in range(len(parts))]

    def probes(style: Callable[[str], str], value: Any = ...) -> list[Any]:
        arguments = [
            {key: style(mark) if value is ... else value for key in part}
            for part, mark in zip(parts[texts:], marks[texts:], strict=True)
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
        for trim in TRIMS:
            trimmed = msgspec.structs.replace(made, writers=(*made.writers[:at], trim, *made.writers[at + 1 :]))
            if [trimmed.write(trial) for trial in trials] == shown:
                made = trimmed
                break
        else:
            return None
    trials = [*map(probes, REPLY_STYLES), *[probes(str, value) for value in _VALUES]]
    if any(made.write(trial) != rendered(trial) for trial in trials):
        return None
    return made


def _texts_of(reply: View) -> tuple[str, ...]:
    return tuple([key for key in ("reasoning_content", "content") if reply.get(key)])


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
    """Cut a text at its parts, of which the first `texts` are texts; None where it does not contain each of them
    once."""
    writers: tuple[Callable[[Any], str], ...] = (*[str] * texts, *[plain_json] * (len(parts) - texts))
    needles = [write(part) for write, part in zip(writers, parts, strict=True)]
    if any(written.count(needle) != 1 for needle in needles):
        return None
    order = sorted(range(len(needles)), key=lambda at: written.index(needles[at]))
    pieces: list[str] = []
    for at in order:
        before, _, written = written.partition(needles[at])
        pieces.append(before)
    return ReplyText((*pieces, written), tuple(order), writers)
