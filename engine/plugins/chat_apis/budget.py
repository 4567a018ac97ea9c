"""What a run has cost, and may cost.

Invariant: a reply is in the file before its episode gets it, so a resume after a kill counts it, also if the episode's journal
does not have it. What an API charged for a reply that never arrived is not known, and not counted.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Self

import msgspec

from engine.errors import BudgetError
from engine.schemas.backend import PricesSpec

_MILLION = 1e6


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one request, as the API counted them."""

    prompt: int = 0
    """The whole prompt, cached or not."""
    cached: int = 0
    """Part of `prompt`: read from the cache."""
    cache_write: int = 0
    """Part of `prompt`: written to the cache."""
    output: int = 0

    def cost(self, prices: PricesSpec) -> float:
        """The price of the request."""
        cached = prices.input if prices.cached is None else prices.cached
        write = prices.input if prices.cache_write is None else prices.cache_write
        rest = self.prompt - self.cached - self.cache_write
        total = rest * prices.input + self.cached * cached + self.cache_write * write + self.output * prices.output
        return total / _MILLION


class Budget:
    """Adds up the costs of a run in a file with one line for each reply, and refuses requests when the limit is reached.

        with Budget(folder / "costs.jsonl", most=5.0) as budget:
            budget.check()                                  # BudgetError if 5.0 are spent
            budget.charge(0.0012, usage, episode="task-1/0", turn=0, model="m")

    Args:
        path: The file. Its lines are read first, except a line that a kill cut off.
        most: What the run may cost; None: any amount.
    """

    def __init__(self, path: Path, most: float | None) -> None:
        """Raises: OSError: the file cannot be read or created."""
        self.most = most
        self.spent = 0.0
        data = path.read_bytes() if path.exists() else b""
        for line in data.splitlines():
            try:
                self.spent += float(json.loads(line)["cost"])
            except (ValueError, TypeError, KeyError):
                continue
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        if data and not data.endswith(b"\n"):
            os.write(self._file, b"\n")

    def check(self) -> None:
        """Refuse a request if the limit is reached. Requests under way may exceed it, each by the cost of its reply.

        Raises:
            BudgetError: The limit is reached.
        """
        if self.most is not None and self.spent >= self.most:
            raise BudgetError(
                f"the run has cost {self.spent:.6g} of at most {self.most:.6g} (`rollout.max_cost`)",
                kind="budget_reached",
            )

    def charge(self, cost: float, usage: Usage, **what: Any) -> None:
        """Add the cost of a reply."""
        self.spent += cost
        os.write(self._file, json.dumps({"cost": cost, **msgspec.structs.asdict(usage), **what}).encode() + b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
