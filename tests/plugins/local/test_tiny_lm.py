"""The tiny language model is transformers' own class, the same for the same seed, and can be taught to answer."""

from __future__ import annotations

import filecmp
import json
import runpy
from itertools import pairwise
from pathlib import Path

import pytest

from engine.plugins.local.tiny_lm import SPECIAL, build

SCRIPT = Path(__file__).parents[3] / "scripts" / "make_tiny_lm.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("tiny") / "lm")


def test_the_same_seed_makes_the_same_files(folder: Path, tmp_path: Path) -> None:
    again, other = build(tmp_path / "again"), build(tmp_path / "other", seed=1)
    names = sorted(file.name for file in folder.iterdir())
    assert names == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert filecmp.cmpfiles(folder, again, names, shallow=False) == (names, [], [])
    assert filecmp.cmpfiles(folder, other, names, shallow=False)[1] == ["model.safetensors"]


def test_every_id_of_the_model_is_a_token_and_its_words_are_whole(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == len(tokenizer)
    ids = tokenizer.convert_tokens_to_ids(list(SPECIAL))
    assert ids == list(range(len(tokenizer) - 3, len(tokenizer)))
    assert tokenizer.tokenize("Parcel for Lyon.") == ["Parcel", "Ġfor", "ĠLyon", "."]
    assert tokenizer.tokenize("Lyon B<|im_end|>") == ["Lyon", "ĠB", "<|im_end|>"]
    text = "Ünïcode \U0001f600 12.5\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_its_template_only_extends_itself(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [
        {"role": "user", "content": "Parcel for Lyon."},
        {"role": "assistant", "content": "Lyon B"},
        {"role": "user", "content": "Sent."},
    ]
    seen = [tokenizer.apply_chat_template(messages[:count], tokenize=False) for count in range(1, 4)]
    assert seen[-1] == (
        "<|im_start|>user\nParcel for Lyon.<|im_end|>\n<|im_start|>assistant\nLyon B<|im_end|>\n"
        "<|im_start|>user\nSent.<|im_end|>\n"
    )
    assert [later.startswith(sooner) for sooner, later in pairwise(seen)] == [True, True]


def test_lessons_name_the_town_and_any_gate(folder: Path) -> None:
    lessons = runpy.run_path(str(SCRIPT))["Lessons"](folder, seed=0)
    batch = lessons.batch(2, 2)
    tokenizer = lessons._tokenizer
    own = [[token for token in row if token != -100] for row in batch["labels"].tolist()]
    assert [tokenizer.decode(row) for row in own] == [
        "Riga D<|im_end|>Bern D<|im_end|>",
        "Riga C<|im_end|>Turku B<|im_end|>",
    ]
    said = tokenizer.decode(batch["input_ids"][0][batch["attention_mask"][0].bool()])
    assert said.startswith("<|im_start|>user\nParcel for Riga.<|im_end|>\n<|im_start|>assistant\nRiga D<|im_end|>\n")


@pytest.mark.slow
def test_a_short_lesson_teaches_it_to_read(tmp_path: Path) -> None:
    folder = build(tmp_path / "lm")
    assert runpy.run_path(str(SCRIPT))["teach"](folder, 100, 0) > 0.95
