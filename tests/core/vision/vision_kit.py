"""Tiny but real vision-language models of three families, with their real processors and chat templates."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

QWEN_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
TILE_TOKENS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
TILE_TOKENS += [f"<row_{row}_col_{col}>" for row in range(1, 5) for col in range(1, 5)]
MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
WORDS = [
    "What colour is the square? And this one? Right. No. Answer in one word. You are a helpful assistant.",
    "red green blue yellow purple orange The square is red. The colour is blue. It is green. Why though?",
    '{"name": "look", "arguments": {"where": "left"}} tool user assistant system parameters type object function',
    "User: Assistant: The answer is \\boxed{12}. 0123456789 First 12 things. Because it is so, and so on.",
]
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

THINKING_VL = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and message.reasoning_content and loop.index0 > ns.last %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}
{%- if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Strips the reasoning of old replies when a user speaks, as thinking vision-language models' templates do."""


def template(name: str) -> str:
    """A chat template as trl ships it: the model's own."""
    found = importlib.util.find_spec("trl")
    assert found is not None
    assert found.origin is not None
    return (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def make_tokenizer(folder: Path, chat_template: str, special: list[str], end: str) -> dict[str, int]:
    """A byte-level BPE tokenizer, cut as Qwen2's cuts; its added tokens' ids."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=600, min_frequency=1, show_progress=False, initial_alphabet=alphabet)
    core.train_from_iterator(WORDS, trainer)
    core.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *special])
    core.add_tokens([AddedToken(text, normalized=False) for text in MARKUP])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=end, pad_token="<|endoftext|>", chat_template=chat_template
    )
    fast.save_pretrained(folder)
    return {**core.get_vocab()}


def build_qwen25(folder: Path, chat_template: str | None = None) -> Path:
    """Qwen2.5-VL, 0.3 M parameters, float32."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    ids = make_tokenizer(folder, chat_template or template("qwen2_5_vl"), QWEN_TOKENS, "<|im_end|>")
    text = _text(ids, mrope=[2, 3, 3])
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 64}
    vision |= {"fullatt_block_indexes": [1], "initializer_range": 0.1}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_qwen_ids(ids), tie_word_embeddings=True)
    torch.manual_seed(0)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    return _processor(folder, "Qwen2_5_VLProcessor", patch_size=14, ids=ids)


def build_qwen2(folder: Path, chat_template: str | None = None) -> Path:
    """Qwen2-VL, float32."""
    import torch
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    ids = make_tokenizer(folder, chat_template or template("qwen2_5_vl"), QWEN_TOKENS, "<|im_end|>")
    vision = {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2, "initializer_range": 0.1}
    config = Qwen2VLConfig(
        text_config=_text(ids, mrope=[2, 3, 3]), vision_config=vision, **_qwen_ids(ids), tie_word_embeddings=True
    )
    torch.manual_seed(0)
    Qwen2VLForConditionalGeneration(config).save_pretrained(folder)
    return _processor(folder, "Qwen2VLProcessor", patch_size=14, ids=ids)


def build_qwen3(folder: Path, chat_template: str | None = None) -> Path:
    """Qwen3-VL, with its deepstack, float32."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    ids = make_tokenizer(folder, chat_template or template("qwen3_vl"), QWEN_TOKENS, "<|im_end|>")
    text = _text(ids, mrope=[4, 2, 2]) | {"head_dim": 16}
    text["rope_parameters"]["mrope_interleaved"] = True
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 64}
    vision |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64, "initializer_range": 0.1}
    config = Qwen3VLConfig(text_config=text, vision_config=vision, **_qwen_ids(ids), tie_word_embeddings=True)
    torch.manual_seed(0)
    Qwen3VLForConditionalGeneration(config).save_pretrained(folder)
    return _processor(folder, "Qwen3VLProcessor", patch_size=16, ids=ids)


def build_smolvlm(folder: Path, chat_template: str | None = None) -> Path:
    """SmolVLM: images in tiles of 32 x 32, four placeholders each, float32."""
    import torch
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    ids = make_tokenizer(folder, chat_template or template("smolvlm"), TILE_TOKENS, "<end_of_utterance>")
    text = _text(ids) | {"model_type": "llama", "eos_token_id": ids["<end_of_utterance>"]}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision |= {"image_size": 32, "patch_size": 8}
    config = SmolVLMConfig(
        text_config=text, vision_config=vision, scale_factor=2, image_token_id=ids["<image>"],
        pad_token_id=ids["<|endoftext|>"], tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    SmolVLMForConditionalGeneration(config).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(
        json.dumps(
            {
                "image_processor_type": "SmolVLMImageProcessor",
                "processor_class": "SmolVLMProcessor",
                "size": {"longest_edge": 64},
                "max_image_size": {"longest_edge": 32},
                "do_image_splitting": True,
            }
        )
    )
    return folder


def build_idefics3(folder: Path, chat_template: str | None = None) -> Path:
    """Idefics3: as SmolVLM, by its own classes."""
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    source = chat_template or template("idefics3").replace("<|begin_of_text|>", "<|im_start|>")
    folder.mkdir(parents=True, exist_ok=True)
    ids = make_tokenizer(folder, source, TILE_TOKENS, "<end_of_utterance>")
    text = _text(ids) | {"model_type": "llama", "eos_token_id": ids["<end_of_utterance>"]}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision |= {"image_size": 32, "patch_size": 8}
    config = Idefics3Config(
        text_config=text, vision_config=vision, scale_factor=2, image_token_id=ids["<image>"],
        pad_token_id=ids["<|endoftext|>"], tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    settings = {"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 64}}
    settings |= {"processor_class": "Idefics3Processor", "max_image_size": {"longest_edge": 32}}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


BUILDERS = {
    "qwen2_vl": build_qwen2,
    "qwen2_5_vl": build_qwen25,
    "qwen3_vl": build_qwen3,
    "smolvlm": build_smolvlm,
    "idefics3": build_idefics3,
}


def _text(ids: dict[str, int], mrope: list[int] | None = None) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    return {
        "vocab_size": len(ids),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "rope_parameters": rope | ({"mrope_section": mrope} if mrope else {}),
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "tie_word_embeddings": True,
    }


def _qwen_ids(ids: dict[str, int]) -> dict[str, int]:
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    names |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    return {key: ids[token] for key, token in names.items()}


def _processor(folder: Path, name: str, *, patch_size: int, ids: dict[str, int]) -> Path:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids["<|im_end|>"]}))
    mean, std = ([0.5] * 3, [0.5] * 3) if patch_size == 16 else ([0.48, 0.46, 0.41], [0.27, 0.26, 0.28])
    side = 2 * patch_size
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": name,
        "min_pixels": 4 * side * side,
        "max_pixels": 64 * side * side,
        "patch_size": patch_size,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": mean,
        "image_std": std,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def square(color: str, width: int = 64, height: int = 64) -> bytes:
    """A PNG of a coloured square on white."""
    image = Image.new("RGB", (width, height), "white")
    ImageDraw.Draw(image).rectangle((width // 4, height // 4, width // 2, height // 2), fill=color)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
