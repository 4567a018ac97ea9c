"""Decoding of byte-level vocabularies: each id is looked up as bytes, and the bytes are joined.

Invariant: `ByteDecoder.decode` gives what the `ByteLevel` decoder of the library `tokenizers` gives.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    """

    def __init__(self, backend: Any) -> None:
        self._bytes_of = _Pieces(backend).__getitem__

    def decode(self, ids: Iterable[int]) -> str:
        """Ids -> text. Bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self._bytes_of, ids)).decode("utf-8", "replace")
