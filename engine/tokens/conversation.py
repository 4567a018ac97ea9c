"""A conversation: messages go in, exact prompts come out, and each branch is one tape.

Invariant: the prompt that a reply is sampled from is the current tape, id for id; sampled ids are never decoded and
encoded again, and each sampled token is on exactly one tape. After a reply, the next prompt continues the tape with a
checked bridge. Where there is none, `history: branch` begins a tape with the thread as the template writes it now, and
`history: keep` continues with the sampled tokens as they are, or raises `RenderError`. A prompt that gets no reply is
removed (`take_back`), so the tapes depend on messages and samples only, and not on failed attempts.

    conversation = Conversation(template, tools=[], history="branch")
    conversation.open([Message(role="user", content="What is 2 + 2?")])
    reply = conversation.reply(sampled_from(conversation.prompt()), turn=0)
    conversation.add([Message(role="user", content="Are you sure?")])
    conversation.prompt()                              # the tape so far, closing, bridge
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from time import time
from typing import Any, Literal

import msgspec
import numpy as np

from engine.errors import BackendError, RenderError
from engine.schemas.generation import Generation
from engine.schemas.message import Message, ToolCall
from engine.schemas.trajectory import Branch
from engine.tokens.bridge.bridge import ReplyEnd
from engine.tokens.bridge.kinds import MessageKinds, View, kind_of
from engine.tokens.reply_parser import ParsedReply
from engine.tokens.tape import IntVector, Tape
from engine.tokens.template import ChatTemplate
from engine.tokens.views import IntendedTokens, Thread

TAIL = 64
"""Ids before a reply that its parser may look at."""


class TurnPlace(msgspec.Struct, frozen=True, gc=False):
    """Position of one turn's sampled tokens."""

    branch: int
    start: int
    end: int


class ConversationMark(msgspec.Struct, frozen=True, eq=False):
    """The state of a conversation directly after a reply, from which `resume_at` continues. O(1)."""

    thread: Thread
    length: int
    """How many messages the thread had, the reply included; it may have grown since."""
    tape: int
    """Number of the reply's tape."""
    end: int
    """Length of that tape after the reply."""
    kinds: MessageKinds
    reply_end: ReplyEnd
    tools: list[dict[str, Any]] | None
    rendered_whole: bool
    """`Conversation.whole`, of the reply's prompt."""
    made: float
    """When the prompt was made, in Unix time."""


class _Undo(msgspec.Struct, eq=False):
    """The state before a prompt that has no reply yet."""

    tapes: int
    """How many tapes there were."""
    at: int
    tape: Tape | None
    """The current tape, number `at`."""
    end: tuple[int, int, int]
    kinds: MessageKinds
    prompted: int
    characters: int = 0
    """Characters of the messages that are in prompts since."""


