"""One episode as a JSON document."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from journals import write_entries, write_result
from store_kit import make_entry, make_header, make_task, make_trajectory

from engine.plugins.show.listing.episode import branch_heads, episode_document, move_document, moves, plain
from engine.plugins.show.listing.tokens import sampled_columns, token_columns
from engine.schemas.journal import ScoreRecord
from engine.schemas.reward import Posting, RewardEvent
from engine.schemas.trajectory import Branch, Span
from engine.store import RunStore


def posting(seq: int, turn: int, delta: float, op: str = "transfer", name: str = "reward") -> Posting:
    return Posting(
        seq=seq, turn=turn, name=name, delta=delta, after=0.0, at_turn=2, op=op, cause="why", source="rule:0"
    )  # type: ignore[arg-type]


def test_the_postings_of_a_transfer_are_one_move_from_turns_to_turns() -> None:
    postings = moves(
        [
            posting(0, 2, 1.0, "add"),
            posting(1, 2, -0.3),
            posting(2, 0, 0.3),
            posting(3, 2, -0.1),
            posting(4, 1, 0.1),
            posting(5, 1, 0.5, "set"),
        ]
    )
    documents = [move_document(moved) for moved in postings]
    assert [(move["op"], move["from"], move["to"], move["amount"], move["postings"]) for move in documents] == [
        ("add", [], [2], 1.0, [0]),
        ("transfer", [2], [0], 0.3, [1, 2]),
        ("transfer", [2], [1], 0.1, [3, 4]),
        ("set", [], [1], 0.5, [5]),
    ]


def branch(index: int, ids: list[int]) -> Branch:
    zeros = np.zeros(len(ids), np.int32)
    spans = [Span(kind="prompt", start=0, end=len(ids))]
    return Branch(
        index=index,
        reason="why" if index else "",
        spans=spans,
        input_ids=np.array(ids, np.int32),
        loss_mask=zeros,
        logprobs=zeros.astype(np.float32),
        weight_versions=zeros - 1,
        turn_ids=zeros - 1,
    )


def test_a_branch_parts_from_the_earlier_branch_with_which_it_shares_most_tokens() -> None:
    heads = branch_heads([branch(0, [1, 2, 3, 4]), branch(1, [1, 2, 9]), branch(2, [1, 2, 3, 8]), branch(3, [1, 2, 9])])
    assert [(each["from"], each["parts_at"], each["reason"]) for each in heads] == [
        (-1, None, ""),
        (0, 2, "why"),
        (0, 3, "why"),
        (1, 3, "why"),
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda each: st.lists(each) | st.dictionaries(st.text(), each),
)


@given(JSON)
def test_every_value_of_a_fact_becomes_json_that_a_browser_reads(value: object) -> None:
    told = json.loads(json.dumps(plain(value), allow_nan=False))
    assert told == plain(value)
    if isinstance(value, int) and abs(value) >= 2**53:
        assert told == str(value)


@pytest.fixture
async def store(tmp_path: Path) -> RunStore:
    """An episode that is done, and one that is running."""
    with RunStore.create(tmp_path, make_header()) as made:
        for sample in (0, 1):
            journal = await made.begin(make_task(), sample)
            await write_entries(journal, *(make_entry(seq, seed=sample) for seq in range(4)))
            if sample == 0:
                await write_result(journal, make_trajectory())
    return RunStore.open(made.folder, readonly=True)


def test_a_finished_episode_has_turns_branches_steps_and_rewards(store: RunStore) -> None:
    document = episode_document(store, "t0/0")
    json.dumps(document, allow_nan=False)
    trajectory = store.trajectory("t0/0")
    assert document["finished"]
    assert document["status"] == "done"
    assert [each["seq"] for each in document["path"]] == [0, 1, 2, 3]
    assert [each["turn"] for each in document["path"]] == [-1, 0, 0, 1]
    assert len(document["turns"]) == len(trajectory.turns)
    assert [each["index"] for each in document["branches"]] == [0, 1]
    assert len(document["postings"]) == len(trajectory.postings)


def test_the_tokens_of_a_branch_are_those_of_the_store(store: RunStore) -> None:
    columns = token_columns(store, "t0/0", 1)
    found = store.trajectory("t0/0").branches[1]
    assert columns["ids"].tolist() == found.input_ids.tolist()
    assert columns["mask"].tolist() == found.loss_mask.tolist()
    assert columns["turns"].tolist() == found.turn_ids.tolist()
    assert columns["texts"] is None, "the run has no model"
    assert columns["problem"]


@pytest.mark.parametrize("marks", [0, 1, 2, 3])
@pytest.mark.parametrize("replies", [0, 1, 2, 3])
async def test_each_reply_of_a_judge_has_its_mark_and_nothing_is_lost(tmp_path: Path, marks: int, replies: int) -> None:
    given = [RewardEvent(turn=at, name=f"mark {at}", value=0.5, source="judge") for at in range(marks)]
    said = [f"reply {at}" for at in range(replies)]
    with RunStore.create(tmp_path, make_header()) as made:
        journal = await made.begin(make_task(), 0)
        for seq, record in enumerate(
            (make_entry(0).record, make_entry(1).record, ScoreRecord(rewards=given, replies=said))
        ):
            await write_entries(journal, replace(make_entry(seq), record=record))
        step = episode_document(made, "t0/0")["path"][-1]
    assert [each["text"] for each in step["judge"] if each["text"] is not None] == said
    own = [each["mark"]["name"] for each in step["judge"] if each["mark"] is not None]
    assert [each["name"] for each in step["marks"]] + own == [f"mark {at}" for at in range(marks)]
    if marks >= replies:
        assert own == [f"mark {at}" for at in range(marks - replies, marks)], "the judge's marks are the last ones"


@pytest.mark.parametrize("content", [None, b"{", b"{}", b"[]", b"\xff\xfe", b'{"model": 3, "added_tokens": []}'])
async def test_a_tokenizer_that_cannot_be_read_is_said_in_the_tokens(tmp_path: Path, content: bytes | None) -> None:
    model = tmp_path / "model"
    if content is not None:
        model.mkdir()
        (model / "tokenizer.json").write_bytes(content)
    spec = {
        "spec": "episode/v1",
        "name": "s",
        "model": {"path": str(model)},
        "tasks": {"source": "python", "use": "a:b"},
    }
    with RunStore.create(tmp_path / "runs", make_header(spec=spec)) as made:
        journal = await made.begin(make_task(), 0)
        await write_entries(journal, *map(make_entry, range(4)))
        await write_result(journal, make_trajectory())
        columns = token_columns(made, "t0/0", 0)
    assert columns["texts"] is None
    assert str(model) in columns["problem"]
    assert len(columns["ids"])


def test_an_unfinished_episode_shows_its_journal(store: RunStore) -> None:
    document = episode_document(store, "t0/1")
    assert not document["finished"]
    assert document["status"] == "broken off"
    assert document["outcome"] is None
    assert [each["role"] for each in document["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert [each["turn"] for each in document["messages"]] == [-1, 0, 0, 1]
    assert [each["tokens"] for each in document["turns"]] == [16, 16]
    columns = sampled_columns(store, "t0/1")
    assert columns["turns"].tolist() == [0] * 16 + [1] * 16
    assert columns["versions"].tolist() == [1] * 16 + [3] * 16
