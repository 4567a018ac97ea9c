"""A conversation: messages go in, exact prompts come out, and each branch is one tape.

Invariant: the prompt that a reply is sampled from is the tape up to that point, id for id, and sampled ids are never decoded
and encoded again. After a reply, the next prompt continues the tape with a checked bridge. Where there is none,
`history: branch` begins a new tape from the whole conversation as the template writes it now, and `history: keep` continues
with the sampled tokens as they are, or raises `BridgeError`. Each sampled token is on exactly one tape. A prompt that gets no
reply is removed (`take_back`), so the tape depends on messages and samples only, and not on failed attempts.

The model is shown the `thread`: all messages so far, until `condense` replaces it by a shorter one. `messages` keeps them all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from engine.errors import BackendError, BridgeError, RenderError
from engine.schemas.generation import Generation
from engine.schemas.message import ImagePart, MalformedCall, Message, ToolCall
from engine.schemas.trajectory import Branch
from engine.tokens.format import ChatFormat
from engine.tokens.parts import call_tokens, text_tokens
from engine.tokens.proof import Trail, TrailMark, View
from engine.tokens.replies import ParsedReply
from engine.tokens.tape import IntVector, Tape, largest
from engine.tokens.views import IntendedTokens
from engine.tokens.vision import PlacedImage

_TAIL = 64
"""Ids before a reply that its parser may look at."""


def _is_vector(array: np.ndarray, dtype: type[np.generic]) -> bool:
    """Whether a backend's array is of one dimension and of a type."""
    return isinstance(array, np.ndarray) and array.dtype == dtype and array.ndim == 1


class Reply(msgspec.Struct, frozen=True):
    """A reply of the model."""

    message: Message
    attempts: list[ToolCall | MalformedCall]
    """Its tool calls and malformed calls, in order."""
    text: str
    """The message's content."""


class TurnPlace(NamedTuple):
    """Position of one turn's sampled tokens."""

    branch: int
    start: int
    end: int


class _Mark(NamedTuple):
    """The state of a conversation before a prompt was made."""

    tapes: list[tuple[Tape, str]]
    tape: tuple[int, int, int]
    trail: TrailMark
    prompted: int
    pending: dict[int, View]
    waiting: int


class _End(msgspec.Struct, frozen=True):
    """How the newest reply ended."""

    last: int | None
    thinking: bool
    sampled: str | None = None
    """The reply as it was sampled, where that is more than its content."""


