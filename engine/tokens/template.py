"""ChatTemplate: how one model's conversations become tokens.

Invariant: a format never guesses. `render` is the template's own output or an error. Bridges are checked or refused
(bridge/bridge.py), and replies keep every attempt at a tool call (reply_parser.py). All episodes of a run share one
format; it holds no state of an episode.

What a chat template can show is asked here, and nowhere else: by the chat format when it is loaded, and by `engine
validate` of the template alone. So both say the same.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from pydantic_core import to_json

from engine.errors import BackendError, RenderError
from engine.schemas.generation import Generation
from engine.schemas.message import Message, ToolCall
from engine.schemas.model import ModelSpec
from engine.tokens.bridge.bridge import Bridges
from engine.tokens.bridge.kinds import (
    ASSISTANT,
    CALLS,
    MARKERS,
    REASONS,
    SYSTEM,
    TOOL,
    TOOL_NAME,
    USER,
    Looked,
    View,
    has_mark,
    kind_of,
    mark,
    probe,
)
from engine.tokens.bridge.wrapper import Bridge
from engine.tokens.images import ProcessedImage
from engine.tokens.reply_parser import ReplyParser
from engine.tokens.tape import IntVector
from engine.tokens.tokenizer import FastTokenizer, quoted_index
from engine.tokens.toolcalls import ToolCallFormat, parse_calls
from engine.tokens.views import IntendedTokens, MessageViews

if TYPE_CHECKING:
    from engine.tokens.reply_readers import FamilyReader
    from engine.tokens.vision import Vision

_ANY_TAG = re.compile(r"[<\[]")
_OTHER = 5000
"""Added to the index of a probe for another of its kind."""
_MAX_OPENINGS = 256
"""Prompts whose ids are kept, the newest: as many tasks as may run at once."""


class ChatTemplate(ABC):
    """What every chat format has; `loading.load_format` makes one.

    A subclass sets `stop_token_ids`, and calls `_find_abilities` once it can render.

    Args:
        name: `template`, or a family's name.
        tokenizer: The tokenizer.
        spec: The spec's `model`.
        vocab_size: One past the largest id of the model.
        context: The largest number of tokens that the model attends to; None where nothing says so.
    """

    def __init__(
        self, name: str, tokenizer: FastTokenizer, spec: ModelSpec, *, vocab_size: int, context: int | None
    ) -> None:
        self.name = name
        self.fast = tokenizer
        self.encode = tokenizer.encode
        """Text -> ids, nothing added. Special tokens that the text spells become tokens."""
        self.decode = tokenizer.decode
        """Ids [tokens] -> text, nothing left out."""
        self.vocab_size = vocab_size
        self.context = context
        self.tool_role: str = spec.tool_role
        self.hidden_roles = frozenset(spec.hidden_roles)
        """Roles whose messages the template may leave out."""
        self.skips_system = False
        """System messages after the first message are not shown to the template, which refuses them."""
        self.allow_special = spec.allow_special
        """Text that spells an added token becomes that token."""
        self.stop_token_ids: list[int] = []
        self.close_id: int | None = None
        """The added token that the template writes at the end of every reply; None where there is none."""
        self.call_format: ToolCallFormat | None = None
        """Reads tool calls in text; None where `reader` reads replies by token."""
        self.reader: FamilyReader | None = None
        """Reads replies by token."""
        self.unread_calls = ""
        """Why tools cannot be used: the template has a syntax for calls that nothing here reads. Empty where they
        can."""
        self.other_calls = "hermes or plain, and describe the tools in the prompt"
        """The value to set `model.tool_calls` to where calls are unread."""
        self.vision: Vision | None = None
        """How images become tokens, for a model that takes images. Ids that this format renders have one marker per
        image."""
        self.no_vision_fix = "use a vision-language model"
        """What to do about images where there is no `vision`."""
        self.knows_tools = False
        """The template shows the schemas of tools."""
        self.knows_tool_results = False
        """The template shows messages of role `tool`."""
        self.knows_reasoning = False
        """The template shows reasoning, at least in the newest reply."""
        self.calls_shown = 0
        """How many calls of one message the template shows as calls: 0, 1 or 2 (any number)."""
        self.reads_calls = False
        """Calls are read as the template writes them, so that a reply's calls can be shown as calls."""
        self.alternates = False
        """The template refuses two user messages in a row."""
        self.looked = Looked(MARKERS)
        """What the template tests of messages."""
        self.inspected: re.Pattern[str] | None = _ANY_TAG
        """What the template may look for in a text; None where it looks for nothing."""
        self.sought: re.Pattern[str] | None = _ANY_TAG
        """The same, for several texts that are searched as one."""
        self.views = MessageViews(self)
        self.replies = ReplyParser(self)
        self.bridges = Bridges(self)
        self._dropped_roles: dict[Any, str] = {}
        self._openings: OrderedDict[bytes, IntVector] = OrderedDict()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of transformers, which is imported for it where the format did without."""
        return self.fast.real

    # --- text and ids -------------------------------------------------------------------------------------

    @cached_property
    def stops(self) -> list[str]:
        """Texts of the tokens that end a reply."""
        return [self.decode([id_]) for id_ in self.stop_token_ids]

    @cached_property
    def stop_set(self) -> frozenset[int]:
        """The ids that end a reply."""
        return frozenset(self.stop_token_ids)

    def check_sampled(self, generation: Generation) -> None:
        """Refuse a reply that no model with this vocabulary can have sampled.

        Raises:
            BackendError: An id is not in the vocabulary (`bad_token`), a log-probability is not finite (`bad_logprob`),
                or the arrays have other types or shapes than a `Generation` (`bad_reply`).
            ImageError: It contains a placeholder of images (`sampled_placeholder`).
        """
        ids, logprobs, size = generation.output_ids, generation.logprobs, self.vocab_size
        if (
            not (isinstance(ids, np.ndarray) and isinstance(logprobs, np.ndarray))
            or not (ids.dtype == np.int32 and logprobs.dtype == np.float32)
            or ids.ndim != 1
            or ids.shape != logprobs.shape
        ):
            raise BackendError(
                "the backend gave a reply whose `output_ids` and `logprobs` are not a flat int32 array and a flat "
                "float32 array of one length",
                kind="bad_reply",
            )
        if np.maximum.reduce(ids.view(np.uint32), initial=0) >= size:  # a negative id is the largest
            wrong = next(int(id_) for id_ in ids if not 0 <= id_ < size)
            raise BackendError(
                f"the backend sampled id {wrong}, but the model's vocabulary is [0, {size}): does it serve the model "
                "that the spec names?",
                kind="bad_token",
            )
        if self.vision is not None:
            self.vision.check_sampled(ids)
        if not math.isfinite(np.add.reduce(logprobs)):
            raise BackendError("the backend gave a log-probability that is not a finite number", kind="bad_logprob")

    def expanded(
        self, ids: Sequence[int] | IntVector, messages: Sequence[Message]
    ) -> tuple[IntVector, list[tuple[ProcessedImage, int]]]:
        """Rendered ids [length] in which markers are replaced by the messages' images."""
        if self.vision is None:
            return np.asarray(ids, np.int32), []
        return self.vision.expand(ids, [image.image for message in messages for image in message.images])

    # --- messages -> ids ----------------------------------------------------------------------------------

    def render(
        self,
        messages: Sequence[Message | View],
        tools: Sequence[View] | None = None,
        intended: Mapping[int, IntendedTokens] | None = None,
    ) -> list[int]:
        """The whole prompt for the next reply, generation prompt included.

        Args:
            messages: The conversation.
            tools: Schemas of the tools.
            intended: By message: where special tokens in its text are intended as tokens; see `MessageViews.of`.

        Raises:
            RenderError: The template refuses these messages; the message says what to change.
            ImageError: A text spells a placeholder of images.
        """
        views = [
            self.views.of(item, (intended or {}).get(index, ())) if isinstance(item, Message) else item
            for index, item in enumerate(messages)
        ]
        shown = list(tools) if tools else None
        ids = self.render_views(views, shown)
        if dropped := self.dropped(bytes([kind_of(view, self.looked) for view in views]), shown):
            raise RenderError(
                f"the chat format {self.name!r} does not show messages of role `{dropped}` here: they would be lost; "
                f"if it leaves them out on purpose, set model.hidden_roles: [{dropped}]"
            )
        return ids

    def render_opening(self, messages: Sequence[View], tools: Sequence[View] | None = None) -> IntVector:
        """`render` for messages that many conversations begin with, as all samples of a task do. int32 [tokens],
        read-only.

        Raises:
            RenderError, ImageError: As `render` does.
        """
        if self.bridges.keys.timed:
            return np.array(self.render(messages, tools), np.int32)
        key = to_json((messages, tools, date.today()))
        ids = self._openings.pop(key, None)
        if ids is None:
            ids = np.array(self.render(messages, tools), np.int32)
            ids.flags.writeable = False
        # Long texts are rendered in another thread, so the entry may be gone by now: put it in again, do not move it.
        self._openings[key] = ids
        if len(self._openings) > _MAX_OPENINGS:
            self._openings.popitem(last=False)
        return ids

    def render_views(self, views: Sequence[View], tools: list[View] | None) -> list[int]:
        """`render`, for messages as templates read them.

        Raises:
            RenderError: The template refuses these messages.
        """
        return self.fast.encode(self.text(views, tools))

    @abstractmethod
    def text(self, views: Sequence[View], tools: list[View] | None) -> str:
        """What `render_views` gives, as text.

        Raises:
            RenderError: The template refuses these messages.
        """

    def ids_from(self, views: Sequence[View], tools: list[View] | None, written: str, index: int) -> list[int]:
        """The ids of what is written for messages, from a character on that begins a token.

        Args:
            views: The messages.
            tools: Tools in view.
            written: Their text (`text`).
            index: The character, in the text before quoting.
        """
        return self.encode(written[quoted_index(written, index) :])

    @abstractmethod
    def unchecked_bridge(self, reply: View, new: Sequence[View], tools: list[View] | None) -> Bridge | None:
        """What follows a reply that was cut when `new` comes next, made without the conversation. Used only once
        proved.

        Args:
            reply: The reply; only the names and ids of its calls are read.
            new: The messages that follow it.
            tools: Tools in view.

        Raises:
            RenderError: The template refuses these messages.
        """

    # --- what the template can show -----------------------------------------------------------------------

    def _find_abilities(self) -> None:
        abilities = abilities_of(self.text)
        self.knows_tools = abilities.tools
        self.knows_tool_results = abilities.tool_results
        self.knows_reasoning = abilities.reasoning
        self.calls_shown = abilities.calls
        self.alternates = abilities.alternates
        self.skips_system = "system" in self.hidden_roles and refuses_later_system(self.text)

    def dropped(self, kinds: bytes, tools: list[View] | None) -> str:
        """The role of a message that the template leaves out without an error; empty where there is none."""
        key = (frozenset(pairwise(kinds)), kinds[:2], tools is not None)
        if key not in self._dropped_roles:
            views = [probe(kind, index, str) for index, kind in enumerate(kinds)]
            try:
                shown = self.text(views, tools)
            except RenderError:  # it refuses the probes, and wrote the messages
                return ""
            self._dropped_roles[key] = ""
            for at, view in enumerate(views):
                if view["role"] in ("assistant", *self.hidden_roles) or not has_mark(view) or mark(at) in shown:
                    continue
                # it may write contents changed: whether it writes the same for another content
                other = probe(kinds[at], at + _OTHER, str)
                if self.text([*views[:at], other, *views[at + 1 :]], tools) == shown:
                    self._dropped_roles[key] = view["role"]
                    break
        return self._dropped_roles[key]


