"""Bridges: the tokens between two turns, checked against the chat template.

Invariant: `Bridges.between` gives the exact continuation of a tape, or the reason why there is none. What is checked on
probes, and for which templates and messages that holds, is in check.py; how a turn uses what they showed, in
wrapper.py. Verdicts and wrappers depend on kinds of messages only, so all episodes of a run share them. Where probes
cannot decide, the whole conversation is rendered and compared with the tape (`_compared_whole`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any

import msgspec
from pydantic_core import to_json

from engine.errors import RenderError
from engine.tokens.bridge.check import BridgeVerdict, ReplyFrame, check_bridge, make_reply_text, make_wrapper
from engine.tokens.bridge.keys import TemplateKeys
from engine.tokens.bridge.kinds import ODD_KINDS, MessageKinds, View, kind_of
from engine.tokens.bridge.wrapper import (
    Bridge,
    Wrapper,
    common_length,
    end_in,
    parts_of,
    pieces_of,
    remainder,
    shape_of,
)
from engine.tokens.tokenizer import MARK, unquote

if TYPE_CHECKING:
    from engine.tokens.tape import Tape
    from engine.tokens.template import ChatTemplate


_THINK_CLOSE = "</think>"
_NO_TOKEN = "the template writes no added token after a reply"
_ALONE = "these messages have no continuation apart from the conversation"
_BEFORE, _EXCERPT = 8, 48
"""Characters of a reply that a branch's reason quotes: how many before the difference, and how many in all."""
_MAX_WRAPPERS = 4096
"""Wrappers that are kept: one for each sequence of roles and tool names."""
_MAX_SHAPES = 256
"""Shapes of replies that are kept for one frame: one for each sequence of tool names."""


class ReplyEnd(msgspec.Struct, frozen=True):
    """How a reply ended, and what it was like as it was sampled."""

    last: int | None = None
    """Its last sampled id; None if there is none."""
    thinking: bool = False
    """Whether it ended inside its reasoning."""
    sampled: str | None = None
    """Its text, the token that ended it included; None where that is plain text in which the template looks for
    nothing."""
    bare: bool = False
    """See `ParsedReply.bare`."""


