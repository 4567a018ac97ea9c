"""A conversation: messages go in, exact prompts come out, and each branch is one tape.

Invariant: the prompt that a reply is sampled from is the tape up to that point, id for id, and sampled ids are never decoded
and encoded again. After a reply, the next prompt continues the tape with a checked bridge. Where there is none,
`history: branch` begins a new tape from the whole conversation as the template writes it now, and `history: keep` continues
with the sampled tokens as they are, or raises `BridgeError`. Each sampled token is on exactly one tape. A prompt that gets no
reply is removed (`take_back`), so the tape depends on messages and samples only, and not on failed attempts.

Prompts are made in prompts.py. The messages, and those of them that the model is shown, are in `thread` (thread.py); the tapes are in tapes.py. `resume_at` continues
after any earlier reply, from the state that `leaf` gave (leaf.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from engine.errors import BackendError
from engine.schemas.generation import Generation
from engine.schemas.message import MalformedCall, Message, ToolCall
from engine.tokens.format import ChatFormat
from engine.tokens.leaf import Leaf, ReplyEnd
from engine.tokens.parts import call_tokens, text_tokens
from engine.tokens.prompts import Prompts
from engine.tokens.proof import MessageKinds
from engine.tokens.replies import ParsedReply
from engine.tokens.sampled import check_sampled
from engine.tokens.tape import IntVector, Tape
from engine.tokens.tapes import TAIL, TurnPlace


class Reply(msgspec.Struct, frozen=True):
    """A reply of the model."""

    message: Message
    attempts: list[ToolCall | MalformedCall]
    """Its tool calls and malformed calls, in order."""
    text: str
    """The message's content."""


