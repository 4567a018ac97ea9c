"""The messages of a conversation, and the exact prompts that are made from them.

Invariant: a prompt is the current tape. It continues with a checked bridge or, where there is none, a new tape begins; see conversation.py.
A prompt that gets no reply is removed (`take_back`).
"""

from __future__ import annotations

from collections.abc import Sequence
from time import time
from typing import Any, Literal

import numpy as np

from engine.errors import BridgeError, RenderError
from engine.schemas.message import ImagePart, Message
from engine.schemas.trajectory import Branch
from engine.tokens.format import ChatFormat
from engine.tokens.leaf import PromptMark, ReplyEnd
from engine.tokens.proof import MessageKinds, View
from engine.tokens.tape import IntVector, Tape
from engine.tokens.tapes import Tapes
from engine.tokens.thread import Thread
from engine.tokens.views import IntendedTokens
from engine.tokens.vision import PlacedImage


class Prompts:
    """The messages, prompts and tapes of one conversation. `Conversation` adds replies.

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
        "_condensed",
        "_end",
        "_kinds",
        "_made",
        "_newest",
        "_prompted",
        "_tokens",
        "_tools",
        "form",
        "history",
        "recorded",
        "tapes",
        "thread",
        "whole",
    )

    def __init__(
        self, form: ChatFormat, tools: Sequence[dict[str, Any]], history: Literal["branch", "keep"] = "branch"
    ) -> None:
        if tools and form.unread_calls:
            raise RenderError(f"{form.unread_calls}; set model.tool_calls: {form.other_calls}")
        self.form = form
        self.history: Literal["branch", "keep"] = history
        """What to do where the template rewrites history."""
        self._tools = list(tools) or None
        self.thread = Thread(form, self._tools)
        """All messages, and those that the model is shown."""
        self._condensed = ""
        """Why the next prompt begins a branch with a shorter thread; empty where it does not."""
        self._tokens = 0
        """Tokens of that thread."""
        self._kinds = MessageKinds()
        self.tapes = Tapes()
        """Its tapes, one for each branch."""
        self._prompted = 0
        """How many messages of the thread are in the current prompt, or were in it when its reply came."""
        self._asked = False
        self._before: PromptMark | None = None
        """The state before the prompt that has no reply yet."""
        self.whole = False
        """Whether the newest bridge was found by rendering the whole conversation because the format was told to (`Bridges.whole`)."""
        self._made = 0.0
        """When the newest prompt was made, in Unix time."""
        self.recorded: bool | None = None
        """What `whole` was when the next prompt was made, for a replay; None: as the format says now."""
        self._newest: View = {}
        """The newest reply."""
        self._end = ReplyEnd(None, False)

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
        self.thread.open(messages, intended)

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
            self.thread.say(message)

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
        self.thread.replace(thread)
        self._kinds, self._prompted = MessageKinds(), 0
        self._condensed, self._tokens = reason, tokens

    def admit(self, new: Sequence[Message], tools: Sequence[dict[str, Any]]) -> None:
        """Check messages and tools for `resume_at`.

        Raises:
            RenderError: The format cannot show a message, or does not read calls of tools.
        """
        if tools and self.form.unread_calls:
            raise RenderError(f"{self.form.unread_calls}; set model.tool_calls: {self.form.other_calls}")
        for message in new:
            self.form.views.of(message)

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """Schemas of the tools that the next prompt shows, in OpenAI's form; None where there are none."""
        return self._tools

    @property
    def messages(self) -> list[Message]:
        """All messages so far, in order."""
        return self.thread.said

    def prompt(self) -> IntVector:
        """The ids that the next reply is sampled from: the whole current tape. int32 [tokens], read-only.

        A second call before a reply gives the same ids.

        Raises:
            RenderError: The template refuses these messages.
            ImageError: The template's image markers are not those of the messages' images.
            BridgeError: `history: keep` is set, and the tape cannot be continued.
        """
        if self._asked and self._prompted == len(self.thread):
            return self.tapes.ids
        if self._before is None:
            self._before = PromptMark(self.tapes.mark(), self._kinds, self._prompted, self.thread.waiting)
        new = self.thread.views(self._prompted)
        kinds = bytes([self.form.views.kind(view) for view in new])
        if self.tapes.current is None:
            self._begin("")
        elif self._asked or self._condensed:
            self._begin(self._condensed or "the prompt was changed before its reply came")
        else:
            self._go_on(new, kinds)
        self.thread.prompted()
        for kind in kinds:
            self._kinds = self._kinds.add(kind)
        self._prompted = len(self.thread)
        self._asked = True
        self._made = time()
        return self.tapes.ids

    def take_back(self) -> None:
        """Undo the newest `prompt()`, which got no reply or failed. The tape is as it was before."""
        before, self._before = self._before, None
        if before is None:
            return
        self.tapes.restore(before.tapes)
        self._kinds = before.kinds
        self._prompted, self._asked = before.prompted, False
        self.thread.wait_again(before.waiting)

    @property
    def length(self) -> int:
        """Tokens of the current tape; after `condense`, of the thread that the next one begins with."""
        if self._condensed and not self._asked:
            return self._tokens
        return self.tapes.length

    def shown(self) -> tuple[list[ImagePart], list[tuple[int, int]]]:
        """The images of `prompt()`, in order, and the tokens [start, end) of each. They are checked again.

        Raises:
            ImageError: The prompt's placeholders are not those of its images (kind `image_mismatch`).
        """
        tape = self.tapes.current
        if self.form.vision is None or tape is None:
            return [], []
        self.form.vision.check_spans(tape.ids, [PlacedImage(picture, start) for picture, start in tape.images])
        return (
            [ImagePart(image=picture.digest) for picture, _ in tape.images],
            [(start, start + len(picture.ids)) for picture, start in tape.images],
        )

    def branches(self) -> list[Branch]:
        """One training row for each tape that has a reply (or the first tape, where none has)."""
        return self.tapes.branches()

    def _go_on(self, new: list[View], kinds: bytes) -> None:
        """Continue the tape after its newest reply, or begin a new one."""
        keep, tape = self.history == "keep", self.tapes.current
        assert tape is not None
        self.whole = self.form.bridges.whole is not None if self.recorded is None else self.recorded
        found = self.form.bridges.bridge(
            self._kinds,
            self._newest,
            new,
            kinds=kinds,
            tools=self._tools,
            last=self._end.last,
            sampled=self._end.sampled,
            thinking=self._end.thinking,
            keep=keep,
            conversation=lambda: self.thread.views(0, self._prompted),
            tape=tape,
            whole=self.whole,
        )
        if not isinstance(found, str):
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
        tape = self.tapes.current
        render = self.form.render if tape is not None else self.form.render_opening
        ids, images = self._expanded(render(self.thread.views(), self._tools), 0)
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
        self.tapes.begin(fresh, reason)

    def _expanded(self, ids: Sequence[int] | IntVector, start: int) -> tuple[IntVector, list[PlacedImage]]:
        """Rendered ids in which markers are replaced by the images of the messages from number `start` on."""
        if self.form.vision is None:
            return np.asarray(ids, np.int32), []
        digests = [image.image for message in self.thread.messages[start:] for image in message.images]
        return self.form.vision.expand(ids, digests)
