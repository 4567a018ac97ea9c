"""A byte-level tokenizer's ASCII text -> ids, and its ids -> text, at less cost than the library `tokenizers` has.

Invariant: `AsciiEncoder.encode` gives what the tokenizer gives, or None for a text that the tokenizer must encode: one
that is not ASCII, spells an added token or is very long. `decoded` gives what its `ByteLevel` decoder gives.

Such a tokenizer splits text by a regular expression and merges bytes only inside a piece, so the ids of a text are the
ids of its pieces in order, and each piece is tokenised once. Most of the cost of `encode` is the splitting. For ASCII
text, Python's `re` splits in the same way: character classes, white space and case mean the same there. Text is decoded
by joining the bytes of each id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from math import inf
from typing import Any, TypeVar

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The expression of `ByteLevel(use_regex=True)`."""
_CLASSES = {r"\p{L}": "a-zA-Z", r"\p{N}": "0-9"}
_ESCAPES = frozenset(f"\\{character}" for character in "sSrnt.-/'?()[]+*")
_TOKEN = re.compile(r"\\[pP]\{\^?\w+\}|\\.|\[\^?\]?|.", re.DOTALL)
_LONGEST = 1 << 16
"""Longest text that is encoded here, in characters: the tokenizer releases the GIL, and `re` does not."""
_REMEMBERED = 1 << 17
"""Largest number of pieces whose ids are kept."""

Cut = Callable[[str], list[str]]
K = TypeVar("K")
V = TypeVar("V")


_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_CHARACTERS = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + at): byte for at, byte in enumerate(_OTHERS)}
"""Character -> the byte that it stands for in a byte-level vocabulary: printable ones stand for themselves, and the
others are written from U+0100 on."""
_CHARACTERS = {byte: character for character, byte in BYTE_CHARACTERS.items()}


class ByKey(dict[K, V]):
    """Key -> what `make` gives for it, made once: `map` and its `__getitem__` look up many at the cost of a dict.

    Args:
        make: Key -> value.
        most: Largest number of values that are kept; all are made again when there are more.
    """

    def __init__(self, make: Callable[[K], V], most: float = inf) -> None:
        self._make = make
        self._most = most

    def __missing__(self, key: K) -> V:
        value = self._make(key)
        if len(self) >= self._most:
            self.clear()
        self[key] = value
        return value


def bytes_by_id(backend: Any) -> ByKey[int, bytes]:
    """Id -> its bytes, of a `tokenizers.Tokenizer` whose decoder is `ByteLevel`; none where it is not in the
    vocabulary. A negative id raises OverflowError.
    """

    def data_of(id_: int) -> bytes:
        token = backend.id_to_token(id_)
        if token is None:  # not in the vocabulary: decoders leave it out
            return b""
        try:
            return bytes([BYTE_CHARACTERS[character] for character in token])
        except KeyError:  # an added token, which is text as it stands
            return str(token).encode()

    return ByKey(data_of)


def decoded(data: ByKey[int, bytes], ids: Iterable[int]) -> str:
    """Ids -> text, by the bytes of each id. Bytes that are not UTF-8 become U+FFFD."""
    return b"".join(map(data.__getitem__, ids)).decode("utf-8", "replace")


class AsciiEncoder:
    """Encodes ASCII texts of one tokenizer; made by `ascii_encoder`."""

    def __init__(self, model: Any, cuts: Sequence[Cut], added: Iterable[str]) -> None:
        self._first, *self._then = cuts

        def ids_of(piece: str) -> list[int]:
            return [token.id for token in model.tokenize(piece.translate(_CHARACTERS))]

        self._ids_of = ByKey(ids_of, _REMEMBERED)
        tokens = sorted({token for token in added if token})
        self._starts = sorted({token[0] for token in tokens})
        self._added = re.compile("|".join(map(re.escape, tokens)) or "(?!)").search

    def encode(self, text: str) -> list[int] | None:
        """The ids of a text, with no token added; None where the tokenizer must encode it."""
        if len(text) > _LONGEST or not text.isascii():
            return None
        for start in self._starts:
            if start in text:
                if self._added(text):
                    return None
                break
        pieces = self._first(text)
        for cut in self._then:
            pieces = [part for piece in pieces for part in cut(piece)]
        if "".join(pieces) != text:  # what the expression leaves out is a piece too
            return None
        return list(chain.from_iterable(map(self._ids_of.__getitem__, pieces)))


def ascii_encoder(backend: Any, added: Iterable[str]) -> AsciiEncoder | None:
    """An encoder for a `tokenizers.Tokenizer`; None where it has steps that are not known here.

    Args:
        backend: The tokenizer.
        added: Its added tokens: text is split at them first.
    """
    model = backend.model
    if type(model).__name__ != "BPE" or model.dropout or backend.truncation or backend.padding:
        return None
    if backend.normalizer is not None and _state(backend.normalizer) != {"type": "NFC"}:  # ASCII is in that form
        return None
    if backend.pre_tokenizer is None:
        return None
    cuts = _cuts(_state(backend.pre_tokenizer))
    return AsciiEncoder(model, cuts, added) if cuts else None


def _state(step: Any) -> Any:
    """A step of a tokenizer, as in tokenizer.json."""
    try:
        return json.loads(step.__getstate__())
    except Exception:  # noqa: BLE001  (a step that is written in Python raises a bare Exception)
        return {"type": None}


def _cuts(step: dict[str, Any]) -> list[Cut] | None:
    """Functions that split as the steps of a pre-tokenizer do; None where a step is not known, or the last is not
    ByteLevel."""
    steps = step["pretokenizers"] if step["type"] == "Sequence" else [step]
    if not steps or [step["type"] == "ByteLevel" for step in steps] != [False] * (len(steps) - 1) + [True]:
        return None
    cuts: list[Cut] = []
    for splitter in steps:
        cut: Cut | None = None
        match splitter:
            case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
                cut = _by(pattern)
            case {"type": "Digits", "individual_digits": bool(single)}:
                cut = re.compile("[0-9]|[^0-9]+" if single else "[0-9]+|[^0-9]+").findall
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
                cut = _by(_GPT2)
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}:
                continue
        if cut is None:
            return None
        cuts.append(cut)
    return cuts


def _by(pattern: str) -> Cut | None:
    """Splits ASCII text by a regular expression of `tokenizers`; None where the expression has parts that are not known
    here."""
    parts: list[str] = []
    inside = False
    for token in _TOKEN.findall(pattern):
        if token in _CLASSES:
            parts.append(_CLASSES[token] if inside else f"[{_CLASSES[token]}]")
            continue
        if token.startswith("[") or (token.startswith("\\") and token not in _ESCAPES):
            if inside or not token.startswith("["):
                return None
            inside = True
        elif token == "]":
            inside = False
        parts.append(token)
    try:
        compiled = re.compile("".join(parts), re.ASCII)
    except re.error:
        return None
    return compiled.findall if not compiled.groups and "&&" not in pattern else None
