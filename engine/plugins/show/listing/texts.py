"""The text of tokens, from the tokenizer of a run's model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from engine.errors import EngineError
from engine.schemas.model import ModelSpec

if TYPE_CHECKING:
    from engine.store.reader import RunReader
    from engine.tokens.tokenizer import FastTokenizer

_LONGEST = 8
"""Maximum number of tokens that are decoded together: no character has more bytes than that many tokens."""
_PARTIAL = "\ufffd"


class TokenTexts:
    """Decodes ids one by one.

    Args:
        tokenizer: The tokenizer; None if it cannot be loaded.
        problem: Why it cannot be loaded.
    """

    def __init__(self, tokenizer: FastTokenizer | None, problem: str = "") -> None:
        self._tokenizer = tokenizer
        self.problem = problem
        self._known: dict[int, str] = {}

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, int [tokens]; empty without a tokenizer."""
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(list(ids))

    def each(self, ids: Sequence[int]) -> list[str] | None:
        """Return a text for each of the ids, int [tokens]; None without a tokenizer.

        A character whose bytes are split over several tokens is the text of the first of them; the others have an empty text.
        """
        if self._tokenizer is None:
            return None
        texts: list[str] = []
        while len(texts) < len(ids):
            at = len(texts)
            text, count = self._one(ids[at]), 1
            while _PARTIAL in text and count < _LONGEST and at + count < len(ids):
                joined = self.decode(ids[at : at + count + 1])
                count += 1
                if _PARTIAL not in joined:
                    text = joined
                    break
            else:
                count = 1  # no following token completes it
            texts += [text, *[""] * (count - 1)]
        return texts

    def _one(self, id_: int) -> str:
        text = self._known.get(id_)
        if text is None:
            text = self._known[id_] = self._decode_one(id_)
        return text

    def _decode_one(self, id_: int) -> str:
        assert self._tokenizer is not None
        if not 0 <= id_ < self._tokenizer.size:
            return f"<{id_}>"
        return self._tokenizer.piece(id_)


@lru_cache(maxsize=8)
def _load(model: str, base: str) -> TokenTexts:
    from engine.tokens.loading import load_tokenizer

    try:
        return TokenTexts(load_tokenizer(ModelSpec.model_validate_json(model), Path(base)))
    except EngineError as error:
        return TokenTexts(None, str(error))
    except (OSError, ValueError) as error:
        return TokenTexts(None, f"the tokenizer cannot be loaded: {error}")


_LOADING = Lock()


def texts_of(store: RunReader) -> TokenTexts:
    """Return the texts of the tokens of a run's model. The tokenizer is loaded once; a failure is kept too."""
    try:
        model = store.header.model.model_dump_json(by_alias=True)
    except (ValueError, KeyError) as error:
        return TokenTexts(None, f"the run's `model` cannot be read: {error}")
    with _LOADING:
        return _load(model, str(store.header.base))
