"""A tiny but real language model, made on the spot: configuration, weights, tokenizer, chat template.

A tenth of a million parameters of transformers' own Qwen2, with a byte-level BPE tokenizer that knows a few words
whole, so that a model can be trained in seconds on a machine that can reach no hub. Its weights are random: what it
says is noise until it is taught.

Invariant: the same seed gives the same files. Nothing is read but this file's own words.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 512
"""Most tokens of the tokenizer, special ones included; its few words make fewer."""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen2's: transformers gives a Qwen2 model this one, whatever tokenizer.json says."""

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
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from engine.tokens.catalogue import no_bars

    folder.mkdir(parents=True, exist_ok=True)
    ids, size = _tokenizer(folder)
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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    with no_bars():
        model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]], "pad_token_id": ids["<|endoftext|>"]})
    )
    return folder


def _tokenizer(folder: Path) -> tuple[dict[str, int], int]:
    """Train a byte-level BPE tokenizer on a few words and save it: the special tokens' ids, and how many tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL),
        min_frequency=1,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_WORDS, trainer)
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
    )
    fast.save_pretrained(folder)
    vocabulary = tokenizer.get_vocab()
    return {token: vocabulary[token] for token in SPECIAL}, len(vocabulary)
