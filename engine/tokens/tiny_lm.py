"""A tiny but real language model, made locally: configuration, weights, tokenizer, chat template.

A tenth of a million parameters of transformers' own Qwen2, with a byte-level BPE tokenizer with tokens for a few
words, so that a model can be trained in seconds on a machine without a network. Its weights are random: its
replies are noise until it is trained.

Invariant: the same seed gives the same files. No other file is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.tokens.tiny import save_model, save_tokenizer

VOCABULARY = 512
"""Largest number of tokens of the tokenizer, special ones included; its few words give fewer."""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

_WORDS = (
    "system\nuser\nassistant\ntool",
    "Parcel for Bern.\nSent. Parcel for Cork.\nLost. Parcel for Graz.",
    "to Bern Cork Graz Lyon Oslo Pisa Riga Turku",
    "Bern\nCork\nGraz\nLyon\nOslo\nPisa\nRiga\nTurku",
    "gate A B C D",
    "The answer is right. That is wrong. Try again. 0123456789",
)

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def build(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Make the model's folder.

    Args:
        folder: The folder that the files go to; it is created.
        seed: Seed of the weights.
        changes: Changes to the model's configuration.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    ids, size = save_tokenizer(folder, _WORDS, VOCABULARY, SPECIAL, template=CHAT_TEMPLATE, context=2048)
    settings: dict[str, Any] = {
        "vocab_size": size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.05,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "tie_word_embeddings": True,
    }
    config = Qwen2Config(**(settings | changes))
    save_model(folder, lambda: Qwen2ForCausalLM(config), seed, ids)
    return folder
