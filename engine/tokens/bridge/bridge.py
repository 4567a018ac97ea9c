"""Bridges: the tokens between two turns, checked against the chat template.

Invariant: `Bridges.bridge` gives the exact continuation of a tape, or the reason why there is none. What is proved on probes, and for
which templates and messages that holds, is in check.py. Verdicts and wrappers depend on kinds of messages only, so all episodes of a
run share them. Where probes cannot decide, the whole conversation is rendered and compared with the tape (`_bridge_by_whole`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from engine.errors import RenderError
from engine.tokens.bridge.cache import Wrapper, is_plain, make_wrapper
from engine.tokens.bridge.check import ODD_KINDS, Extension, Frame, MessageKinds, Verdict, View, prove, remainder
from engine.tokens.bridge.keys import TemplateKeys
from engine.tokens.bridge.reply_text import make_reply_text, parts_of, shape_of
from engine.tokens.quoting import MARK, unquote
from engine.tokens.tape_text import difference, end_in, pieces_of

if TYPE_CHECKING:
    from engine.tokens.format import ChatFormat
    from engine.tokens.tape import Tape

_THINK_CLOSE = "</think>"
_NO_TOKEN = "the template writes no added token after a reply"
_BEFORE, _EXCERPT = 8, 48
"""Characters of a reply that a branch's reason quotes: how many before the difference, and how many in all."""
_MAX_WRAPPERS = 4096
"""Wrappers that are kept: one for each sequence of roles and tool names."""
_MAX_SHAPES = 256
"""Shapes of replies that are kept for one frame: one for each sequence of tool names."""


