"""Log-probs of exported rows, computed again by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText

from engine.store.loader import collate, forward_inputs
from engine.store.reader import RunReader
from engine.store.rows.export import export_rows
from engine.tokens.vision import Vision


def apart(store: RunReader, vision: Vision, folder: Path) -> tuple[float, int, list[dict[str, Any]]]:
    """The largest difference between a sampled token's log-prob and transformers', how many were compared, the rows.

    One forward pass over what a row carries, and nothing else.
    """
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    rows = list(export_rows(store))
    batch = collate(rows, vision, pad_id=0)
    with torch.no_grad():
        logits = model(**forward_inputs(batch)).logits[:, :-1].float()
    logits[..., batch["banned_token_ids"]] = float("-inf")
    found = logits.log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    sampled = batch["loss_mask"][:, 1:] == 1
    off = (found - batch["logprobs"][:, 1:]).abs()[sampled]
    return float(off.max()), int(sampled.sum()), rows
