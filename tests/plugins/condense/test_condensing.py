"""Condensing: a long episode goes on in a shorter thread; every branch is exact, and each sampled token is in one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from book_kit import call
from damaged_rows import assert_refused, damaged_row

from engine.plugins.condense.chunks import block_text, history_text
from engine.schemas.message import Message
from engine.schemas.trajectory import Trajectory


def sampled(trajectory: Trajectory) -> dict[int, list[int]]:
    """By turn: the ids on which the loss mask is 1. Each turn is in one branch."""
    found: dict[int, list[int]] = {}
    for branch in trajectory.branches:
        for turn in np.unique(branch.turn_ids[branch.turn_ids >= 0]):
            assert int(turn) not in found, "a turn is in two branches"
            found[int(turn)] = branch.input_ids[(branch.turn_ids == turn) & (branch.loss_mask == 1)].tolist()
    return found


def threads(trajectory: Trajectory) -> list[list[Message]]:
    """What the model was shown after each condensation."""
    return [
        [trajectory.messages[item] if isinstance(item, int) else item for item in found.thread]
        for found in trajectory.condensations
    ]


def check(ran: Any) -> Trajectory:
    """What holds of every condensed episode."""
    trajectory: Trajectory = ran.only
    assert trajectory.outcome.failure is None, trajectory.outcome.failure
    turns = sampled(trajectory)
    assert sorted(turns) == list(range(len(trajectory.turns)))
    assert sum(map(len, turns.values())) == trajectory.counts["sampled_tokens"]
    journal = ran.store.journal(trajectory.episode_id)
    said = [entry.record.generation.output_ids.tolist() for entry in journal if entry.record.kind == "generation"]
    assert [turns[turn] for turn in sorted(turns)] == said
    for found, shown in zip(trajectory.condensations, threads(trajectory), strict=True):
        assert found.after < found.before
        branch = next(
            (item for item in trajectory.branches if item.reason == found.reason and found.turn + 1 in item.turn_ids),
            None,
        )
        if branch is None:
            assert found.turn + 1 >= len(trajectory.turns)  # nothing was sampled after it
            continue
        prompt = branch.input_ids[: branch.spans[0].end]
        schemas = ran.runner._object_builder.shared_toolbox.schemas
        assert prompt.tolist() == ran.template.render(shown, schemas)
        assert len(prompt) == found.after
    return trajectory


async def test_dropped_observations_make_room_and_stay_in_the_journal(play_book: Any) -> None:
    trajectory = check(await play_book([*map(call, range(9)), "done"]))
    assert trajectory.outcome.limit is None
    assert trajectory.messages[-1].text == "done"
    assert [message.text for message in trajectory.messages if message.role == "tool"] == [
        f"page {page}: " + " ".join(f"w{page}x{i}" for i in range(40)) for page in range(9)
    ]
    assert len(trajectory.condensations) >= 2
    assert len(trajectory.branches) == len(trajectory.condensations) + 1
    first = threads(trajectory)[0]
    assert first[2].text == block_text(1, "[left out]")
    assert first[2].tool_call_id == "call_0_0"
    assert first[-1].text == trajectory.messages[len(first) - 1].text  # the newest is as it was
    assert [number for found in trajectory.condensations for number in found.blocks] == list(
        range(1, 1 + sum(len(found.blocks) for found in trajectory.condensations))
    )
    assert ("GENERATING", "overflow", "CONDENSING") in trajectory.path
    assert ("CONDENSING", "condensed", "GENERATING") in trajectory.path


@pytest.mark.parametrize("branch", [0, 1, -1])
async def test_the_guard_reads_every_branch_of_a_condensed_episode(branch: int, play_book: Any) -> None:
    with damaged_row(branch) as places:
        ran = await play_book([*map(call, range(9)), "done"])
    assert_refused(ran.only.outcome, places)


async def test_without_condensing_the_same_episode_ends_at_its_limit(play_book: Any) -> None:
    ran = await play_book([*map(call, range(9)), "done"], limits={"on_overflow": "end"})
    assert ran.only.outcome.limit == "episode_tokens"
    assert len(ran.only.branches) == 1


@pytest.mark.parametrize(
    ("condense", "block"),
    [
        ({"condenser": {"kind": "drop", "text": "gone"}}, "gone"),
        ({"condenser": {"kind": "own", "use": "book:shorten"}}, "page 0: w0x0"),
        pytest.param(
            {"condenser": {"kind": "own", "use": "book:shorten", "with": {"keep": 1}, "isolation": "process"}},
            "page",
            marks=pytest.mark.slow,  # by default: the test above, and other code in processes in tests/plugins/isolation
        ),
        (
            {
                "condenser": {
                    "kind": "summary",
                    "model": None,
                    "backend": {"kind": "scripted", "replies": ["<think>hm</think> short"] * 9},
                }
            },
            "short",
        ),
    ],
    ids=["drop", "own", "own in a process", "summary"],
)
async def test_every_condenser(play_book: Any, tiny_tokenizer_dir: Path, condense: dict[str, Any], block: str) -> None:
    if "model" in condense["condenser"]:
        condense["condenser"]["model"] = {"path": str(tiny_tokenizer_dir)}
    ran = await play_book([*map(call, range(8)), "done"], condense=condense)
    trajectory = check(ran)
    assert trajectory.messages[-1].text == "done"
    assert threads(trajectory)[0][2].text == block_text(1, block)


@pytest.mark.parametrize("chunks", [{"by": "tokens", "size": 40}, {"by": "passage", "pattern": r"\bw\d+x20"}])
async def test_chunks_cut_a_text_and_the_rest_of_it_stays(play_book: Any, chunks: dict[str, Any]) -> None:
    pytest.importorskip("semantic_text_splitter")
    condense = {"chunks": chunks, "condenser": {"kind": "own", "use": "book:shorten", "tokens": 24}}
    ran = await play_book([*map(call, range(8)), "done"], condense=condense)
    trajectory = check(ran)
    journal = [entry.record for entry in ran.store.journal("a/0") if entry.record.kind == "condense"]
    originals = {block.number: block.original for record in journal for block in record.blocks}
    shown = threads(trajectory)[-1][2].text
    for number, original in originals.items():
        mark = next(block for record in journal for block in record.blocks if block.number == number).text
        shown = shown.replace(block_text(number, mark), original)
    assert shown == trajectory.messages[2].text  # with its blocks expanded, the text is the original one


async def test_keywords_fit_their_budget(play_book: Any) -> None:
    pytest.importorskip("yake")
    condense = {"condenser": {"kind": "keywords", "tokens": 30}}
    ran = await play_book([*map(call, range(8)), "done"], condense=condense)
    check(ran)
    blocks = [
        block for entry in ran.store.journal("a/0") if entry.record.kind == "condense" for block in entry.record.blocks
    ]
    assert blocks
    for block in blocks:
        assert 0 < len(ran.template.encode(block.text)) <= 30
        assert all(word in block.original for word in block.text.split("; "))


async def test_the_policy_summarises_its_history_in_a_turn_that_is_trained(play_book: Any) -> None:
    summary = "I have read page 0 and page 1."
    condense = {
        "chunks": "history",
        "condenser": {"kind": "policy", "tokens": 60, "prompt": "Summarise."},
        "reserve_tokens": 400,
    }
    ran = await play_book(
        [*map(call, range(3)), summary, call(4), "done"],
        condense=condense,
        rewards={"reassign": [{"name": "brief", "when": "true", "at": "SUMMARIZING", "op": "add", "value": 0.5}]},
    )
    trajectory = check(ran)
    assert [step for step in trajectory.path if step[1] in ("overflow", "asked", "condensed")] == [
        ("GENERATING", "overflow", "ASKING_SUMMARY"),
        ("ASKING_SUMMARY", "asked", "SUMMARIZING"),
        ("CONDENSING", "condensed", "GENERATING"),
    ]
    (shown,) = threads(trajectory)
    said = trajectory.messages
    assert shown == [said[0], Message(role="user", content=block_text(1, summary)), said[5], said[6]]
    assert [turn.rewards for turn in trajectory.turns][3] == {"brief": 0.5}
    (record,) = [entry.record for entry in ran.store.journal("a/0") if entry.record.kind == "condense"]
    assert record.blocks[0].original == history_text(said[1:5])


async def test_expand_returns_the_original_text(play_book: Any) -> None:
    expand = {"tool_calls": [{"name": "expand", "arguments": {"block": 1}}]}
    wrong = {"tool_calls": [{"name": "expand", "arguments": {"block": 99}}]}
    ran = await play_book([*map(call, range(5)), expand, wrong, "done"], condense={"expand": True})
    trajectory = check(ran)
    results = [message for message in trajectory.messages if message.name == "expand"]
    assert results[0].text == trajectory.messages[2].text
    assert results[1].text.startswith("There is no block 99. The blocks are 1 to ")


async def test_nothing_shorter_ends_at_the_limit_and_not_in_a_loop(play_book: Any) -> None:
    ran = await play_book([*map(call, range(9)), "done"], condense={"keep_last": 50})
    trajectory = ran.only
    assert trajectory.outcome.limit == "episode_tokens"
    assert trajectory.condensations == []
    tried = [turn for turn, step in enumerate(trajectory.path) if step == ("CONDENSING", "unchanged", "GENERATING")]
    assert 1 <= len(tried) <= 2  # once before each turn that has less room than a reply may need


async def test_the_number_of_condensations_is_limited(play_book: Any) -> None:
    ran = await play_book([*map(call, range(12)), "done"], limits={"condensations": 1})
    assert len(ran.only.condensations) == 1
    assert ran.only.outcome.limit == "condensations"


async def test_a_guard_condenses_at_any_turn(play_book: Any) -> None:
    machine = {
        "preset": "tools",
        "states": {"CONDENSING": {"action": "condense"}},
        "transitions": [
            {
                "trigger": "results",
                "source": "AWAITING_TOOL",
                "dest": "CONDENSING",
                "conditions": "turns.assistant == 3 && condensed.times == 0",
            },
            {"trigger": ["condensed", "unchanged"], "source": "CONDENSING", "dest": "GENERATING"},
        ],
    }
    ran = await play_book(
        [*map(call, range(4)), "done"],
        machine=machine,
        limits={"on_overflow": "end"},
        condense={"target_tokens": 1, "keep_last": 0},
    )
    trajectory = check(ran)
    assert trajectory.condensations[0].turn == 2
    assert trajectory.condensations[0].blocks == [1, 2, 3]


async def test_a_condenser_that_answers_badly_fails_its_episode(play_book: Any) -> None:
    ran = await play_book(
        [*map(call, range(8)), "done"], condense={"condenser": {"kind": "own", "use": "book:numbers"}}
    )
    failure = ran.only.outcome.failure
    assert (failure.kind, failure.blame) == ("environment_bad_reply", "environment")
    assert "`book:numbers` returned int; it must return a text" in failure.message
