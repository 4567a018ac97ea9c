"""A replay gives the same bytes however an episode ended: nothing but the journal's records says what it comes to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ending_marks import marked
from endings import CASES, ENDS, filled
from slow_cases import slow_but_each

from engine.runner.replay import Replayer


@pytest.mark.parametrize("case", marked(slow_but_each(5, CASES)))
async def test_a_replay_is_the_same_to_the_byte(make_spec: Any, run_spec: Any, tmp_path: Path, case: str) -> None:
    replies, changes = filled(case, str(tmp_path / "log"))
    ran = await run_spec(make_spec(replies, **changes))
    assert ran.result.faults == []
    outcome = ran.only.outcome
    ended = (outcome.event, outcome.limit, outcome.failure.kind if outcome.failure else None)
    assert ended == ENDS.get(case, ("satisfied", None, None))
    assert bool(ran.only.condensations) == case.startswith("condensed")
    replayer = Replayer(ran.loaded, ran.template, ran.store)
    try:
        assert (await replayer.check(ran.only, ran.store.task("a"))).difference is None
    finally:
        replayer.close()
