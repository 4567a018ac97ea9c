"""What is checked about a bridge before it is used, and what is assumed.

A bridge continues a tape after a reply without rendering the conversation again: next prompt = tape + closing + bridge. That is
correct exactly when the template, shown the whole conversation, (1) writes everything up to the reply as it did
before, (2) shows the reply itself, and (3) writes after it something that depends on the new messages alone. For a
conversation of n messages and new messages N, `prove` renders *probes*, messages of the same kinds in the same
order whose contents are unique marks, in two styles, and checks

  1. text: render(before the reply) is a prefix of render(all with N): nothing said earlier is shown differently;
  2. text: a reply without reasoning or calls is shown as it was said, with its end token and nothing around it;
  3. tokens: the ids of render(all with N) end with the ids of the bridge, which hold all of N and were made from a
     stand-in for the reply and N alone, and which begin at an added token (text is split there before it is tokenised, so
     no merge crosses it).

If (1) fails, the template rewrites history. If (3) fails, there is no bridge. (2) holds for every reply that is plain text in
which the template's source looks for nothing. Any other reply (reasoning, calls, tags, blank, ended by another token) is
checked by itself: the template writes it in a *frame*, a conversation of one question in which the probe is
shown as it is in the whole one, or else in the whole conversation. What the template writes must begin with what was
sampled; the rest of it, up to its end token, is the closing. Otherwise a branch begins, which says where they differ.

A verdict on probes holds for messages of the same kinds if a template tests of a message what its kind tells, and copies contents,
trimmed at most. Kinds tell a message's role, whether it has reasoning (or has it in its content, between its markers), whether it
calls none, one or several tools, whether it holds images and one of them comes first, and whether its content is blank, wrapped as a
tool's response, or has a text that the template looks for. What a template tests is not assumed: keys.py reads it
from the template's syntax tree. A template that tests anything else, or that this reading does not understand, has no
bridges by probes: every conversation is rendered whole at each turn (`Bridges.whole`).

The verdict for a sequence of kinds is that of its *signature*: the kinds before the first reply, which kind ever followed which, and
which did since the newest user message, the last kinds, and the new ones. A template that counts messages, or keeps states of them, is one
that is rendered whole, so no other one can tell two sequences of one signature apart. Verdicts are kept per signature, so a proof costs
O(conversation) once for a signature and process, and a turn costs O(new messages).

Two kinds of messages make only their own conversation be rendered whole, from then on: a reply with reasoning markers in odd places
(several of them, unclosed, not at its beginning), and a message with a text that the template looks for.

The reply's sampled tokens are kept as they are, canonical or not. White space in what was sampled may differ from what the
template would write (it trims contents, and spaces its JSON); any other difference begins a branch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import date
from typing import Any, NamedTuple, Protocol

import msgspec

from engine.errors import RenderError
from engine.tokens.bridge.reply_text import ReplyText
from engine.tokens.quoting import MARK, unquote

View = dict[str, Any]
"""A message as chat templates read it."""

SYSTEM, USER, TOOL, ASSISTANT = range(4)
_ROLES = {"system": SYSTEM, "user": USER, "tool": TOOL}
REASONS, MARKED, ODD, CALLS, BLANK = 1, 2, 3, 4, 12
"""Added to ASSISTANT: reasoning (1), or reasoning inside the content between its markers (2), or markers
elsewhere (3); one call (4) or several (8); blank content (12)."""
WRAPPED, WRAPPED_LOOSELY, BLANK_SYSTEM = 27, 28, 29
"""A user message that is a tool's response by its tags, alone or amid white space: templates of Qwen's look for them. A
blank message that is not the model's: this and its role."""
PICTURED = 32
"""A message with images that is not the model's: this, its role, and 3 where an image comes first, or 6 where there is
no text at all. Some templates look at the first part."""
LOOKED = 41
"""A message that is not the model's, with a text that the template looks for: this and its role. All kinds are below 44."""
_KINDS = 44

MARKERS = ("<think>", "</think>", "<|channel", "[THINK]", "[/THINK]", "<seed:think>", "</seed:think>")
"""Texts that templates look for inside a reply's content to find its reasoning."""
WRAP = ("<tool_response>", "</tool_response>")
_USERS = frozenset(
    (USER, WRAPPED, WRAPPED_LOOSELY, BLANK_SYSTEM + USER, *range(PICTURED + USER, LOOKED, 3), LOOKED + USER)
)
STYLES: tuple[Callable[[str], str], ...] = (str, lambda mark: f"First 12 things.\n\n  then {mark}")

