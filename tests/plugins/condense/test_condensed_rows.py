"""Rows for fine-tuning of condensed episodes: what the model was shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from book_kit import call
from sft_columns import sft_columns

from engine.plugins.datasets.sft_rows import ExportedTurns
from engine.schemas.message import Message
from engine.store.shown_messages import shown_messages

POLICY_SUMMARY = {
    "chunks": "history",
    "condenser": {"kind": "policy", "tokens": 60, "prompt": "Summarise."},
    "reserve_tokens": 400,
}


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


@pytest.mark.parametrize("condense", [{}, {"keep_last": 0}, {"chunks": "history"}, POLICY_SUMMARY], ids=str)
async def test_messages_are_what_the_model_was_shown(play: Any, condense: dict[str, Any]) -> None:
    """The chat format renders a row's messages, without the newest reply, to the ids that this reply was sampled from."""
    if condense.get("chunks") == "history" and "condenser" not in condense:
        condense = condense | {"condenser": {"kind": "drop", "text": "pages were read"}}
    replies = [*map(call, range(3)), "I have read two pages.", call(4), "done"]
    ran = await play([*map(call, range(9)), "done"] if condense is not POLICY_SUMMARY else replies, condense=condense)
    trajectory = ran.only
    assert trajectory.condensations
    schemas = ran.runner._object_builder.shared_toolbox.schemas
    rows = list(sft_columns(ran.store, ExportedTurns()))
    assert len(rows) == len(trajectory.branches) > 1
    trained: Counter[int] = Counter()
    for row, branch in zip(rows, trajectory.branches, strict=True):
        own = [turn for turn in trajectory.turns if turn.branch == branch.index]
        shown, numbers = shown_messages(trajectory, own[-1].index)
        assert ran.template.render(shown[:-1], schemas) == row["input_ids"][: own[-1].start].tolist()
        assert [(each["role"], each["content"]) for each in row["messages"]] == [plain(each)[:2] for each in shown]
        assert [turn for turn in row["message_turns"] if turn >= 0] == [turn.index for turn in own]
        assert [numbers[at] for at, turn in enumerate(row["message_turns"]) if turn == own[-1].index] == [numbers[-1]]
        assert row["assistant_masks"].tolist() == row["loss_mask"].tolist() == branch.loss_mask.tolist()
        trained.update(row["turn_ids"][row["loss_mask"] == 1].tolist())
    assert trained == {turn.index: turn.end - turn.start for turn in trajectory.turns}