class Bridges:
    """Makes the bridges of one chat format.

    Args:
        template: The chat template.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self.whole: str | None = None
        """Why every bridge is found by rendering the whole conversation and comparing it with the tape; None where
        checks of probes decide. Setting it takes effect from the next bridge on, in all conversations of this
        format."""
        self.keys = TemplateKeys()
        """What the template tests of a conversation."""
        self._day = date.today()
        self._verdicts: dict[Any, BridgeVerdict] = {}
        self._wrappers: dict[Any, Wrapper | None] = {}

    def between(
        self,
        kinds: MessageKinds,
        reply: View,
        end: ReplyEnd,
        new: Sequence[View],
        *,
        new_kinds: bytes,
        tools: list[View] | None,
        keep: bool,
        whole: bool,
        conversation: Callable[[], list[View]],
        tape: Tape,
    ) -> Bridge | str:
        """The exact continuation of a tape whose newest reply is `reply`, or why there is none.

        Costs O(new) for a plain reply, and O(reply + new) for another, once this process has met messages of these
        kinds.

        Args:
            kinds: The kinds of all messages up to and including the reply.
            reply: The reply as templates read it.
            end: How it ended.
            new: The messages that follow.
            new_kinds: Their kinds.
            tools: The conversation's tools.
            keep: Continue although the template would rewrite earlier messages.
            whole: Render the whole conversation, and compare it with the tape.
            conversation: Gives all messages up to and including the reply; called where a shorter conversation is not
                enough.
            tape: The tape, which ends with the reply.
        """
        if self.keys.dated and self._day != (today := date.today()):  # forget what was made of an earlier date
            self._day = today
            self._verdicts.clear()
            self._wrappers.clear()
        other_day = self.keys.dated and kinds.day != self._day
        if whole or other_day or kinds.odd or not ODD_KINDS.isdisjoint(new_kinds):
            compared = self._compared_whole(conversation(), new, new_kinds, tools, end.last, tape)
            if not (keep and isinstance(compared, str)):
                return compared
        key = (kinds.signature(new_kinds), to_json(tools) if tools and self.keys.tests_tools else tools is not None)
        verdict = self._verdicts.get(key)
        if verdict is None:
            kinds_before = bytes([kind_of(view, self._template.looked) for view in conversation()])
            verdict = self._verdicts[key] = check_bridge(self._template, kinds_before, new_kinds, tools)
        if not verdict.bridged or not (verdict.history or keep):
            return verdict.why
        try:
            bridge = self.cached_bridge(reply, new, tools if verdict.with_tools else None)
            if bridge is None:
                return _ALONE
            if end.sampled is None:
                return self._without_end(bridge, end.last, keep) if keep or not verdict.rewrites else verdict.why
            shown = self._shown_reply(verdict.frame, reply, end.bare, new, bridge, tools, conversation)
        except RenderError as error:
            return str(error)
        return self._fitted(bridge, end, end.sampled, shown, keep)

    def cached_bridge(self, reply: View, new: Sequence[View], tools: list[View] | None) -> Bridge | None:
        """`ChatTemplate.unchecked_bridge`, through a wrapper where there is one for messages like these.

        Raises:
            RenderError: The template refuses these messages.
        """
        template = self._template
        if self.keys.changes:
            return template.unchecked_bridge(reply, new, tools)
        contents: list[str] = []
        around: tuple[Any, ...] = ()
        for view in new:
            content = view["content"]
            if not isinstance(content, str) or "<" in content or not content or content.isspace():
                return template.unchecked_bridge(reply, new, tools)
            contents.append(content)
            around += (view["role"], view.get("name"))
        called: tuple[str, ...] = ()
        for call in reply.get("tool_calls", ()):
            called += (call["function"]["name"],)
        key = (tools and to_json(tools), around, called)
        try:
            wrapper = self._wrappers[key]
        except KeyError:
            wrapper = None
            if len(self._wrappers) < _MAX_WRAPPERS:
                wrapper = self._wrappers[key] = make_wrapper(template, reply, new, tools)
        return template.unchecked_bridge(reply, new, tools) if wrapper is None else wrapper.bridge(template, contents)

    def _compared_whole(
        self,
        views: list[View],
        new: Sequence[View],
        kinds: bytes,
        tools: list[View] | None,
        last: int | None,
        tape: Tape,
    ) -> Bridge | str:
        """`between` for any template: what it writes for the whole conversation, after the text of the tape;
        O(conversation).

        Nothing is taken from probes, from earlier renderings or from what a template usually does with contents.
        """
        template = self._template
        shown = [*views, *new]
        try:
            written = template.text(shown, tools)
        except RenderError as error:
            return str(error)
        pieces, text = pieces_of(template, tape), unquote(written)
        end = end_in(pieces, text)
        if end is None:
            return _difference("tape", "".join([piece for _, piece in pieces]), text)
        if role := template.dropped(bytes([kind_of(view, template.looked) for view in views]) + kinds, tools):
            return f"the template does not show a message of role `{role}` here"
        closing = [last] if last is not None and last in template.stop_set else []
        # A token that ends a reply may take white space after it: it is encoded again, in front of what follows.
        ids = template.ids_from(shown, tools, written, end - len(template.decode(closing)) if closing else end)
        if closing:
            return Bridge([], ids[1:]) if ids[:1] == closing else _NO_TOKEN
        ends = [at for at, id_ in enumerate(ids) if id_ in template.fast.added_ids]
        if not ends:
            return _NO_TOKEN
        cut = next((at + 1 for at in ends if ids[at] == template.close_id), 0)
        return Bridge(ids[:cut], ids[cut:])

    def _without_end(self, made: Bridge, last: int | None, keep: bool) -> Bridge | str:
        """The continuation without the reply's end token, where that was sampled; or why the reply ended in another
        way."""
        if last not in self._template.stop_set:
            return made
        if made.closing:
            if made.closing[0] == last:
                return Bridge(made.closing[1:], made.bridge)
        elif made.bridge[:1] == [last]:
            return Bridge([], made.bridge[1:])
        if keep:
            return made
        wanted = self._template.decode((made.closing or made.bridge)[:1])
        return f"the reply ended with {self._template.decode([last or 0])!r}, where the template writes {wanted!r}"

    def _fitted(self, made: Bridge, end: ReplyEnd, sampled: str, shown: str | None, keep: bool) -> Bridge | str:
        """The continuation of a reply that the template writes as `shown`: its closing is the part that was not
        sampled."""
        template, last = self._template, end.last
        ended = self._without_end(made, last, keep)
        closed = last in template.stop_set
        if shown is not None and not isinstance(ended, str):
            implied = closed and not made.closing  # the token that ends the reply begins the next message
            rest = remainder(sampled.removesuffix(template.decode([last or 0])) if implied else sampled, shown)
            if rest == "":
                return Bridge([], ended.bridge)
            if rest is not None and not closed:
                return Bridge(template.encode(rest), ended.bridge)
        if keep:
            continued = made if isinstance(ended, str) else ended
            if end.thinking and not closed and (close := template.fast.added.get(_THINK_CLOSE)) is not None:
                return Bridge([close, *continued.closing], continued.bridge)
            return continued
        if isinstance(ended, str):
            return ended
        if end.thinking and closed:
            return "the reply ended inside its reasoning"
        if shown is None:
            return "the template shows the conversation differently with this reply"
        return _difference("reply", sampled, shown)

    def _shown_reply(
        self,
        frame: ReplyFrame | None,
        reply: View,
        bare: bool,
        new: Sequence[View],
        made: Bridge,
        tools: list[View] | None,
        conversation: Callable[[], list[View]],
    ) -> str | None:
        """What the template writes for a reply, its end token included; None where it rewrites earlier messages."""
        shown = None if frame is None else self.shown_in(frame, reply, bare)
        if shown is not None:
            return unquote(shown) if MARK in shown else shown
        template, views = self._template, conversation()
        before, written = template.text(views[:-1], tools), template.text([*views, *new], tools)
        return _between(unquote(before), unquote(written), template.decode(made.bridge))

    def shown_in(self, frame: ReplyFrame, reply: View, bare: bool = False) -> str | None:
        """What the template writes for a reply in a frame; None where it writes other text around it.

        Args:
            frame: The frame.
            reply: The reply.
            bare: Its texts have nothing that the template may look for; else they are searched.
        """
        shape = shape_of(reply, None if bare else self._is_inspected)
        if shape is None:
            return self._rendered_in(frame, reply)
        if shape not in frame.replies and len(frame.replies) < _MAX_SHAPES:
            frame.replies[shape] = make_reply_text(lambda view: self._rendered_in(frame, view), reply)
        text = frame.replies.get(shape)
        return self._rendered_in(frame, reply) if text is None else text.write(parts_of(reply))

    def _rendered_in(self, frame: ReplyFrame, reply: View) -> str | None:
        return _between(frame.text, self._template.text([*frame.before, reply, *frame.new], None), frame.tail)

    def _is_inspected(self, text: str) -> bool:
        """Whether a text has something that the template may look for, or a mark of quoted text."""
        inspected = self._template.inspected
        return MARK in text or (inspected is not None and inspected.search(text) is not None)


def _difference(of: str, said: str, shown: str) -> str:
    at = max(common_length(said, shown) - _BEFORE, 0)
    return f"the template writes {shown[at : at + _EXCERPT]!r} where the {of} has {said[at : at + _EXCERPT]!r}"


def _between(before: str, whole: str, after: str) -> str | None:
    """The text between a beginning and an end; None where the text has others."""
    if not (whole.startswith(before) and whole.endswith(after)) or len(whole) < len(before) + len(after):
        return None
    return whole[len(before) : len(whole) - len(after)]
