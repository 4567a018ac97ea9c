"""Sampled ids of a model family -> what the family's parser in the library `renderers` reads in them.

Invariant: every attempt at a call is kept, read or malformed, and all words and markers that are no structure are in
the content or the reasoning. Where the template shows no reasoning, a reader reports none: a reply's reasoning is then
part of its content, so that no prompt loses it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from engine.errors import RenderError
from engine.schemas.message import MalformedCall, ToolCall
from engine.tokens.tape import IntVector
from engine.tokens.tokenizer import MARK, FastTokenizer
from engine.tokens.toolcalls import UnreadableCall, as_arguments, properties_of, storable_call

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
_OPEN, _CLOSE = "<think>", "</think>"
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_raw_decode = json.JSONDecoder().raw_decode
"""`json.loads` without its outer layers, for text without white space around it."""
_READ_ALIKE = {("renderers.qwen3", "Qwen3Renderer"), ("renderers.qwen3_vl", "Qwen3VLRenderer")}
"""Renderers that parse replies by `parse_qwen3`."""


class QwenCall(msgspec.Struct, frozen=True):
    """One attempt at a call, with the library's field names."""

    raw: str
    name: str | None
    arguments: Any
    token_span: tuple[int, int]
    status: str


class QwenReply(msgspec.Struct, frozen=True):
    """A reply, with the library's field names."""

    content: str
    tool_calls: list[QwenCall]
    reasoning_content: str | None = None
    reasoning_complete: bool | None = None
    sampled: str | None = None
    """The whole reply as text, where it ends with its one call and was decoded at once."""
    texts: str = ""
    """With `sampled`: its reasoning, its content and the inside of its call, which spell no added token."""
    ending: str = ""
    """With `sampled`: the token that ended it."""


class QwenReader:
    """Parses replies in Qwen3's format, of one tokenizer.

    `read` gives what the library's `parse_qwen3` gives, or None for a reply that the library must parse: one with
    reasoning (unless it ends with its only call), one that went on after a token that ends replies, or one after a
    prompt that may have opened reasoning.

    Args:
        decode: Ids -> text.
        ends: Ids that end a reply.
        call: The id of `<tool_call>`.
        call_end: The id of `</tool_call>`.
        think: The ids of `<think>` and `</think>`.
        tagged: All added tokens begin with `<`.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        *,
        ends: frozenset[int],
        call: int,
        call_end: int,
        think: tuple[int, int],
        tagged: bool,
    ) -> None:
        self._decode = decode
        self._ends = {end: decode([end]) for end in ends}
        """Ids that end a reply, and their texts."""
        self._tagged = tagged
        self._call = call
        self._call_end = call_end
        self._opens, self._closes = think
        self._think = frozenset(think)
        self._marks = frozenset({*ends, *think, call, call_end})

    def read(self, array: IntVector, before: IntVector) -> QwenReply | None:
        """The reply; None where the library must parse it.

        Args:
            array: What was sampled, the id that ended it included; int32 [tokens].
            before: The last ids of the prompt, int32 [tokens].
        """
        if self._opens in before.tolist():
            return None
        ids = array.tolist()
        marked = [*filter(self._marks.__contains__, ids)]
        if self._tagged and len(marked) in (3, 5) and (reply := self._decoded_at_once(ids, marked)) is not None:
            return reply
        marks = [at for at, id_ in enumerate(ids) if id_ in self._marks]
        for number, at in enumerate(marks):
            if ids[at] in self._ends:
                if at + 1 < len(ids):
                    return None
                ids, marks = ids[:at], marks[:number]
                break
            if ids[at] in self._think:
                return None
        calls: list[QwenCall] = []
        after = 0
        for number, start in enumerate(marks):
            if start < after or ids[start] != self._call:
                continue
            end = next((at for at in marks[number + 1 :] if ids[at] == self._call_end), -1)
            if end < 0:
                raw = self._decode(ids[start + 1 :]).strip()
                calls.append(QwenCall(raw, None, None, (start, len(ids)), "unclosed_block"))
                break
            after = end + 1
            calls.append(_call(self._decode(ids[start + 1 : end]).strip(), (start, after)))
        said = ids[: calls[0].token_span[0]] if calls else ids
        return QwenReply(self._decode(said).strip(), calls)

    def _decoded_at_once(self, ids: list[int], marked: list[int]) -> QwenReply | None:
        """A reply that ends with one call, cut as text; None where its texts may spell an added token, or text follows
        the call.

        A text without `<` has no added token, and JSON without a backslash has none once it is read.

        Args:
            ids: Its ids.
            marked: Those of them that are marks.
        """
        *think, call, call_end, last = marked
        if call != self._call or call_end != self._call_end or last not in self._ends or ids[-1] != last:
            return None
        sampled, ending = self._decode(ids), self._ends[last]
        reasoning, rest = "", sampled
        if think:
            if think != [self._opens, self._closes] or ids[0] != self._opens:
                return None
            reasoning, _, rest = sampled[len(_OPEN) :].partition(_CLOSE)
            if not reasoning or reasoning.isspace():
                return None
        content, _, rest = rest.partition(_CALL)
        raw, _, after = rest.partition(_CALL_END)
        texts = f"{reasoning}\0{content}\0{raw}"
        if "<" in texts or "\\" in raw or after.lstrip() != ending or MARK in texts:
            return None
        calls = [_call(raw.strip(), (ids.index(call), ids.index(call_end) + 1))]
        return QwenReply(content.strip(), calls, reasoning.strip() or None, None, sampled, texts, ending)


def _call(raw: str, span: tuple[int, int]) -> QwenCall:
    try:
        read, end = _raw_decode(raw)
        if end != len(raw):
            read = json.loads(raw)  # which raises the error that more text follows
    except json.JSONDecodeError:
        return QwenCall(raw, None, None, span, "invalid_json")
    name, arguments = (read.get("name", ""), read.get("arguments", {})) if isinstance(read, dict) else ("", {})
    return QwenCall(raw, name, arguments, span, "ok") if name else QwenCall(raw, None, arguments, span, "missing_name")


def qwen_reader(renderer: Any, tokenizer: Any) -> QwenReader | None:
    """The reader for a family's renderer; None where the family parses replies in another way."""
    kind = type(renderer)
    if (kind.__module__, kind.__name__) not in _READ_ALIKE:
        return None
    think = [tokenizer.convert_tokens_to_ids(marker) for marker in (_OPEN, _CLOSE)]
    ids = [renderer._tool_call, renderer._tool_call_end, renderer._think_end, *think]
    if any(not isinstance(token, int) or token == tokenizer.unk_token_id for token in ids) or think[1] != ids[2]:
        return None
    return QwenReader(
        tokenizer.decode,
        ends=frozenset(renderer.get_stop_token_ids()),
        call=ids[0],
        call_end=ids[1],
        think=(think[0], think[1]),
        tagged=all(token.startswith("<") for token in tokenizer.added),
    )


