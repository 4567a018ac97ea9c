"""The experts of a mixture-of-experts model, as its configuration declares them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.schemas.base import Struct

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys for the number of experts of a layer: of Qwen and OLMoE; of Mixtral and gpt-oss; of DeepSeek and GLM."""


class ExpertLayout(Struct, frozen=True, kw_only=True):
    """The sizes of a model's expert choices."""

    layers: int
    """All layers of the model, also those without experts."""
    top_k: int
    """Experts of one token in one layer."""
    experts: int
    """Experts of one layer, without shared ones, which every token uses."""
    sparse: tuple[int, ...]
    """The layers with experts, ascending."""


def expert_layout(config: Mapping[str, Any]) -> ExpertLayout | None:
    """Return the layout of a model's experts; None for a model without experts, or with keys that are not known.

    Args:
        config: The content of `config.json`.
    """
    text = config.get("text_config")
    settings = {**config, **text} if isinstance(text, Mapping) else config
    experts = next(
        (settings[key] for key in _EXPERTS if isinstance(settings.get(key), int) and settings[key] > 1), None
    )
    layers, top_k = settings.get("num_hidden_layers"), settings.get("num_experts_per_tok")
    if experts is None or not isinstance(layers, int) or not isinstance(top_k, int):
        return None
    dense = set(settings.get("mlp_only_layers") or ())
    first, step = settings.get("first_k_dense_replace") or 0, settings.get("decoder_sparse_step") or 1
    sparse = (layer for layer in range(layers) if layer not in dense and layer >= first and (layer + 1) % step == 0)
    return ExpertLayout(layers=layers, top_k=top_k, experts=experts, sparse=tuple(sparse))
