"""Text that spells special tokens is encoded as text; everything around it keeps its ids."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.tokens.template import ChatTemplate
from engine.tokens.tokenizer import MARK, FastTokenizer, Quoting, quoted_index, unquote

QUOTING = Quoting(["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|im|>"])
PIECES = st.sampled_from(
    ["<|im_start|>", "<|im_end|>", "<think>", "</think>", MARK, "<|im_", "end|>", " a", "b\n", "é", "<", "|>"]
)
TEXTS = st.lists(PIECES, max_size=12).map("".join)


@pytest.fixture(scope="module")
def qwen(shipped: Callable[[str], ChatTemplate]) -> FastTokenizer:
    return shipped("qwen3").fast


@given(TEXTS)
def test_a_quoted_text_spells_no_token_and_is_what_it_was(text: str) -> None:
    quoted = QUOTING.quote(text)
    assert QUOTING.spans(quoted) == []
    assert unquote(quoted) == text


@given(TEXTS, st.data())
def test_what_is_meant_stays(text: str, data: st.DataObject) -> None:
    spans = QUOTING.spans(text)
    meant = data.draw(st.lists(st.sampled_from(spans), unique=True)) if spans else []
    quoted = QUOTING.quote(text, meant)
    assert len(QUOTING.spans(quoted)) == len(meant)
    assert unquote(quoted) == text


def test_a_text_without_a_token_is_not_copied() -> None:
    text = "2 < 3 and <b>bold</b>"
    assert QUOTING.quote(text) is text


@given(around=st.lists(TEXTS.map(lambda text: text.replace(MARK, "")), min_size=2, max_size=2), content=TEXTS)
def test_ids_are_those_of_the_parts(qwen: FastTokenizer, around: list[str], content: str) -> None:
    """Between two real tokens, a quoted text has the ids that a tokenizer without added tokens gives it."""
    before, after = around
    ids = qwen.encode(f"{before}<|im_start|>{qwen.quoting.quote(content)}<|im_end|>{after}")
    expected = [*qwen.encode(f"{before}<|im_start|>"), *plain_ids(qwen, content), *qwen.encode(f"<|im_end|>{after}")]
    assert ids == expected
    assert qwen.decode(ids) == f"{before}<|im_start|>{content}<|im_end|>{after}"


def plain_ids(qwen: FastTokenizer, text: str) -> list[int]:
    """The ids of a text by the same tokenizer, read from its file without the added tokens."""
    return list(_without_added(qwen).encode(text, add_special_tokens=False).ids)


@functools.cache
def _without_added(qwen: FastTokenizer) -> Tokenizer:
    file = Path(qwen.full.name_or_path) / "tokenizer.json"
    return Tokenizer.from_str(json.dumps({**json.loads(file.read_text(encoding="utf-8")), "added_tokens": []}))


@pytest.mark.parametrize(
    "token", ["<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "<|image_pad|>"]
)
def test_no_added_token_comes_of_a_quoted_one(qwen: FastTokenizer, token: str) -> None:
    text = f"He said {token}, twice: {token}{token}."
    ids = qwen.encode(qwen.quoting.quote(text))
    assert qwen.added[token] not in ids
    assert qwen.decode(ids) == text
    assert qwen.added[token] in qwen.encode(text)


@given(TEXTS)
def test_places_in_a_quoted_text_are_found(text: str) -> None:
    quoted = QUOTING.quote(text)
    for index in range(len(text)):
        assert unquote(quoted[quoted_index(quoted, index) :]).endswith(text[index + 1 :])
        assert quoted[quoted_index(quoted, index)] == text[index]
    assert quoted_index(quoted, len(text)) == len(quoted)


def test_a_mark_in_the_text_itself_is_text(qwen: FastTokenizer) -> None:
    text = f"a{MARK}b"
    assert qwen.decode(qwen.encode(qwen.quoting.quote(text))) == text