TOOL_NAME = "probe_tool"
_ASKED = 800
"""Index of the question at the beginning of a frame."""


def mark(index: int) -> str:
    """Text that occurs in no template and in no other message: the content of probe `index`."""
    return f"Qz{index}vKxProbe"


def _why(index: int) -> str:
    return f"Why {mark(index)}w"


class Looked(NamedTuple):
    """What a template tests of a message, as far as kinds tell it."""

    markers: tuple[str, ...] = ()
    """Those of MARKERS that it looks for."""
    texts: re.Pattern[str] | None = None
    """What it looks for in contents; None where it looks for nothing."""
    in_replies: re.Pattern[str] | None = None
    """`texts` without the markers."""
    wrap: bool = True
    """It looks for the tags of a tool's response."""
    blank: bool = False
    """It tests whether a text is empty."""
    in_calls: bool = False
    """It looks for `texts` in tool calls and names of tools too."""


def kind_of(view: View, looked: Looked) -> int:
    """The kind of a message, in [0, 44): what a template may test of it.

    Args:
        view: The message.
        looked: What the template tests.
    """
    role, content = view["role"], view["content"]
    if looked.in_calls and looked.texts is not None and _calls_have(view, looked.texts):
        return ASSISTANT + ODD if role == "assistant" else LOOKED + _ROLES[role]
    if isinstance(content, str):
        text = content
    else:
        own = _ROLES.get(role, ASSISTANT)
        joined = "".join([part.get("text", "") for part in content])
        if looked.texts is not None and looked.texts.search(unquote(joined)):
            return LOOKED + own if own < ASSISTANT else ASSISTANT + ODD
        if own < ASSISTANT and any(part["type"] == "image" for part in content):
            if all(part["type"] == "image" for part in content):
                return PICTURED + 6 + own
            return PICTURED + (3 if content[0]["type"] == "image" else 0) + own
        text = "x"
    bare = text.strip()
    spaced = looked.blank and not bare and bool(text)
    if role != "assistant":
        wrapped = looked.wrap and role == "user" and bare.startswith(WRAP[0]) and bare.endswith(WRAP[1])
        inner = bare[len(WRAP[0]) : -len(WRAP[1])] if wrapped else text
        inner = unquote(inner) if MARK in inner else inner
        if spaced or (looked.texts is not None and looked.texts.search(inner)):
            return LOOKED + _ROLES[role]
        if wrapped:
            return WRAPPED if bare == text else WRAPPED_LOOSELY
        return _ROLES[role] if bare else BLANK_SYSTEM + _ROLES[role]
    kind = ASSISTANT + CALLS * min(len(view.get("tool_calls", ())), 2)
    reasons = bool(view.get("reasoning_content"))
    if spaced or (
        looked.in_replies is not None and looked.in_replies.search(f"{text}\0{view.get('reasoning_content', '')}")
    ):
        return kind + ODD
    for marker in looked.markers:
        if marker in text:
            kind += ODD if reasons or not _is_marked(bare) else MARKED
            break
    else:
        kind += REASONS * reasons
    return kind if bare else kind + BLANK


def _calls_have(view: View, texts: re.Pattern[str]) -> bool:
    """Whether a message's tool calls, or the name of the tool that it is of, have a text that is looked for."""
    calls = view.get("tool_calls", ())
    names = [view.get("name", ""), *(call["function"]["name"] for call in calls)]
    return any(map(texts.search, [*names, *map(str, (call["function"]["arguments"] for call in calls))]))


def is_odd(kind: int) -> bool:
    """Whether kinds do not tell what the template does with such a message: its conversation is rendered whole."""
    return kind >= LOOKED or (ASSISTANT <= kind < WRAPPED and (kind - ASSISTANT) % CALLS == ODD)


ODD_KINDS = frozenset(filter(is_odd, range(_KINDS)))


def _is_marked(text: str) -> bool:
    """Whether a reply is reasoning between its markers and then something else, in the one form that is not odd."""
    reasoning, _, rest = text.removeprefix(MARKERS[0]).partition(MARKERS[1])
    odd = any(marker in part for part in (reasoning, rest) for marker in MARKERS)
    return text.startswith(MARKERS[0]) and bool(reasoning.strip()) and bool(rest.strip()) and not odd


