"""Text <-> ids as the model's tokenizer gives them, at the speed of the Rust library below transformers.

Invariant: `encode` adds no special token of its own and reads special tokens that are spelled out, exactly as
`apply_chat_template` does; `decode` leaves nothing out and cleans nothing up. Character offsets are deliberately
not offered: `renderers` then encodes a message in one pass, and skips the attribution that the engine has no use for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from engine.errors import RenderError
from engine.tokens.ascii import ascii_encoder
from engine.tokens.byte_level import BYTE_CHARACTERS, ByteDecoder
from engine.tokens.plain_tokenizer import PlainTokenizer
from engine.tokens.quoting import MARK, LiteralEncoder, Quoting

_BYTE = re.compile("<0x[0-9A-F]{2}>")
_SHORT = 32
"""Longest text, in characters, whose ids are kept: texts that templates repeat."""
_REMEMBERED = 4096
_LONG = 1 << 16
"""A longer text, in characters, is encoded without offsets and without blocking other threads."""


class FastTokenizer:
    """A tokenizer of transformers, called directly.

    Args:
        tokenizer: A tokenizer of transformers, or a `PlainTokenizer`, which has the same names.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.full = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._vocab: dict[str, int] = tokenizer.get_vocab()
        self._memory: dict[str, list[int]] = {}
        self._borders: dict[str, bool] = {}
        byte_level = type(getattr(self._backend, "decoder", None)).__name__ == "ByteLevel"
        self._bytes = ByteDecoder(self._backend, self.size) if byte_level else None
        self.name_or_path: str = getattr(tokenizer, "name_or_path", "")
        self.unk_token_id: int | None = tokenizer.unk_token_id
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self.added: dict[str, int] = {str(token): id_ for id_, token in tokenizer.added_tokens_decoder.items()}
        """Special and added tokens, text -> id: text is split at them before it is tokenised."""
        self.added_ids = frozenset(self.added.values())
        characters = {byte: character for character, byte in BYTE_CHARACTERS.items()}
        self._ascii = None if self._backend is None else ascii_encoder(self._backend, self.added, characters)

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
    def _literal(self) -> LiteralEncoder:
        if self._backend is None:
            raise RenderError(
                "text in the conversation spells a special token; this tokenizer cannot encode it as plain text"
            )
        return LiteralEncoder(self._backend, self.added)

    def borders(self, text: str) -> list[str]:
        """Added tokens in a text at which it is always split first, whatever is put around it.

        They absorb no white space, are matched in the text before normalisation, and overlap with no other added token.
        """
        return [token for token in self.added if token and token in text and self._is_border(token)]

    def _is_border(self, token: str) -> bool:
        known = self._borders.get(token)
        if known is None:
            flags = ("lstrip", "rstrip", "single_word", "normalized")
            made = next(made for made in self.full.added_tokens_decoder.values() if str(made) == token)
            sizes = range(1, len(token))
            known = not any(getattr(made, flag, True) for flag in flags) and not any(
                (token in other and token != other)
                or any(other.endswith(token[:size]) or other.startswith(token[size:]) for size in sizes)
                for other in self.added
            )
            self._borders[token] = known
        return known

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        """Text -> ids, with no token added; quoted parts as plain text (see quoting.py)."""
        if MARK in text:
            return self._literal.encode(text)
        if len(text) > _SHORT:
            return self._encode(text)
        known = self._memory.get(text)
        if known is None:
            known = self._encode(text)
            if len(self._memory) < _REMEMBERED:
                self._memory[text] = known
        return known.copy()

    def _encode(self, text: str) -> list[int]:
        if self._ascii is not None and (known := self._ascii.encode(text)) is not None:
            return known
        if self._backend is not None:
            if len(text) > _LONG:  # half the time, and releases the GIL
                return list(self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
            return ids
        return list(self.full.encode(text, add_special_tokens=False))

    def decode(self, ids: int | Sequence[int] | np.ndarray, *_: Any, **__: Any) -> str:
        """Ids -> text, with special tokens as text. ids: int, or int [tokens]."""
        if isinstance(ids, int):
            ids = [ids]
        plain = ids.tolist() if isinstance(ids, np.ndarray) else ids
        if self._bytes is not None:
            return self._bytes.decode(plain)
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
            return self._bytes.data_of(id_)
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
