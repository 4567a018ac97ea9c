"""The messages of a conversation, those that the model is shown, and each as its chat template reads it.

Invariant: `said` has all messages and only grows. `messages`, the thread that the model is shown, is `said` itself until `replace`
shows a shorter one. A message that the template cannot show is refused before anything changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from engine.schemas.message import ImagePart, Message
from engine.tokens.format import ChatFormat
from engine.tokens.proof import View
from engine.tokens.views import IntendedTokens

Waiting = tuple[dict[int, View], int]
"""Views of the messages since the last prompt, by number in the thread, and how many characters these messages have."""


class ThreadState(NamedTuple):
    """A thread directly after a reply."""

    messages: list[Message]
    numbers: list[int | None]
    verbatim: dict[int, View]
    intended: dict[int, IntendedTokens]


class Thread:
    """The messages of one conversation, and those of them that the model is shown.

    Args:
        form: The chat format.
        tools: Schemas of the tools; None where there are none.
    """

    __slots__ = (
        "_characters",
        "_form",
        "_intended",
        "_new",
        "_numbers",
        "_opening",
        "_tools",
        "messages",
        "said",
        "verbatim",
    )

    def __init__(self, form: ChatFormat, tools: list[dict[str, Any]] | None) -> None:
        self._form = form
        self._tools = tools
        self.said: list[Message] = []
        """All messages so far, in order."""
        self.messages: list[Message] = self.said
        """The messages that the model is shown."""
        self.verbatim: dict[int, View] = {}
        """By number in the thread: views of replies that a template gets as they were written (their calls, or text that only spells a token)."""
        self._opening: int | None = None
        """How many messages preceded the first reply; None before it."""
        self._numbers: list[int | None] | None = None
        """By message of the thread: its number in `said`, None for one that stands for others. None: the thread is `said`."""
        self._intended: dict[int, IntendedTokens] = {}
        """By number in the thread: where special tokens in the prompt's messages are intended as tokens."""
        self._new: dict[int, View] = {}
        self._characters = 0

    def __len__(self) -> int:
        return len(self.messages)

    @property
    def numbers(self) -> Sequence[int | None]:
        """By message of the thread: its number in `said`; None for one that stands for others."""
        return range(len(self.said)) if self._numbers is None else self._numbers

    @property
    def opening(self) -> int:
        """How many messages precede the first reply."""
        return len(self.messages) if self._opening is None else self._opening

    @property
    def images(self) -> list[ImagePart]:
        """The images of the thread, in order."""
        return [image for message in self.messages for image in message.images]

    @property
    def characters(self) -> int:
        """Characters of the messages since the last prompt, which the next one tokenises."""
        return self._characters

    # --- messages -----------------------------------------------------------------------------------------

    def open(self, messages: Sequence[Message], intended: Sequence[IntendedTokens]) -> None:
        """Begin with the prompt's messages.

        Args:
            messages: The messages.
            intended: For each of the first messages, where special tokens are intended as tokens.

        Raises:
            RenderError: The format cannot show a message.
        """
        self._intended.update(enumerate(intended))
        for message in messages:
            self.say(message)

    def say(self, message: Message) -> None:
        """Add a message that the model did not sample.

        Raises:
            RenderError: The format cannot show it. Nothing has changed then.
        """
        number = len(self.messages)
        view = self._form.views.of(message, self._intended.get(number, ()))
        self._new[number] = view
        self._characters += len(message.text)
        self._keep(message)

    def reply(self, message: Message, verbatim: View | None) -> None:
        """Add a reply of the model.

        Args:
            message: The reply.
            verbatim: What its template gets instead of the message's own view; None for that view.
        """
        if verbatim is not None:
            self.verbatim[len(self.messages)] = verbatim
        if self._opening is None:
            self._opening = len(self.messages)
        self._keep(message)

    def replace(self, thread: Sequence[int | Message]) -> None:
        """Show other messages instead.

        Args:
            thread: Numbers of `said` that are in the thread now, or messages that stand for others.

        Raises:
            ValueError: A number is not in the thread.
        """
        places = {at: place for place, at in enumerate(self.numbers) if at is not None}
        if missing := [at for at in thread if isinstance(at, int) and at not in places]:
            raise ValueError(f"message {missing[0]} is not in the thread")
        kept = {new: places[at] for new, at in enumerate(thread) if isinstance(at, int)}
        self.verbatim = {new: self.verbatim[old] for new, old in kept.items() if old in self.verbatim}
        self._intended = {new: self._intended[old] for new, old in kept.items() if old in self._intended}
        self._numbers = [at if isinstance(at, int) else None for at in thread]
        self.messages = [self.said[at] if isinstance(at, int) else at for at in thread]
        self.prompted()

    def state(self) -> ThreadState:
        """The current state, for `resume`; O(thread)."""
        return ThreadState([*self.messages], [*self.numbers], {**self.verbatim}, {**self._intended})

    def resume(
        self,
        state: ThreadState | None,
        new: Sequence[Message],
        tools: list[dict[str, Any]] | None,
        *,
        opening: bool,
        again: bool,
    ) -> None:
        """Show an earlier thread (None: no message), followed by new messages.

        A reply that the model did not sample is in `said` only before the first sampled one, as in `open`.

        Args:
            state: The earlier thread.
            new: The messages that follow; the format can show them.
            tools: The thread's tools.
            opening: No reply was sampled yet.
            again: The new messages are in `said` already.
        """
        self._tools = tools
        kept = state or ThreadState([], [], {}, {})
        self.messages, self._numbers = [*kept.messages], [*kept.numbers]
        self.verbatim, self._intended = {**kept.verbatim}, {**kept.intended}
        self.prompted()
        for message in new:
            if again or (message.role == "assistant" and not opening):
                self._numbers.append(None)
                self.messages.append(message)
            else:
                self.say(message)

    def _keep(self, message: Message) -> None:
        if self._numbers is not None:
            self._numbers.append(len(self.said))
            self.messages.append(message)
        self.said.append(message)

    # --- messages since the last prompt -------------------------------------------------------------------

    @property
    def waiting(self) -> Waiting:
        """The state that `prompted` clears, for `wait_again`."""
        return self._new, self._characters

    def prompted(self) -> None:
        """All messages are in a prompt."""
        self._new, self._characters = {}, 0

    def wait_again(self, before: Waiting) -> None:
        """Undo `prompted`, for a prompt that was taken back."""
        if self._new is not before[0]:  # else the prompt failed before `prompted`
            self._new = before[0] | self._new
            self._characters += before[1]

    # --- views --------------------------------------------------------------------------------------------

    def views(self, start: int = 0, end: int | None = None) -> list[View]:
        """Messages of the thread from number `start` up to `end`, as the template gets them."""
        numbers: Sequence[int] = range(start, len(self.messages) if end is None else end)
        if self._form.skips_system:
            numbers = [at for at in numbers if at == 0 or self.messages[at].role != "system"]
        views = [self._view(number) for number in numbers]
        return _alternating(views) if self._form.alternates else views

    def measure(self, thread: Sequence[Message]) -> int:
        """Tokens of a prompt that shows these messages; O(conversation).

        Args:
            thread: Messages of the thread (the same objects), and others.

        Raises:
            RenderError: The template refuses them.
        """
        form = self._form
        own = {id(message): self._view(number) for number, message in enumerate(self.messages)}
        shown = [at for at, message in enumerate(thread) if not (at and form.skips_system and message.role == "system")]
        views = [own.get(id(thread[at])) or form.views.of(thread[at]) for at in shown]
        ids = form.render_views(_alternating(views) if form.alternates else views, self._tools)
        if form.vision is None:
            return len(ids)
        return len(form.vision.expand(ids, [image.image for message in thread for image in message.images])[0])

    def _view(self, number: int) -> View:
        view = self.verbatim.get(number) or self._new.get(number)
        return self._form.views.of(self.messages[number], self._intended.get(number, ())) if view is None else view


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
