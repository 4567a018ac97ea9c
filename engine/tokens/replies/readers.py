"""Sampled ids of a model family -> what the family's parser in the library `renderers` reads in them.

Invariant: every attempt at a call is kept, read or malformed, and all words and markers that are no structure are in the content
or the reasoning. Where the template shows no reasoning, a reader reports none: a reply's reasoning is then part of its content,
so that no prompt loses it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from engine.errors import RenderError
from engine.schemas.message import MalformedCall, ToolCall
from engine.tokens.replies.arguments import restored
from engine.tokens.replies.qwen import QwenReply, qwen_reader
from engine.tokens.tape import IntVector
from engine.tokens.tokenizer import FastTokenizer
from engine.tokens.toolcalls import UnreadableCall
from engine.tokens.toolcalls.base import as_arguments, storable_call
from engine.tokens.toolcalls.hermes import HERMES_FORM

if TYPE_CHECKING:
    from engine.tokens.bridge.kinds import View

_PROBLEMS = {
    "invalid_json": "Its arguments are not valid JSON.",
    "unclosed_block": "It was begun but never finished: its closing tag is missing.",
    "missing_name": "It does not say which tool to call.",
    "malformed_structure": "It is not in the form that tool calls have.",
}

_OPENING = re.compile(r"<think>|<\|channel>(?:thought\b)?")
_CLOSING = re.compile(r"</think>|<channel\|>")
"""The markers of reasoning."""
_CHANNEL = re.compile(r"<\|channel\|>\s*([^\s<]+)")
_TITLE = re.compile(rf"<\|start\|>(?:assistant)?|to=[^\s<]+|{_CHANNEL.pattern}|(?:<\|constrain\|>)?\s*json\s*\Z")
_SECTION = re.compile(r"tool[_▁]calls|_section_")
"""The tokens that begin and end a section of calls, by their names."""


class TokenParse(msgspec.Struct, eq=False):
    """The parts of one reply, as a family's parser found them."""

    content: str
    reasoning: str | None
    attempts: list[ToolCall | MalformedCall]
    thinking: bool = False
    """It ended inside its reasoning."""
    whole: bool = False
    """`content` is the whole reply."""
    calls_end_it: bool = True
    """There is no text between the calls or after them."""
    after: str = ""
    """The text after the reasoning, calls included. Only set where there are calls."""
    sampled: str | None = None
    """The whole reply as text, the token that ended it included, where it was decoded at once; `texts` spell no added token then."""
    texts: str = ""
    """With `sampled`: its reasoning, its content and the inside of its calls."""


class Harmony:
    """The library's parser of gpt-oss replies, without the vocabulary file that the family's renderer downloads.

    Raises:
        KeyError: The tokenizer lacks one of the tokens.
    """

    has_reasoning_channel = True
    """Replies have reasoning in a channel of its own, whether or not the template shows it."""
    _TOKENS = ("return", "call", "start", "end", "channel", "message", "constrain")

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = {f"{name}_id": tokenizer.added[f"<|{name}|>"] for name in self._TOKENS}
        self._opening = tokenizer.encode("<|start|>assistant")

    def get_stop_token_ids(self) -> list[int]:
        """See the library's `Renderer.get_stop_token_ids`."""
        return [self._ids[name] for name in ("return_id", "call_id", "end_id")]

    def parse_response(self, ids: list[int], **_: Any) -> Any:
        """See the library's `Renderer.parse_response`. The prompt has begun the first message."""
        from renderers.parsing import parse_gpt_oss

        whole = [*self._opening, *ids]
        read = parse_gpt_oss(self._tokenizer, whole, **self._ids)
        read.content = self._content(whole)
        for call in read.tool_calls:
            if call.token_span is not None:
                start, end = (max(0, at - len(self._opening)) for at in call.token_span)
                call.token_span = (start, end)
        return read

    def _content(self, ids: list[int]) -> str:
        """What is said beside reasoning and calls: the final channel, commentary, and what is in no channel that is known."""
        from renderers.parsing import harmony_blocks

        parts: list[str] = []
        at = 0
        marks = {name: self._ids[name] for name in ("start_id", "message_id", "end_id", "call_id")}
        for start, header, end, closed in harmony_blocks(ids, **marks):
            parts.append(self._tokenizer.decode(ids[at:start]))
            at = end + closed
            title = self._tokenizer.decode(ids[start:header])
            channel = _CHANNEL.search(title)
            if channel is None or channel[1] not in ("analysis", "commentary", "final"):
                parts.append(self._tokenizer.decode(ids[start:at]))
                continue
            parts.append(_TITLE.sub("", title))
            if channel[1] != "analysis" and "to=functions." not in title:
                parts.append(self._tokenizer.decode(ids[header + 1 : end]))
        rest = ids[at or len(self._opening) :]
        parts.append(self._tokenizer.decode(rest[:-1] if rest and rest[-1] in self._ids.values() else rest))
        return "\n".join(text.strip() for text in parts if text.strip())


