"""The success of one run with its interval, by SQL over the summaries of its episodes: the value of `engine eval` and
`engine compare`, in a second over a million episodes."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np

from engine.plugins.evaluation.intervals import proportion_interval
from engine.plugins.evaluation.measures import Estimate
from engine.store.reader import RunReader

_MEASURED = "status = 'done' AND (failure IS NULL OR blame = 'policy')"
_TASKS = f"SELECT avg(solved), count(*) FROM episodes WHERE {_MEASURED} GROUP BY task_index, task_id"


def success_of(store: RunReader) -> dict[str, Any]:
    """Return the success of a run's policy as `Estimate` gives it, and the number of episodes that are measured. Those
    with a failure that the policy did not cause are left out."""
    with store.snapshot() as connection:
        pairs = np.fromiter(chain.from_iterable(connection.execute(_TASKS)), np.float64).reshape(-1, 2)
    means, episodes = pairs[:, 0], int(pairs[:, 1].sum())
    low, high = proportion_interval(means, episodes)
    value = float(means.mean()) if len(means) else float("nan")
    return Estimate(value=value, low=low, high=high, tasks=len(means)).plain() | {"episodes": episodes}
