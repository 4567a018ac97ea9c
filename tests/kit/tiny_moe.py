"""Tiny mixture-of-experts models with random weights, with a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from engine.plugins.local import tiny_lm
from engine.plugins.local.tiny_lm import save_model, save_tokenizer
from engine.tokens.catalogue import no_bars

FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 8, "moe_intermediate_size": 32, "norm_topk_prob": True, "head_dim": 16},
    "Qwen2Moe": {
        "num_experts": 8, "moe_intermediate_size": 32, "norm_topk_prob": False, "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [0],
    },
    "Mixtral": {"num_local_experts": 8},
}  # fmt: skip
"""Settings of a family's experts. Each chooses three of eight."""


def build(folder: Path, family: str = "Qwen3Moe", *, ties: bool = False, **changes: Any) -> Path:
    """Save a model of three layers in `folder`.

    Args:
        folder: The folder.
        family: A key of `FAMILIES`.
        ties: Experts come in pairs whose router logits differ by rounding alone, so that the third choice of a token depends on
            the kernels that compute it.
        changes: Changes to the configuration.
    """
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    ids, size = save_tokenizer(
        folder, tiny_lm._WORDS, tiny_lm.VOCABULARY, tiny_lm.SPECIAL, template=tiny_lm.CHAT_TEMPLATE, context=2048
    )
    settings = {
        "vocab_size": size, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_experts_per_tok": 3, "max_position_embeddings": 2048, "initializer_range": 0.15,
        "bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"],
        "tie_word_embeddings": False, **FAMILIES[family], **changes,
    }  # fmt: skip
    config = getattr(transformers, f"{family}Config")(**settings)

    def make() -> Any:
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        for name, parameter in model.named_parameters():
            if name.endswith(".gate.weight"):
                parameter.data = torch.randn_like(parameter) * 0.5
                if ties:
                    parameter.data[1::2] = parameter.data[::2] * (1 + 1e-7 * torch.randn(len(parameter) // 2, 1))
        return model

    with no_bars():
        save_model(folder, make, 0, ids)
    return folder
