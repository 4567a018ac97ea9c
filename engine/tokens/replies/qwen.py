"""Sampled ids in Qwen3's format -> what the library `renderers` reads in them.

Invariant: `QwenReader.read` gives what the library's `parse_qwen3` gives, or None for a reply that the library must parse: one
with reasoning (unless it ends with its only call), one that went on after a token that ends replies, or one after a prompt that may have
opened reasoning.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.tokens.quoting import MARK

IntVector = NDArray[np.int32]

_OPEN, _CLOSE = "<think>", "</think>"
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_decode = json.JSONDecoder().raw_decode
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
    """Parses replies of one tokenizer.

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
        self._spelled = [struct.pack("i", mark) for mark in sorted({*ends, *self._think, call, call_end})]

    def read(self, array: IntVector, before: Sequence[int]) -> QwenReply | None:
        """The reply; None where the library must parse it.

        Args:
            array: What was sampled, the id that ended it included; int32 [tokens].
            before: The last ids of the prompt.
        """
        if self._opens in before:
            return None
        ids, marks = array.tolist(), self._find(array.tobytes())
        if self._tagged and len(marks) in (3, 5) and (reply := self._decoded_at_once(ids, marks)) is not None:
            return reply
        for number, at in enumerate(marks):
            if ids[at] in self._ends:
                if at + 1 < len(ids):
                    return None
                ids, marks = ids[:at], marks[:number]
                break
            if ids[at] in self._think:
                return None
        calls = self._calls(ids, marks)
        said = ids[: calls[0].token_span[0]] if calls else ids
        return QwenReply(self._decode(said).strip(), calls)

    def _decoded_at_once(self, ids: list[int], marks: list[int]) -> QwenReply | None:
        """A reply that ends with one call, cut as text; None where its texts may spell an added token, or text follows the call.

        A text without `<` has no added token, and JSON without a backslash has none once it is read.
        """
        *think, start, close, end = marks
        if ids[start] != self._call or ids[close] != self._call_end or ids[end] not in self._ends or end + 1 < len(ids):
            return None
        sampled, ending = self._decode(ids), self._ends[ids[end]]
        reasoning, rest = "", sampled
        if think:
            if think[0] or ids[0] != self._opens or ids[think[1]] != self._closes:
                return None
            reasoning, _, rest = sampled[len(_OPEN) :].partition(_CLOSE)
            if not reasoning or reasoning.isspace():
                return None
        content, _, rest = rest.partition(_CALL)
        raw, _, after = rest.partition(_CALL_END)
        texts = f"{reasoning}\0{content}\0{raw}"
        if "<" in texts or "\\" in raw or after.lstrip() != ending or MARK in texts:
            return None
        call = _call(raw.strip(), (start, close + 1))
        return QwenReply(content.strip(), [call], reasoning.strip() or None, None, sampled, texts, ending)

    def _find(self, data: bytes) -> list[int]:
        """Positions of marks among ids of four bytes each, in order. Searching bytes is faster than comparing numbers."""
        marks: list[int] = []
        for mark in self._spelled:
            at = data.find(mark)
            while at >= 0:
                if at % 4 == 0:
                    marks.append(at // 4)
                at = data.find(mark, at + 1)
        marks.sort()
        return marks

    def _calls(self, ids: list[int], marks: list[int]) -> list[QwenCall]:
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
        return calls


def _call(raw: str, span: tuple[int, int]) -> QwenCall:
    try:
        read, end = _decode(raw)
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
