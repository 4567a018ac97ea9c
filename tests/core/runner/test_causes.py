"""When the first episodes of a run mean that it fails as a whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import FailingError
from engine.runner.failure_causes import FIRST, Cause, Verdict
from engine.schemas.trajectory import Failure

CAUSES = [
    None,
    Cause(kind="user_error", blame="user", place="spec.yaml:3:9"),
    Cause(kind="user_error", blame="user", place="spec.yaml:4:9"),
    Cause(kind="user_timeout", blame="user", place="spec.yaml:3:9"),
    Cause(kind="user_error", blame="tool", place="spec.yaml:3:9"),
    Cause(kind="sampled_placeholder", blame="policy", place=""),
]


@given(
    st.one_of(
        st.lists(st.sampled_from(CAUSES), max_size=40),
        st.tuples(st.sampled_from(CAUSES), st.integers(0, 40), st.lists(st.sampled_from(CAUSES), max_size=5)).map(
            lambda drawn: [drawn[0]] * drawn[1] + drawn[2]
        ),
    ),
    st.integers(0, 40),
)
def test_a_run_stops_exactly_when_its_first_episodes_fail_alike_and_not_by_the_policy(
    causes: list[Cause | None], total: int
) -> None:
    verdict = Verdict(lambda: total)
    stopped = []
    for number, cause in enumerate(causes, 1):
        failure = None if cause is None else Failure(kind=cause.kind, blame=cause.blame, message="so")
        try:
            verdict.add(cause, failure)
        except FailingError:
            stopped.append(number)
    need = min(FIRST, total or FIRST)
    first = causes[:need]
    alike = len(first) == need and len(set(first)) == 1 and first[0] is not None and first[0].blame != "policy"
    assert stopped == ([need] if alike else [])


def test_the_cause_is_told_with_the_end_of_its_traceback() -> None:
    verdict = Verdict(lambda: 1)
    trace = "\n".join(f"line {number}" for number in range(100))
    with pytest.raises(FailingError) as caught:
        verdict.add(CAUSES[1], Failure(kind="user_error", blame="user", message="it raised", trace=trace))
    lines = caught.value.cause.splitlines()
    assert (lines[:2], lines[-1], len(lines)) == (["it raised", "…"], "line 99", 14)
    assert "user_error (user) at spec.yaml:3:9" in str(caught.value)
