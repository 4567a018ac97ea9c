"""ChatFormat: how one model's conversations become tokens, and its tokens messages.

Invariant: a format never guesses. `render` is the template's own output or an error, `bridge` is proved or refused
(see proof.py), and `parse` keeps every attempt at a tool call. One format is shared by all episodes of a run; it
holds no episode's state.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import structlog
from pydantic_core import to_json

from engine.errors import RenderError
from engine.schemas.message import ImagePart, MalformedCall, Message, ToolCall
from engine.schemas.model import ModelSpec
from engine.tokens.literal import MARK, Span, unquote
from engine.tokens.proof import (
    ASSISTANT,
    CALLS,
    MARKERS,
    REASONS,
    TOOL,
    TOOL_NAME,
    USER,
    Extension,
    Frame,
    Trail,
    Verdict,
    View,
    has_mark,
    kind_of,
    mark,
    probe,
    prove,
    remainder,
)
from engine.tokens.readers import FamilyReader
from engine.tokens.tape import IntVector
from engine.tokens.tokenizer import FastTokenizer
from engine.tokens.toolcalls import CallParser, TaggedParser, Unreadable, checked_call
from engine.tokens.vision import Vision
from engine.tokens.wrapper import Wrapper, make_wrapper, plain

log = structlog.get_logger(__name__)

_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"
_TAIL = 48
"""Tokens before a reply that are decoded to see whether the prompt opened a reasoning block."""
_OPEN_AT_END = re.compile(r"<think>\s*\Z")
_MOST_RENDERED_CALLS = 2
_ANY_TAG = re.compile(r"[<\[]")
_BESIDE, _EXCERPT = 8, 48
"""Characters of a reply that a branch's reason quotes: how many ahead of the difference, and how many in all."""
Meant = Sequence[Sequence[Span]]
"""For each text of a message, where the special tokens that it spells are meant as such."""
_MOST_WRAPPERS = 4096
"""Wrappers that are remembered: one for each sequence of roles and tool names that is met."""


_MOST_OPENINGS = 256
"""Prompts whose ids are remembered, the newest: as many tasks as may be under way at once."""


class Parsed(msgspec.Struct, frozen=True):
    """A reply, read."""

    content: str
    """What it says, without reasoning and without readable calls."""
    reasoning: str | None
    attempts: list[ToolCall | MalformedCall]
    """Tool calls and failed attempts at them, in order."""
    body: str
    """The reply as written behind its reasoning: what a template is shown where it cannot show the calls as calls."""
    thinking: bool
    """It ended inside its reasoning."""
    as_calls: bool
    """A template can be shown the calls as calls: all were read, and nothing was said after them."""
    whole: bool = False
    """`content` is all that was sampled but for white space at its edges and the token that ended it."""


