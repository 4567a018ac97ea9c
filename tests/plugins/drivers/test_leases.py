"""Leases of groups: each group has one holder, and no lease is lost or given twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import StoreError
from engine.plugins.drivers.leases import Counts, LeaseAnswer, Leases


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def opened(tmp_path: Path, clock: Clock, groups: int = 10) -> Leases:
    return Leases(tmp_path / "leases.db", groups, clock)


def test_groups_are_leased_in_order_and_never_twice(tmp_path: Path, clock: Clock) -> None:
    leases = opened(tmp_path, clock)
    assert leases.join(0, "a", []) == ("0", [])
    assert leases.join(1, "a", ["0"]) == ("1", [])
    assert leases.call(0, 1, 2) == LeaseAnswer(word="run", leases=((0, 0), (1, 0)))
    assert leases.call(1, 1, 2) == LeaseAnswer(word="run", leases=((2, 0), (3, 0)))
    assert leases.counts == Counts(free=6, leased=4, done=0, faulty=0)


def test_a_driver_gets_no_more_than_it_has_room_for_and_near_the_end_only_a_part(tmp_path: Path, clock: Clock) -> None:
    leases = opened(tmp_path, clock)
    leases.join(0, "a", [])
    leases.join(1, "a", [])
    assert leases.call(0, 1, 0).leases == ()
    assert leases.call(0, 2, 10).leases == ((0, 0), (1, 0), (2, 0))
    assert leases.call(1, 1, 1).leases == ((3, 0),)


def test_a_call_that_is_repeated_gets_the_same_answer_also_from_a_new_coordinator(tmp_path: Path, clock: Clock) -> None:
    leases = opened(tmp_path, clock)
    leases.join(0, "a", [])
    leases.call(0, 1, 2)
    first = leases.call(0, 2, 1, done=[0])
    leases.close()
    again = opened(tmp_path, clock)
    assert again.call(0, 2, 1, done=[0]) == first == LeaseAnswer(word="run", leases=((2, 0),))
    assert again.counts == Counts(free=7, leased=2, done=1, faulty=0)


def test_a_driver_that_comes_back_on_its_disk_has_its_leases_and_its_store(tmp_path: Path, clock: Clock) -> None:
    leases = opened(tmp_path, clock)
    leases.join(0, "a", [])
    leases.call(0, 1, 2)
    assert leases.join(0, "a", ["0"]) == ("0", [(0, 0), (1, 0)])


def test_a_driver_on_another_disk_gets_a_new_store_and_its_groups_begin_again(tmp_path: Path, clock: Clock) -> None:
    leases = opened(tmp_path, clock)
    leases.join(0, "a", [])
    leases.call(0, 1, 2)
    assert leases.join(0, "b", []) == ("0b", [])
    assert leases.call(0, 1, 3).leases == ((0, 1), (1, 1), (2, 0))
    assert leases.join(0, "a", ["0"]) == ("0", [])  # back on the first disk: the groups of `0b` begin again
    assert leases.call(0, 1, 1).leases == ((0, 2),)


def test_a_silent_driver_loses_its_leases_and_is_told_so(tmp_path: Path, clock: Clock) -> None:
    leases = opened(tmp_path, clock)
    leases.join(0, "a", [])
    leases.join(1, "a", [])
    leases.call(0, 1, 2)
    clock.now = 50.0
    leases.call(1, 1, 1)
    clock.now = 70.0
    assert leases.expire(before=10.0) == [0]
    assert leases.call(1, 2, 2).leases == ((0, 1), (1, 1))
    assert leases.call(0, 2, 1, done=[0]) == LeaseAnswer(word="rejoin")
    assert leases.counts.done == 0
    assert leases.join(0, "a", ["0"]) == ("0", [])


def test_the_run_is_over_when_every_group_is_done_or_faulty(tmp_path: Path, clock: Clock) -> None:
    leases = opened(tmp_path, clock, groups=2)
    leases.join(0, "a", [])
    leases.join(1, "a", [])
    assert leases.call(0, 1, 1).leases == ((0, 0),)
    assert leases.call(1, 1, 5) == LeaseAnswer(word="run", leases=((1, 0),))
    assert leases.call(0, 2, 5, done=[0]) == LeaseAnswer(word="run")  # the other driver may still lose its group
    assert leases.call(1, 2, 5, faulty=[1]) == LeaseAnswer(word="over")
    assert leases.call(0, 3, 5) == LeaseAnswer(word="over")


def test_a_resume_frees_what_nobody_holds_and_what_cannot_be_read(tmp_path: Path, clock: Clock) -> None:
    leases = opened(tmp_path, clock, groups=8)
    for slot in range(3):
        leases.join(slot, "a", [])
        leases.call(slot, 1, 1)
    leases.call(0, 2, 1, done=[0])
    leases.call(1, 2, 1, faulty=[1])
    assert leases.counts == Counts(free=3, leased=3, done=1, faulty=1)
    leases.close()
    resumed = opened(tmp_path, clock, groups=8)
    resumed.restart(2, incomplete=[0, 1, 2, 7])
    assert resumed.counts == Counts(free=6, leased=2, done=0, faulty=0)
    assert resumed.join(0, "a", ["0"])[1] == [(3, 0)]
    assert resumed.call(0, 1, 8).leases == ((0, 1), (1, 1))
    assert resumed.call(0, 2, 8).leases == ((2, 1),)


def test_a_file_of_a_larger_run_is_refused(tmp_path: Path, clock: Clock) -> None:
    leases = opened(tmp_path, clock)
    leases.join(0, "a", [])
    leases.call(0, 1, 5)
    leases.close()
    with pytest.raises(StoreError, match="it has 5 groups, and the run has 3; has the file of tasks changed"):
        opened(tmp_path, clock, groups=3)
