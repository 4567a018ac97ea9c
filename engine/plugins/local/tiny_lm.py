"""A tiny but real language model, made locally: configuration, weights, tokenizer, chat template.

A tenth of a million parameters of transformers' own Qwen2, with a byte-level BPE tokenizer with tokens for a few
words, so that a model can be trained in seconds on a machine without a network. Its weights are random: its
replies are noise until it is trained.

Invariant: the same seed gives the same files. No other file is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine.tokens.catalogue import MadeEntry, no_bars
from engine.tokens.plain_tokenizer import QWEN_SPLIT

ENTRY = MadeEntry(
    name="tiny-qwen2",
    recipe="engine.plugins.local.tiny_lm:build",
    teach="python scripts/make_tiny_lm.py models/tiny-lm --teach 200",
    taught="models/tiny-lm",
    parameters="0.1M, random",
    disk_mb=1,
)
"""Its name in the catalogue."""
END, TURN, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


def save_tokenizer(
    folder: Path,
    words: Sequence[str],
    size: int,
    special: Sequence[str],
    *,
    markup: Sequence[str] = (),
    template: str,
    context: int,
) -> tuple[dict[str, int], int]:
    """Train a byte-level BPE tokenizer on a few words and save it.

    Args:
        folder: The folder that the files go to.
        words: The texts that it is trained on.
        size: Largest number of tokens, special ones included.
        special: Special tokens; `END`, `TURN` and `TURN_END` first.
        markup: Added tokens that are not special.
        template: The chat template.
        context: Largest number of tokens of a conversation.

    Returns:
        The special tokens' ids, and the number of tokens.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(special) - len(markup),
        min_frequency=1,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(words, trainer)
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in markup])
    more: dict[str, Any] = {"additional_special_tokens": list(special[3:])} if special[3:] else {}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END,
        chat_template=template,
        model_max_length=context,
        **more,
    )
    fast.save_pretrained(folder)
    vocabulary = tokenizer.get_vocab()
    return {token: vocabulary[token] for token in special}, len(vocabulary)


def save_model(folder: Path, make: Callable[[], Any], seed: int, ids: dict[str, int]) -> None:
    """Make a model with random weights, and save it with the ids that end its replies.

    Args:
        folder: The folder that the files go to.
        make: Makes the model.
        seed: Seed of the weights; torch's own random state does not change.
        ids: The special tokens' ids.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make()
    with no_bars():
        model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [ids[TURN_END], ids[END]], "pad_token_id": ids[END]})
    )


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
    save_model(folder, lambda: Qwen2ForCausalLM(Qwen2Config(**(settings | changes))), seed, ids)
    return folder
