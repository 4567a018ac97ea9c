"""Rows for supervised fine-tuning: what the model was shown, each sampled token at most once, and which episodes and turns are chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from book_kit import call
from sft_columns import sft_columns
from slow_cases import slow_but_each

from engine.api.runs import Run
from engine.errors import StoreError
from engine.plugins.datasets.sft_rows import ExportedTurns
from engine.schemas.message import Message
from engine.store.episode_filter import EPISODE_VARIABLES, TURN_VARIABLES, EpisodeFilter


@pytest.fixture
def play(play_book: Callable[..., Any]) -> Callable[..., Any]:
    """`play_book` with a prompt that has an answer."""
    prompt = [
        {"role": "user", "content": "What is on page 1?"},
        {"role": "assistant", "content": "Nothing."},
        {"role": "user", "content": "Read the book."},
    ]
    return partial(play_book, prompt=prompt)


def plain(message: Message) -> tuple[str, str, list[str]]:
    return message.role, message.text, [each.name for each in message.tool_calls]


async def test_turns_are_chosen_by_an_expression(play: Any) -> None:
    ran = await play([*map(call, range(3)), "done"])
    selection = ExportedTurns()
    selection.turn = EpisodeFilter(ran.store, 'turn.index > 0 && turn.event == "tool_calls"', "--turns", TURN_VARIABLES)
    (row,) = sft_columns(ran.store, selection)
    assert sorted(set(row["turn_ids"][row["loss_mask"] == 1].tolist())) == [1, 2]
    assert [turn for turn in row["message_turns"] if turn >= 0] == [1, 2]
    selection = ExportedTurns(turn=lambda episode, turn: False)
    assert list(sft_columns(ran.store, selection)) == []
    assert selection.summary() == ["left out: 1 rows without a chosen turn"]


async def test_copies_are_left_out(play: Any) -> None:
    rollout = {"samples_per_task": 4, "seed": 0}
    ran = await play([call(1), "done"], rollout=rollout)
    selection = ExportedTurns()
    rows = list(sft_columns(ran.store, selection))
    assert [row["episode_id"] for row in rows] == ["a/0"]
    assert (selection.episodes, selection.summary()) == (1, ["left out: 3 copies of other rows"])


TRUE = [
    "turns.assistant == 4 && turns.user == 0",
    "tools.calls == 3 && tools.errors == 0",
    "tokens.sampled > 0 && tokens.context > tokens.sampled",
    "images.shown == 0 && condensed.times == 0" if "condensed" in EPISODE_VARIABLES else "images.shown == 0",
    "limits.turn_tokens == 60 && limits.assistant_turns == 40 && limits.images == 9007199254740991",
    "rewards.total == 0.0 && rewards.last == 0.0 && rewards.previous == 0.0",
    'last.finish == "stop" && last.calls == 0 && !last.malformed && last.text == "done" && last.tokens > 0',
    "!feedback.solved && !feedback.satisfied && !feedback.malformed",
    "size(facts) == 0",
    "size(task) > 0",
    'outcome.event == "answered" && outcome.limit == "" && outcome.failure == "" && outcome.blame == ""',
    "!outcome.solved && outcome.solved_turn == -1 && outcome.reward == 0.0",
    'outcome.state != "" && !("x" in outcome.rewards)',
    'episode.id == episode.task + "/0" && episode.sample == 0 && episode.attempt == 0 && episode.status == "done"',
    "episode.trainable && episode.branches == 1 && episode.images == 0 && episode.trained == tokens.sampled",
    "episode.version == 0 && episode.oldest_version == 0 && episode.seconds > 0.0",
    "has(states.GENERATING) && states.GENERATING > 0.0",
]


@pytest.mark.parametrize("expression", slow_but_each(3, TRUE))
async def test_a_filter_reads_every_variable(play: Any, expression: str) -> None:
    ran = await play([*map(call, range(3)), "done"])
    assert EpisodeFilter(ran.store, expression)(ran.only) is True
    assert EpisodeFilter(ran.store, f"!({expression})")(ran.only) is False


def test_every_variable_is_in_a_filter_above() -> None:
    named = {name for name in EPISODE_VARIABLES if any(f"{name}." in text or f"({name})" in text for text in TRUE)}
    assert named == set(EPISODE_VARIABLES)
    fields = [
        f"{name}.{field}"
        for name in ("outcome", "rewards", "last", "turns")
        for field in EPISODE_VARIABLES[name].fields
    ]
    assert [each for each in fields if not any(each in text for text in TRUE)] == []


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("outcome.solvd", "--filter `outcome.solvd`, column 9: `outcome` has no field `solvd`; did you mean `solved`?"),
        ("turn.index == 0", "there is no variable `turn`"),
        ("outcome.reward", "a guard must be true or false"),
        ("facts.score > 1", "--filter: a/0: guard `facts.score > 1`"),
    ],
)
async def test_a_wrong_filter_is_refused_with_its_place(play: Any, expression: str, words: str) -> None:
    ran = await play(["done"])
    with pytest.raises(StoreError) as caught:
        EpisodeFilter(ran.store, expression)(ran.only)
    assert words in str(caught.value)


async def test_a_failure_of_others_is_left_out(play: Any) -> None:
    ran = await play([call(1), {"error": "gone"}, "done"])
    selection = ExportedTurns()
    assert [np.sum(row["loss_mask"]) for row in sft_columns(ran.store, selection)] == []
    assert selection.summary() == ["left out: 1 episodes with a failure of blame backend"]


async def test_a_backend_without_ids_gives_messages(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `openai` does: no token counts as sampled, and a turn with a malformed call is not whole."""
    ran = await play([call(1), "done"])
    given = ran.only
    turns = [replace(turn, end=turn.start) for turn in given.turns]
    branches = [replace(each, loss_mask=np.zeros_like(each.loss_mask)) for each in given.branches]
    found = replace(given, turns=turns, branches=branches, outcome=replace(given.outcome, trainable=False))
    monkeypatch.setattr(ran.store, "trajectories", lambda score=None: iter([found]))
    (row,) = sft_columns(ran.store, ExportedTurns())
    assert "input_ids" not in row
    assert row["message_turns"] == [-1, -1, -1, 0, -1, 1]
    assert row["messages"][3]["tool_calls"] == [
        {"type": "function", "id": "call_0_0", "function": {"name": "read", "arguments": '{"page":1}'}}
    ]
    found = replace(found, turns=[replace(turns[0], event="malformed"), turns[1]])
    (row,) = sft_columns(ran.store, ExportedTurns())
    assert row["message_turns"] == [-1, -1, -1, -1, -1, 1]


async def test_options_without_effect_are_said(play: Any) -> None:
    run = Run((await play([call(1), "done"])).store)
    for options, message in (
        ({"turns": "true"}, "--turns has no effect with --format jsonl; leave it out, or use --format sft"),
        ({"format": "sft", "credit": ["gamma=1"]}, "--credit has no effect with --format sft"),
        ({"format": "sft", "values": "v.jsonl"}, "--values has no effect with --format sft"),
        ({"format": "sft", "trainable_only": True}, "--trainable-only has no effect with --format sft"),
        ({"format": "sft", "path": "a.parquet"}, "--format sft writes JSON lines"),
        ({"format": "sft", "tunrs": "true"}, "--tunrs has no effect with --format sft; leave it out"),
    ):
        with pytest.raises(StoreError) as raised:
            run.export(**options)
        assert str(raised.value).startswith(message)
