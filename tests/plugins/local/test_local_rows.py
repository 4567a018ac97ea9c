from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import torch
from generate_requests import generate_request
from hypothesis import given
from hypothesis import strategies as st

from engine.backends.stops import StopStrings
from engine.plugins.local.kv import KVRows, Plan, RowChunk
from engine.plugins.local.rows import CacheRow, PendingReply, RowTable, common_prefix
from engine.plugins.local.sampler import SamplingState

CPU = torch.device("cpu")
HEADS, WIDTH = 2, 4


def pending(ids: list[int], episode: str, most: int = 4) -> PendingReply:
    request = generate_request(ids, episode=episode, max_new_tokens=most, stop_token_ids=[])
    sampling = SamplingState(request, 1000, CPU)
    return PendingReply(request, Future(), sampling, StopStrings(str, []), most)


class Cached:
    """A table whose keys are the tokens themselves, so that what stands in the cache can be read."""

    def __init__(self, rows: int, stash_bytes: int = 1 << 20) -> None:
        self.store = KVRows(1, rows)
        self.table = RowTable(self.store, rows, stash_bytes)

    def compute(self, row: CacheRow) -> None:
        """What a forward pass does, up to the newest token."""
        new = row.known[row.cached :].tolist()
        self.store.reserve(row.length)
        states = torch.tensor(new, dtype=torch.float32)[:, None, None].expand(len(new), HEADS, WIDTH)
        plan = Plan([RowChunk(row=row.index, ids=new, past=row.cached)], CPU)
        self.store.write("keys", 0, states, plan)
        self.store.write("values", 0, -states, plan)
        row.cached = row.length

    def check(self, row: CacheRow) -> None:
        """The cache holds this row's tokens."""
        if row.cached:
            assert (
                self.store.tensors["keys"][0, row.index, 0, : row.cached, 0].tolist()
                == row.known[: row.cached].tolist()
            )
            assert (
                self.store.tensors["values"][0, row.index, 1, : row.cached, 3].tolist()
                == (-row.known[: row.cached]).tolist()
            )


@given(left=st.lists(st.integers(0, 3), max_size=12), right=st.lists(st.integers(0, 3), max_size=12))
def test_the_common_prefix_is_the_longest(left: list[int], right: list[int]) -> None:
    expected = 0
    while expected < min(len(left), len(right)) and left[expected] == right[expected]:
        expected += 1
    assert common_prefix(np.asarray(left, dtype=np.int32), np.asarray(right, dtype=np.int32)) == expected


def test_a_request_waits_for_a_prefix_that_another_is_computing() -> None:
    cached = Cached(3)
    shared = list(range(100, 200))
    first = cached.table.admit(pending([*shared, 1], "a"))
    assert first is not None
    assert cached.table.admit(pending([*shared, 2], "b")) is None
    other = cached.table.admit(pending([*shared[:50], 3], "c"))
    assert other is not None  # too little in common to wait for
    cached.compute(first)
    second = cached.table.admit(pending([*shared, 2], "b"))
    assert second is not None
    assert (second.cached, second.reused) == (100, 100)
    cached.check(second)


def test_no_free_row_means_waiting() -> None:
    table = Cached(1).table
    assert table.admit(pending([1, 2], "a")) is not None
    assert table.admit(pending([3, 4], "b")) is None


def test_an_empty_row_goes_before_a_finished_one_and_that_before_a_resting_one() -> None:
    cached = Cached(3)
    rows = []
    for episode in ("a", "b"):
        row = cached.table.admit(pending([ord(episode)] * 20, episode))
        assert row is not None
        cached.compute(row)
        cached.table.finish(row)
        rows.append(row)
    empty = cached.table.admit(pending([1] * 20, "c"))
    assert empty is not None
    assert empty.index == 2
    cached.table.release("b")
    finished = cached.table.admit(pending([2] * 20, "d"))
    assert finished is rows[1]
    assert cached.table.counts["stashed"] == 0
    assert cached.table.admit(pending([3] * 20, "e")) is rows[0]
    assert cached.table.counts["stashed"] == 1


def test_an_episode_that_is_released_while_it_runs_leaves_nothing_to_come_back_to() -> None:
    cached = Cached(1)
    row = cached.table.admit(pending([5] * 20, "a"))
    assert row is not None
    cached.compute(row)
    cached.table.release("a")
    assert row.pending is not None
    cached.table.finish(row)
    assert row.episode is None


TURN = st.tuples(st.integers(0, 5), st.integers(1, 30), st.booleans(), st.booleans())


@given(
    turns=st.lists(TURN, min_size=1, max_size=30), rows=st.integers(1, 4), budget=st.sampled_from([0, 3000, 1 << 20])
)
def test_whatever_is_reused_is_what_the_prompt_says(
    turns: list[tuple[int, int, bool, bool]], rows: int, budget: int
) -> None:
    """Episodes grow, are rewritten, share prefixes, are stashed, come back and end, in any order."""
    cached = Cached(rows, budget)
    contexts: dict[int, list[int]] = {}
    shared = list(range(200, 220))
    for number, (episode, new, rewrite, over) in enumerate(turns):
        context = contexts.setdefault(episode, list(shared))
        if rewrite:
            del context[len(context) // 2 :]
        context.extend((number * 31 + place) % 900 for place in range(new))
        row = cached.table.admit(pending(context, str(episode)))
        assert row is not None
        assert row.cached <= len(context) - 1
        cached.check(row)
        cached.compute(row)
        cached.check(row)
        row.push(7, -1.0, 0)
        context.append(7)
        cached.table.finish(row)
        assert cached.table.stashed_bytes <= budget
        if over:
            cached.table.release(str(episode))
            del contexts[episode]
    for row in cached.table.rows:
        cached.check(row)


def test_version_spans_cover_a_reply() -> None:
    row = CacheRow(0)
    row.begin(pending([1, 2], "a"), 0, 1)
    for version in (4, 4, 6):
        row.push(9, -0.5, version)
    assert [(span.version, span.start, span.end) for span in row.versions] == [(4, 0, 2), (6, 2, 3)]
    assert row.known.tolist() == [1, 2, 9, 9, 9]
    assert row.sampled == 3
