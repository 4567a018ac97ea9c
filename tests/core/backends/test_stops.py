from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.backends.stops import StopStrings


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_tokenizer_dir)


def test_only_the_token_that_completes_the_string_matches(tokenizer: Any) -> None:
    ids = tokenizer.encode("The answer is <answer>42</answer> and so on")
    stops = StopStrings(tokenizer.decode, ["</answer>"])
    found = [at for at in range(1, len(ids) + 1) if stops.matched(ids[:at])]
    end = found[0]
    assert "</answer>" in tokenizer.decode(ids[:end])
    assert "</answer>" not in tokenizer.decode(ids[: end - 1])
    assert stops.first(ids) == (end, "</answer>")


def test_the_overshooting_token_is_kept(tokenizer: Any) -> None:
    ids = tokenizer.encode("jumps over")
    inside = tokenizer.decode(ids[:1])[1:3]  # ends inside the first token
    assert StopStrings(tokenizer.decode, [inside]).first(ids) == (1, inside)


def test_the_earliest_of_several_strings_matches(tokenizer: Any) -> None:
    ids = tokenizer.encode("brown fox")
    assert StopStrings(tokenizer.decode, ["fox", "brown"]).first(ids)[1] == "brown"


def test_special_tokens_can_be_stop_strings(tokenizer: Any) -> None:
    ids = tokenizer.encode("fox<|im_end|>")
    assert StopStrings(tokenizer.decode, ["<|im_end|>"]).first(ids) == (len(ids), "<|im_end|>")


def test_no_strings_stop_nothing(tokenizer: Any) -> None:
    stops = StopStrings(tokenizer.decode, [])
    assert not stops
    assert stops.matched([1, 2]) is None
    assert stops.first([1, 2]) is None


@given(text=st.text(alphabet="ab<é漢 ", max_size=60), string=st.text(alphabet="ab<é漢 ", min_size=1, max_size=6))
def test_a_string_is_found_exactly_when_the_whole_text_holds_it(tokenizer: Any, text: str, string: str) -> None:
    ids = tokenizer.encode(text)
    whole = [at for at in range(1, len(ids) + 1) if string in tokenizer.decode(ids[:at])]
    expected = (whole[0], string) if whole else None
    assert StopStrings(tokenizer.decode, [string]).first(ids) == expected
