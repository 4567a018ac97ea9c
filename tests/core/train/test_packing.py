from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from nets_for_tests import make_row

from engine.errors import TrainError
from engine.store.rows.row import TrainingRow
from engine.train.packing import Pack, PackImage, Segment, pack_rows


def only(
    rows: list[TrainingRow], max_tokens_per_microbatch: int = 1000, share: bool = True, min_shared_tokens: int = 1
) -> Pack:
    (pack,) = pack_rows(rows, max_tokens_per_microbatch, share_prefixes=share, min_shared_tokens=min_shared_tokens)
    return pack


def test_a_common_beginning_stands_once() -> None:
    rows = [make_row([5, 6, 7, 1, 2, 3], [0, 0, 0, 1, 1, 1]), make_row([5, 6, 7, 9, 8], [0, 0, 0, 1, 1])]
    pack = only(rows)
    assert pack.input_ids.tolist() == [5, 6, 7, 1, 2, 9]  # the last token of each is only predicted
    assert pack.position_ids.tolist() == [0, 1, 2, 3, 4, 3]
    assert pack.segments == (Segment(0, 3, -1, 0, 6), Segment(3, 5, 0, 3, 5), Segment(5, 6, 0, 3, 6))
    assert pack.paths == ((0, 1), (0, 2))
    assert pack.sources.tolist() == [2, 3, 4, 2, 5]
    assert pack.labels.tolist() == [1, 2, 3, 9, 8]
    assert pack.row.tolist() == [0, 0, 0, 1, 1]
    assert pack.token.tolist() == [3, 4, 5, 3, 4]
    assert pack.longest == 5


def test_rows_stay_in_their_order_whatever_their_tokens() -> None:
    rows = [make_row([9, 1]), make_row([3, 1, 2], [0, 0, 0]), make_row([2, 4]), make_row([5, 3])]
    pack = only(rows)
    assert pack.rows == (0, 2, 3)
    assert pack.input_ids.tolist() == [2, 5, 9]
    assert pack.sources.tolist() == [2, 0, 1]
    assert pack.labels.tolist() == [1, 4, 3]


def test_branches_of_one_episode_share_what_they_share() -> None:
    first = make_row([7, 7, 7, 7, 1, 2, 3])
    pack = only([first, make_row([7, 7, 7, 7, 1, 2, 8, 9]), make_row([7, 7, 4, 4])])
    assert pack.segments == (
        Segment(0, 2, -1, 0, 8),
        Segment(2, 3, 0, 2, 3),
        Segment(3, 7, 0, 2, 8),
        Segment(7, 8, 2, 6, 8),
    )
    assert pack.paths == ((0, 2), (0, 2, 3), (0, 1))
    assert pack.row_tokens(1).tolist() == [0, 1, 3, 4, 5, 6, 7]


def test_the_same_row_twice_is_computed_once_and_predicted_twice() -> None:
    pack = only([make_row([1, 2, 3])] * 2)
    assert pack.input_ids.tolist() == [1, 2]
    assert pack.labels.tolist() == [2, 3, 2, 3]
    assert pack.sources.tolist() == [0, 1, 0, 1]


def test_short_beginnings_are_not_worth_a_segment() -> None:
    rows = [make_row([1] * 10 + [tail, 5]) for tail in (2, 3, 4)]
    assert len(only(rows, min_shared_tokens=20).segments) == 4
    assert [segment.parent for segment in only(rows, min_shared_tokens=21).segments] == [-1, -1, -1]


def test_without_sharing_each_row_is_its_own() -> None:
    pack = only([make_row([1, 2, 3]), make_row([1, 2, 4])], share=False)
    assert pack.input_ids.tolist() == [1, 2, 1, 2]
    assert pack.position_ids.tolist() == [0, 1, 0, 1]
    assert pack.segments == (Segment(0, 2, -1, 0, 2), Segment(2, 4, -1, 0, 4))


def test_a_row_beyond_the_budget_goes_alone() -> None:
    rows = [make_row([1] * 9), make_row([2] * 30), make_row([3] * 5)]
    packs = pack_rows(rows, 12, share_prefixes=True, min_shared_tokens=1)
    assert [pack.rows for pack in packs] == [(0,), (1,), (2,)]
    assert [pack.tokens for pack in packs] == [8, 29, 4]