# --- what a chat template can show, found by rendering probes (see bridge/check.py) --------------------------

Writer = Callable[[Sequence[View], list[View] | None], str]
"""(messages, tools) -> what the template writes. Raises RenderError where it refuses."""


class Abilities(msgspec.Struct, frozen=True):
    """What a chat template can show."""

    tools: bool
    """The schemas of tools."""
    tool_results: bool
    """Messages of role `tool`."""
    reasoning: bool
    """Reasoning, at least in the newest reply."""
    calls: int
    """How many calls of one message it shows as calls: 0, 1 or 2 (any number)."""
    alternates: bool
    """It refuses two user messages in a row."""


PROBE_TOOL: View = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}
"""The schema of a tool that is shown only to templates."""


def abilities_of(write: Writer) -> Abilities:
    """What a chat template can show.

    Args:
        write: The template.
    """
    calls, reply = [ASSISTANT + CALLS, ASSISTANT + 2 * CALLS], ASSISTANT
    # The newest reply: a template may leave out reasoning once a user speaks again.
    reasons = [{"role": "user", "content": "Q"}, probe(ASSISTANT + REASONS, 1, str)]
    return Abilities(
        tools=_shows(write, [USER], TOOL_NAME, tools=[PROBE_TOOL]),
        tool_results=_shows(write, [USER, calls[0], TOOL], mark(2)) or _shows(write, [USER, reply, TOOL], mark(2)),
        reasoning=_shows(write, reasons, f"Why {mark(1)}w"),
        calls=sum(
            _shows(write, [USER, kind, TOOL], TOOL_NAME, f"{mark(1)}n{number}") for number, kind in enumerate(calls)
        ),
        alternates=_shows(write, [USER, reply, USER], mark(2))
        and not _shows(write, [USER, reply, USER, USER], mark(3)),
    )


