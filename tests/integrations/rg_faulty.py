"""A data set in reasoning-gym's form whose items and scorer fail as their index says."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import reasoning_gym
from reasoning_gym.dataset import ProceduralDataset

FAULTY_EVERY = 20
FAULTS = ("raise", "shape", "score", "hang")


def fault_of(index: int) -> str | None:
    """Which fault an item has."""
    return FAULTS[index // FAULTY_EVERY % len(FAULTS)] if index % FAULTY_EVERY == 0 else None


@dataclass
class FaultyConfig:
    seed: int = 0
    size: int = 500
    live: bool = True
    """Whether the faults occur."""


class Faulty(ProceduralDataset):
    """Add one to the index."""

    def __init__(self, config: FaultyConfig) -> None:
        super().__init__(config=config, seed=config.seed, size=config.size)

    def __getitem__(self, idx: int) -> Any:
        fault = fault_of(idx) if self.config.live else None
        if fault == "raise":
            raise RuntimeError("no item today")
        if fault == "hang":
            time.sleep(3600)
        if fault == "shape":
            return ["what is this?"]
        return {"question": f"{idx} + {self.seed}?", "answer": str(idx + self.seed), "metadata": {"index": idx}}

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> Any:
        if fault_of(entry["metadata"]["index"]) == "score" and self.config.live:
            return float("nan")
        return 1.0 if answer == entry["answer"] else 0.01


reasoning_gym.register_dataset("faulty", Faulty, FaultyConfig)
