"""What a run has cost, and may cost.

Invariant: a reply is in the file before its episode gets it, so a resume after a kill counts it, also if the episode's
journal does not have it. What an API charged for a reply that never arrived is not known, and not counted.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import BackendError
from engine.plugins.chat_apis.spec import PricesSpec

_MILLION = 1e6


class BudgetError(BackendError):
    """The run has cost `rollout.max_cost` (kind `budget_reached`). It stops, and no episode fails because of it."""

    stops_run = True
    drains = True
    resume_words = "--set rollout.max_cost=AMOUNT"


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
    """Adds up the costs of a run in a file with one line for each reply, and refuses requests when the limit is
    reached.

        budget = Budget(folder / "costs.jsonl", most=5.0)
        budget.check()                                      # BudgetError if 5.0 are spent
        budget.charge(0.0012, usage, episode="task-1/0", turn=0, model="m")
        budget.close()

    Several may count in one file, one for each `Runner` of a training: each counts what the others have added.

    Args:
        path: The file. Its lines are read first, except a line that a kill cut off.
        most: What the run may cost; None: any amount.
    """

    def __init__(self, path: Path, most: float | None) -> None:
        """Raises: OSError: the file cannot be read or created."""
        self.most = most
        self.spent = 0.0
        self._read = 0
        """Size of the part of the file that is counted."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self.count()
        if self._read < os.fstat(self._file).st_size:
            os.write(self._file, b"\n")

    def count(self) -> float:
        """Count the lines that were added to the file. Returns what is spent."""
        if self._file < 0:
            return self.spent
        size = os.fstat(self._file).st_size
        if size == self._read:
            return self.spent
        lines, end, _ = os.pread(self._file, size - self._read, self._read).rpartition(b"\n")
        self._read += len(lines) + len(end)
        for line in lines.splitlines():
            try:
                self.spent += float(json.loads(line)["cost"])
            except (ValueError, TypeError, KeyError):
                continue
        return self.spent

    def check(self) -> None:
        """Refuse a request if the limit is reached. Requests under way may exceed it, each by the cost of its reply.

        Raises:
            BudgetError: The limit is reached.
        """
        self.count()
        if self.most is not None and self.spent >= self.most:
            raise BudgetError(
                f"the run has cost {self.spent:.6g} of at most {self.most:.6g} (`rollout.max_cost`)",
                kind="budget_reached",
            )

    def charge(self, cost: float, usage: Usage, **what: Any) -> None:
        """Add the cost of a reply."""
        os.write(self._file, json.dumps({"cost": cost, **msgspec.structs.asdict(usage), **what}).encode() + b"\n")
        self.count()

    def close(self) -> None:
        """Close the file. Later calls do nothing."""
        if self._file >= 0:
            self.count()
            os.close(self._file)
            self._file = -1