def reads_template(template: ChatTemplate, call_format: ToolCallFormat) -> bool:
    """Whether a tool-call format reads a call as the template writes it.

    Raises:
        RenderError: The spec's own format failed.
    """
    if not template.calls_shown:
        return False
    views = [probe(USER, 0, str), probe(ASSISTANT + CALLS, 1, str)]
    attempts = parse_calls(call_format, template.text(views, None), [PROBE_TOOL], "call").attempts
    wanted = views[1]["tool_calls"][0]["function"]
    calls = [(attempt.name, attempt.arguments) for attempt in attempts if isinstance(attempt, ToolCall)]
    return calls == [(wanted["name"], wanted["arguments"])]


def rewritten_part(write: Writer) -> str | None:
    """What the template writes differently once a user has spoken again: `reasoning`, `the reply`, or None."""
    question, again = probe(USER, 0, str), probe(USER, 2, str)
    answer, why = mark(1), f"Why {mark(1)}w"
    replies: list[tuple[str, View]] = [
        ("reasoning", {"role": "assistant", "content": answer, "reasoning_content": why}),
        ("reasoning", {"role": "assistant", "content": f"<think>\n{why}\n</think>\n\n{answer}"}),
        ("the reply", {"role": "assistant", "content": answer}),
    ]
    for part, reply in replies:
        try:
            newest, later = write([question, reply], None), write([question, reply, again], None)
        except RenderError:
            continue
        before, shown, _ = newest.rpartition(answer)
        if shown and not later.startswith(before):
            return part
    return None


