"""The three sums of TRL's batches, compared with those of the engine's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.integrations.trainers.handover import Sums


def sums_of_batches(batches: Sequence[Mapping[str, Any]]) -> Sums:
    """The sums of what TRL's loss reads, over all slices of one generation."""
    tokens = trained = 0
    total = 0.0
    for batch in batches:
        mask = batch["completion_mask"] * batch.get("tool_mask", 1)
        advantages = batch["advantages"]
        if advantages.dim() == 1:
            advantages = advantages[:, None]
        tokens += int(batch["prompt_mask"].sum() + batch["completion_mask"].sum())
        trained += int(mask.sum())
        total += float((advantages.double().abs() * mask).sum())
    return Sums(tokens, trained, total)


def check_batches(rows: Sums, batches: Sequence[Mapping[str, Any]]) -> None:
    """Compare the engine's sums with those of TRL's batch.

    Raises:
        TrainError: kind `handover`: they differ.
    """
    rows.check(
        sums_of_batches(batches), "TRL", "an overridden method, an option of GRPOConfig that masks or cuts completions"
    )