class Conversation:
    """One episode's messages and tapes.

    Args:
        template: The chat template, shared by all episodes.
        tools: Schemas of the tools, in OpenAI's form.
        history: What to do where the template rewrites history.

    Raises:
        RenderError: There are tools, and no reader reads the calls that the template writes.
    """

    __slots__ = (
        "_at",
        "_begins",
        "_end",
        "_kinds",
        "_made",
        "_newest",
        "_opening",
        "_prompt",
        "_prompted",
        "_thread_tokens",
        "_undo",
        "_written",
        "asked",
        "characters",
        "checked",
        "history",
        "messages",
        "recorded",
        "tapes",
        "template",
        "thread",
        "tools",
        "turns",
        "whole",
    )

    def __init__(
        self, template: ChatTemplate, tools: Sequence[dict[str, Any]], history: Literal["branch", "keep"] = "branch"
    ) -> None:
        self.template = template
        self.history: Literal["branch", "keep"] = history
        """What to do where the template rewrites history."""
        self.tools = self._readable(tools)
        """Schemas of the tools that the next prompt shows, in OpenAI's form; None where there are none."""
        self.messages: list[Message] = []
        """All messages so far, in order."""
        self.thread: Thread = Thread(template, self.messages)
        """The messages that the model is shown."""
        self._opening: int | None = None
        """How many messages of the thread preceded the first reply; None before it."""
        self.characters = 0
        """Characters of the messages since the last prompt, which the next one tokenises."""

        self.tapes: list[Tape] = []
        """One for each branch, in the order in which they began. Only one without a turn is ever removed or
        replaced."""
        self._at = -1
        """Number of the current tape; -1 before the first."""
        self.turns: list[TurnPlace] = []
        """By turn: where its sampled tokens are."""
        self.asked: dict[int, ConversationMark] = {}
        """By number of a tape: the state after its newest reply."""

        self._kinds = MessageKinds()
        """The kinds of the messages in the current prompt, or of these and its reply."""
        self._prompted = 0
        """How many messages of the thread are in the current prompt, or were in it when its reply came."""
        self._prompt: IntVector | None = None
        """The prompt that waits for its reply, while nothing is added."""
        self._undo: _Undo | None = None
        """None where no prompt waits for its reply."""
        self._begins = ""
        """Why the next prompt begins a branch with another thread; empty where it does not."""
        self._thread_tokens = 0
        """Tokens of that thread."""
        self.recorded: bool | None = None
        """What `whole` was when the next prompt was made, for a replay; None: as the format says now."""
        self.whole = False
        """Whether the newest bridge was found by rendering the whole conversation because `Bridges.whole` is set."""
        self._made = 0.0
        """When the newest prompt was made, in Unix time."""

        self._newest: View = {}
        """The newest reply."""
        self._end = ReplyEnd()
        self.checked: Generation | None = None
        """The reply that `check`, or the backend that gave it, has checked."""
        self._written = ""
        """The newest reply of a backend that gives text and no ids."""

    @classmethod
    def begun(
        cls, template: ChatTemplate, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()
    ) -> Conversation:
        """A conversation that is no episode's, with its first messages: for checks, reports and comparisons."""
        conversation = cls(template, tools)
        conversation.open(messages)
        return conversation

    # --- messages -----------------------------------------------------------------------------------------

    def open(self, messages: Sequence[Message], intended: Sequence[IntendedTokens] = ()) -> None:
        """Begin with the prompt's messages, which may contain examples of replies.

        `intended`, for each of the first messages: where special tokens are intended as tokens (`MessageViews.of`).

        Raises:
            RenderError: There are messages already, or the format cannot show one.
        """
        if self.messages:
            raise RenderError("the conversation has begun already")
        self.thread.intended.update(enumerate(intended))
        for message in messages:
            self._say(message)

    def add(self, messages: Sequence[Message]) -> None:
        """Add messages of a user, tools or an environment.

        Raises:
            RenderError: A message has role `assistant`: only the model replies. Or the format cannot show one.
        """
        if "assistant" in [message.role for message in messages]:
            raise RenderError("a message of role `assistant` was added to a running episode; only the model replies")
        for message in messages:
            self._say(message)

    def show(self, thread: Sequence[int | Message], reason: str, tokens: int) -> None:
        """Show the model another thread of `tokens` tokens (`measure`) from the next prompt on, which begins a branch
        for this reason.

        Its items are numbers of `messages` that are shown now, or messages that stand for others.

        Raises:
            ValueError: A number is not shown now, or a prompt waits for its reply.
        """
        if self._undo is not None:
            raise ValueError("a prompt waits for its reply: call take_back() before show()")
        self.thread = self.thread.rearranged(thread)
        self.characters = 0
        self._kinds, self._prompted = MessageKinds(), 0
        self._begins, self._thread_tokens = reason, tokens

    @property
    def opening(self) -> int:
        """How many shown messages precede the first reply."""
        return len(self.thread.messages) if self._opening is None else self._opening

    def measure(self, thread: Sequence[Message]) -> int:
        """Tokens of a prompt that shows these messages: the objects that are shown now, or others; O(conversation).

        Raises:
            RenderError: The template refuses them.
        """
        shown = zip(self.thread.messages, self.thread.places, strict=True)
        number_of = {id(message): number for message, number in shown if number is not None}
        other = self.thread.rearranged([number_of.get(id(message), message) for message in thread])
        ids = self.template.render_views(other.views(), self.tools)
        return len(self.template.expanded(ids, thread)[0])

    def _say(self, message: Message) -> None:
        """Add a message that the model did not sample. One that the format cannot show changes nothing."""
        thread, content = self.thread, message.content
        number = len(thread.messages)
        thread.fresh[number] = self.template.views.of(message, thread.intended.get(number, ()))
        self.characters += len(content if isinstance(content, str) else message.text)
        self._prompt = None
        self._keep(message)

    def _keep(self, message: Message) -> None:
        """Add a message to `messages` and to the thread, which are one list until another thread is shown."""
        if self.thread.numbers is not None:
            self.thread.numbers.append(len(self.messages))
            self.thread.messages.append(message)
        self.messages.append(message)

    def _readable(self, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
        if tools and self.template.unread_calls:
            raise RenderError(f"{self.template.unread_calls}; set model.tool_calls: {self.template.other_calls}")
        return list(tools) or None

    # --- prompts ------------------------------------------------------------------------------------------

    @property
    def tape(self) -> Tape | None:
        """The current tape; None before the first."""
        return self.tapes[self._at] if self.tapes else None

    @property
    def length(self) -> int:
        """Tokens of the current tape; after `show`, of the thread that the next one begins with."""
        if self._prompt is not None:
            return len(self._prompt)
        if self._begins and self._undo is None:
            return self._thread_tokens
        return len(self.tapes[self._at]) if self.tapes else 0

    def prompt(self) -> IntVector:
        """The ids that the next reply is sampled from: the whole current tape. int32 [tokens], read-only.

        A second call before a reply gives the same ids. A prompt that cannot be made is taken back.

        Raises:
            RenderError: The template refuses these messages.
            ImageError: The template's image markers are not those of the messages' images.
            RenderError: `history: keep` is set, and the tape cannot be continued.
        """
        if self._prompt is not None:
            return self._prompt
        tape, waited = self.tapes[self._at] if self.tapes else None, self._undo is not None
        if self._undo is None:
            end = (0, 0, 0) if tape is None else tape.mark()
            self._undo = _Undo(len(self.tapes), self._at, tape, end, self._kinds, self._prompted)
        try:
            new = self.thread.views(self._prompted)
            looked = self.template.looked
            kinds = bytes([kind_of(view, looked) for view in new])
            if tape is None:
                self._begin("")
            elif waited or self._begins:
                self._begin(self._begins or "the prompt was changed before its reply came", anew=waited)
            else:
                self._go_on(tape, new, kinds)
        except BaseException:
            self.take_back()
            raise
        self._undo.characters += self.characters
        self.thread.fresh, self.characters = {}, 0
        for kind in kinds:
            self._kinds = self._kinds.add(kind)
        self._prompted = len(self.thread.messages)
        self._made = time()
        self._prompt = self.tapes[self._at].ids
        return self._prompt

    def take_back(self) -> None:
        """Undo the newest `prompt()`, which got no reply. The tape is as it was before."""
        undo, self._undo, self._prompt = self._undo, None, None
        if undo is None:
            return
        del self.tapes[undo.tapes :]
        self._at = undo.at
        if undo.tape is not None:
            self.tapes[undo.at] = undo.tape
            undo.tape.cut(undo.end)
        self._kinds, self._prompted = undo.kinds, undo.prompted
        self.characters += undo.characters

    def _go_on(self, tape: Tape, new: list[View], kinds: bytes) -> None:
        """Continue the tape after its newest reply, or begin a new one."""
        keep = self.history == "keep"
        self.whole = self.template.bridges.whole is not None if self.recorded is None else self.recorded
        bridge = self.template.bridges.between(
            self._kinds,
            self._newest,
            self._end,
            new,
            new_kinds=kinds,
            tools=self.tools,
            keep=keep,
            whole=self.whole,
            conversation=lambda: self.thread.views(0, self._prompted),
            tape=tape,
        )
        if not isinstance(bridge, str):
            ids, images = self.template.expanded(bridge.bridge, self.thread.messages[self._prompted :])
            if bridge.closing:
                tape.append("closing", bridge.closing)
            tape.append("bridge", ids, images)
        elif keep:
            message = f"the tape cannot go on exactly: {bridge}; set model.history: branch"
            raise RenderError(message, kind="bridge_error")
        else:
            self._begin(bridge)

    def _begin(self, reason: str, *, anew: bool = False) -> None:
        """Begin a tape with the whole thread, unless its ids continue the current one; `anew`: the current one has them
        already."""
        tape = self.tape
        render = self.template.render if tape is not None else self.template.render_opening
        ids, images = self.template.expanded(render(self.thread.views(), self.tools), self.thread.messages)
        if tape is not None and not anew and len(tape) < len(ids) and np.array_equal(tape.ids, ids[: len(tape)]):
            cut = len(tape)
            if self._end.last not in self.template.stop_set:
                cut += int(ids[cut]) in self.template.stop_set
            tape.append("closing", ids[len(tape) : cut])
            tape.append("bridge", ids[cut:], [(picture, at - cut) for picture, at in images if at >= cut])
            return
        vision = self.template.vision
        fresh = Tape(self.template.vocab_size, None if vision is None else vision.placeholder_id, reason)
        fresh.append("prompt", ids, images)
        self._put(fresh)

    def _put(self, fresh: Tape) -> None:
        """Make a tape the current one. It replaces the current one if that has no turn, with its reason."""
        tape = self.tape
        if tape is None or tape.has_turns:
            self.tapes.append(fresh)
            self._at = len(self.tapes) - 1
        else:
            fresh.reason = tape.reason
            self.tapes[self._at] = fresh

    # --- replies ------------------------------------------------------------------------------------------

    def reply(self, generation: Generation, turn: int) -> ParsedReply:
        """Append what was sampled from `prompt()` to the tape, parse it, and add its message.

        Raises:
            BackendError, ImageError: As `check` does.
            RenderError: The reader of replies failed.
            ValueError: There was no call of `prompt()` since the last reply or message.
        """
        prompt = self._prompt
        if prompt is None:
            raise ValueError("nothing was asked: call prompt() before reply()")
        tape, before, ids = self.tapes[self._at], prompt[-TAIL:], generation.output_ids
        if generation.text is not None and not len(ids):
            return self._reply_in_text(tape, generation, generation.text, turn)
        if generation is not self.checked:
            self.check(generation)
        self.checked = None
        start, end = tape.append_reply(generation, turn)
        replies = self.template.replies
        self._undo = self._prompt = None
        parsed = replies.parse(ids, before=before, turn=turn, tools=self.tools or ())
        sampled = parsed.sampled
        if sampled is None and not replies.is_plain(parsed):
            sampled = self.template.decode(ids)
        self._end = ReplyEnd(int(ids[-1]) if end > start else None, parsed.thinking, sampled, parsed.bare)
        return self._replied(parsed, TurnPlace(self._at, start, end), ids)

    def _reply_in_text(self, tape: Tape, generation: Generation, text: str, turn: int) -> ParsedReply:
        """The reply of a backend that gives text and no ids: nothing counts as sampled, and its text is on the tape
        with loss mask 0."""
        start, end = tape.append_reply(generation, turn)
        replies = self.template.replies
        self._undo = self._prompt = None
        if generation.calls or generation.reasoning:
            parsed, text = replies.given(text, generation.reasoning, generation.calls)
        else:
            parsed = replies.parse_text(text, turn=turn, tools=self.tools or ())
        tape.append("bridge", self.template.encode(text))
        tape.texts.append((end, len(tape)))
        self._written = text
        self._end = ReplyEnd(None, parsed.thinking, None if replies.is_plain(parsed) else text)
        return self._replied(parsed, TurnPlace(self._at, start, end), signed=generation.signed)

    def _replied(
        self,
        parsed: ParsedReply,
        place: TurnPlace,
        ids: IntVector | None = None,
        signed: list[dict[str, Any]] | None = None,
    ) -> ParsedReply:
        views, thread = self.template.views, self.thread
        calls: list[Any] = parsed.attempts
        if not parsed.as_calls:
            calls = [attempt for attempt in calls if isinstance(attempt, ToolCall)]
        message = Message(
            role="assistant", content=parsed.content, reasoning=parsed.reasoning, signed=signed, tool_calls=calls
        )
        view = views.of_reply(parsed, () if ids is None else ids)
        number = len(thread.messages)
        if not parsed.bare and ((parsed.attempts and not parsed.as_calls) or views.spells_tokens(view)):
            thread.verbatim[number] = view
        if self._opening is None:
            self._opening = number
        self._keep(message)
        self._kinds = self._kinds.add(kind_of(view, self.template.looked))
        self._prompted = number + 1
        self._newest = view
        self._begins, self.recorded = "", None
        self.turns.append(place)
        at, end, length = place.branch, self._end, len(self.tapes[place.branch])
        self.asked[at] = ConversationMark(
            thread, number + 1, at, length, self._kinds, end, self.tools, self.whole, self._made
        )
        return parsed

    def check(self, generation: Generation) -> None:
        """Refuse a reply that the model cannot have sampled. The reply that was checked last is not checked again.

        Raises:
            BackendError, ImageError: As `ChatTemplate.check_sampled`; or experts are not those of the tokens that they
            were requested
                for (`bad_reply`).
        """
        if generation is self.checked:
            return
        self.template.check_sampled(generation)
        if generation.routed_experts is not None and self.tapes:
            try:
                self.tapes[self._at].admit_experts(len(generation.output_ids), generation.routed_experts)
            except ValueError as error:
                raise BackendError(f"backend.routed_experts: {error}", kind="bad_reply") from None
        self.checked = generation

    def sampled(self, turn: int) -> tuple[IntVector, IntVector]:
        """Up to `TAIL` ids before a turn's sampled ids, and these; int32 [tokens] each, read-only."""
        place = self.turns[turn]
        ids = self.tapes[place.branch].ids
        return ids[max(0, place.start - TAIL) : place.start], ids[place.start : place.end]

    @property
    def written(self) -> str:
        """The newest reply as it was sampled, without the token that ended it; empty before the first."""
        if not self.turns:
            return ""
        ids = self.sampled(-1)[1]
        if not len(ids):  # of a backend that gives text and no ids
            return self._written
        return self.template.decode(ids[:-1] if int(ids[-1]) in self.template.stop_set else ids)

    def branches(self, untrained: Collection[int] = ()) -> list[Branch]:
        """One training row for each tape that has a reply (or the first tape, where none has), up to its last sampled
        token.

        Args:
            untrained: Turns that are not trained: their spans are `unreceived`.
        """
        tapes = [tape for tape in self.tapes if tape.has_turns] or self.tapes[:1]
        return [tape.branch(index, as_seen=True, untrained=untrained) for index, tape in enumerate(tapes)]

    # --- going on after an earlier reply ------------------------------------------------------------------

    def mark(self) -> ConversationMark:
        """The current state, directly after a reply.

        Raises:
            ValueError: A prompt waits for its reply, or there is no reply yet.
        """
        mark = self.asked.get(self._at)
        if self._undo is not None or mark is None:
            raise ValueError("a mark is the state directly after a reply")
        return mark

    def resume_at(
        self,
        mark: ConversationMark | None,
        new: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] = (),
        reason: str = "",
        again: bool = False,
    ) -> None:
        """Continue after an earlier reply, or begin another thread.

        The next prompt continues the reply's tape, if nothing follows the reply there and the tools are the same.
        Otherwise it begins a branch: with the tape's own ids up to the reply (not trained again), or rendered anew for
        other tools.

        Args:
            mark: The reply's state; None begins a thread without a reply.
            new: The messages that follow. Those of role `assistant` were not sampled.
            tools: The schemas of the tools from here on.
            reason: The branch's reason, where it begins one.
            again: The messages are in `messages` already, because another reply to them was sampled.

        Raises:
            RenderError: As `admit`. Nothing has changed then.
            ValueError: A prompt waits for its reply.
        """
        if self._undo is not None:
            raise ValueError("a prompt waits for its reply: call take_back() before resume_at()")
        self.admit(new, tools)
        if self.tapes and not self.tapes[-1].has_turns:
            self.tapes.pop()
            self._at = len(self.tapes) - 1
        begun = bool(self.turns)
        self._show_again(mark, tools)
        for message in new:
            if again or (message.role == "assistant" and begun):
                self._show_only(message)
            else:
                self._say(message)
        if mark is None or not self._goes_on_after(mark):
            self._begins, self._thread_tokens = (reason or "another thread") if self.tapes else "", 0
            return
        self._at = mark.tape
        if len(self.tapes[mark.tape]) != mark.end:
            self.tapes.append(self.tapes[mark.tape].fork(mark.end, reason))
            self._at = len(self.tapes) - 1

    def after(
        self, mark: ConversationMark | None, new: Sequence[Message], tools: Sequence[dict[str, Any]] = ()
    ) -> Conversation:
        """A conversation whose prompt is the one that `resume_at` with these arguments leads to. This one does not
        change.

        Raises:
            RenderError: As `admit`.
        """
        other = Conversation(self.template, tools, self.history)
        other.admit(new, tools)
        other._show_again(mark, tools, copy=True)
        for message in new:
            other._show_only(message)
        if mark is not None and other._goes_on_after(mark):
            other._put(self.tapes[mark.tape].fork(mark.end, ""))
        return other

    def admit(self, new: Sequence[Message], tools: Sequence[dict[str, Any]]) -> None:
        """Check messages and tools for `resume_at`.

        Raises:
            RenderError: The format cannot show a message, or does not read calls of tools.
        """
        self._readable(tools)
        for message in new:
            self.template.views.of(message)

    def _show_again(
        self, mark: ConversationMark | None, tools: Sequence[dict[str, Any]], *, copy: bool = False
    ) -> None:
        """Show the thread of a mark, or one without a message. A thread that has grown since, or of another
        conversation, is copied."""
        self.tools, self._begins, self.characters = list(tools) or None, "", 0
        self._kinds, self._prompted, self._end = MessageKinds(), 0, ReplyEnd()
        if mark is None:
            self.thread = Thread(self.template, [], []) if self.messages else Thread(self.template, self.messages)
        elif copy or len(mark.thread.messages) != mark.length:
            self.thread = mark.thread.beginning(mark.length)
        else:
            self.thread = mark.thread
        self.thread.fresh = {}

    def _show_only(self, message: Message) -> None:
        """Add a message that is not in `messages`, or was added there before."""
        if self.thread.numbers is None:
            self.thread = self.thread.beginning(len(self.thread.messages))
        assert self.thread.numbers is not None
        self.thread.numbers.append(None)
        self.thread.messages.append(message)

    def _goes_on_after(self, mark: ConversationMark) -> bool:
        """Go on after the reply of a mark; False where its tools are not those that are shown now."""
        if mark.tools != self.tools:
            return False
        self._kinds, self._end, self._prompted = mark.kinds, mark.reply_end, mark.length
        self._newest = self.thread.view(mark.length - 1)
        return True