def refuses_later_system(write: Writer) -> bool:
    """Whether the template refuses a system message after a reply, and takes the conversation without it."""
    before, after = [probe(USER, 0, str), probe(ASSISTANT, 1, str)], [probe(USER, 3, str)]
    return _shows(write, [*before, *after], mark(3)) and not _shows(write, [*before, probe(SYSTEM, 2, str), *after])


def hidden_roles(write: Writer) -> list[str]:
    """Roles whose messages the template leaves out somewhere, and `system` where it refuses a later system message."""
    caller = [ASSISTANT + CALLS, TOOL]
    roles = {"system"} if refuses_later_system(write) else set()
    for kinds in (
        [USER, *caller, *caller, ASSISTANT, USER] * 3,
        [SYSTEM, USER, ASSISTANT, SYSTEM, USER, ASSISTANT, USER],
    ):
        views = [probe(kind, index, str) for index, kind in enumerate(kinds)]
        for end in range(1, len(views) + 1):
            try:
                shown = write(views[:end], None)
            except RenderError:
                continue
            roles |= {view["role"] for index, view in enumerate(views[:end]) if mark(index) not in shown}
    return sorted(roles - {"assistant"})


def _shows(write: Writer, messages: Sequence[int | View], *texts: str, tools: list[View] | None = None) -> bool:
    """Whether messages, or probes of these kinds, are rendered, with each of `texts` in the result."""
    views = [probe(item, index, str) if isinstance(item, int) else item for index, item in enumerate(messages)]
    try:
        shown = write(views, tools)
    except RenderError:
        return False
    return all(text in shown for text in texts)