class Conversation:
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

    __slots__ = (
        "_asked",
        "_before",
        "_checked",
        "_condensed",
        "_end",
        "_intended",
        "_newest",
        "_opening",
        "_pending",
        "_places",
        "_prompted",
        "_said_at",
        "_tapes",
        "_tokens",
        "_tools",
        "_trail",
        "_verbatim",
        "_waiting",
        "_written",
        "form",
        "history",
        "messages",
        "thread",
    )

    def __init__(
        self, form: ChatFormat, tools: Sequence[dict[str, Any]], history: Literal["branch", "keep"] = "branch"
    ) -> None:
        if tools and form.unread_calls:
            raise RenderError(f"{form.unread_calls}; set model.tool_calls: {form.other_calls}")
        self.form = form
        self.history: Literal["branch", "keep"] = history
        """What to do where the template rewrites history."""
        self.messages: list[Message] = []
        """All messages so far, in order."""
        self.thread: list[Message] = self.messages
        """The messages that the model is shown: `messages` itself, until the conversation is condensed."""
        self._said_at: list[int | None] | None = None
        """By message of the thread: its number in `messages`, None for one that stands for others. None: the thread is `messages`."""
        self._condensed = ""
        """Why the next prompt begins a branch with a shorter thread; empty where it does not."""
        self._tokens = 0
        """Tokens of that thread."""
        self._opening: int | None = None
        """How many messages preceded the first reply; None before it."""
        self._tools = list(tools) or None
        self._verbatim: dict[int, View] = {}
        """By message of the thread: views of replies that a template gets as they were written (their calls, or text that only spells a token)."""
        self._intended: dict[int, IntendedTokens] = {}
        """By message of the thread: where special tokens in the prompt's messages are intended as tokens."""
        self._pending: dict[int, View] = {}
        """By message of the thread: views of the messages since the last prompt."""
        self._waiting = 0
        """Characters of the messages since the last prompt."""
        self._trail = Trail()
        self._tapes: list[tuple[Tape, str]] = []
        self._places: list[TurnPlace] = []
        self._written = ""
        """The newest reply of a backend that gives text and no ids."""
        self._prompted = 0
        """How many messages of the thread are in the current prompt, or were in it when its reply came."""
        self._asked = False
        self._before: _Mark | None = None
        """The state before the prompt that has no reply yet."""
        self._checked: Generation | None = None
        self._newest: View = {}
        """The newest reply."""
        self._end = _End(None, False)

    def open(self, messages: Sequence[Message], intended: Sequence[IntendedTokens] = ()) -> None:
        """Begin with the prompt's messages, which may contain examples of replies.

        Args:
            messages: The messages.
            intended: For each of the first messages, where special tokens are intended as tokens; see `MessageViews.of`. In all
                other text they are plain text.

        Raises:
            RenderError: There are messages already, or the format cannot show one.
        """
        if self.messages:
            raise RenderError("the conversation has begun already")
        self._intended.update(enumerate(intended))
        for message in messages:
            self._say(message)

    def add(self, messages: Sequence[Message]) -> None:
        """Add messages of a user, tools or an environment.

        Raises:
            RenderError: A message has role `assistant`: only the model replies.
        """
        for message in messages:
            if message.role == "assistant":
                raise RenderError(
                    "a message of role `assistant` was added to a running episode; only the model replies"
                )
        for message in messages:
            self._say(message)

    def condense(self, thread: Sequence[int | Message], reason: str, tokens: int) -> None:
        """Show the model another thread from the next prompt on, which begins a branch.

        Args:
            thread: Its messages: numbers of `messages` that are in the thread now, or messages that stand for others.
            reason: The branch's reason.
            tokens: How many tokens it has (`measure`).

        Raises:
            ValueError: A number is not in the thread, or a prompt waits for its reply.
        """
        if self._asked:
            raise ValueError("a prompt waits for its reply: call take_back() before condense()")
        places = {at: place for place, at in enumerate(self.said_at) if at is not None}
        if missing := [at for at in thread if isinstance(at, int) and at not in places]:
            raise ValueError(f"message {missing[0]} is not in the thread")
        kept = {new: places[at] for new, at in enumerate(thread) if isinstance(at, int)}
        self._verbatim = {new: self._verbatim[old] for new, old in kept.items() if old in self._verbatim}
        self._intended = {new: self._intended[old] for new, old in kept.items() if old in self._intended}
        self._said_at = [at if isinstance(at, int) else None for at in thread]
        self.thread = [self.messages[at] if isinstance(at, int) else at for at in thread]
        self._pending, self._trail, self._prompted = {}, Trail(), 0
        self._waiting, self._condensed, self._tokens = 0, reason, tokens

    @property
    def said_at(self) -> Sequence[int | None]:
        """By message of the thread: its number in `messages`; None for one that stands for others."""
        return range(len(self.messages)) if self._said_at is None else self._said_at

    @property
    def opening(self) -> int:
        """How many messages precede the first reply."""
        return len(self.thread) if self._opening is None else self._opening

    def measure(self, thread: Sequence[Message]) -> int:
        """Tokens of a prompt that shows these messages; O(conversation).

        Args:
            thread: Messages of the thread (the same objects), and others.

        Raises:
            RenderError: The template refuses them.
        """
        own = {
            id(message): view
            for message, view in zip(self.thread, map(self._view, range(len(self.thread))), strict=True)
        }
        views = [own.get(id(message)) or self.form.views.of(message) for message in thread]
        if self.form.alternates:
            views = _alternating(views)
        ids = self.form.render_views(views, self._tools)
        if self.form.vision is None:
            return len(ids)
        return len(self.form.vision.expand(ids, [image.image for message in thread for image in message.images])[0])

    def prompt(self) -> IntVector:
        """The ids that the next reply is sampled from: the whole current tape. int32 [tokens], read-only.

        A second call before a reply gives the same ids.

        Raises:
            RenderError: The template refuses these messages.
            ImageError: The template's image markers are not those of the messages' images.
            BridgeError: `history: keep` is set, and the tape cannot be continued.
        """
        if self._asked and self._prompted == len(self.thread):
            return self._tapes[-1][0].ids
        if self._before is None:
            tape = self._tapes[-1][0].mark() if self._tapes else (0, 0, 0)
            self._before = _Mark([*self._tapes], tape, self._trail.mark(), self._prompted, self._pending, self._waiting)
        new = self._views(self._prompted)
        kinds = bytes([self.form.views.kind(view) for view in new])
        if not self._tapes:
            self._begin("")
        elif self._asked or self._condensed:
            self._begin(self._condensed or "the prompt was changed before its reply came")
        else:
            self._go_on(new, kinds)
        self._pending, self._waiting = {}, 0
        for kind in kinds:
            self._trail.add(kind)
        self._prompted = len(self.thread)
        self._asked = True
        return self._tapes[-1][0].ids

    def take_back(self) -> None:
        """Undo the newest `prompt()`, which got no reply or failed. The tape is as it was before."""
        before, self._before = self._before, None
        if before is None:
            return
        self._tapes = before.tapes
        if self._tapes:
            self._tapes[-1][0].cut(before.tape)
        self._trail.cut(before.trail)
        self._prompted, self._asked = before.prompted, False
        if self._pending is not before.pending:  # else it failed before it used them
            self._pending = before.pending | self._pending
            self._waiting += before.waiting

    def reply(self, generation: Generation, turn: int) -> Reply:
        """Append what was sampled from `prompt()` to the tape, and parse it.

        Raises:
            BackendError: An id is not in the vocabulary (`bad_token`), or a log-probability is not finite (`bad_logprob`).
            ImageError: It contains a placeholder of images (`sampled_placeholder`).
            RenderError: The reader of replies failed.
            ValueError: There was no call of `prompt()` since the last reply.
        """
        if not self._asked:
            raise ValueError("nothing was asked: call prompt() before reply()")
        tape = self._tapes[-1][0]
        before = tape.ids[-_TAIL:]
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
            checked=True,
        )
        self._before = None
        parsed = self.form.replies.parse(ids, before=before, turn=turn, tools=self._tools or ())
        sampled = None if self.form.replies.is_plain(parsed) else self.form.decode(ids)
        last = int(ids[-1]) if end > start else None
        return self._replied(
            parsed, TurnPlace(len(self._tapes) - 1, start, end), _End(last, parsed.thinking, sampled), ids
        )

    def call_tokens(self, turn: int, call: int) -> tuple[int, int] | None:
        """The sampled tokens [start, end) of a tool call of a turn; see `engine.tokens.parts.call_tokens`."""
        branch, start, end = self._places[turn]
        ids = self._tapes[branch][0].ids
        return call_tokens(self.form, ids[start:end], ids[max(0, start - _TAIL) : start], self._tools or (), call)

    def text_tokens(self, turn: int, text: str) -> tuple[int, int] | None:
        """The sampled tokens [start, end) of a turn that hold a text; see `engine.tokens.parts.text_tokens`."""
        branch, start, end = self._places[turn]
        return text_tokens(self.form, self._tapes[branch][0].ids[start:end], text)

    @property
    def length(self) -> int:
        """Tokens of the current tape; after `condense`, of the thread that the next one begins with."""
        if self._condensed and not self._asked:
            return self._tokens
        return len(self._tapes[-1][0]) if self._tapes else 0

    @property
    def turns(self) -> list[TurnPlace]:
        """(branch, start, end) of each turn's sampled tokens."""
        return self._places

    @property
    def written(self) -> str:
        """The newest reply as it was sampled, without the token that ended it; empty before the first."""
        if not self._places:
            return ""
        branch, start, end = self._places[-1]
        if start == end:  # of a backend that gives text and no ids
            return self._written
        ids = self._tapes[branch][0].ids[start:end]
        return self.form.decode(ids[:-1] if int(ids[-1]) in self.form.stop_set else ids)

    @property
    def images(self) -> list[ImagePart]:
        """The images of the thread, in order."""
        return [image for message in self.thread for image in message.images]

    def shown(self) -> tuple[list[ImagePart], list[tuple[int, int]]]:
        """The images of `prompt()`, in order, and the tokens [start, end) of each. They are checked again.

        Raises:
            ImageError: The prompt's placeholders are not those of its images (kind `image_mismatch`).
        """
        if self.form.vision is None or not self._tapes:
            return [], []
        tape = self._tapes[-1][0]
        self.form.vision.check_spans(tape.ids, [PlacedImage(picture, start) for picture, start in tape.images])
        return (
            [ImagePart(image=picture.digest) for picture, _ in tape.images],
            [(start, start + len(picture.ids)) for picture, start in tape.images],
        )

    @property
    def pending(self) -> int:
        """Characters of the messages since the last `prompt()`, which the next one tokenises."""
        return self._waiting

    def branches(self) -> list[Branch]:
        """One training row for each tape that has a reply (or the first tape, where none has)."""
        taken = [pair for pair in self._tapes if pair[0].has_turns] or self._tapes[:1]
        return [tape.branch(index, reason) for index, (tape, reason) in enumerate(taken)]

    # --- prompts ------------------------------------------------------------------------------------------

    def _say(self, message: Message) -> None:
        # Raises for a message that cannot be shown before the conversation changes.
        view = self.form.views.of(message, self._intended.get(len(self.thread), ()))
        self._pending[len(self.thread)] = view
        self._waiting += len(message.text)
        self._keep(message)

    def _keep(self, message: Message) -> None:
        if self._said_at is not None:
            self._said_at.append(len(self.messages))
            self.thread.append(message)
        self.messages.append(message)

    def _view(self, index: int) -> View:
        """A message of the thread, as the template gets it."""
        view = self._verbatim.get(index) or self._pending.get(index)
        return self.form.views.of(self.thread[index], self._intended.get(index, ())) if view is None else view

    def _views(self, start: int, end: int | None = None) -> list[View]:
        """Messages of the thread from number `start` up to `end`, as the template gets them."""
        views = [self._view(index) for index in range(start, len(self.thread) if end is None else end)]
        return _alternating(views) if self.form.alternates else views

    def _go_on(self, new: list[View], kinds: bytes) -> None:
        """Continue the tape after its newest reply, or begin a new one."""
        keep = self.history == "keep"
        found = self.form.bridges.bridge(
            self._trail,
            self._newest,
            new,
            kinds=kinds,
            tools=self._tools,
            last=self._end.last,
            sampled=self._end.sampled,
            thinking=self._end.thinking,
            keep=keep,
            conversation=lambda: self._views(0, self._prompted),
        )
        if not isinstance(found, str):
            tape = self._tapes[-1][0]
            bridge, images = self._expanded(found.bridge, self._prompted)
            if found.closing:
                tape.append("closing", found.closing)
            tape.append("bridge", bridge, images=images)
        elif keep:
            raise BridgeError(f"the tape cannot go on exactly: {found}; set model.history: branch")
        else:
            self._begin(found)

    def _begin(self, reason: str) -> None:
        """Begin a tape with the whole conversation, unless its ids continue the current one."""
        render = self.form.render if self._tapes else self.form.render_opening
        ids, images = self._expanded(render(self._views(0), self._tools), 0)
        tape = self._tapes[-1][0] if self._tapes else None
        if tape is not None and not self._asked and len(tape) < len(ids) and np.array_equal(tape.ids, ids[: len(tape)]):
            cut = len(tape)
            if self._end.last not in self.form.stop_set:
                cut += int(ids[cut]) in self.form.stop_set
            tape.append("closing", ids[len(tape) : cut])
            tape.append("bridge", ids[cut:], images=[(picture, at - cut) for picture, at in images if at >= cut])
            return
        vision = self.form.vision
        fresh = Tape(self.form.vocab_size, None if vision is None else vision.placeholder_id)
        fresh.append("prompt", ids, images=images)
        if tape is not None and not tape.has_turns:
            self._tapes[-1] = (fresh, self._tapes[-1][1])
        else:
            self._tapes.append((fresh, reason))

    def _expanded(self, ids: Sequence[int] | IntVector, start: int) -> tuple[IntVector, list[PlacedImage]]:
        """Rendered ids in which markers are replaced by the images of the messages from number `start` on."""
        if self.form.vision is None:
            return np.asarray(ids, np.int32), []
        digests = [image.image for message in self.thread[start:] for image in message.images]
        return self.form.vision.expand(ids, digests)

    # --- replies ------------------------------------------------------------------------------------------

    def check(self, generation: Generation) -> None:
        """Refuse a reply that the model cannot have sampled. The reply that was checked last is not checked again.

        Raises:
            BackendError, ImageError: As `reply` does.
        """
        if generation is self._checked:
            return
        ids, logprobs, size = generation.output_ids, generation.logprobs, self.form.vocab_size
        if not (_is_vector(ids, np.int32) and _is_vector(logprobs, np.float32) and len(ids) == len(logprobs)):
            raise BackendError(
                "the backend gave a reply whose `output_ids` and `logprobs` are not a flat int32 array and a flat float32 "
                "array of one length",
                kind="bad_reply",
            )
        if largest(ids) >= size:
            wrong = next(int(id_) for id_ in ids if not 0 <= id_ < size)
            raise BackendError(
                f"the backend sampled id {wrong}, but the model's vocabulary is [0, {size}): does it serve the model "
                "that the spec names?",
                kind="bad_token",
            )
        if self.form.vision is not None:
            self.form.vision.check_sampled(ids)
        if not math.isfinite(np.add.reduce(logprobs)):
            raise BackendError("the backend gave a log-probability that is not a finite number", kind="bad_logprob")
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
        end_ = _End(None, parsed.thinking, None if self.form.replies.is_plain(parsed) else text)
        return self._replied(parsed, TurnPlace(len(self._tapes) - 1, start, end), end_)

    def _replied(self, parsed: ParsedReply, place: TurnPlace, end: _End, ids: IntVector | None = None) -> Reply:
        message = Message(
            role="assistant",
            content=parsed.content,
            reasoning=parsed.reasoning,
            tool_calls=[attempt for attempt in parsed.attempts if isinstance(attempt, ToolCall)],
        )
        view = self.form.views.of_reply(parsed, () if ids is None else ids)
        if (parsed.attempts and not parsed.as_calls) or self.form.views.spells_tokens(view):
            self._verbatim[len(self.thread)] = view
        if self._opening is None:
            self._opening = len(self.thread)
        self._keep(message)
        self._trail.add(self.form.views.kind(view))
        self._prompted = len(self.thread)
        self._condensed = ""
        self._places.append(place)
        self._newest = view
        self._end = end
        self._asked = False
        return Reply(message, parsed.attempts, parsed.content)


def _alternating(views: Sequence[View]) -> list[View]:
    """Messages in which no message of a user follows another: their contents are joined."""
    found: list[View] = []
    for view in views:
        if found and found[-1]["role"] == view["role"] == "user":
            view = {**view, "content": _joined(found.pop()["content"], view["content"])}
        found.append(view)
    return found


def _joined(first: Any, second: Any) -> Any:
    """Two contents of one message, with a blank line between them."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    parts = [
        [{"type": "text", "text": content}] if isinstance(content, str) else content for content in (first, second)
    ]
    return [*parts[0], {"type": "text", "text": "\n\n"}, *parts[1]]