class TokenParse(msgspec.Struct, eq=False):
    """The parts of one reply, as a family's parser found them."""

    content: str
    reasoning: str | None
    attempts: list[ToolCall | MalformedCall]
    thinking: bool = False
    """It ended inside its reasoning."""
    only_content: bool = False
    """`content` is the whole reply."""
    calls_end_it: bool = True
    """There is no text between the calls or after them."""
    after: str = ""
    """The text after the reasoning, calls included. Only set where there are calls."""
    sampled: str | None = None
    """The whole reply as text, the token that ended it included, where it was decoded at once; `texts` spell no added
    token then."""
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

        with_opening = [*self._opening, *ids]
        read = parse_gpt_oss(self._tokenizer, with_opening, **self._ids)
        read.content = self._content(with_opening)
        for call in read.tool_calls:
            if call.token_span is not None:
                start, end = (max(0, at - len(self._opening)) for at in call.token_span)
                call.token_span = (start, end)
        return read

    def _content(self, ids: list[int]) -> str:
        """What is said beside reasoning and calls: the final channel, commentary, and what is in no channel that is
        known."""
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
        read: Any = self._qwen.read(ids, before) if self._qwen is not None else None
        if read is None:
            try:
                read = self._library.parse_response(ids.tolist(), tools=list(tools) or None, prompt_ids=before.tolist())
            except Exception as error:
                raise RenderError(f"the renderer {self.name!r} cannot read a reply: {error}") from error
        attempts = [_attempt(call, f"{prefix}_{index}", tools) for index, call in enumerate(read.tool_calls)]
        reasoning = read.reasoning_content
        if type(read) is QwenReply and read.sampled is not None and not foreign and (reasons or reasoning is None):
            after = read.sampled.removesuffix(read.ending)
            if reasoning is not None:
                after = _CLOSING.split(after, 1)[1].lstrip("\n")
            return TokenParse(read.content, reasoning, attempts, after=after, sampled=read.sampled, texts=read.texts)
        parse = TokenParse(read.content, read.reasoning_content, attempts)
        if read.reasoning_complete is False:
            parse.thinking, parse.reasoning = True, (parse.reasoning or "").strip("\n")
        if not attempts and type(read) is QwenReply:
            parse.only_content = True
            return parse
        said: list[int] = ids.tolist()
        if said and said[-1] in self._stops:
            said.pop()
        self._account(parse, said, [call.token_span or (0, len(said)) for call in read.tool_calls], reasons)
        return parse

    def _account(self, parse: TokenParse, said: list[int], spans: list[tuple[int, int]], reasons: bool) -> None:
        """Add to a reply what the library leaves out: words beside its calls, and markers where they mark nothing.

        Args:
            parse: The reply as the library read it.
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
        parse.calls_end_it = not "".join(others).strip()
        if self._has_channels:
            if not reasons:
                parse.content, parse.reasoning, parse.thinking = self._decode(said).strip(), None, False
            calls = [self._decode(said[start:end]) for start, end in dict.fromkeys(spans)]
            parse.after = "\n".join([*([parse.content] if parse.content else []), *calls])
            return
        head = self._section.sub("", before) if spans else before
        section = before[len(head) :] if before.startswith(head) else ""
        if reasons or (spans and parse.reasoning is None):
            parse.reasoning, head = _split_reasoning(head, parse.reasoning, parse.content)
        if not reasons:
            parse.reasoning, parse.thinking = None, False
        words = "".join([head, *[self._section.sub("", part) for part in others]])
        if words.strip() != parse.content and _bare(words) != _bare(parse.content):
            parse.content = words.strip()
        parse.only_content = not spans and parse.reasoning is None and parse.content.strip() == before.strip()
        if spans:
            written = before if parse.reasoning is None else (head + section).lstrip("\n")
            parse.after = written + self._decode(said[spans[0][0] :])


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
            arguments = arguments or {}
            if not isinstance(arguments, dict):
                arguments = as_arguments(arguments)
            return storable_call(id_, call.name, arguments, call.raw)
    except UnreadableCall as problem:
        return MalformedCall(raw=call.raw, problem=str(problem))
    return MalformedCall(raw=call.raw, problem=_PROBLEMS.get(status, f"It could not be read ({status})."))


_PYTHON: dict[str, tuple[Any, str]] = {"True": (True, "boolean"), "False": (False, "boolean"), "None": (None, "null")}
_TAGGED = (
    re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.DOTALL),
    re.compile(r'<parameter name="([^"]+)">\n?(.*?)\n?</parameter>', re.DOTALL),
    re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL),
)
"""A parameter's name and its value as the families write them."""
_QUOTE = re.escape('<|"|>')
"""Quotes of Gemma 4, which it puts around strings only."""
_QUOTED_NONE = re.compile(f"{_QUOTE}None{_QUOTE}(?=[,}}\\]])")
_BARE_NONE = re.compile(r"[:\[,]None(?=[,}\]])")


