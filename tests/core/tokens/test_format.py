"""Loading a format: sizes, limits, stop tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from engine.errors import RenderError
from engine.schemas.message import ImagePart, Message, TextPart
from engine.schemas.model import ModelSpec
from engine.tokens.loading import load_format


def test_sizes_and_stop_tokens_come_from_the_models_files(tmp_path: Path, tokenizer_dirs: dict[str, Path]) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tokenizer_dirs["plain"], folder)
    bare = load_format(ModelSpec(path="model"), tmp_path)  # relative to the spec's folder
    assert (bare.vocab_size, bare.context, bare.stop_token_ids) == (448, None, bare.encode("<|im_end|>"))
    (folder / "config.json").write_text(
        json.dumps({"vocab_size": 512, "max_position_embeddings": 64, "model_type": "x"})
    )
    ends = [bare.encode("<|endoftext|>")[0], bare.encode("<|im_end|>")[0]]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    form = load_format(ModelSpec(path="model"), tmp_path)
    assert (form.vocab_size, form.context, form.stop_token_ids) == (512, 64, ends[::-1])
    assert load_format(ModelSpec(path="model", context=32), tmp_path).context == 32
    (folder / "config.json").write_text(
        json.dumps({"text_config": {"vocab_size": 600, "max_position_embeddings": 128}})
    )
    nested = load_format(ModelSpec(path="model"), tmp_path)
    assert (nested.vocab_size, nested.context) == (600, 128)


def test_a_tokenizer_may_be_another_models(tmp_path: Path, tokenizer_dirs: dict[str, Path]) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"vocab_size": 448, "max_position_embeddings": 64, "model_type": "x"})
    )
    form = load_format(ModelSpec(path="weights", tokenizer=str(tokenizer_dirs["plain"])), tmp_path)
    assert (form.name, form.context) == ("template", 64)
    with pytest.raises(RenderError, match="no tokenizer can be loaded from"):
        load_format(ModelSpec(path="weights"), tmp_path)


def test_an_image_is_refused_by_a_format_that_shows_none(tokenizer_dirs: dict[str, Path]) -> None:
    form = load_format(ModelSpec(path=str(tokenizer_dirs["plain"])), Path())
    message = Message(role="user", content=[TextPart(text="What is this?"), ImagePart(image="sha256:00")])
    with pytest.raises(RenderError, match="shows no images"):
        form.render([message])
    parts = Message(role="user", content=[TextPart(text="a"), TextPart(text="b")])
    assert form.render([parts]) == form.render([Message(role="user", content="ab")])


def test_an_opening_is_rendered_once_for_all_samples_of_a_task(tmp_path: Path, tokenizer_dirs: dict[str, Path]) -> None:
    form = load_format(ModelSpec(path=str(tokenizer_dirs["plain"])), tmp_path)
    hello, other = [{"role": "user", "content": "hello"}], [{"role": "user", "content": "hallo"}]
    first = form.render_opening(hello)
    assert first.tolist() == form.render(hello)
    assert form.render_opening(list(map(dict, hello))) is first
    assert form.render_opening(other).tolist() == form.render(other) != first.tolist()
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1


def test_encoding_and_decoding_lose_nothing(tokenizer_dirs: dict[str, Path]) -> None:
    form = load_format(ModelSpec(path=str(tokenizer_dirs["plain"])), Path())
    text = " Hello , 你好 <|im_end|>\n\n<think> x"
    ids = form.encode(text)
    assert ids == form.tokenizer.encode(text, add_special_tokens=False)
    assert form.decode(ids) == text
    short = form.encode("user\n")
    short.append(0)  # what is remembered is not handed out
    assert form.encode("user\n") == form.tokenizer.encode("user\n", add_special_tokens=False)
