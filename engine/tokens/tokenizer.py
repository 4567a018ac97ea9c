"""Text <-> ids as the model's tokenizer gives them, at the speed of the Rust library below transformers.

Invariant: `encode` adds no special token of its own and reads special tokens that are spelled out, exactly as
`apply_chat_template` does; `decode` leaves nothing out and cleans nothing up. Character offsets are deliberately
not offered: `renderers` then encodes a message in one pass, and skips the attribution that the engine has no use for.

Users, environments, tools and the model itself may write `<|im_end|>` or `<think>`. A tokenizer reads such text as the
token, so such text could end a message, open another role or fake the model's reasoning. It is quoted before a chat
template gets it (`Quoting`), and encoded as plain text. A quoted text has one `MARK` after the first
character of each added token that it spells; a `MARK` that was there before is doubled. A template copies a quoted text
like any other text, and finds no token in it. The ids of a rendered text with quoted parts are those of the text
itself, except that quoted tokens are encoded as any other text. A tokenizer that cannot do that is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, cached_property
from typing import Any

import numpy as np

from engine.errors import RenderError
from engine.tokens.byte_level import ascii_encoder, bytes_by_id, decoded
from engine.tokens.plain_tokenizer import PlainTokenizer

_BYTE = re.compile("<0x[0-9A-F]{2}>")
_SHORT = 32
"""Longest text, in characters, whose ids are kept: texts that templates repeat."""
_REMEMBERED = 4096
_LONG = 1 << 16
"""A longer text, in characters, is encoded without offsets and without blocking other threads."""

MARK = "\ufdd0"
"""A code point that Unicode reserves for internal use of programs."""
Span = tuple[int, int]

_MARKS = re.compile(f"{MARK}{MARK}?")


def unquote(text: str) -> str:
    """The text before quoting."""
    return _MARKS.sub(lambda match: match[0][1:], text) if MARK in text else text


def texts_in(value: Any) -> Iterator[str]:
    """All texts in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from texts_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_in(item)


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with each text in it changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): with_texts(item, change) for key, item in value.items()}
    return [with_texts(item, change) for item in value] if isinstance(value, list) else value


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
        for character in self._quotes:
            if character in text:
                break
        else:
            return text
        parts: list[str] = []
        at = 0
        for start, end in self.spans(text):
            if any(first <= start and end <= last for first, last in intended):
                continue
            parts += [text[at : start + 1].replace(MARK, MARK + MARK), MARK]
            at = start + 1
        return "".join([*parts, text[at:].replace(MARK, MARK + MARK)])

    def quote_new(self, text: str, before: str) -> str:
        """A quoted text that was made of the quoted text `before`, in which the tokens that `before` did not spell are
        quoted, too."""
        if self.spans(before):
            return text
        for start, _ in reversed(self.spans(text)):
            text = text[: start + 1] + MARK + text[start + 1 :]
        return text


def _refusal(why: str) -> RenderError:
    return RenderError(
        f"text in the conversation spells a special token, and this tokenizer cannot encode it as plain text: {why}; "
        "set `model.allow_special: true` if such text may become special tokens"
    )


