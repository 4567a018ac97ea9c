"""Messages as chat templates read them: dicts in OpenAI's form, in which text that only spells a special token is
quoted.

Invariant: what a template cannot show is refused, and never left out. See tokenizer.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from engine.errors import RenderError
from engine.schemas.message import ImagePart, Message, ToolCall
from engine.tokens.bridge.kinds import View
from engine.tokens.tokenizer import MARK, Span, quoted_index, with_texts

if TYPE_CHECKING:
    from engine.tokens.reply_parser import ParsedReply
    from engine.tokens.tape import IntVector
    from engine.tokens.template import ChatTemplate

IntendedTokens = Sequence[Sequence[Span]]
"""For each text of a message: the characters [start, end) whose special tokens are intended as tokens."""


def call_view(call: ToolCall) -> View:
    """A tool call as templates read it: OpenAI's form, with the arguments as an object."""
    return {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}


class MessageViews:
    """Makes the views of one chat format's messages.

    Args:
        template: The chat template.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def of(self, message: Message, intended: IntendedTokens = ()) -> View:
        """The view of a message that the model did not sample.

        Args:
            message: The message.
            intended: For each of its texts, the characters [start, end) in which added tokens are intended as tokens.

        Raises:
            RenderError: It has an image, tool calls or role `tool`, and this format does not show them.
            ImageError: Its text spells a placeholder of images, and would become one.
        """
        template = self._template
        role, content = message.role, self._content(message, intended)
        if role == "tool":
            if template.tool_role == "user":
                return {"role": "user", "content": content}
            if not template.knows_tool_results:
                raise RenderError(
                    f"the chat format {template.name!r} does not show messages of role `tool`; set model.tool_role: "
                    "user"
                )
            view: View = {"role": "tool", "content": content}
            if message.name is not None:
                view["name"] = message.name if template.allow_special else template.fast.quoting.quote(message.name)
            if message.tool_call_id is not None:
                view["tool_call_id"] = message.tool_call_id
            return view
        view = {"role": role, "content": content}
        if role == "assistant":
            if message.reasoning:
                view["reasoning_content"] = self._quoted(message.reasoning)
            if message.tool_calls:
                if not template.calls_shown:
                    raise RenderError(
                        f"the chat format {template.name!r} does not show tool calls: they would be lost; write them "
                        "into the message's content as the model is to write them"
                    )
                view["tool_calls"] = self._calls(message.tool_calls)
        return view

    def of_reply(self, parsed: ParsedReply, ids: IntVector | Sequence[int] = ()) -> View:
        """The view of a reply that the model sampled: its calls as calls, or as they were written.

        Args:
            parsed: The reply.
            ids: What was sampled, int32 [tokens]: added tokens in it stay tokens, and text that only spells one stays
                text.
        """
        if parsed.bare:
            view: View = {"role": "assistant", "content": parsed.content, "tool_calls": []}
            if parsed.reasoning:
                view["reasoning_content"] = parsed.reasoning
            for call in parsed.attempts:
                if isinstance(call, ToolCall):
                    view["tool_calls"].append(call_view(call))
            return view
        calls = [attempt for attempt in parsed.attempts if isinstance(attempt, ToolCall)]
        view = {"role": "assistant", "content": parsed.content if parsed.as_calls else parsed.body}
        if parsed.reasoning:
            view["reasoning_content"] = parsed.reasoning
        if calls and parsed.as_calls:
            view["tool_calls"] = self._calls(calls)
        for key in () if self._template.allow_special else ("content", "reasoning_content"):
            if key in view and (MARK in view[key] or self._template.fast.quoting.spans(view[key])):
                view[key] = self._quoted_part(view[key], ids, last=key == "content")
        return view

    def spells_tokens(self, view: View) -> bool:
        """Whether a reply's text spells an added token, sampled as such or not."""
        spans = self._template.fast.quoting.spans
        return any(MARK in text or spans(text) for text in (view["content"], view.get("reasoning_content", "")))

    def _content(self, message: Message, intended: IntendedTokens) -> str | list[View]:
        """A message's content: text, or parts where it has images."""
        template = self._template
        if isinstance(message.content, str) and template.vision is None and not intended:
            return message.content if template.allow_special else template.fast.quoting.quote(message.content)
        parts = [message.content] if isinstance(message.content, str) else message.content
        texts = [part if isinstance(part, str) else part.text for part in parts if not isinstance(part, ImagePart)]
        spans = [*intended, *([()] * (len(texts) - len(intended)))]
        if template.vision is not None and message.role != "assistant":  # a reply's own text stays as it was sampled
            for text, text_spans in zip(texts, spans, strict=True):
                template.vision.check_text(
                    text if template.allow_special else "\n".join(text[a:b] for a, b in text_spans)
                )
        if len(texts) > 1:
            quoted = self._quoted_together(texts, spans)
        else:
            quoted = [self._quoted(text, text_spans) for text, text_spans in zip(texts, spans, strict=True)]
        if not message.images:
            return "".join(quoted)
        if template.vision is None:
            raise RenderError(f"the chat format {template.name!r} shows no images; {template.no_vision_fix}")
        if message.role == "assistant":
            raise RenderError("a message of role `assistant` holds an image; models reply in text")
        following = iter(quoted)
        return [
            {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": next(following)}
            for part in parts
        ]

    def _quoted_together(self, texts: list[str], spans: Sequence[Sequence[Span]]) -> list[str]:
        """Texts that a template may write one after another: a token that they only spell together is quoted, too."""
        ends = list(accumulate(map(len, texts)))
        intended = [
            (end - len(text) + first, end - len(text) + last)
            for text, text_spans, end in zip(texts, spans, ends, strict=True)
            for first, last in text_spans
        ]
        quoted = self._quoted("".join(texts), intended)
        cuts = [0, *(quoted_index(quoted, end) for end in ends[:-1]), len(quoted)]
        return [quoted[start:end] for start, end in pairwise(cuts)]

    def _calls(self, calls: Iterable[ToolCall]) -> list[View]:
        views = [call_view(call) for call in calls]
        for view in views:
            view["function"] = self._quoted(view["function"])
        return views

    def _quoted(self, value: Any, intended: Sequence[Span] = ()) -> Any:
        """A text, or JSON of texts, with the added tokens that it spells quoted."""
        if self._template.allow_special:
            return value
        quote = self._template.fast.quoting.quote
        return quote(value, intended) if isinstance(value, str) else with_texts(value, quote)

    def _quoted_part(self, part: str, ids: IntVector | Sequence[int], *, last: bool) -> str:
        """A part of a reply. Added tokens that were sampled as tokens are not quoted."""
        text, sampled = self._template.fast.spelled(ids)
        at = text.rfind(part) if last else text.find(part)
        if at < 0:
            return self._template.fast.quoting.quote(part)
        return self._template.fast.quoting.quote(part, [(start - at, end - at) for start, end in sampled])


class Thread:
    """The messages that a model is shown, and their views. Its lists only grow, so a thread and a length are a state of
    it.

    Args:
        template: The chat template.
        messages: Its first messages.
        numbers: By message: its number in `Conversation.messages`; None for one that stands for others. None: the
            thread is that list.
    """

    __slots__ = ("_template", "fresh", "intended", "messages", "numbers", "verbatim")

    def __init__(
        self, template: ChatTemplate, messages: list[Message], numbers: list[int | None] | None = None
    ) -> None:
        self._template = template
        self.messages = messages
        self.numbers = numbers
        self.verbatim: dict[int, View] = {}
        """By place: views of replies that a template gets as they were written (their calls, or text that only spells a
        token)."""
        self.intended: dict[int, IntendedTokens] = {}
        """By place: where special tokens in the prompt's messages are intended as tokens."""
        self.fresh: dict[int, View] = {}
        """By place: views of messages since the last prompt."""

    @property
    def places(self) -> Sequence[int | None]:
        """`numbers`, of any thread."""
        return range(len(self.messages)) if self.numbers is None else self.numbers

    @property
    def images(self) -> list[ImagePart]:
        """The images of its messages, in order."""
        return [image for message in self.messages for image in message.images]

    def view(self, place: int) -> View:
        """A message as the template gets it."""
        view = self.verbatim.get(place) or self.fresh.get(place)
        if view is None:
            view = self._template.views.of(self.messages[place], self.intended.get(place, ()))
        return view

    def views(self, start: int = 0, end: int | None = None) -> list[View]:
        """The messages from place `start` up to `end`, as the template gets them."""
        template, messages = self._template, self.messages
        if end is None:
            end = len(messages)
        usual = not (template.skips_system or template.alternates)
        if usual and len(self.fresh) == end - start and end == len(messages):
            return [*self.fresh.values()]
        places: Sequence[int] = range(start, end)
        if template.skips_system:
            places = [place for place in places if place == 0 or messages[place].role != "system"]
        views: list[View] = []
        for place in places:
            view = self.view(place)
            if template.alternates and views and views[-1]["role"] == view["role"] == "user":
                view = {**view, "content": _joined(views.pop()["content"], view["content"])}
            views.append(view)
        return views

    def beginning(self, length: int) -> Thread:
        """Its first messages, as a thread that grows by itself."""
        other = Thread(self._template, self.messages[:length], list(self.places[:length]))
        other.verbatim = {place: view for place, view in self.verbatim.items() if place < length}
        other.intended = {place: spans for place, spans in self.intended.items() if place < length}
        return other

    def rearranged(self, items: Sequence[int | Message]) -> Thread:
        """A thread of messages of this one, by their numbers in the conversation, and of others that stand for some.

        Raises:
            ValueError: A number is not in this thread.
        """
        place_of = {number: place for place, number in enumerate(self.places) if number is not None}
        other = Thread(self._template, [], [])
        assert other.numbers is not None
        for at, item in enumerate(items):
            other.numbers.append(item if isinstance(item, int) else None)
            if isinstance(item, Message):
                other.messages.append(item)
                continue
            if (place := place_of.get(item)) is None:
                raise ValueError(f"message {item} is not in the thread")
            other.messages.append(self.messages[place])
            if place in self.verbatim:
                other.verbatim[at] = self.verbatim[place]
            if place in self.intended:
                other.intended[at] = self.intended[place]
        return other


def _joined(first: Any, second: Any) -> Any:
    """Two contents of one message, with a blank line between them."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    parts = [
        [{"type": "text", "text": content}] if isinstance(content, str) else content for content in (first, second)
    ]
    return [*parts[0], {"type": "text", "text": "\n\n"}, *parts[1]]
