"""The recorded episodes have what the comparison needs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.trainers]


def test_episodes_have_turns_uneven_groups_and_several_rows(single: Any, several: Any) -> None:
    groups = Counter(row["task_id"] for row in single.rows)
    assert len(groups) == 12
    assert len(set(groups.values())) > 1  # failed episodes are not trained on
    assert all(len(set(row["turn_ids"][row["loss_mask"] == 1].tolist())) == 2 for row in single.rows)
    by_turn = [len(np.unique(row["advantages"][row["loss_mask"] == 1])) for row in single.rows]
    assert max(by_turn) == 2
    rows = Counter(row["episode_id"] for row in several.rows)
    assert set(rows.values()) == {2}