class MessageKinds(msgspec.Struct, frozen=True):
    """What the verdict on a bridge depends on, of the messages before it: a value, made from its predecessor in O(1)."""

    day: date = msgspec.field(default_factory=date.today)
    """The day on which the conversation began."""
    opening: bytes = b""
    """The kinds before the first reply."""
    replied: bool = False
    last: bytes = b""
    """The last three kinds."""
    pairs: int = 0
    """A bit for each kind that ever followed another."""
    since: int = 0
    """`pairs` since the newest plain message of a user."""
    since_any: int = 0
    """`pairs` since the newest message of role `user`."""
    odd: bool = False
    """A message is of an odd kind."""

    def add(self, kind: int) -> MessageKinds:
        """With one more message."""
        replied = self.replied or kind >= ASSISTANT
        pair = 1 << (self.last[-1] * _KINDS + kind) if self.last else 0
        return MessageKinds(
            self.day,
            self.opening if replied else self.opening + bytes((kind,)),
            replied,
            self.last[-2:] + bytes((kind,)),
            self.pairs | pair,
            0 if kind == USER else self.since | pair,
            0 if kind in _USERS else self.since_any | pair,
            self.odd or (kind >= ASSISTANT and is_odd(kind)),
        )

    def signature(self, new: bytes) -> tuple[bytes, bool, int, int, int, bytes, bytes]:
        """The key of the verdict on the kinds `new` after these messages."""
        return self.opening, self.replied, self.pairs, self.since, self.since_any, self.last, new


class Frame(NamedTuple):
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
    """By shape of a reply: what the template writes around its parts here; None where a reply of this shape has to be rendered."""


class Verdict(NamedTuple):
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
    frame: Frame | None = None
    """In which an actual reply is rendered; None where only the whole conversation is possible."""


class Extension(msgspec.Struct, frozen=True):
    """What follows a reply: the token that ends it, where the template writes one, and the bridge."""

    closing: list[int]
    bridge: list[int]


class Provable(Protocol):
    """The part of a chat format that the checks use."""

    def render_views(self, views: Sequence[View], tools: list[View] | None) -> list[int]: ...

    def text(self, views: Sequence[View], tools: list[View] | None) -> str: ...

    def extension(self, reply: View, new: Sequence[View], tools: list[View] | None) -> Extension | None: ...

    def decode(self, ids: Sequence[int]) -> str: ...


def remainder(said: str, shown: str) -> str | None:
    """What a template writes after the text that was sampled; None where it shows this text differently.

    White space inside the sampled text may differ: it stays as it was sampled.

    Args:
        said: The sampled text, the token that ended it included.
        shown: What the template writes for the reply, its end token included.
    """
    if shown.startswith(said):
        return shown[len(said) :]
    bare = "".join(said.split())
    if not "".join(shown.split()).startswith(bare):
        return None
    at = left = 0
    while left < len(bare):
        left += not shown[at].isspace()
        at += 1
    own = said[len(said.rstrip()) :]
    rest = shown[at:]
    written = rest[: len(rest) - len(rest.lstrip())]
    return rest[len(own) :] if written.startswith(own) else rest.lstrip()


def probe(kind: int, index: int, style: Callable[[str], str]) -> View:
    """A message of one kind; each of its parts contains the mark of `index`."""
    content = style(mark(index))
    kind = kind - LOOKED if kind >= LOOKED else kind
    if kind >= PICTURED:
        form, role = divmod(kind - PICTURED, 3)
        parts = [{"type": "text", "text": content}, {"type": "image"}]
        return {**probe(role, index, style), "content": (parts, parts[::-1], parts[1:])[form]}
    if kind in (WRAPPED, WRAPPED_LOOSELY):
        wrapped = f"{WRAP[0]}\n{content}\n{WRAP[1]}"
        return {"role": "user", "content": wrapped if kind == WRAPPED else f"\n{wrapped} "}
    if kind >= BLANK_SYSTEM:
        kind, content = kind - BLANK_SYSTEM, ""
    if kind == SYSTEM:
        return {"role": "system", "content": content}
    if kind == USER:
        return {"role": "user", "content": content}
    if kind == TOOL:
        return {"role": "tool", "content": content, "name": TOOL_NAME, "tool_call_id": f"call_0_{index}"}
    blank, flags = divmod(kind - ASSISTANT, BLANK)
    calls, reasons = divmod(flags, CALLS)
    view: View = {"role": "assistant", "content": "" if blank else content}
    if reasons == REASONS:
        view["reasoning_content"] = _why(index)
    elif reasons == MARKED:
        view["content"] = f"<think>\n{_why(index)}\n</think>\n\n{content}"
    if calls:
        view["tool_calls"] = [probe_call(index, number) for number in range(calls)]
    return view


