"""A tiny but real language model, made on the spot: configuration, weights, tokenizer, chat template.

A tenth of a million parameters of transformers' own Qwen2, with a byte-level BPE tokenizer that knows a few words
whole, so that a model can be trained in seconds on a machine that can reach no hub. Its weights are random: what it
says is noise until it is taught.

Invariant: the same seed gives the same files. Nothing is read but this file's own words.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.tokens.tiny import save_model, save_tokenizer

VOCABULARY = 512
"""Most tokens of the tokenizer, special ones included; its few words make fewer."""
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
        folder: Where to; it is made.
        seed: Seeds the weights.
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
