"""Tiny causal models of several families, and log-probs of rows by one plain pass a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from training_rows import row_of

from engine.store.rows.row import TrainingRow
from engine.tokens.catalogue import no_bars

VOCAB = 40

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}


def build(family: str, folder: Path, **changes: Any) -> Path:
    """Save a tiny model with random weights (biases and norms too) in `folder`; a setting of `...` is left out."""
    import transformers

    settings = {name: value for name, value in (_TEXT | changes).items() if value is not ...}
    config = getattr(transformers, f"{family}Config")(**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.3 * torch.randn_like(parameter)
    with no_bars():
        model.save_pretrained(folder)
    return folder


def widen_norms(model: Any) -> Any:
    """Root-mean-square norms in the weights' own dtype: transformers' are float32, which hides what is beyond it."""

    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    for module in model.modules():
        if type(module).__name__ in ("LlamaRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"):
            module.forward = forward.__get__(module)
    return model


def make_row(ids: Sequence[int], mask: Sequence[int] | None = None, **more: Any) -> TrainingRow:
    """A training row as far as packing reads it; without a mask all tokens but the first are trained."""
    found = np.asarray(ids, np.int32)
    trained = np.arange(len(found)) > 0 if mask is None else np.asarray(mask)
    return row_of({"input_ids": found, "loss_mask": trained}, **more)


Plain = Callable[[Any, Sequence[TrainingRow]], tuple[torch.Tensor, torch.Tensor]]


def plain(
    model: Any, rows: Sequence[TrainingRow], temperature: float = 1.0, vocab: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of trained tokens, rows in order, tokens in order: one pass a row, all logits at once."""
    logprobs, entropies = [], []
    for row in rows:
        ids = torch.tensor(row.branch.input_ids.astype(np.int64))
        logits = model(input_ids=ids[None], use_cache=False).logits[0] / temperature
        chances = logits[:, :vocab].log_softmax(-1)
        places = torch.from_numpy(np.flatnonzero(row.loss_mask()))
        logprobs.append(chances[places - 1].gather(1, ids[places, None])[:, 0])
        entropies.append(-(chances.exp() * chances).sum(-1)[places - 1])
    return torch.cat(logprobs), torch.cat(entropies)