def has_mark(view: View) -> bool:
    """Whether a probe's content contains its mark."""
    content = view["content"]
    return bool(content) and (isinstance(content, str) or any(part["type"] == "text" for part in content))


def probe_call(index: int, number: int, name: str = TOOL_NAME, id_: str | None = None) -> View:
    """A tool call whose argument contains the mark of `index`."""
    return {
        "type": "function",
        "id": id_ or f"call_{index}_{number}",
        "function": {"name": name, "arguments": {"x": f"{mark(index)}n{number}"}},
    }


def prove(form: Provable, kinds: bytes, new: bytes, tools: list[View] | None) -> Verdict:
    """The verdict on continuing with messages of the kinds `new` after those of `kinds`.

    Args:
        form: The chat format.
        kinds: The kinds of the conversation's messages; the last is the reply.
        new: The kinds of the messages that follow.
        tools: The conversation's tools.
    """
    attempts = (None,) if not tools else (None, tools)
    verdict = Verdict(False, False, why="nothing to prove")
    for shown in attempts:
        verdict = _prove_all(form, kinds, new, tools, shown)
        if verdict.bridged:
            return verdict
    return verdict


def _prove_all(form: Provable, kinds: bytes, new: bytes, tools: list[View] | None, shown: list[View] | None) -> Verdict:
    found: list[Verdict] = []
    for style in STYLES:
        try:
            verdict = _prove_one(form, kinds, new, tools, shown, style)
        except RenderError as error:
            return Verdict(False, False, why=str(error))
        if not verdict.bridged:
            return verdict
        found.append(verdict)
    return Verdict(
        True,
        any(verdict.rewrites for verdict in found),
        bool(shown),
        next((verdict.why for verdict in found if verdict.why), ""),
        all(verdict.history for verdict in found),
        found[0].frame if all(verdict.frame for verdict in found) else None,
    )


def _prove_one(
    form: Provable,
    kinds: bytes,
    new: bytes,
    tools: list[View] | None,
    shown: list[View] | None,
    style: Callable[[str], str],
) -> Verdict:
    at = len(kinds) - 1
    views = [probe(kind, index, style) for index, kind in enumerate(kinds + new)]
    reply = views[at]
    extension = form.extension(reply, views[at + 1 :], shown)
    if extension is None:
        return Verdict(False, False, why="these messages have no continuation apart from the conversation")
    before = form.render_views(views[:at], tools)
    after = form.render_views(views, tools)
    whole = [*extension.closing, *extension.bridge]
    cut = len(after) - len(extension.bridge)
    if after[len(after) - len(whole) :] != whole:
        return Verdict(False, False, why="what the template writes after a reply depends on more than the new messages")
    said, coming = form.decode(after[:cut]), form.decode(after[cut:])
    for index in range(at + 1, len(views)):
        if mark(index) in said or (has_mark(views[index]) and mark(index) not in coming):
            return Verdict(
                False, False, why=f"the template does not show a message of role `{views[index]['role']}` here"
            )
    earlier = form.decode(before)
    if not said.startswith(earlier):
        return Verdict(True, True, why="the template shows what was said before the reply differently")
    region = said[len(earlier) :]
    why = _judge_reply(reply, kinds[-1], region, form.decode(extension.closing))
    return Verdict(True, bool(why), why=why, history=True, frame=_frame(form, reply, views[at + 1 :], region, coming))


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


def _frame(form: Provable, reply: View, new: list[View], region: str, coming: str) -> Frame | None:
    """A conversation of one question in which the reply is shown as in the whole one; None where it is not."""
    before = [probe(USER, _ASKED, str)]
    try:
        text, whole = form.text(before, None), form.text([*before, reply, *new], None)
    except RenderError:
        return None
    same = whole == text + region + coming
    return Frame(before, text, new, coming, {}) if same else None