class FamilyReader:
    """Reads replies as one family writes them.

    Args:
        name: The family.
        library: Its renderer in the library.
        tokenizer: The tokenizer.
        stops: Ids that end a reply.
    """

    def __init__(self, name: str, library: Any, tokenizer: FastTokenizer, stops: frozenset[int]) -> None:
        self.name = name
        self.has_reasoning_channel: bool = getattr(library, "has_reasoning_channel", False)
        """Replies have reasoning in a channel of its own, whether or not the template shows it."""
        self._library = library
        self._decode = tokenizer.decode
        self._stops = stops
        sections = "|".join(re.escape(text) for text in tokenizer.added if _SECTION.search(text)) or "(?!)"
        self._section = re.compile(rf"\A\s*(?:{sections})|(?:{sections})\s*\Z")
        """A token at the edge of a text beside calls, which begins or ends a section of calls."""
        self._has_channels = self.has_reasoning_channel or name == "inkling"
        self._foreign = stops - set(library.get_stop_token_ids())
        """Tokens that end replies and that the library does not know as such."""
        self._qwen = qwen_reader(library, tokenizer)

    def read(self, ids: IntVector, before: IntVector, prefix: str, tools: Sequence[View], reasons: bool) -> TokenParse:
        """Parse a reply.

        Args:
            ids: Its sampled ids, the one that ended it included; int32 [tokens].
            before: The ids that it was sampled from, int32 [tokens]; the last few are enough.
            prefix: What the ids of its calls begin with.
            tools: The tools' schemas.
            reasons: The template shows reasoning; else it is left in the content.

        Raises:
            RenderError: The library's parser failed.
        """
        foreign = bool(len(ids)) and int(ids[-1]) in self._foreign
        if foreign:
            ids = ids[:-1]
        read = self._read(ids, before.tolist(), tools)
        attempts = [_attempt(call, f"{prefix}_{index}", tools) for index, call in enumerate(read.tool_calls)]
        reasoning = read.reasoning_content
        if type(read) is QwenReply and read.sampled is not None and not foreign and (reasons or reasoning is None):
            after = read.sampled.removesuffix(read.ending)
            if reasoning is not None:
                after = _CLOSING.split(after, 1)[1].lstrip("\n")
            return TokenParse(read.content, reasoning, attempts, after=after, sampled=read.sampled, texts=read.texts)
        found = TokenParse(read.content, read.reasoning_content, attempts)
        if read.reasoning_complete is False:
            found.thinking, found.reasoning = True, (found.reasoning or "").strip("\n")
        if not attempts and type(read) is QwenReply:
            found.whole = True
            return found
        said: list[int] = ids.tolist()
        if said and said[-1] in self._stops:
            said.pop()
        self._account(found, said, [call.token_span or (0, len(said)) for call in read.tool_calls], reasons)
        return found

    def _account(self, found: TokenParse, said: list[int], spans: list[tuple[int, int]], reasons: bool) -> None:
        """Add to a reply what the library leaves out: words beside its calls, and markers where they mark nothing.

        Args:
            found: The reply as the library read it.
            said: The sampled ids, without the one that ended it.
            spans: The tokens [start, end) of each attempt at a call; several may share them.
            reasons: The template shows reasoning; else it is left in the content.
        """
        parts, at = [], 0
        for start, end in [*spans, (len(said), 0)]:
            if at <= start:
                parts.append(self._decode(said[at:start]) if at < start else "")
                at = end
        before, *others = parts
        found.calls_end_it = not "".join(others).strip()
        if self._has_channels:
            if not reasons:
                found.content, found.reasoning, found.thinking = self._decode(said).strip(), None, False
            calls = [self._decode(said[start:end]) for start, end in dict.fromkeys(spans)]
            found.after = "\n".join([*([found.content] if found.content else []), *calls])
            return
        head = self._section.sub("", before) if spans else before
        section = before[len(head) :] if before.startswith(head) else ""
        if reasons or (spans and found.reasoning is None):
            found.reasoning, head = _split_reasoning(head, found.reasoning, found.content)
        if not reasons:
            found.reasoning, found.thinking = None, False
        words = "".join([head, *[self._section.sub("", part) for part in others]])
        if words.strip() != found.content and _bare(words) != _bare(found.content):
            found.content = words.strip()
        found.whole = not spans and found.reasoning is None and found.content.strip() == before.strip()
        if spans:
            written = before if found.reasoning is None else (head + section).lstrip("\n")
            found.after = written + self._decode(said[spans[0][0] :])

    def _read(self, ids: IntVector, before: list[int], tools: Sequence[View]) -> QwenReply | Any:
        """A reply as the library parses it."""
        found = self._qwen.read(ids, before) if self._qwen is not None else None
        if found is not None:
            return found
        try:
            return self._library.parse_response(ids.tolist(), tools=list(tools) or None, prompt_ids=before)
        except Exception as error:
            raise RenderError(f"the renderer {self.name!r} cannot read a reply: {error}") from error