class Conversation(Prompts):
    """One episode's messages and tapes.

        conversation = Conversation(form, tools=[], history="branch")
        conversation.open([Message(role="user", content="What is 2 + 2?")])
        ids = conversation.prompt()                       # int32, the whole prompt
        reply = conversation.reply(generation, turn=0)
        conversation.add([Message(role="user", content="Are you sure?")])
        ids = conversation.prompt()                       # the tape so far, closing, bridge

    Args:
        form: The chat format, shared by all episodes.
        tools: Schemas of the tools, in OpenAI's form.
        history: What to do where the template rewrites history.

    Raises:
        RenderError: There are tools, and no reader reads the calls that the template writes.
    """

    __slots__ = ("_checked", "_written")

    def __init__(
        self, form: ChatFormat, tools: Sequence[dict[str, Any]], history: Literal["branch", "keep"] = "branch"
    ) -> None:
        super().__init__(form, tools, history)
        self._written = ""
        """The newest reply of a backend that gives text and no ids."""
        self._checked: Generation | None = None

    def leaf(self) -> Leaf:
        """The current state, directly after a reply; O(conversation).

        Raises:
            ValueError: A prompt waits for its reply, or there is no reply yet.
        """
        if self._asked or not self.tapes.places:
            raise ValueError("a leaf is the state directly after a reply")
        return Leaf(
            self.tapes.at,
            self.tapes.length,
            self.thread.state(),
            self._prompted,
            self._kinds,
            self._newest,
            self._end,
            self._tools,
        )

    def resume_at(
        self,
        leaf: Leaf | None,
        new: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] = (),
        reason: str = "",
        again: bool = False,
    ) -> None:
        """Continue after an earlier reply, or begin another thread.

        The next prompt continues the reply's tape, if nothing follows the reply there and the tools are the same. Otherwise it
        begins a branch: with the tape's own ids up to the reply (not trained again), or rendered anew for other tools.

        Args:
            leaf: The reply's state (`leaf()`); None begins a thread without a reply.
            new: The messages that follow. Those of role `assistant` were not sampled.
            tools: The schemas of the tools from here on.
            reason: The branch's reason, where it begins one.
            again: The messages are in `messages` already, because another reply to them was sampled.

        Raises:
            RenderError: As `admit`. Nothing has changed then.
            ValueError: A prompt waits for its reply.
        """
        if self._asked:
            raise ValueError("a prompt waits for its reply: call take_back() before resume_at()")
        self.admit(new, tools)
        self.tapes.drop_unanswered()
        self._tools, kept = list(tools) or None, None if leaf is None else leaf.thread
        self.thread.resume(kept, new, self._tools, opening=not self.tapes.places, again=again)
        self._condensed = ""
        if leaf is None or leaf.tools != self._tools:
            self._kinds, self._prompted, self._end = MessageKinds(), 0, ReplyEnd(None, False)
            if self.tapes.current is not None:
                self._condensed = reason or "another thread"
                self._tokens = 0
            return
        self._kinds, self._newest, self._end = leaf.kinds, leaf.newest, leaf.last
        self._prompted = leaf.prompted
        self.tapes.resume(leaf.at, leaf.end, reason)

    def after(self, leaf: Leaf | None, new: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> Conversation:
        """A conversation whose prompt is the one that `resume_at` with these arguments leads to. This one does not change.

        Raises:
            RenderError: As `admit`.
        """
        found = Conversation(self.form, tools, self.history)
        found.admit(new, tools)
        found.thread.resume(None if leaf is None else leaf.thread, new, found._tools, opening=False, again=True)
        if leaf is not None and leaf.tools == found._tools:
            found.tapes.begin(self.tapes.all[leaf.at][0].fork(leaf.end), "")
            found._kinds, found._newest, found._end = leaf.kinds, leaf.newest, leaf.last
            found._prompted = leaf.prompted
        return found

    def reply(self, generation: Generation, turn: int) -> Reply:
        """Append what was sampled from `prompt()` to the tape, and parse it.

        Raises:
            BackendError: An id is not in the vocabulary (`bad_token`), a log-probability is not finite (`bad_logprob`), or experts
                are not those of the tokens that they were requested for (`bad_reply`).
            ImageError: It contains a placeholder of images (`sampled_placeholder`).
            RenderError: The reader of replies failed.
            ValueError: There was no call of `prompt()` since the last reply.
        """
        if not self._asked:
            raise ValueError("nothing was asked: call prompt() before reply()")
        tape = self.tapes.current
        assert tape is not None
        before = tape.ids[-TAIL:]
        if generation.text is not None and not len(generation.output_ids):
            return self._reply_in_text(tape, generation, generation.text, turn)
        self.check(generation)
        self._checked = None
        ids = generation.output_ids
        start, end = tape.append(
            "generated",
            ids,
            turn=turn,
            logprobs=generation.logprobs,
            versions=generation.versions,
            experts=generation.routed_experts,
            checked=True,
        )
        self._before = None
        parsed = self.form.replies.parse(ids, before=before, turn=turn, tools=self._tools or ())
        sampled = None if self.form.replies.is_plain(parsed) else self.form.decode(ids)
        last = int(ids[-1]) if end > start else None
        return self._replied(
            parsed, TurnPlace(self.tapes.at, start, end), ReplyEnd(last, parsed.thinking, sampled), ids
        )

    def call_tokens(self, turn: int, call: int) -> tuple[int, int] | None:
        """The sampled tokens [start, end) of a tool call of a turn; see `engine.tokens.parts.call_tokens`."""
        before, ids = self.tapes.sampled(turn)
        return call_tokens(self.form, ids, before, self._tools or (), call)

    def text_tokens(self, turn: int, text: str) -> tuple[int, int] | None:
        """The sampled tokens [start, end) of a turn that hold a text; see `engine.tokens.parts.text_tokens`."""
        return text_tokens(self.form, self.tapes.sampled(turn)[1], text)

    @property
    def routed(self) -> int:
        """How many tokens of `prompt()`, from the first one on, have known experts."""
        tape = self.tapes.current
        return 0 if tape is None else tape.routed

    @property
    def turns(self) -> list[TurnPlace]:
        """(branch, start, end) of each turn's sampled tokens."""
        return self.tapes.places

    @property
    def written(self) -> str:
        """The newest reply as it was sampled, without the token that ended it; empty before the first."""
        if not self.tapes.places:
            return ""
        ids = self.tapes.sampled(-1)[1]
        if not len(ids):  # of a backend that gives text and no ids
            return self._written
        return self.form.decode(ids[:-1] if int(ids[-1]) in self.form.stop_set else ids)

    def check(self, generation: Generation) -> None:
        """Refuse a reply that the model cannot have sampled. The reply that was checked last is not checked again.

        Raises:
            BackendError, ImageError: As `reply` does.
        """
        if generation is self._checked:
            return
        check_sampled(self.form, generation)
        tape = self.tapes.current
        if generation.routed_experts is not None and tape is not None:
            try:
                tape.admit_experts(len(generation.output_ids), generation.routed_experts)
            except ValueError as error:
                raise BackendError(f"backend.routed_experts: {error}", kind="bad_reply") from None
        self._checked = generation

    def _reply_in_text(self, tape: Tape, generation: Generation, text: str, turn: int) -> Reply:
        """The reply of a backend that gives text and no ids: nothing counts as sampled, and its text is on the tape with loss mask 0."""
        start, end = tape.append("generated", [], turn=turn, logprobs=[])
        self._before = None
        if generation.calls or generation.reasoning:
            parsed, text = self.form.replies.given(text, generation.reasoning, generation.calls)
        else:
            parsed = self.form.replies.parse_text(text, turn=turn, tools=self._tools or ())
        tape.append("bridge", self.form.encode(text))
        self._written = text
        end_ = ReplyEnd(None, parsed.thinking, None if self.form.replies.is_plain(parsed) else text)
        return self._replied(parsed, TurnPlace(self.tapes.at, start, end), end_, signed=generation.signed)

    def _replied(
        self,
        parsed: ParsedReply,
        place: TurnPlace,
        end: ReplyEnd,
        ids: IntVector | None = None,
        signed: list[dict[str, Any]] | None = None,
    ) -> Reply:
        message = Message(
            role="assistant",
            content=parsed.content,
            reasoning=parsed.reasoning,
            signed=signed,
            tool_calls=[attempt for attempt in parsed.attempts if isinstance(attempt, ToolCall)],
        )
        view = self.form.views.of_reply(parsed, () if ids is None else ids)
        thread = self.thread
        messages, numbers = thread.messages, None if thread.messages is thread.said else thread.numbers
        self.tapes.asked[place.branch] = (
            messages,
            numbers,
            len(messages),
            thread.verbatim,
            self._tools,
            self.whole,
            self._made,
        )
        as_written = (parsed.attempts and not parsed.as_calls) or self.form.views.spells_tokens(view)
        self.thread.reply(message, view if as_written else None)
        self._kinds = self._kinds.add(self.form.views.kind(view))
        self._prompted = len(self.thread)
        self._condensed = ""
        self.tapes.places.append(place)
        self._newest = view
        self._end = end
        self._asked, self.recorded = False, None
        return Reply(message, parsed.attempts, parsed.content)
