"""Messages as chat templates read them: dicts in OpenAI's form, in which text that only spells a special token is quoted.

Invariant: what a template cannot show is refused, and never left out. See quoting.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from engine.errors import RenderError
from engine.schemas.message import ImagePart, Message, ToolCall
from engine.tokens.bridge.kinds import View
from engine.tokens.quoting import MARK, Span, quoted_index
from engine.tokens.renderer import Renderer

if TYPE_CHECKING:
    from engine.tokens.replies.parser import ParsedReply
    from engine.tokens.tape import IntVector

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

    def __init__(self, template: Renderer) -> None:
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
                    f"the chat format {template.name!r} does not show messages of role `tool`; set model.tool_role: user"
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
                        f"the chat format {template.name!r} does not show tool calls: they would be lost; write them into the "
                        "message's content as the model is to write them"
                    )
                view["tool_calls"] = self._calls(message.tool_calls)
        return view

    def of_reply(self, parsed: ParsedReply, ids: IntVector | Sequence[int] = ()) -> View:
        """The view of a reply that the model sampled: its calls as calls, or as they were written.

        Args:
            parsed: The reply.
            ids: What was sampled, int32 [tokens]: added tokens in it stay tokens, and text that only spells one stays text.
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
            for text, own in zip(texts, spans, strict=True):
                template.vision.check_text(text if template.allow_special else "\n".join(text[a:b] for a, b in own))
        if len(texts) > 1:
            quoted = self._quoted_together(texts, spans)
        else:
            quoted = [self._quoted(text, own) for text, own in zip(texts, spans, strict=True)]
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
            for text, own, end in zip(texts, spans, ends, strict=True)
            for first, last in own
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
        if isinstance(value, str):
            return self._template.fast.quoting.quote(value, intended)
        if isinstance(value, dict):
            return {self._quoted(key): self._quoted(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._quoted(item) for item in value]
        return value

    def _quoted_part(self, part: str, ids: IntVector | Sequence[int], *, last: bool) -> str:
        """A part of a reply. Added tokens that were sampled as tokens are not quoted."""
        text, sampled = self._template.fast.spelled(ids)
        at = text.rfind(part) if last else text.find(part)
        if at < 0:
            return self._template.fast.quoting.quote(part)
        return self._template.fast.quoting.quote(part, [(start - at, end - at) for start, end in sampled])
