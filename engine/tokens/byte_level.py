"""Ids of a byte-level vocabulary -> their text, by joining the bytes of each.

Invariant: `ByteDecoder.decode` gives what the `ByteLevel` decoder of the library `tokenizers` gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any


def _byte_characters() -> dict[str, int]:
    """Character -> byte, as byte-level vocabularies write bytes: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


BYTE_CHARACTERS = _byte_characters()
"""Character -> the byte that it stands for in a byte-level vocabulary."""


class _Pieces(dict[int, bytes]):
    """Id -> its bytes, filled when an id occurs first."""

    def __init__(self, backend: Any) -> None:
        self._token = backend.id_to_token

    def __missing__(self, id_: int) -> bytes:
        token = self._token(id_)
        if token is None:  # not in the vocabulary: decoders leave it out
            piece = b""
        else:
            try:
                piece = bytes([BYTE_CHARACTERS[character] for character in token])
            except KeyError:  # an added token, which is text as it stands
                piece = token.encode()
        self[id_] = piece
        return piece


class ByteDecoder:
    """Decodes ids of one tokenizer.

    Args:
        backend: The `tokenizers.Tokenizer`; its decoder is `ByteLevel`.
        size: One past the largest id.
    """

    def __init__(self, backend: Any, size: int) -> None:
        self._bytes_of = _Pieces(backend)
        self._known: list[bytes | None] = [None] * size
        """By id: its bytes, once it has occurred."""

    def data_of(self, id_: int) -> bytes:
        """The bytes of one id; none where it is not in the vocabulary."""
        return self._bytes_of[id_]

    def decode(self, ids: Sequence[int]) -> str:
        """Ids -> text. Bytes that are not UTF-8 become U+FFFD.

        Raises:
            OverflowError: An id is negative.
        """
        known = self._known
        if len(ids) > 1 and min(ids) >= 0:
            try:  # `itemgetter` looks all of them up in one call, which costs less than `map`
                return b"".join(itemgetter(*ids)(known)).decode("utf-8", "replace")
            except (TypeError, IndexError):  # an id occurs for the first time, or is not in the vocabulary
                for id_ in ids:
                    if id_ < len(known):
                        known[id_] = self._bytes_of[id_]
        return b"".join(map(self._bytes_of.__getitem__, ids)).decode("utf-8", "replace")
