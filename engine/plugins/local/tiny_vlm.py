"""A tiny but real Qwen2.5-VL, made locally: configuration, weights, tokenizer, chat template, image processor.

Under half a million parameters of transformers' own classes, so that every part of a vision episode runs on a machine
without a network. Its weights are random: its replies are noise, but every token and log-prob is exact.

Invariant: the same seed gives the same files. No other file is read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.plugins.local.tiny_lm import save_model, save_tokenizer
from engine.tokens.catalogue import MadeEntry

ENTRY = MadeEntry(
    name="tiny-qwen2_5-vl",
    recipe="engine.plugins.local.tiny_vlm:build",
    teach="python scripts/make_tiny_vlm.py models/tiny-vlm --teach 150 --right 0.4",
    taught="models/tiny-vlm",
    parameters="0.35M, random",
    disk_mb=2,
)
"""Its name in the catalogue."""
VOCABULARY = 1024
"""Largest number of tokens of the tokenizer, special ones included; its few words give fewer."""
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
MARKUP = ("<tool_call>", "</tool_call>")
"""Added tokens that are not special, as in Qwen2.5."""

_WORDS = (
    "What colour is the square? And this one? Right. No. Answer in one word.",
    "red green blue yellow purple orange The square is red. The colour is blue. It is green.",
    "In the figure, find the value of x. Give a numeric answer, rounded to two decimal places if it is not an integer.",
    "Find the measure of angle ABC in degrees. The answer is \\boxed{12}. \\frac{1}{2} \\sqrt{3} <answer>5</answer>",
    "That is not right. Read the question again, check your steps, and answer again. 0123456789",
    '{"name": "calc_score", "arguments": {"answer": "12"}} {"type": "function", "function": {"description": "", '
    '"parameters": {"type": "object", "properties": {}, "required": []}}}',
    "You are a helpful assistant. Call calc_score with your answer. Your tool call could not be read.",
)

CHAT_TEMPLATE = """\
{%- macro said(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}{%- for part in content -%}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif 'text' in part -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- if messages[0].role == 'system' or tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0].role == 'system' -%}{{ said(messages[0].content) }}{%- endif -%}
{%- if tools -%}
{{- '\\n\\n# Tools\\n' -}}
{%- for tool in tools -%}{{ tool | tojson }}{{ '\\n' }}{%- endfor -%}
{{- 'Call one so:\\n<tool_call>\\n{"name": "<name>", "arguments": {...}}\\n</tool_call>' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
{{- '\\n<tool_response>\\n' -}}{{ said(message.content) }}{{- '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{ '<|im_end|>\\n' }}{%- endif -%}
{%- elif message.role != 'system' -%}
{{- '<|im_start|>' + message.role + '\\n' -}}{{ said(message.content) }}
{%- for call in message.tool_calls or [] -%}
{%- if not loop.first or message.content -%}{{ '\\n' }}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""


def build(folder: Path, seed: int = 0, **text: Any) -> Path:
    """Make the model's folder.

    Args:
        folder: The folder that the files go to; it is created.
        seed: Seed of the weights.
        text: Changes to the language model's configuration.
    """
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    ids, size = save_tokenizer(folder, _WORDS, VOCABULARY, SPECIAL, markup=MARKUP, template=CHAT_TEMPLATE, context=8192)
    # Qwen2-VL's image processor, in the file that both transformers and SGLang read
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": 4 * 28 * 28,
        "max_pixels": 256 * 28 * 28,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": size,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 8192,
            "initializer_range": 0.2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
            "tie_word_embeddings": True,
        }
        | text,
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.1,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    save_model(folder, lambda: Qwen2_5_VLForConditionalGeneration(config), seed, ids)
    return folder
