"""A run changes how garbage is collected, and leaves it as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def frozen(request: pytest.FixtureRequest, frozen_objects_counted: None) -> Iterator[int]:
    """The number of frozen objects: none, or all that there are."""
    before = gc.get_freeze_count() > 0
    (gc.freeze if request.param else gc.unfreeze)()
    yield gc.get_freeze_count()
    (gc.freeze if before else gc.unfreeze)()


@pytest.mark.parametrize("frozen", [True, False], indirect=True)
async def test_a_run_leaves_what_its_caller_has_frozen(make_spec: Any, run_spec: Any, frozen: int) -> None:
    thresholds = gc.get_threshold()
    assert (await run_spec(make_spec(["It is 42."]))).only.outcome.failure is None
    assert gc.get_threshold() == thresholds
    if frozen:
        assert abs(gc.get_freeze_count() - frozen) < 1000  # a frozen object that nothing refers to is freed
    else:
        assert gc.get_freeze_count() == 0
