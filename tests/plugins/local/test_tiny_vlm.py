"""The tiny model is Qwen2.5-VL's own classes from end to end, and the same for the same seed."""

from __future__ import annotations

import filecmp
import json
from itertools import pairwise
from pathlib import Path

import pytest

from engine.plugins.local.tiny_vlm import MARKUP, SPECIAL, build


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("tiny") / "vlm")


def test_the_same_seed_makes_the_same_files(folder: Path, tmp_path: Path) -> None:
    again, other = build(tmp_path / "again"), build(tmp_path / "other", seed=1)
    names = sorted(file.name for file in folder.iterdir())
    assert names == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert filecmp.cmpfiles(folder, again, names, shallow=False) == (names, [], [])
    assert filecmp.cmpfiles(folder, other, names, shallow=False)[1] == ["model.safetensors"]


def test_every_id_of_the_model_is_a_token(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["text_config"]["vocab_size"] == len(tokenizer)
    ids = tokenizer.convert_tokens_to_ids([*SPECIAL, *MARKUP])
    assert ids == list(range(len(tokenizer) - 10, len(tokenizer)))
    assert [config[f"{name}_token_id"] for name in ("vision_start", "vision_end", "image", "video")] == [
        tokenizer.convert_tokens_to_ids(f"<|{name}|>")
        for name in ("vision_start", "vision_end", "image_pad", "video_pad")
    ]
    text = "What colour is the square? Ünïcode \U0001f600 12.5\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_picture_goes_through_the_real_processor_and_model(folder: Path) -> None:
    import torch
    from PIL import Image
    from transformers import AutoImageProcessor, AutoTokenizer, Qwen2_5_VLForConditionalGeneration

    processor, tokenizer = AutoImageProcessor.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder).eval()
    assert sum(weight.numel() for weight in model.parameters()) < 400_000
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What colour is the square?"}]}
    ]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert prompt.count(pad) == 1

    def logits(color: str) -> torch.Tensor:
        pixels = processor(images=[Image.new("RGB", (64, 64), color)], return_tensors="pt")
        assert pixels["image_grid_thw"].tolist() == [[1, 4, 4]]
        ids = torch.tensor([[token for id_ in prompt for token in [id_] * (4 if id_ == pad else 1)]])
        with torch.no_grad():
            return model(input_ids=ids, mm_token_type_ids=(ids == pad).int(), **pixels).logits[0, -1]

    assert not torch.equal(logits("red"), logits("blue"))  # it sees
    assert torch.equal(logits("red"), logits("red"))


def test_its_template_shows_every_part_and_only_extends_itself(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "q"}]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "r"}, {"type": "image"}]},
        {"role": "assistant", "content": "a"},
    ]
    seen = [tokenizer.apply_chat_template(messages[:count], tokenize=False) for count in range(1, 6)]
    vision = "<|vision_start|><|image_pad|><|vision_end|>"
    assert seen[-1] == (
        f"<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n{vision}q<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>\n'
        f"<|im_start|>user\n<tool_response>\nr{vision}\n</tool_response><|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    )
    assert [later.startswith(sooner) for sooner, later in pairwise(seen)] == [True] * 4
