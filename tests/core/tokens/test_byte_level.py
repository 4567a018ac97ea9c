"""Ids decoded by their bytes are what the library makes of them, whichever ids occurred before."""

from __future__ import annotations

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.tokens.byte_level import BYTE_CHARACTERS, bytes_by_id, decoded

VOCAB = {character: 2 * at for at, character in enumerate(BYTE_CHARACTERS)}
"""Every second id is in no vocabulary."""
SIZE = 2 * len(VOCAB)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE(vocab=VOCAB, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|é|>", special=True)])
    return made


@given(calls=st.lists(st.lists(st.integers(0, SIZE + 2), max_size=6), min_size=1, max_size=4))
@settings(max_examples=examples(100), deadline=None)
def test_ids_are_decoded_as_the_library_does(tokenizer: Tokenizer, calls: list[list[int]]) -> None:
    data = bytes_by_id(tokenizer)
    for ids in calls:
        assert decoded(data, ids) == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("negative", [-1, -2, 1 - SIZE, -SIZE, -SIZE - 2, 1 - 2 * SIZE, -2 * SIZE, -(2**31)])
def test_a_negative_id_is_refused_as_the_library_does(tokenizer: Tokenizer, negative: int) -> None:
    data = bytes_by_id(tokenizer)
    decoded(data, range(SIZE))
    for ids in ([negative], [0, negative]):
        with pytest.raises(OverflowError):
            tokenizer.decode(ids)
        with pytest.raises(OverflowError):
            decoded(data, ids)