class ChatFormat(ABC):
    """What every chat format has. See `load_format`.

    A subclass sets `close_id`, `stop_token_ids` and calls `_look` once it can render.
    """

    def __init__(
        self, name: str, tokenizer: FastTokenizer, spec: ModelSpec, *, vocab_size: int, context: int | None
    ) -> None:
        self.name = name
        """`template`, or a family's name."""
        self.fast = tokenizer
        self.vocab_size = vocab_size
        self.context = context
        """Most tokens that the model attends to; None where nothing says so."""
        self.tool_role = spec.tool_role
        self.allow_special = spec.allow_special
        """Text that spells an added token becomes that token, whoever wrote it."""
        self.stop_token_ids: list[int] = []
        self.parser: CallParser | None = None
        """Reads calls in text, where `reader` does not read replies."""
        self.reader: FamilyReader | None = None
        """Reads replies by token."""
        self.unread_calls = ""
        """Why no tools may be used: the template has a syntax of its own for calls, which nothing here reads."""
        self.other_calls = "hermes or plain, and describe the tools in the prompt"
        """What to set `model.tool_calls` to where calls are unread."""
        self.vision: Vision | None = None
        """How images become tokens, for a model that sees; ids that this format renders hold one marker for each."""
        self.blind = "use a vision-language model"
        """What to do about images where there is no `vision`."""
        self.knows_tools = False
        """The template shows the schemas of tools."""
        self.knows_tool_results = False
        """The template shows messages of role `tool`."""
        self.knows_reasoning = False
        """The template shows reasoning, at least in the newest reply."""
        self.calls_shown = 0
        """How many calls of one message the template can show as calls: 0, 1 or 2 (any number)."""
        self.reads_calls = False
        """Calls are read as the template writes them, so a reply's calls can be shown as calls."""
        self.alternates = False
        """The template refuses two user messages in a row."""
        self.markers: tuple[str, ...] = MARKERS
        """Reasoning markers that the format may look for inside a reply's content."""
        self._special: re.Pattern[str] | None = _ANY_TAG
        """What the format may look for inside any content; None where it looks for nothing."""
        self._verdicts: dict[Any, Verdict] = {}
        self._lost: dict[Any, str] = {}
        self._openings: OrderedDict[bytes, IntVector] = OrderedDict()
        self._wrappers: dict[Any, Wrapper | None] = {}

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of transformers, which is imported for it where the format did without."""
        return self.fast.real

    # --- text and ids -------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Text -> ids, nothing added; special tokens that are spelled out are read as such."""
        return self.fast.encode(text)

    def decode(self, ids: Sequence[int] | IntVector) -> str:
        """Ids -> text, nothing left out."""
        return self.fast.decode(ids)

    @cached_property
    def stops(self) -> list[str]:
        """Texts of the tokens that end a reply."""
        return [self.decode([id_]) for id_ in self.stop_token_ids]

    @cached_property
    def stop_set(self) -> frozenset[int]:
        """The ids that end a reply."""
        return frozenset(self.stop_token_ids)

    def borders(self, text: str) -> list[str]:
        """Added tokens in a text that it is cut at, whatever is put around it: see `FastTokenizer.borders`."""
        return self.fast.borders(text)

    # --- messages -> ids ----------------------------------------------------------------------------------

    def render(
        self,
        messages: Sequence[Message | View],
        tools: Sequence[View] | None = None,
        meant: Mapping[int, Meant] | None = None,
    ) -> list[int]:
        """The whole prompt for the next reply, generation prompt included.

        Args:
            messages: The conversation.
            tools: Schemas of the tools.
            meant: By message: where the special tokens that its text spells are meant as such; see `view`.

        Raises:
            RenderError: The template refuses these messages; the message says what to change.
        """
        views = [
            self.view(item, (meant or {}).get(index, ())) if isinstance(item, Message) else item
            for index, item in enumerate(messages)
        ]
        shown = list(tools) if tools else None
        ids = self.render_views(views, shown)
        if dropped := self._dropped(bytes([self.kind(view) for view in views]), shown):
            raise RenderError(
                f"the chat format {self.name!r} does not show messages of role `{dropped}` here: they would be lost"
            )
        return ids

    def render_opening(self, messages: Sequence[View], tools: Sequence[View] | None = None) -> IntVector:
        """`render` for messages that many conversations begin with, as all samples of a task do. int32 [tokens]."""
        key = to_json((messages, tools))
        known = self._openings.pop(key, None)
        if known is None:
            known = np.array(self.render(messages, tools), np.int32)
            known.flags.writeable = False
        # Long texts are rendered in another thread: the entry may be gone by now, so it is put in anew rather than moved.
        self._openings[key] = known
        if len(self._openings) > _MOST_OPENINGS:
            self._openings.popitem(last=False)
        return known

    def _dropped(self, kinds: bytes, tools: list[View] | None) -> str:
        """The role of a message that the template leaves out without a word; empty where there is none."""
        key = (frozenset(pairwise(kinds)), kinds[:2], tools is not None)
        if key not in self._lost:
            views = [probe(kind, index, str) for index, kind in enumerate(kinds)]
            shown = self.decode(self.render_views(views, tools))
            lost = [view["role"] for index, view in enumerate(views) if has_mark(view) and mark(index) not in shown]
            self._lost[key] = next((role for role in lost if role != "assistant"), "")
        return self._lost[key]

    @abstractmethod
    def render_views(self, views: Sequence[View], tools: list[View] | None) -> list[int]:
        """`render`, for messages as templates read them."""

    @abstractmethod
    def text(self, views: Sequence[View], tools: list[View] | None) -> str:
        """What `render_views` gives, as text.

        Raises:
            RenderError: The template refuses these messages.
        """

    @abstractmethod
    def extension(self, reply: View, new: Sequence[View], tools: list[View] | None) -> Extension | None:
        """What follows a reply that was cut when `new` is said next, made without the conversation. Used only once proved.

        Args:
            reply: The reply; only the names and ids of its calls are read.
            new: The messages that follow it.
            tools: Tools in view.
        """

    def bridge(
        self,
        trail: Trail,
        reply: View,
        new: Sequence[View],
        *,
        tools: list[View] | None,
        last: int | None,
        said: str | None = None,
        kinds: bytes | None = None,
        thinking: bool = False,
        keep: bool = False,
        conversation: Callable[[], list[View]] | None = None,
    ) -> Extension | str:
        """The exact continuation of a tape whose newest reply is `reply`, or why there is none.

        Costs O(new) for a plain reply, and O(reply + new) for another, once messages of these kinds were met before in this
        process.

        Args:
            trail: The kinds of all messages up to and including the reply.
            reply: The reply as templates read it.
            new: The messages that follow.
            tools: The conversation's tools.
            last: The reply's last sampled id; None where nothing was sampled.
            said: The reply as it was sampled, the token that ended it included; None where `is_plain` holds of it.
            kinds: The kinds of `new`, where they are known already.
            thinking: The reply ended inside its reasoning.
            keep: Go on although the template would rewrite what was said.
            conversation: All messages up to and including the reply; asked for where a shorter one will not do.
        """
        if trail.odd and not keep:
            return self._bridge_of_all(reply, new, tools, last, said, thinking, conversation)
        if kinds is None:
            kinds = bytes([self.kind(view) for view in new])
        key = (trail.signature(kinds), tools is not None)
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._verdicts[key] = prove(self, bytes(trail.kinds), kinds, tools)
        if not verdict.bridged or not (verdict.history or keep):
            return verdict.why
        try:
            found = self._extension(reply, new, tools if verdict.with_tools else None)
            if found is None:
                return "these messages have no continuation apart from the conversation"
            if said is None and (keep or not verdict.rewrites):
                return self._ended(found, last, keep)
            if said is None:
                return verdict.why
            shown = self._shown_reply(verdict.frame, reply, new, found, tools, conversation)
        except RenderError as error:
            return str(error)
        return self._fitted(found, said, shown, last, thinking, keep)

    def _bridge_of_all(
        self,
        reply: View,
        new: Sequence[View],
        tools: list[View] | None,
        last: int | None,
        said: str | None,
        thinking: bool,
        conversation: Callable[[], list[View]] | None,
    ) -> Extension | str:
        """`bridge` where a reply has reasoning markers in odd places: looked at in the whole conversation."""
        why = "a reply has reasoning markers where the template reads them in a way of its own"
        for shown in (None, tools) if tools else (None,):
            try:
                found = self._extension(reply, new, shown)
                seen = None if found is None else self._shown_reply(None, reply, new, found, tools, conversation)
            except RenderError as error:
                return str(error)
            if found is None or seen is None:
                continue
            if said is None:
                said = unquote(reply["content"]) + (
                    self.decode([last]) if last is not None and last in self.stop_set else ""
                )
            return self._fitted(found, said, seen, last, thinking, False)
        return why

    def _ended(self, found: Extension, last: int | None, keep: bool) -> Extension | str:
        """The continuation of a reply that is shown as it was said: without the end token, where it was sampled."""
        if last not in self.stop_set:
            return found
        if found.closing[:1] == [last]:
            return Extension(found.closing[1:], found.bridge)
        if not found.closing and found.bridge[:1] == [last]:
            return Extension([], found.bridge[1:])
        return found if keep else self._other_end(found, last)

    def _other_end(self, found: Extension, last: int | None) -> str:
        wanted = self.decode((found.closing or found.bridge)[:1])
        return f"the reply ended with {self.decode([last or 0])!r}, where the template writes {wanted!r}"

    def _fitted(
        self, found: Extension, said: str, shown: str | None, last: int | None, thinking: bool, keep: bool
    ) -> Extension | str:
        """The continuation of a reply that the template shows as `shown`: its closing is what it was not sampled of that."""
        ended = self._ended(found, last, keep)
        closed = last in self.stop_set
        if shown is not None and not isinstance(ended, str):
            implied = closed and not found.closing  # the token that ends the reply begins the next message
            words = said.removesuffix(self.decode([last or 0])) if implied else said
            rest = remainder(words, shown)
            if rest is not None and not (closed and rest):
                return Extension(self.encode(rest), ended.bridge)
        if keep:
            kept = found if isinstance(ended, str) else ended
            end = self.fast.added.get(_THINK_CLOSE)
            return Extension([end, *kept.closing], kept.bridge) if thinking and not closed and end is not None else kept
        if isinstance(ended, str):
            return ended
        if thinking and closed:
            return "the reply ended inside its reasoning"
        if shown is None:
            return "the template shows the conversation differently with this reply"
        at = next(
            (at for at, (a, b) in enumerate(zip(said, shown, strict=False)) if a != b), min(len(said), len(shown))
        )
        at = max(at - _BESIDE, 0)
        return f"the template writes {shown[at : at + _EXCERPT]!r} where the reply has {said[at : at + _EXCERPT]!r}"

    def _shown_reply(
        self,
        frame: Frame | None,
        reply: View,
        new: Sequence[View],
        found: Extension,
        tools: list[View] | None,
        conversation: Callable[[], list[View]] | None,
    ) -> str | None:
        """What the template writes for a reply, its end token included; None where it rewrites what was said before."""
        if frame is not None:
            shown = _between(frame.text, self.text([*frame.before, reply, *frame.new], None), frame.tail)
            if shown is not None:
                return unquote(shown)
        if conversation is None:
            return None
        views = conversation()
        before, whole = self.text(views[:-1], tools), self.text([*views, *new], tools)
        return _between(unquote(before), unquote(whole), self.decode(found.bridge))

    def is_plain(self, parsed: Parsed) -> bool:
        """Whether a reply is text that no template looks into: what holds of a probe holds of it."""
        special = self._special
        body = parsed.body
        return parsed.whole and (special is None or special.search(body) is None) and bool(body) and not body.isspace()

    def _extension(self, reply: View, new: Sequence[View], tools: list[View] | None) -> Extension | None:
        """`extension`, through a wrapper where there is one for messages like these."""
        if not all(plain(view) for view in new):
            return self.extension(reply, new, tools)
        calls = tuple([call["function"]["name"] for call in reply.get("tool_calls", ())])
        key = (tools is not None, tuple([(view["role"], view.get("name")) for view in new]), calls)
        try:
            wrapper = self._wrappers[key]
        except KeyError:
            wrapper = make_wrapper(self, reply, new, tools)
            if len(self._wrappers) < _MOST_WRAPPERS:
                self._wrappers[key] = wrapper
        if wrapper is None:
            return self.extension(reply, new, tools)
        return wrapper.extension(self, [view["content"] for view in new])

    @cached_property
    def rewrites_history(self) -> bool:
        """Whether a reply with reasoning is shown differently once a user speaks again."""
        kind = ASSISTANT + (REASONS if self.knows_reasoning else 0)
        verdict = prove(self, bytes([USER, kind]), bytes([USER]), None)
        return verdict.rewrites or not verdict.bridged

    # --- ids -> messages ----------------------------------------------------------------------------------

    def parse(self, ids: IntVector, *, before: IntVector, turn: int, tools: Sequence[View] = ()) -> Parsed:
        """Read a reply.

        Args:
            ids: Its sampled ids, the one that ended it included.
            before: The ids that it was sampled from; the last few are enough.
            turn: The assistant turn; call number i is `call_<turn>_<i>`.
            tools: The tools' schemas.
        """
        if self.parser is None and self.reader is not None:
            return self._read(self.reader, ids, before, turn, tools)
        closed = bool(len(ids)) and int(ids[-1]) in self.stop_set
        text = self.decode(ids[:-1] if closed else ids)
        opened = self.knows_reasoning and _OPEN_AT_END.search(self.decode(before[-_TAIL:])) is not None
        return self.parse_text(text, turn=turn, tools=tools, opened=opened)

    def _read(
        self, reader: FamilyReader, ids: IntVector, before: IntVector, turn: int, tools: Sequence[View]
    ) -> Parsed:
        found = reader.read(ids, before, f"call_{turn}", tools, self.knows_reasoning)
        if not found.attempts:
            return Parsed(found.content, found.reasoning, [], found.content, found.thinking, True, found.whole)
        read = MalformedCall not in map(type, found.attempts)
        as_calls = read and self._can_show(len(found.attempts)) and found.open
        body = found.content if as_calls else found.after
        return Parsed(found.content if read else body, found.reasoning, found.attempts, body, found.thinking, as_calls)

    def parse_text(self, text: str, *, turn: int, tools: Sequence[View] = (), opened: bool = False) -> Parsed:
        """Read a reply that is text. `opened`: the prompt ended inside a reasoning block."""
        reasoning, body, thinking = self._split_reasoning(text, opened)
        whole = reasoning is None
        if thinking or self.parser is None:
            return Parsed(body, reasoning, [], body, thinking, True, whole)
        content, attempts = self.parser.parse(body, tools, f"call_{turn}")
        if not attempts:
            return Parsed(body, reasoning, [], body, False, True, whole)
        if not isinstance(self.parser, TaggedParser):  # somebody else's parser, whose calls nobody has checked
            attempts = [_admitted(attempt, body) for attempt in attempts]
        read = all(isinstance(attempt, ToolCall) for attempt in attempts)
        as_calls = read and self._can_show(len(attempts)) and body.startswith(content)
        return Parsed(content if read else body, reasoning, attempts, body, False, as_calls, whole and not as_calls)

    def _can_show(self, calls: int) -> bool:
        """Whether so many calls of a reply can be shown as calls."""
        return self.reads_calls and (calls <= self.calls_shown or self.calls_shown >= _MOST_RENDERED_CALLS)

    def _split_reasoning(self, text: str, opened: bool) -> tuple[str | None, str, bool]:
        """Reasoning, what follows it, and whether it was left open."""
        if not self.knows_reasoning:
            return None, text, False
        start = text.lstrip()
        if start.startswith(_THINK_OPEN):
            start = start[len(_THINK_OPEN) :]
        elif not opened:
            return None, text, False
        reasoning, closing, body = start.partition(_THINK_CLOSE)
        return reasoning.strip("\n"), body.lstrip("\n"), not closing

    # --- messages as templates read them ------------------------------------------------------------------

    def kind(self, view: View) -> int:
        """The kind of a message: see proof.py."""
        return kind_of(view, self.markers)

    def view(self, message: Message, meant: Meant = ()) -> View:
        """A message as templates read it, the added tokens that its text spells quoted: see `literal`.

        Args:
            message: The message.
            meant: For each of its texts, the characters [start, end) in which added tokens are meant as such.

        Raises:
            RenderError: It holds an image, or is a tool's, and this format shows none.
            ImageError: Its text spells a placeholder of images, and would become one.
        """
        role, content = message.role, self._content(message, meant)
        if role == "tool":
            if self.tool_role == "user":
                return {"role": "user", "content": content}
            if not self.knows_tool_results:
                raise RenderError(
                    f"the chat format {self.name!r} does not show messages of role `tool`; set model.tool_role: user"
                )
            view: View = {"role": "tool", "content": content}
            if message.name is not None:
                view["name"] = self._quoted(message.name)
            if message.tool_call_id is not None:
                view["tool_call_id"] = message.tool_call_id
            return view
        view = {"role": role, "content": content}
        if role == "assistant":
            if message.reasoning:
                view["reasoning_content"] = self._quoted(message.reasoning)
            if message.tool_calls:
                if not self.calls_shown:
                    raise RenderError(
                        f"the chat format {self.name!r} does not show tool calls: they would be lost; write them into the "
                        "message's content as the model is to write them"
                    )
                view["tool_calls"] = self._call_views(message.tool_calls)
        return view

    def _quoted(self, value: Any, meant: Sequence[Span] = ()) -> Any:
        """A text, or JSON of texts, with the added tokens that it spells quoted."""
        if self.allow_special:
            return value
        if isinstance(value, str):
            return self.fast.quoting.quote(value, meant)
        if isinstance(value, dict):
            return {self._quoted(key): self._quoted(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._quoted(item) for item in value]
        return value

    def _call_views(self, calls: Iterable[ToolCall]) -> list[View]:
        views = [call_view(call) for call in calls]
        for view in views:
            view["function"] = self._quoted(view["function"])
        return views

    def _content(self, message: Message, meant: Meant) -> str | list[View]:
        """A message's content: text, or parts where it holds images."""
        parts = [message.content] if isinstance(message.content, str) else message.content
        texts = [part if isinstance(part, str) else part.text for part in parts if not isinstance(part, ImagePart)]
        spans = [*meant, *([()] * (len(texts) - len(meant)))]
        if self.vision is not None and message.role != "assistant":  # a reply's own words stay as they were sampled
            for text, own in zip(texts, spans, strict=True):
                self.vision.check_text(text if self.allow_special else "\n".join(text[a:b] for a, b in own))
        quoted = [self._quoted(text, own) for text, own in zip(texts, spans, strict=True)]
        if not message.images:
            return "".join(quoted)
        if self.vision is None:
            raise RenderError(f"the chat format {self.name!r} shows no images; {self.blind}")
        if message.role == "assistant":
            raise RenderError("a message of role `assistant` holds an image; models reply in text")
        following = iter(quoted)
        return [
            {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": next(following)}
            for part in parts
        ]

    def reply_view(self, parsed: Parsed, ids: IntVector | Sequence[int] = ()) -> View:
        """A reply of the model's as templates read it: its calls as calls, or as they were written.

        Args:
            parsed: The reply.
            ids: What was sampled: added tokens that it holds stay tokens, and text that only spells one stays text.
        """
        calls = [attempt for attempt in parsed.attempts if isinstance(attempt, ToolCall)]
        view: View = {"role": "assistant", "content": parsed.content if parsed.as_calls else parsed.body}
        if parsed.reasoning:
            view["reasoning_content"] = parsed.reasoning
        if calls and parsed.as_calls:
            view["tool_calls"] = self._call_views(calls)
        for key in () if self.allow_special else ("content", "reasoning_content"):
            if key in view and (MARK in view[key] or self.fast.quoting.spans(view[key])):
                view[key] = self._quoted_part(view[key], ids, last=key == "content")
        return view

    def spells(self, view: View) -> bool:
        """Whether a reply's words spell an added token, sampled as such or not."""
        texts = (view["content"], view.get("reasoning_content", ""))
        return any(MARK in text or bool(self.fast.quoting.spans(text)) for text in texts)

    def _quoted_part(self, part: str, ids: IntVector | Sequence[int], *, last: bool) -> str:
        """A part of a reply, in which the added tokens that were sampled as such are not quoted."""
        text, sampled = self.fast.spelled(ids)
        at = text.rfind(part) if last else text.find(part)
        if at < 0:
            return self.fast.quoting.quote(part)
        return self.fast.quoting.quote(part, [(start - at, end - at) for start, end in sampled])

    # --- what the template can show -----------------------------------------------------------------------

    def _shows(self, kinds: Iterable[int], *texts: str, tools: list[View] | None = None) -> bool:
        """Whether probes of these kinds are rendered, with each of `texts` in the result."""
        views = [probe(kind, index, str) for index, kind in enumerate(kinds)]
        return self._shows_views(views, *texts, tools=tools)

    def _shows_views(self, views: list[View], *texts: str, tools: list[View] | None = None) -> bool:
        try:
            shown = self.decode(self.render_views(views, tools))
        except RenderError:
            return False
        return all(text in shown for text in texts)

    def _look(self) -> None:
        """Find out, by probes, what the template shows."""
        calls, reply = [ASSISTANT + CALLS, ASSISTANT + 2 * CALLS], ASSISTANT
        self.knows_tools = self._shows([USER], TOOL_NAME, tools=[probe_tool()])
        # The newest reply: a template may drop reasoning once a user speaks again.
        reasons = [{"role": "user", "content": "Q"}, probe(ASSISTANT + REASONS, 1, str)]
        self.knows_reasoning = self._shows_views(reasons, f"Why {mark(1)}w")
        self.calls_shown = sum(
            self._shows([USER, kind, TOOL], TOOL_NAME, f"{mark(1)}n{number}") for number, kind in enumerate(calls)
        )
        self.knows_tool_results = self._shows([USER, calls[0], TOOL], mark(2)) or self._shows(
            [USER, reply, TOOL], mark(2)
        )
        self.alternates = self._shows([USER, reply, USER], mark(2)) and not self._shows(
            [USER, reply, USER, USER], mark(3)
        )

    def _writes_calls_as(self, parser: CallParser) -> bool:
        """Whether what the template writes for a call is what `parser` reads."""
        if not self.calls_shown:
            return False
        views = [probe(USER, 0, str), probe(ASSISTANT + CALLS, 1, str)]
        text = self.decode(self.render_views(views, None))
        attempts = parser.parse(text, [probe_tool()], "call").attempts
        wanted = views[1]["tool_calls"][0]["function"]
        return [(a.name, a.arguments) for a in attempts if isinstance(a, ToolCall)] == [
            (wanted["name"], wanted["arguments"])
        ]


def _between(before: str, whole: str, after: str) -> str | None:
    """What stands between a text's beginning and its end; None where it has others."""
    if not (whole.startswith(before) and whole.endswith(after)) or len(whole) < len(before) + len(after):
        return None
    return whole[len(before) : len(whole) - len(after)]


def probe_tool() -> View:
    """The schema of a tool that is only ever shown to a template to see what it does."""
    return {
        "type": "function",
        "function": {
            "name": TOOL_NAME,
            "description": "A probe.",
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
        },
    }


def _admitted(attempt: ToolCall | MalformedCall, body: str) -> ToolCall | MalformedCall:
    """A call as it is where it can be stored, else as malformed."""
    if isinstance(attempt, MalformedCall):
        return attempt
    try:
        return checked_call(ToolCall, attempt.id, attempt.name, attempt.arguments)
    except Unreadable as problem:
        return MalformedCall(raw=body, problem=str(problem))


def call_view(call: ToolCall) -> View:
    """A tool call as templates read it: OpenAI's form, arguments as an object."""
    return {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}


def load_format(model: ModelSpec, base: Path) -> ChatFormat:
    """The chat format that a spec's `model` asks for. Loads the tokenizer, once; no weights.

    Args:
        model: The spec's `model`.
        base: The folder that relative paths are under.

    Raises:
        RenderError: There is no tokenizer, no chat template, or no such family.
    """
    from engine.tokens.loading import load

    return load(model, base)
