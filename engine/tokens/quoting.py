"""Text that spells special tokens -> quoted text that a template copies, whose ids are those of plain text.

Users, environments, tools and the model itself may write `<|im_end|>` or `<think>`. A tokenizer reads such text as the
token, so such text could end a message, open another role or fake the model's reasoning. Here it is quoted before a chat template
gets it, and encoded as plain text.

A quoted text has one `MARK` after the first character of each added token that it spells; a `MARK` that was there before is doubled.
A template copies a quoted text like any other text, and finds no token in it.

Invariant: the ids of a rendered text with quoted parts are those of the text itself, except that quoted tokens are
encoded as any other text. A tokenizer that cannot do that is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

from engine.errors import RenderError

MARK = "\ufdd0"
"""A code point that Unicode reserves for internal use of programs."""
Span = tuple[int, int]

_MARKS = re.compile(f"{MARK}{MARK}?")


def unquote(text: str) -> str:
    """The text before quoting."""
    return _MARKS.sub(lambda match: match[0][1:], text) if MARK in text else text


def quoted_index(text: str, index: int) -> int:
    """The index in a quoted text of the character that has `index` in the text before quoting."""
    if MARK not in text:
        return index
    for match in _MARKS.finditer(text):
        if match.start() > index:
            break
        index += 1
    return index


class Quoting:
    """Finds and quotes the added tokens of one tokenizer, special or not."""

    def __init__(self, added: Iterable[str]) -> None:
        tokens = sorted({token for token in added if token.strip()}, key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, tokens)) or "(?!)")
        self._starts = tuple(sorted({token[0] for token in tokens}))
        self._quotes = (*self._starts, MARK)
        """A text without any of them stays as it is."""

    def spans(self, text: str) -> list[Span]:
        """The characters [start, end) of each added token that a text spells."""
        for start in self._starts:
            if start in text:
                return [match.span() for match in self._tokens.finditer(text)]
        return []

    def quote(self, text: str, intended: Sequence[Span] = ()) -> str:
        """The text with every added token in it quoted, except those in the spans `intended`."""
        for start in self._quotes:
            if start in text:
                return self._quote(text, intended)
        return text

    def _quote(self, text: str, intended: Sequence[Span]) -> str:
        parts: list[str] = []
        at = 0
        for start, end in self.spans(text):
            if any(first <= start and end <= last for first, last in intended):
                continue
            parts += [_doubled(text[at : start + 1]), MARK]
            at = start + 1
        return "".join([*parts, _doubled(text[at:])])

    def quote_new(self, text: str, before: str) -> str:
        """A quoted text that was made of the quoted text `before`, in which the tokens that `before` did not spell are quoted, too."""
        if self.spans(before):
            return text
        for start, _ in reversed(self.spans(text)):
            text = text[: start + 1] + MARK + text[start + 1 :]
        return text


def _doubled(text: str) -> str:
    return text.replace(MARK, MARK + MARK)


class LiteralEncoder:
    """Encodes texts with quoted parts.

    Args:
        backend: The `tokenizers.Tokenizer`.
        added: Its added tokens, text -> id.
    """

    def __init__(self, backend: Any, added: dict[str, int]) -> None:
        self._backend = backend
        self._added = frozenset(added.values())
        self._probe = next((token for token in added if token.strip()), "")

    @cached_property
    def _plain(self) -> Callable[[str], list[int]]:
        """An encoder without added tokens."""
        from tokenizers import Tokenizer

        plain = Tokenizer(self._backend.model)  # shares the model, has no added tokens
        if self._backend.normalizer is not None:
            plain.normalizer = self._backend.normalizer
        if self._backend.pre_tokenizer is not None:
            plain.pre_tokenizer = self._backend.pre_tokenizer

        def encode(text: str) -> list[int]:
            return list(plain.encode(text, add_special_tokens=False).ids)

        whole = self._backend.encode(f"{self._probe}to be, or", add_special_tokens=False).ids
        if whole[1:] != encode("to be, or"):
            raise self._refusal("it encodes a text after an added token differently from the text alone")
        return encode

    @staticmethod
    def _refusal(why: str) -> RenderError:
        return RenderError(
            f"text in the conversation spells a special token, and this tokenizer cannot encode it as plain text: {why}; "
            "set `model.allow_special: true` if such text may become special tokens"
        )

    def encode(self, text: str) -> list[int]:
        """The ids of a text with quoted parts.

        Raises:
            RenderError: This tokenizer cannot encode them as plain text.
        """
        encoding = self._backend.encode(text, add_special_tokens=False)
        ids: list[int] = []
        begin = 0
        taken = 0
        offsets = encoding.offsets
        for index, id_ in [*enumerate(encoding.ids), (len(offsets), -1)]:
            if id_ != -1 and id_ not in self._added:
                continue
            start, end = (len(text), len(text)) if id_ == -1 else offsets[index]
            between = text[begin:start]
            if MARK in between:
                plain = self._plain(unquote(between))
                if not self._added.isdisjoint(plain):
                    raise self._refusal("its vocabulary holds that text as one piece")
                ids += plain
            else:
                ids += encoding.ids[taken:index]
            if id_ != -1:
                ids.append(id_)
            begin, taken = end, index + 1
        return ids