def restored(
    name: str | None, arguments: dict[str, Any], raw: str, tools: Sequence[dict[str, Any]]
) -> tuple[dict[str, Any], bool]:
    """A call's arguments as they were written.

    A template that writes `<parameter=text>` or `<arg_value>` writes a string as it stands, and any other value as JSON
    or as Python prints it. The library's parsers trim such strings, and take `None`, `True` and `False` for text. Here
    a string keeps its white space, and these words are values only where the tool's schema or the quotes of the family
    say so.

    Args:
        name: The tool.
        arguments: The call's arguments as the library read them.
        raw: The call as it was written.
        tools: The tools' schemas, in OpenAI's form.

    Returns:
        The arguments, and whether the tool's schema permits each text among them.

    Raises:
        UnreadableCall: A text could stand for two values.
    """
    tagged = "<" in raw
    written = {key.strip(): value for pattern in _TAGGED for key, value in pattern.findall(raw)} if tagged else {}
    if not written and "None" in raw and _BARE_NONE.search(raw):
        if _QUOTED_NONE.search(raw):
            raise UnreadableCall("It holds None both as a text and as no value: write null for no value.")
        return _each(arguments, lambda text: None if text == "None" else text), True
    schema = properties_of(name, tools)
    values = dict(arguments)
    permitted = True
    for key, value in arguments.items():
        if not isinstance(value, str):
            continue
        text, types = written.get(key, value), schema.get(key)
        word, kind = _PYTHON.get(value, (None, ""))
        if key in written and kind and _permits(types, kind):  # as the library reads JSON, where text is permitted too
            values[key] = word
            continue
        if text.strip() == value:
            values[key] = text
        permitted = permitted and _permits(types, "string")
    return values, permitted


def _each(value: Any, change: Callable[[str], Any]) -> Any:
    """A JSON value with each text in it changed."""
    if isinstance(value, dict):
        return {key: _each(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_each(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def _permits(schema: Any, type_: str) -> bool:
    """Whether a parameter may be of this type of JSON. One without a schema may be of any."""
    if not isinstance(schema, dict):
        return True
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return any(_permits(option, type_) for option in options)
    if "type" in schema:
        return type_ == schema["type"] or (isinstance(schema["type"], list) and type_ in schema["type"])
    if isinstance(values := schema.get("enum"), list):
        return any(isinstance(value, {"string": str, "boolean": bool, "null": type(None)}[type_]) for value in values)
    return True