class FastTokenizer:
    """A tokenizer of transformers, called directly.

    Args:
        tokenizer: A tokenizer of transformers, or a `PlainTokenizer`, which has the same names.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.full = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._vocab: dict[str, int] = tokenizer.get_vocab()
        self._memory: dict[str, list[int]] = {}
        self._is_border = cache(self._splits_first)
        byte_level = type(getattr(self._backend, "decoder", None)).__name__ == "ByteLevel"
        self._bytes = bytes_by_id(self._backend) if byte_level else None
        self.name_or_path: str = getattr(tokenizer, "name_or_path", "")
        self.unk_token_id: int | None = tokenizer.unk_token_id
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self.added: dict[str, int] = {str(token): id_ for id_, token in tokenizer.added_tokens_decoder.items()}
        """Special and added tokens, text -> id: text is split at them before it is tokenised."""
        self.added_ids = frozenset(self.added.values())
        self._ascii = None if self._backend is None else ascii_encoder(self._backend, self.added)

    @property
    def real(self) -> Any:
        """The tokenizer of transformers; a `PlainTokenizer` imports it now."""
        return self.full.real if isinstance(self.full, PlainTokenizer) else self.full

    @property
    def size(self) -> int:
        """One past the largest id."""
        return max(self._vocab.values(), default=-1) + 1

    @cached_property
    def longest(self) -> int:
        """Characters of the longest token in the vocabulary; a text of n characters has at least n / longest tokens.

        This also holds for a byte-level vocabulary: a text has at least as many bytes as characters.
        """
        return max(map(len, self._vocab), default=1)

    @cached_property
    def quoting(self) -> Quoting:
        """Finds and quotes added tokens that a text spells."""
        return Quoting(self.added)

    @cached_property
    def _plain(self) -> Any:
        """The `tokenizers.Tokenizer` without added tokens."""
        from tokenizers import Tokenizer

        plain = Tokenizer(self._backend.model)  # shares the model
        if self._backend.normalizer is not None:
            plain.normalizer = self._backend.normalizer
        if self._backend.pre_tokenizer is not None:
            plain.pre_tokenizer = self._backend.pre_tokenizer
        probe = next((token for token in self.added if token.strip()), "")
        with_token = self._backend.encode(f"{probe}to be, or", add_special_tokens=False).ids
        if with_token[1:] != plain.encode("to be, or", add_special_tokens=False).ids:
            raise _refusal("it encodes a text after an added token differently from the text alone")
        return plain

    def borders(self, text: str) -> list[str]:
        """Added tokens in a text at which it is always split first, whatever is put around it.

        They absorb no white space, are matched in the text before normalisation, and overlap with no other added token.
        """
        return [token for token in self.added if token and token in text and self._is_border(token)]

    def _splits_first(self, token: str) -> bool:
        flags = ("lstrip", "rstrip", "single_word", "normalized")
        made = next(made for made in self.full.added_tokens_decoder.values() if str(made) == token)
        sizes = range(1, len(token))
        return not any(getattr(made, flag, True) for flag in flags) and not any(
            (token in other and token != other)
            or any(other.endswith(token[:size]) or other.startswith(token[size:]) for size in sizes)
            for other in self.added
        )

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        """Text -> ids, with no token added; quoted parts as plain text (see above)."""
        if MARK in text:
            return self._encode_quoted(text)
        if len(text) > _SHORT:
            return self._encode(text)
        ids = self._memory.get(text)
        if ids is None:
            ids = self._encode(text)
            if len(self._memory) < _REMEMBERED:
                self._memory[text] = ids
        return ids.copy()

    def _encode_quoted(self, text: str) -> list[int]:
        """The ids of a text with quoted parts.

        Raises:
            RenderError: This tokenizer cannot encode them as plain text.
        """
        if self._backend is None:
            raise RenderError(
                "text in the conversation spells a special token; this tokenizer cannot encode it as plain text"
            )
        encoding = self._backend.encode(text, add_special_tokens=False)
        ids: list[int] = []
        begin = taken = 0
        offsets = encoding.offsets
        for index, id_ in [*enumerate(encoding.ids), (len(offsets), -1)]:
            if id_ != -1 and id_ not in self.added_ids:
                continue
            start, end = (len(text), len(text)) if id_ == -1 else offsets[index]
            between = text[begin:start]
            if MARK in between:
                plain = self._plain.encode(unquote(between), add_special_tokens=False).ids
                if not self.added_ids.isdisjoint(plain):
                    raise _refusal("its vocabulary holds that text as one piece")
                ids += plain
            else:
                ids += encoding.ids[taken:index]
            if id_ != -1:
                ids.append(id_)
            begin, taken = end, index + 1
        return ids

    def _encode(self, text: str) -> list[int]:
        if self._ascii is not None and len(text) <= _LONG and text.isascii():
            ids = self._ascii.encode(text)
            if ids is None:
                ids = self._encode_between(self._ascii.encode, text)
            if ids is not None:
                return ids
        if self._backend is not None:
            if len(text) > _LONG:  # half the time, and releases the GIL
                return list(self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        return list(self.full.encode(text, add_special_tokens=False))

    def _encode_between(self, encode: Callable[[str], list[int] | None], text: str) -> list[int] | None:
        """The ids of a text that is cut at its added tokens; None where one of them cuts it in another way, or a part
        has no ids."""
        ids: list[int] = []
        at = 0
        for start, end in [*self.quoting.spans(text), (len(text), len(text))]:
            part = encode(text[at:start])
            if part is None:
                return None
            ids += part
            if end > start:
                token = text[start:end]
                if not self._is_border(token):
                    return None
                ids.append(self.added[token])
            at = end
        return ids

    def decode(self, ids: int | Sequence[int] | np.ndarray, *_: Any, **__: Any) -> str:
        """Ids -> text, with special tokens as text. ids: int, or int [tokens]."""
        if isinstance(ids, int):
            ids = [ids]
        plain = ids.tolist() if isinstance(ids, np.ndarray) else ids
        if self._bytes is not None:
            return decoded(self._bytes, plain)
        plain = list(plain)
        if self._backend is not None:
            text: str = self._backend.decode(plain, skip_special_tokens=False)
            return text
        return str(self.full.decode(plain, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def piece(self, id_: int) -> str:
        """The text of one token inside a longer text: SentencePiece's decoders leave out the space of a first token."""
        if self._bytes is None and self._backend is not None:
            piece = self._backend.id_to_token(id_)
            if piece is not None and piece.startswith("▁"):
                return str(piece.replace("▁", " "))
        return self.decode(id_)

    def data_of(self, id_: int) -> bytes:
        """The bytes of one token inside a longer text; those of a part of a character are not UTF-8."""
        if self._bytes is not None:
            return self._bytes[id_]
        if self._backend is not None:
            token = self._backend.id_to_token(id_) or ""
            if id_ not in self.added_ids and _BYTE.fullmatch(token):  # SentencePiece's parts of characters
                return bytes([int(token[3:5], 16)])
        return self.piece(id_).encode()

    def spelled(self, ids: Sequence[int] | np.ndarray) -> tuple[str, list[tuple[int, int]]]:
        """The decoded text, and the characters [start, end) of each added token in it. ids: int [tokens]."""
        parts: list[str] = []
        spans: list[tuple[int, int]] = []
        length = begin = 0
        plain = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        for index in [*(index for index, id_ in enumerate(plain) if id_ in self.added_ids), len(plain)]:
            parts.append(self.decode(plain[begin:index]))
            length += len(parts[-1])
            if index < len(plain):
                parts.append(self.decode(plain[index]))
                spans.append((length, length + len(parts[-1])))
                length += len(parts[-1])
            begin = index + 1
        return "".join(parts), spans

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> Any:
        """As in transformers: an unknown token is `unk_token_id`."""
        if isinstance(tokens, str):
            return self._vocab.get(tokens, self.unk_token_id)
        return [self._vocab.get(token, self.unk_token_id) for token in tokens]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "full":
            raise AttributeError(name)
        return getattr(self.full, name)
