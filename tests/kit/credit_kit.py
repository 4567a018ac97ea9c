"""Ledgers and branches, made in one line."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.rewards.credit import Member, credit
from engine.rewards.ledger import Ledger
from engine.rewards.sealed import SealedLedger
from engine.schemas.credit import read_credit
from engine.schemas.reward import RewardEvent
from engine.schemas.trajectory import Branch

PUBLISHED = {"baseline": "mean", "scale": "std"}
"""The comparison of GRPO, GiGPO, MT-GRPO: the numbers of the papers. The engine's default is without bias, and has other numbers."""


def sealed(*rewards: float | dict[str, float]) -> SealedLedger:
    """A sealed ledger: for each turn its reward, or its rewards by name."""
    ledger = Ledger()
    for turn, value in enumerate(rewards):
        named = value if isinstance(value, dict) else {"reward": value} if value else {}
        for name, amount in named.items():
            ledger.post(RewardEvent(turn=turn, name=name, value=amount), len(rewards) - 1)
    return ledger.seal(len(rewards))


def advantages(group: list[SealedLedger] | list[Member], **spec: Any) -> list[list[float]]:
    """What a method makes of a group, as lists: `outcome`, compared as the papers do, unless `spec` says otherwise."""
    compared = {} if spec.get("method") in ("bilevel_gae", "turn_ppo", "entry") else PUBLISHED
    return [values.tolist() for values in credit(read_credit({"method": "outcome"} | compared | spec), group)]


def branch(turn_ids: list[int], index: int = 0) -> Branch:
    """A branch whose tokens are of these turns; -1 is not sampled."""
    turns = np.array(turn_ids, dtype=np.int32)
    return Branch.read(
        {
            "index": index,
            "spans": [],
            "input_ids": np.arange(len(turns), dtype=np.int32),
            "loss_mask": (turns >= 0).astype(np.int32),
            "logprobs": np.zeros(len(turns), dtype=np.float32),
            "weight_versions": np.where(turns >= 0, 0, -1),
            "turn_ids": turns,
        }
    )
