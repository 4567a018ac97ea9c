"""The ledger: append-only, exact, whole events or none."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import LedgerError
from engine.rewards.ledger import Ledger, blame_of
from engine.schemas.reward import Posting, RewardEvent


def add(value: float, turn: Any = "last", **more: Any) -> RewardEvent:
    return RewardEvent(turn=turn, value=value, **more)


def transfer(turn: Any, to: Any, **more: Any) -> RewardEvent:
    return RewardEvent(op="transfer", turn=turn, to=to, **more)


def ledger_of(*events: tuple[RewardEvent, int]) -> Ledger:
    ledger = Ledger()
    for event, at_turn in events:
        ledger.post(event, at_turn)
    return ledger


def test_a_posting_tells_who_wrote_what_and_when() -> None:
    ledger = Ledger()
    first = ledger.post(add(1.0, cause="right answer", source="user"), 2)
    second = ledger.post(transfer("last", "previous", share=0.25, cause="earned earlier", source="rule:0"), 3 - 1)
    assert first == [
        Posting(
            seq=0, turn=2, name="reward", delta=1.0, after=1.0, at_turn=2, op="add", cause="right answer", source="user"
        )
    ]
    told: dict[str, Any] = {"at_turn": 2, "op": "transfer", "cause": "earned earlier", "source": "rule:0"}
    assert second == [
        Posting(seq=1, turn=2, name="reward", delta=-0.25, after=0.75, **told),
        Posting(seq=2, turn=1, name="reward", delta=0.25, after=0.25, **told),
    ]
    assert ledger.postings == (*first, *second)
    assert ledger.totals(3) == [0.0, 0.25, 0.75]


def test_an_address_means_the_turns_of_the_moment_it_is_written() -> None:
    ledger = ledger_of((add(1.0), 0), (add(2.0), 1), (add(4.0, "previous"), 1), (add(8.0, "first"), 2))
    assert ledger.totals(3) == [13.0, 2.0, 0.0]


def test_all_splits_a_value_and_each_gives_it_to_everyone() -> None:
    assert ledger_of((add(3.0, "all"), 2)).totals(3) == [1.0, 1.0, 1.0]
    assert ledger_of((add(4.0, "each", discount=0.5), 2)).totals(3) == [1.0, 2.0, 4.0]
    assert ledger_of((add(10.0, "each", discount=0.9), 2)).totals(3) == pytest.approx([8.1, 9.0, 10.0], abs=1e-12)


def test_set_leaves_exactly_what_it_says() -> None:
    ledger = ledger_of((add(0.1), 0), (add(0.2), 0))
    (posting,) = ledger.post(RewardEvent(op="set", value=0.3), 0)
    assert (posting.delta, posting.after) == (0.3 - (0.1 + 0.2), 0.3)
    ledger.post(add(0.5), 0)
    assert ledger.totals(1) == [0.8]
    assert ledger_of((RewardEvent(op="set", turn="all", value=1.0), 3)).totals(4) == [0.25] * 4


def test_names_are_kept_apart() -> None:
    ledger = ledger_of((add(1.0, name="format"), 0), (add(2.0), 0), (add(4.0, name="format"), 1))
    assert ledger.turn(0) == {"format": 1.0, "reward": 2.0}
    assert ledger.turn(7) == {}
    assert ledger.by_name() == {"format": 5.0, "reward": 2.0}
    assert ledger.totals(2) == [3.0, 4.0]


def test_a_transfer_of_a_share_moves_each_name_that_the_payer_holds() -> None:
    ledger = ledger_of((add(1.0, name="a"), 1), (add(4.0, name="b"), 1), (transfer("last", "first", share=0.5), 1))
    assert (ledger.turn(0), ledger.turn(1)) == ({"a": 0.5, "b": 2.0}, {"a": 0.5, "b": 2.0})
    ledger.post(transfer("last", "first", share=1.0, name="a"), 1)
    assert (ledger.turn(0), ledger.turn(1)) == ({"a": 1.0, "b": 2.0}, {"a": 0.0, "b": 2.0})


def test_a_transfer_of_a_value_may_leave_the_payer_in_debt() -> None:
    ledger = ledger_of((add(1.0), 1), (transfer("last", 0, value=3.0), 1))
    assert ledger.totals(2) == [3.0, -2.0]


def test_a_transfer_to_all_or_each_is_shared_out() -> None:
    to_all = ledger_of((add(4.0), 3), (transfer("last", "all", share=1.0), 3))
    assert to_all.totals(4) == [1.0, 1.0, 1.0, 1.0]
    to_each = ledger_of((add(7.0), 2), (transfer("last", "each", share=1.0, discount=0.5), 2))
    assert to_each.totals(3) == [1.0, 2.0, 4.0]


def test_a_transfer_from_several_turns_takes_from_each() -> None:
    held = [(add(2.0, turn), 2) for turn in range(3)]
    assert ledger_of(*held, (transfer("all", "last", share=0.5), 2)).totals(3) == [1.0, 1.0, 4.0]
    assert ledger_of(*held, (transfer("all", "last", value=3.0), 2)).totals(3) == [1.0, 1.0, 4.0]
    assert ledger_of(*held, (transfer("each", "last", share=1.0, discount=0.5), 2)).totals(3) == [1.5, 1.0, 3.5]


@pytest.mark.parametrize(
    ("event", "at_turn", "said", "blame"),
    [
        (add(1.0, 5, source="user"), 2, "user: there is no turn `5`: only turns 0 to 2.", "user"),
        (add(1.0, source="tool:search"), -1, "tool:search: there is no turn `last`: no turn yet.", "tool"),
        (transfer("last", 1, share=0.5, source="rule:3"), 1, "rule:3: a transfer from turn 1 to itself", "spec"),
        (
            transfer("first", "last", share=0.5, source="environment"),
            1,
            "environment: turn 0 has never held a reward. Add to it before it pays",
            "environment",
        ),
        (
            transfer("last", "first", share=0.5, name="format"),
            1,
            "a reward event: turn 1 has never held `format`; it holds `a`, `b`.",
            "spec",
        ),
        (
            transfer("last", "first", value=0.5),
            1,
            "a reward event: a transfer of 0.5 without a `name`, and turn 1 holds `a`, `b`; say which",
            "spec",
        ),
        (
            transfer("each", "last", share=0.75, name="a", discount=2.0),
            1,
            "a reward event: `share` 0.75 times its discount is 1.5: more than turn 0 holds",
            "spec",
        ),
        (add(1e30, name="a"), 1, None, "spec"),
        (add(1.5e30, name="a"), 1, "a reward event: 1.5e+30 on top of 1.0 is beyond 1e+30; check the value", "spec"),
    ],
)
def test_what_cannot_be_carried_out_changes_nothing(
    event: RewardEvent, at_turn: int, said: str | None, blame: str
) -> None:
    ledger = ledger_of((add(1.0, name="a"), 1), (add(4.0, name="b"), 1))
    before = (ledger.totals(3), ledger.postings)
    if said is None:
        assert len(ledger.post(event, at_turn)) == 1
        return
    with pytest.raises(LedgerError, match=f"^{re.escape(said)}") as caught:
        ledger.post(event, at_turn)
    assert caught.value.blame == blame
    assert (ledger.totals(3), ledger.postings) == before


def test_an_event_is_carried_out_wholly_or_not_at_all() -> None:
    ledger = ledger_of((add(9e29, 1), 1))
    with pytest.raises(LedgerError):
        ledger.post(add(2e29, "each"), 1)
    assert ledger.totals(2) == [0.0, 9e29]


@pytest.mark.parametrize(
    ("source", "blame"),
    [
        ("environment", "environment"),
        ("user", "user"),
        ("tool:calc", "tool"),
        ("score", "environment"),
        ("rule:0", "spec"),
        ("", "spec"),
    ],
)
def test_blame_is_on_who_wrote_the_event(source: str, blame: str) -> None:
    assert blame_of(source) == blame


def test_a_sealed_ledger_is_frozen() -> None:
    ledger = ledger_of((add(1.0, name="a"), 0), (add(2.0, name="b"), 2))
    sealed = ledger.seal(4)
    assert (sealed.turns, sealed.names, sealed.total) == (4, ("a", "b"), 3.0)
    assert sealed.totals.tolist() == [1.0, 0.0, 2.0, 0.0]
    assert {name: values.tolist() for name, values in sealed.matrix.items()} == {
        "a": [1.0, 0.0, 0.0, 0.0],
        "b": [0.0, 0.0, 2.0, 0.0],
    }
    with pytest.raises(ValueError, match="read-only"):
        sealed.totals[0] = 5.0
    with pytest.raises(LedgerError, match="user: the ledger is sealed: the episode is over"):
        ledger.post(add(1.0, source="user"), 3)
    assert (ledger.turn(2), ledger.by_name()) == ({"b": 2.0}, {"a": 1.0, "b": 2.0})


def test_a_reward_beyond_the_last_turn_cannot_be_sealed() -> None:
    with pytest.raises(LedgerError, match="turn 2 holds a reward, but the episode took 2 turns"):
        ledger_of((add(1.0), 2)).seal(2)


def test_an_empty_ledger_holds_nothing() -> None:
    sealed = Ledger().seal(0)
    assert (sealed.names, sealed.total, sealed.postings, sealed.totals.shape) == ((), 0.0, (), (0,))
    assert Ledger().seal(2).totals.tolist() == [0.0, 0.0]


TURNS = 5
NAMES = ["reward", "format", "progress"]
values = st.floats(-10, 10, allow_nan=False).map(lambda x: x + 0.0)
addresses = st.integers(0, TURNS - 1) | st.sampled_from(["first", "second", "previous", "last", "all", "each"])
writes = st.builds(
    RewardEvent,
    turn=addresses,
    name=st.none() | st.sampled_from(NAMES),
    op=st.sampled_from(["add", "set"]),
    value=values,
    discount=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)
amounts = st.floats(0, 1).map(lambda share: {"share": share}) | values.map(lambda value: {"value": value})
moves = st.builds(
    lambda turn, to, name, amount, discount: RewardEvent(
        op="transfer", turn=turn, to=to, name=name, discount=discount, **amount
    ),
    addresses,
    addresses,
    st.none() | st.sampled_from(NAMES),
    amounts,
    st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)
entries = st.lists(st.tuples(writes | moves, st.integers(0, TURNS - 1)), max_size=12)


def post_what_goes(ledger: Ledger, event: RewardEvent, at_turn: int) -> list[Posting]:
    try:
        return ledger.post(event, at_turn)
    except LedgerError:
        return []


def exact(postings: tuple[Posting, ...]) -> dict[tuple[int, str], Fraction]:
    """A naive model: every posting in rational numbers."""
    held: dict[tuple[int, str], Fraction] = {}
    for posting in postings:
        key = (posting.turn, posting.name)
        if posting.op == "set":
            held[key] = Fraction(posting.after)
        else:
            held[key] = held.get(key, Fraction(0)) + Fraction(posting.delta)
    return held


@given(entries)
def test_a_turn_holds_the_exact_sum_of_its_postings_rounded_once(written: list[tuple[RewardEvent, int]]) -> None:
    ledger = Ledger()
    for event, at_turn in written:
        post_what_goes(ledger, event, at_turn)
    for (turn, name), held in exact(tuple(ledger.postings)).items():
        assert ledger.turn(turn)[name] == float(held)
    assert [posting.seq for posting in ledger.postings] == list(range(len(ledger.postings)))


@given(entries)
def test_stored_postings_fold_to_the_same_ledger(written: list[tuple[RewardEvent, int]]) -> None:
    ledger = Ledger()
    for event, at_turn in written:
        post_what_goes(ledger, event, at_turn)
    sealed = ledger.seal(TURNS)
    stored = [Posting.read_json(posting.json()) for posting in sealed.postings]
    again = Ledger.of(stored).seal(TURNS)
    assert (again.turns, again.names, again.postings) == (sealed.turns, sealed.names, sealed.postings)
    assert again.totals.tobytes() == sealed.totals.tobytes()
    assert {name: held.tobytes() for name, held in again.matrix.items()} == {
        name: held.tobytes() for name, held in sealed.matrix.items()
    }


@given(
    st.lists(st.tuples(st.builds(RewardEvent, turn=addresses, name=st.sampled_from(NAMES), value=values), st.just(4))),
    st.randoms(use_true_random=False),
)
def test_the_order_of_additions_does_not_matter(
    written: list[tuple[RewardEvent, int]], shuffled: random.Random
) -> None:
    other = list(written)
    shuffled.shuffle(other)
    left, right = ledger_of(*written), ledger_of(*other)
    for turn in range(TURNS):
        assert left.turn(turn) == right.turn(turn)


@given(entries, moves, st.integers(0, TURNS - 1))
def test_a_transfer_is_pairs_that_sum_to_zero(
    written: list[tuple[RewardEvent, int]], move: RewardEvent, at_turn: int
) -> None:
    ledger = Ledger()
    for event, when in written:
        post_what_goes(ledger, event, when)
    before = sum(exact(tuple(ledger.postings)).values())
    postings = post_what_goes(ledger, move, at_turn)
    for paid, received in zip(postings[::2], postings[1::2], strict=True):
        assert (paid.name, paid.delta) == (received.name, 0.0 - received.delta)
        assert paid.turn != received.turn
    assert sum(exact(tuple(ledger.postings)).values()) == before


def random_ledger(rng: random.Random) -> tuple[Ledger, float]:
    """A ledger of random rewards and transfers, and what was put into it."""
    ledger = Ledger()
    put: list[float] = []
    for at_turn in range(rng.randint(1, 8)):
        for _ in range(rng.randint(0, 3)):
            value = rng.uniform(-10, 10)
            ledger.post(RewardEvent(turn=rng.randint(0, at_turn), name=rng.choice(NAMES), value=value), at_turn)
            put.append(value)
        for _ in range(rng.randint(0, 3)):
            amount = {"share": rng.random()} if rng.random() < 0.5 else {"value": rng.uniform(-5, 5)}
            where = ["first", "last", "all", "each", rng.randint(0, at_turn)]
            move = RewardEvent(
                op="transfer",
                turn=rng.choice(where),
                to=rng.choice(where),
                name=rng.choice([None, *NAMES]),
                discount=rng.random(),
                **amount,
            )
            post_what_goes(ledger, move, at_turn)
    return ledger, math.fsum(put)


def conserved(seeds: range) -> tuple[float, int]:
    """The largest difference that transfers made to a sum, and how many there were."""
    worst, moves = 0.0, 0
    for seed in seeds:
        ledger, put = random_ledger(random.Random(seed))
        sealed = ledger.seal(8)
        moves += sum(posting.op == "transfer" for posting in sealed.postings)
        worst = max(worst, abs(sealed.total - put), abs(math.fsum(ledger.by_name().values()) - put))
        assert float(np.sum(sealed.totals)) == pytest.approx(put, abs=1e-12)
    return worst, moves


def test_transfers_conserve_the_sum_over_five_hundred_random_ledgers() -> None:
    worst, moves = conserved(range(500))
    assert worst <= 1e-12
    assert moves > 5_000


@pytest.mark.slow
def test_transfers_conserve_the_sum_over_ten_thousand_random_ledgers() -> None:
    worst, moves = conserved(range(10_000))
    assert worst <= 1e-12
    assert moves > 100_000


@given(st.floats(0, 1), values, values)
def test_a_share_of_one_leaves_nothing_not_even_dust(share: float, first: float, second: float) -> None:
    ledger = ledger_of((add(first), 1), (transfer("last", "previous", share=share), 1), (add(second), 1))
    ledger.post(transfer("last", "previous", share=1.0), 1)
    assert ledger.totals(2) == [math.fsum([first, second]), 0.0]


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None)
@given(st.integers(0, 2**63))
def test_transfers_conserve_the_sum_of_any_random_ledger(seed: int) -> None:
    ledger, put = random_ledger(random.Random(seed))
    assert abs(ledger.seal(8).total - put) <= 1e-12


def test_the_cost_of_a_posting_does_not_grow_with_the_names_of_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    summed = [0]

    def counted(values: Iterable[float]) -> float:
        listed = list(values)
        summed[0] += len(listed)
        return math.fsum(listed)

    monkeypatch.setattr("engine.rewards.ledger.math", SimpleNamespace(fsum=counted))
    ledger = Ledger()
    for index in range(2000):
        ledger.post(RewardEvent(name=f"r{index}", value=1.0), 0)
    assert ledger.totals(1) == [2000.0]
    assert summed[0] <= 10 * 2000