class Bridges:
    """Makes the bridges of one chat format.

    Args:
        form: The chat format.
    """

    def __init__(self, form: ChatFormat) -> None:
        self._form = form
        self.whole: str | None = None
        """Why every bridge is found by rendering the whole conversation and comparing it with the tape; None where checks of
        probes decide. Setting it takes effect from the next bridge on, in all conversations of this format."""
        self.timed = False
        """No two renderings are alike: they show the time."""
        self._copies = True
        self._reads_tools = False
        self._dated = False
        self._day = date.today()
        self._verdicts: dict[Any, Verdict] = {}
        self._wrappers: dict[Any, Wrapper | None] = {}

    def follow(self, keys: TemplateKeys) -> None:
        """Rely on the checks of probes as far as what the template tests allows it."""
        self.whole = next(iter(keys.whole), None)
        self.timed, self._dated = keys.timed, keys.dated
        self._copies, self._reads_tools = keys.copies, keys.tests_tools

    def bridge(
        self,
        before: MessageKinds,
        reply: View,
        new: Sequence[View],
        *,
        tools: list[View] | None,
        last: int | None,
        sampled: str | None = None,
        kinds: bytes | None = None,
        thinking: bool = False,
        keep: bool = False,
        conversation: Callable[[], list[View]],
        tape: Tape,
        whole: bool | None = None,
    ) -> Extension | str:
        """The exact continuation of a tape whose newest reply is `reply`, or why there is none.

        Costs O(new) for a plain reply, and O(reply + new) for another, once this process has met messages of these kinds.

        Args:
            before: The kinds of all messages up to and including the reply.
            reply: The reply as templates read it.
            new: The messages that follow.
            tools: The conversation's tools.
            last: The reply's last sampled id; None where nothing was sampled.
            sampled: The reply's text as it was sampled, the token that ended it included; None where `is_plain` holds of it.
            kinds: The kinds of `new`, where they are known already.
            thinking: The reply ended inside its reasoning.
            keep: Continue although the template would rewrite earlier messages.
            conversation: Gives all messages up to and including the reply; called where a shorter conversation is not enough.
            tape: The tape, which ends with the reply.
            whole: Whether the whole conversation is rendered. Default: as `self.whole` says.
        """
        if kinds is None:
            kinds = self._kinds(new)
        if whole is None:
            whole = self.whole is not None
        whole = whole or before.odd or not ODD_KINDS.isdisjoint(kinds)
        if self._dated and before.day != (today := date.today()):
            whole = True
            if today != self._day:
                self._day = today
                self._verdicts.clear()
                self._wrappers.clear()
        if whole:
            compared = self._bridge_by_whole(conversation(), new, kinds, tools, last, tape)
            if not (keep and isinstance(compared, str)):
                return compared
        key = (before.signature(kinds), tools is not None if not (tools and self._reads_tools) else to_json(tools))
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._verdicts[key] = prove(self._form, self._kinds(conversation()), kinds, tools)
        if not verdict.bridged or not (verdict.history or keep):
            return verdict.why
        try:
            found = self.extension(reply, new, tools if verdict.with_tools else None)
            if found is None:
                return "these messages have no continuation apart from the conversation"
            if sampled is None and (keep or not verdict.rewrites):
                return self._without_end(found, last, keep)
            if sampled is None:
                return verdict.why
            shown = self._shown_reply(verdict.frame, reply, new, found, tools, conversation)
        except RenderError as error:
            return str(error)
        return self._fitted(found, sampled, shown, last, thinking, keep)

    def extension(self, reply: View, new: Sequence[View], tools: list[View] | None) -> Extension | None:
        """`ChatFormat.extension`, through a wrapper where there is one for messages like these.

        Raises:
            RenderError: The template refuses these messages.
        """
        form = self._form
        if not (self._copies and all(is_plain(view) for view in new)):
            return form.extension(reply, new, tools)
        calls = tuple([call["function"]["name"] for call in reply.get("tool_calls", ())])
        key = (tools and to_json(tools), tuple([(view["role"], view.get("name")) for view in new]), calls)
        try:
            wrapper = self._wrappers[key]
        except KeyError:
            wrapper = make_wrapper(form, reply, new, tools)
            if len(self._wrappers) < _MAX_WRAPPERS:
                self._wrappers[key] = wrapper
        if wrapper is None:
            return form.extension(reply, new, tools)
        return Extension(*wrapper.ids(form, [view["content"] for view in new]))

    def _kinds(self, views: Sequence[View]) -> bytes:
        return bytes([self._form.views.kind(view) for view in views])

    def _bridge_by_whole(
        self,
        views: list[View],
        new: Sequence[View],
        kinds: bytes,
        tools: list[View] | None,
        last: int | None,
        tape: Tape,
    ) -> Extension | str:
        """`bridge` for any template: what it writes for the whole conversation, after the text of the tape; O(conversation).

        Nothing is taken from probes, from earlier renderings or from what a template usually does with contents.
        """
        form = self._form
        shown = [*views, *new]
        try:
            written = form.text(shown, tools)
        except RenderError as error:
            return str(error)
        pieces, text = pieces_of(form, tape), unquote(written)
        end = end_in(pieces, text)
        if end is None:
            at = max(difference(pieces, text) - _BEFORE, 0)
            said = "".join([piece for _, piece in pieces])
            return f"the template writes {text[at : at + _EXCERPT]!r} where the tape has {said[at : at + _EXCERPT]!r}"
        if role := form.dropped(self._kinds(views) + kinds, tools):
            return f"the template does not show a message of role `{role}` here"
        closing = [last] if last is not None and last in form.stop_set else []
        # A token that ends a reply may take white space after it: it is encoded again, in front of what follows.
        ids = form.ids_from(shown, tools, written, end - len(form.decode(closing)) if closing else end)
        if closing:
            return Extension([], ids[1:]) if ids[:1] == closing else _NO_TOKEN
        ends = [at for at, id_ in enumerate(ids) if id_ in form.fast.added_ids]
        if not ends:
            return _NO_TOKEN
        cut = next((at + 1 for at in ends if ids[at] == form.close_id), 0)
        return Extension(ids[:cut], ids[cut:])

    def _without_end(self, found: Extension, last: int | None, keep: bool) -> Extension | str:
        """The continuation without the reply's end token, where that was sampled; or why the reply ended in another way."""
        if last not in self._form.stop_set:
            return found
        if found.closing[:1] == [last]:
            return Extension(found.closing[1:], found.bridge)
        if not found.closing and found.bridge[:1] == [last]:
            return Extension([], found.bridge[1:])
        return found if keep else self._other_end(found, last)

    def _other_end(self, found: Extension, last: int | None) -> str:
        wanted = self._form.decode((found.closing or found.bridge)[:1])
        return f"the reply ended with {self._form.decode([last or 0])!r}, where the template writes {wanted!r}"

    def _fitted(
        self, found: Extension, sampled: str, shown: str | None, last: int | None, thinking: bool, keep: bool
    ) -> Extension | str:
        """The continuation of a reply that the template writes as `shown`: its closing is the part that was not sampled."""
        form = self._form
        ended = self._without_end(found, last, keep)
        closed = last in form.stop_set
        if shown is not None and not isinstance(ended, str):
            implied = closed and not found.closing  # the token that ends the reply begins the next message
            words = sampled.removesuffix(form.decode([last or 0])) if implied else sampled
            rest = remainder(words, shown)
            if rest is not None and not (closed and rest):
                return Extension(form.encode(rest), ended.bridge)
        if keep:
            kept = found if isinstance(ended, str) else ended
            end = form.fast.added.get(_THINK_CLOSE)
            return Extension([end, *kept.closing], kept.bridge) if thinking and not closed and end is not None else kept
        if isinstance(ended, str):
            return ended
        if thinking and closed:
            return "the reply ended inside its reasoning"
        if shown is None:
            return "the template shows the conversation differently with this reply"
        at = next(
            (at for at, (a, b) in enumerate(zip(sampled, shown, strict=False)) if a != b),
            min(len(sampled), len(shown)),
        )
        at = max(at - _BEFORE, 0)
        return f"the template writes {shown[at : at + _EXCERPT]!r} where the reply has {sampled[at : at + _EXCERPT]!r}"

    def _shown_reply(
        self,
        frame: Frame | None,
        reply: View,
        new: Sequence[View],
        found: Extension,
        tools: list[View] | None,
        conversation: Callable[[], list[View]],
    ) -> str | None:
        """What the template writes for a reply, its end token included; None where it rewrites earlier messages."""
        form = self._form
        shown = None if frame is None else self._shown_in(frame, reply)
        if shown is not None:
            return unquote(shown)
        views = conversation()
        before, whole = form.text(views[:-1], tools), form.text([*views, *new], tools)
        return _between(unquote(before), unquote(whole), form.decode(found.bridge))

    def _shown_in(self, frame: Frame, reply: View) -> str | None:
        """What the template writes for a reply in a frame; None where it writes other text around it."""

        def rendered(view: View) -> str | None:
            return _between(frame.text, self._form.text([*frame.before, view, *frame.new], None), frame.tail)

        shape = shape_of(reply, self._is_inspected)
        if shape is None:
            return rendered(reply)
        if shape not in frame.replies and len(frame.replies) < _MAX_SHAPES:
            frame.replies[shape] = make_reply_text(rendered, reply)
        known = frame.replies.get(shape)
        return rendered(reply) if known is None else known.write(parts_of(reply))

    def _is_inspected(self, text: str) -> bool:
        """Whether a text has something that the template may look for, or a mark of quoted text."""
        inspected = self._form.inspected
        return MARK in text or (inspected is not None and inspected.search(text) is not None)


def _between(before: str, whole: str, after: str) -> str | None:
    """The text between a beginning and an end; None where the text has others."""
    if not (whole.startswith(before) and whole.endswith(after)) or len(whole) < len(before) + len(after):
        return None
    return whole[len(before) : len(whole) - len(after)]
