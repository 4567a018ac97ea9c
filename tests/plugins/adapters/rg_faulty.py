"""A data set in reasoning-gym's form whose items and scorer fail as its config says."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import reasoning_gym
from reasoning_gym.dataset import ProceduralDataset


@dataclass
class FaultyConfig:
    seed: int = 0
    size: int = 500
    fault: str | None = None
    """Which fault an item has."""


class Faulty(ProceduralDataset):
    """Add one to the index."""

    def __init__(self, config: FaultyConfig) -> None:
        super().__init__(config=config, seed=config.seed, size=config.size)

    def __getitem__(self, idx: int) -> Any:
        fault = self.config.fault
        if fault == "raise":
            raise RuntimeError("no item today")
        if fault == "exit":
            os._exit(3)
        if fault == "hang":
            time.sleep(3600)
        if fault == "shape":
            return ["what is this?"]
        return {"question": f"{idx} + {self.seed}?", "answer": str(idx + self.seed), "metadata": {"index": idx}}

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> Any:
        if self.config.fault == "score":
            return float("nan")
        return 1.0 if answer == entry["answer"] else 0.01


reasoning_gym.register_dataset("faulty", Faulty, FaultyConfig)
