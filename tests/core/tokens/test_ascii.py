"""Texts encoded by their pieces are what the tokenizer itself makes of them, id for id."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slow_cases import slow_but
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from engine.tokens.byte_level import AsciiEncoder, ascii_encoder
from engine.tokens.plain_tokenizer import QWEN_SPLIT as QWEN2_SPLIT

FOLDER = os.environ.get("EPISODE_ENGINE_TOKENIZERS", "")
CORPUS = [
    "What is 17 plus 25? The answer is 42, don't you think?  I'LL see.",
    "def add(a: int, b: int) -> int:\n    return a + b\n",
    "The quick brown fox jumps over the lazy dog; 0123456789 times.\r\n\tTwice.",
]

LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
SHAPES = {
    "qwen": lambda: pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated"), BYTES]),
    "llama": lambda: pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"), BYTES]),
    "gpt2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    "digits": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "runs of digits": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}
SPECIAL = ["<|im_start|>", "<|im_end|>"]
WORDS = [
    "don't",
    "I'LL",
    "'s",
    "'S",
    "  x",
    "\n\n",
    "\r\n",
    " \n ",
    "12345",
    "3.14",
    "a_b",
    " the",
    "<|im_end|>",
    "<|im",
    "|>",
]
texts = st.lists(st.sampled_from(WORDS) | st.characters(max_codepoint=127), max_size=20).map("".join)


def train(steps: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = steps
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 8, trainer)
    return tokenizer


MADE: dict[int, tuple[Tokenizer, AsciiEncoder | None]] = {}
TRAINED = {name: train(shape()) for name, shape in SHAPES.items()}


def encoder(tokenizer: Tokenizer) -> AsciiEncoder | None:
    if id(tokenizer) not in MADE:
        MADE[id(tokenizer)] = tokenizer, make(tokenizer)
    return MADE[id(tokenizer)][1]


def make(tokenizer: Tokenizer) -> AsciiEncoder | None:
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    return ascii_encoder(tokenizer, added)


def agree(tokenizer: Tokenizer, text: str) -> None:
    ours = encoder(tokenizer)
    assert ours is not None
    for _ in range(2):  # the second time from memory
        found = ours.encode(text)
        if any(token.content in text for token in tokenizer.get_added_tokens_decoder().values()):
            assert found is None
        else:
            assert found == tokenizer.encode(text, add_special_tokens=False).ids


@given(name=st.sampled_from(sorted(TRAINED)), text=texts)
def test_a_text_is_the_ids_of_its_pieces(name: str, text: str) -> None:
    agree(TRAINED[name], text)


@pytest.mark.parametrize("name", slow_but(sorted(TRAINED), "qwen", "digits", "llama"))
def test_every_pair_of_ascii_characters_is_cut_alike(name: str) -> None:
    ours, theirs = encoder(TRAINED[name]), TRAINED[name]
    assert ours is not None
    pairs = [f"{chr(a)}{chr(b)}" for a in range(128) for b in range(128)]
    batch = theirs.encode_batch(pairs, add_special_tokens=False)
    assert [ours.encode(pair) for pair in pairs] == [encoding.ids for encoding in batch]


def test_other_texts_are_left_to_the_tokenizer() -> None:
    ours = encoder(TRAINED["qwen"])
    assert ours is not None
    assert ours.encode("naïve") is None
    assert ours.encode("one <|im_end|> more") is None
    assert ours.encode("a b " * 20_000) is None
    assert ours.encode("") == []


def changed(**changes: Any) -> Tokenizer:
    tokenizer = Tokenizer.from_str(TRAINED["qwen"].to_str())
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return tokenizer


def split(pattern: str, behavior: str = "isolated", *, invert: bool = False) -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior, invert=invert), BYTES])


@pytest.mark.parametrize(
    "tokenizer",
    [
        changed(normalizer=normalizers.Lowercase()),
        changed(normalizer=normalizers.Sequence([normalizers.NFC()])),
        changed(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
        changed(pre_tokenizer=pre_tokenizers.Whitespace()),
        changed(pre_tokenizer=pre_tokenizers.Sequence([BYTES, pre_tokenizers.Digits()])),
        changed(pre_tokenizer=split(QWEN2_SPLIT, "removed")),
        changed(pre_tokenizer=split(QWEN2_SPLIT, "merged_with_next")),
        changed(pre_tokenizer=split(QWEN2_SPLIT, invert=True)),
        changed(pre_tokenizer=split(r"\p{Lu}+|\s+|.")),
        changed(pre_tokenizer=split(r"\w+|\W+")),
        changed(pre_tokenizer=split(r"(a)|[^a]+")),
        changed(model=models.WordPiece({"a": 0}, unk_token="a")),
    ],
)
def test_a_tokenizer_that_takes_other_steps_has_none(tokenizer: Tokenizer) -> None:
    assert encoder(tokenizer) is None


def test_one_that_leaves_tokens_out_by_chance_has_none() -> None:
    tokenizer = changed()
    tokenizer.model.dropout = 0.1
    assert encoder(tokenizer) is None


def test_one_that_cuts_texts_short_or_pads_them_has_none() -> None:
    short, padded = changed(), changed()
    short.enable_truncation(8)
    padded.enable_padding(length=8)
    assert (encoder(short), encoder(padded)) == (None, None)


def test_what_an_expression_leaves_out_is_left_to_the_tokenizer() -> None:
    tokenizer = changed(pre_tokenizer=split(r"[a-z]+"))
    ours = encoder(tokenizer)
    assert ours is not None
    assert ours.encode("abc") == tokenizer.encode("abc", add_special_tokens=False).ids
    assert ours.encode("abc 12") is None


def test_an_added_token_of_letters_is_found() -> None:
    tokenizer = changed()
    tokenizer.add_tokens([AddedToken("apples", normalized=False)])
    ours = encoder(tokenizer)
    assert ours is not None
    assert ours.encode("three apples") is None
    assert ours.encode("an axe") == tokenizer.encode("an axe", add_special_tokens=False).ids


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.tokens.byte_level._REMEMBERED", 10)
    ours = make(TRAINED["qwen"])
    assert ours is not None
    for number in range(100):
        text = f"a{chr(97 + number % 26)}{chr(97 + number // 26)} b"
        assert ours.encode(text) == TRAINED["qwen"].encode(text, add_special_tokens=False).ids
        assert len(ours._ids_of) <= 10


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER, reason="NOT CHECKED ON REAL TOKENIZERS: scripts/fetch_tokenizers.sh brings them")
@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "llama3_1"])
@given(data=st.data())
def test_real_tokenizers_agree(name: str, data: st.DataObject) -> None:
    if name not in REAL:
        REAL[name] = Tokenizer.from_file(str(Path(FOLDER) / name / "tokenizer.json"))
    agree(REAL[name], data.draw(texts))


REAL: dict[str, Tokenizer] = {}