def test_a_shared_beginning_counts_once_in_the_budget() -> None:
    rows = [make_row([1] * 20 + [tail, 5, 5]) for tail in range(2, 10)]
    assert [pack.tokens for pack in pack_rows(rows, 30, share_prefixes=True, min_shared_tokens=1)] == [30, 26]
    assert len(pack_rows(rows, 30, share_prefixes=False)) == 8


def test_budget_holds_where_beginnings_are_too_short_to_share() -> None:
    rows = [make_row([1, 1, 1, tail, 5]) for tail in range(2, 10)]
    packs = pack_rows(rows, 12, share_prefixes=True, min_shared_tokens=50)
    assert [pack.tokens for pack in packs] == [12, 12, 8]


def test_the_same_placeholders_of_other_pixels_part_rows() -> None:
    def row(digest: str, end: int) -> TrainingRow:
        image = {"image": digest, "start": 2, "end": 5, "grid": [1, 2, 2]}
        return make_row([1, 2, 30, 30, 30, 3, end], [0, 0, 0, 0, 0, 0, 1], images=[image])

    pack = only([row("a", 7), row("b", 8), row("a", 9)])
    assert pack.input_ids.tolist() == [1, 2, 30, 30, 30, 3, 30, 30, 30, 3]
    assert pack.images == (PackImage("a", 2, (1, 2, 2)), PackImage("b", 6, (1, 2, 2)))
    assert pack.sources.tolist() == [5, 9, 5]


def test_images_behind_the_last_trained_token_are_left_out() -> None:
    image = {"image": "a", "start": 3, "end": 5, "grid": [1, 2, 2]}
    pack = only([make_row([1, 2, 3, 30, 30], [0, 1, 1, 0, 0], images=[image])])
    assert pack.images == ()
    assert pack.input_ids.tolist() == [1, 2]


def test_a_trained_first_token_is_refused() -> None:
    with pytest.raises(TrainError, match="row 1: its first token is trained"):
        pack_rows([make_row([1, 2]), make_row([1, 2], [1, 1])], 10, share_prefixes=True)


def test_nothing_to_train_is_no_pack() -> None:
    assert pack_rows([make_row([1, 2], [0, 0])], 10, share_prefixes=True) == []


rows_strategy = st.lists(
    st.integers(1, 14).flatmap(
        lambda size: st.tuples(
            st.lists(st.integers(1, 2), min_size=size, max_size=size),
            st.lists(st.integers(0, 1), min_size=size, max_size=size),
        )
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=examples(200), deadline=None)
@given(rows_strategy, st.integers(1, 60), st.booleans(), st.integers(1, 20))
def test_packs_hold_the_rows(
    raw: list[Any], max_tokens_per_microbatch: int, share: bool, min_shared_tokens: int
) -> None:
    rows = [make_row(ids, [0, *mask[1:]]) for ids, mask in raw]
    packs = pack_rows(rows, max_tokens_per_microbatch, share_prefixes=share, min_shared_tokens=min_shared_tokens)
    seen = {}
    for pack in packs:
        assert pack.tokens <= max_tokens_per_microbatch or len(pack.rows) == 1
        assert [segment.start for segment in pack.segments[1:]] == [segment.end for segment in pack.segments[:-1]]
        for index, segment in enumerate(pack.segments):
            below = [other for place, other in enumerate(pack.segments) if _descends(pack, place, index)]
            assert below == list(pack.segments[index : index + len(below)])
            assert segment.subtree_end == below[-1].end
        for number, row in enumerate(pack.rows):
            places = pack.row_tokens(number)
            ids, mask = rows[row].branch.input_ids, rows[row].loss_mask()
            end = int(np.flatnonzero(mask)[-1])
            assert pack.input_ids[places].tolist() == ids[:end].tolist()
            assert pack.position_ids[places].tolist() == list(range(end))
            mine = pack.row == row
            assert pack.token[mine].tolist() == np.flatnonzero(mask).tolist()
            assert pack.labels[mine].tolist() == ids[mask == 1].tolist()
            assert pack.sources[mine].tolist() == places[pack.token[mine] - 1].tolist()
            seen[row] = True
        assert pack.row.tolist() == sorted(pack.row.tolist())
    assert sorted(seen) == [index for index, row in enumerate(rows) if row.loss_mask().any()]


def _descends(pack: Pack, place: int, above: int) -> bool:
    while place > above:
        place = pack.segments[place].parent
    return place == above