def _bare(text: str) -> str:
    return "".join(text.split())


def _split_reasoning(head: str, reasoning: str | None, content: str) -> tuple[str | None, str]:
    """The reasoning of a reply as it was sampled, and the rest of the text before its calls.

    Args:
        head: The text before the first call.
        reasoning: The reasoning as the library read it: without markers inside of it.
        content: The content as the library read it.
    """
    opened, bare = _OPENING.search(head), _bare(content)
    for before, begin in ([opened.span()] if opened else []) + [(0, 0)]:
        closed = _CLOSING.search(head, begin)
        end, after = closed.span() if closed else (len(head), len(head))
        inside, rest = head[begin:end], head[:before] + head[after:]
        if (
            reasoning is None
            and not inside.strip()
            and not bare.startswith(_bare(head))
            and bare.startswith(_bare(rest))
        ):
            return None, rest
        if reasoning is not None and _bare(_OPENING.sub("", inside)) == _bare(_OPENING.sub("", reasoning)):
            return reasoning if _bare(inside) == _bare(reasoning) else inside.strip(), rest
    return None, head


def _attempt(call: Any, id_: str, tools: Sequence[View]) -> ToolCall | MalformedCall:
    status = str(call.status)
    arguments = call.arguments
    try:
        plain = "<" not in call.raw and "None" not in call.raw  # nothing to restore
        if not (plain and status == "ok") and isinstance(call.name, str) and isinstance(arguments, dict):
            arguments, permitted = restored(call.name, arguments, call.raw, tools)
            if status == "invalid_json" and permitted:
                status = "ok"
        if not isinstance(call.name, str | None):
            status = "missing_name"
        if status in ("ok", "unknown_tool") and call.name:
            return storable_call(id_, call.name, as_arguments(arguments or {}, HERMES_FORM))
    except UnreadableCall as problem:
        return MalformedCall(raw=call.raw, problem=str(problem))
    return MalformedCall(raw=call.raw, problem=_PROBLEMS.get(status, f"It could not be read ({status})."))
