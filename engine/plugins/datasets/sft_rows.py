"""Converts stored episodes to rows for supervised fine-tuning (`engine export --format sft`).

    chosen = Selection()                        # every episode without a failure that is not the policy's
    write_jsonl(sft_rows(store, chosen), Path("sft.jsonl"))
    chosen.summary()

`docs/rows.md` has the columns. A row is one branch: the ids that the model was shown and sampled, and the same
conversation as messages.

Invariants:
- `messages` are those that the model was shown in this branch: after a condensation the shorter thread, not the whole
  conversation.
- A sampled token has loss mask 1 in at most one row; in none if its turn is not chosen or its row is a copy of another.
- Two rows never have equal ids with equal masks (or equal messages, where a backend gives no ids).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from engine.schemas.message import ImagePart
from engine.store.rows.columns import json_text, outcome_columns
from engine.store.shown_messages import reply_numbers, shown_messages

if TYPE_CHECKING:
    from engine.schemas.message import Message
    from engine.schemas.trajectory import Branch, Trajectory, Turn
    from engine.store.reader import RunReader
    from engine.store.rows.columns import Columns

SFT_MEANINGS: dict[str, str] = {
    "run_id": "The run.",
    "task_id": "The task.",
    "episode_id": "The episode: `<task_id>/<sample_index>`.",
    "branch": "Index of the branch in the episode, from 0.",
    "trainable": "Always true.",
    "input_ids": "The token ids of the branch: what the model saw and sampled.",
    "loss_mask": "1 on the sampled tokens of the chosen turns, 0 elsewhere.",
    "assistant_masks": "As `loss_mask`, under the name that TRL reads.",
    "turn_ids": "The assistant turn, from 0, on sampled tokens; -1 elsewhere.",
    "images": "Images of the branch, as in training rows; only in a run with images.",
    "messages": "The conversation that the model was shown in this branch, up to its newest reply, in OpenAI's form: "
    "`role`, `content`, `reasoning_content`, `tool_calls` (arguments as JSON texts), `tool_call_id`, `name`. A "
    "condensed part is the block that stood for it.",
    "tools": "The tools that the episode was shown, as the JSON text of a list of OpenAI's function schemas; only in "
    "rows of episodes with tools. "
    "TRL reads it where it renders `messages`.",
    "message_turns": "For each message: the assistant turn, from 0, if its tokens are trained in this row; -1 for all "
    "others.",
    "outcome": "How the episode ended, as in training rows.",
    "metadata": "The origin of the row: spec, model, engine_version, created, score.",
}
"""The meaning of every column of a row for supervised fine-tuning, in order."""


@dataclass
class ExportedTurns:
    """Which episodes and turns are exported, and what was left out."""

    episode: Callable[[Trajectory], bool] = lambda trajectory: True
    """Whether an episode is exported."""
    turn: Callable[[Trajectory, Turn], bool] = lambda trajectory, turn: True
    """Whether a turn is exported, or its tokens are trained."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of episodes, turns and rows that are not exported, by reason."""
    episodes: int = 0
    """Number of episodes with at least one row."""

    def trajectories(self, store: RunReader, score: str | None) -> Iterator[Trajectory]:
        """The exported episodes of a run, in the order of tasks and samples; the others are counted."""
        for trajectory in store.trajectories(score):
            reason = "episodes of an evaluation" if store.header.evaluation else unusable(trajectory)
            if reason is None and not self.episode(trajectory):
                reason = "episodes by the filter"
            if reason is None:
                yield trajectory
            else:
                self.left_out[reason] += 1

    def summary(self) -> list[str]:
        """One line per reason for which something was left out."""
        return [f"left out: {count} {reason}" for reason, count in sorted(self.left_out.items()) if count]


def sft_rows(store: RunReader, chosen: ExportedTurns, *, score: str | None = None) -> Iterator[Columns]:
    """Yield the rows of the chosen episodes, in the order of tasks, samples and branches.

    Args:
        store: The run, which may still be running.
        chosen: Which episodes and turns; it counts what is left out.
        score: Label of a score of `engine rescore`, whose outcomes and rewards are used.

    Raises:
        StoreError: the run has no such score.
    """
    seen: set[bytes] = set()
    tools_of = store.tool_schemas()
    in_parts = bool(store.image_digests())
    header = store.header
    metadata = {
        "spec": header.name,
        "model": (header.spec.get("model") or {}).get("path"),
        "engine_version": header.engine_version,
        "created": header.created,
        "score": score,
    }
    for trajectory in chosen.trajectories(store, score):
        trained = {turn.index for turn in trajectory.turns if chosen.turn(trajectory, turn)}
        has_rows = False
        for branch in trajectory.branches:
            row = _row(trajectory, branch, trained, in_parts, tools_of(trajectory.episode_id), metadata)
            if row is None:
                chosen.left_out["rows without a chosen turn"] += 1
                continue
            identity = _identity(row)
            if identity in seen:
                chosen.left_out["copies of other rows"] += 1
                continue
            seen.add(identity)
            has_rows = True
            yield row
        chosen.episodes += has_rows


def unusable(trajectory: Trajectory) -> str | None:
    """Why nothing of an episode may be trained on; None if something may."""
    failure = trajectory.outcome.failure
    if failure is not None and failure.blame != "policy":
        return f"episodes with a failure of blame {failure.blame}"
    if any(turn.finish.type == "abort" for turn in trajectory.turns):
        return "episodes with an aborted turn"
    return None if trajectory.turns else "episodes without a turn"


def _row(
    trajectory: Trajectory,
    branch: Branch,
    trained: set[int],
    in_parts: bool,
    tools: str | None,
    metadata: Mapping[str, Any],
) -> Columns | None:
    """The row of a branch, without columns that do not apply; None if none of its turns is trained."""
    turns_of_branch = [turn for turn in trajectory.turns if turn.branch == branch.index]
    sampled = any(turn.end > turn.start for turn in trajectory.turns)
    # A backend that gives no ids gives malformed calls as no part of a message: such a turn is not whole.
    turns = {turn.index for turn in turns_of_branch if turn.index in trained and (sampled or turn.event != "malformed")}
    if not turns:
        return None
    columns: Columns = {
        "run_id": trajectory.run_id,
        "task_id": trajectory.task_id,
        "episode_id": trajectory.episode_id,
        "branch": branch.index,
        "trainable": True,
    }
    if sampled:
        mask = ((branch.loss_mask == 1) & np.isin(branch.turn_ids, sorted(turns))).astype(np.int32)
        if not mask.any():
            return None
        columns["input_ids"] = branch.input_ids
        columns["loss_mask"] = columns["assistant_masks"] = mask
        columns["turn_ids"] = branch.turn_ids
    if in_parts:  # TRL takes rows with such a column for those of a vision-language model
        columns["images"] = [image.plain() for image in branch.images]
    messages, numbers = shown_messages(trajectory, turns_of_branch[-1].index)
    turn_of = {at: turn for turn, at in enumerate(reply_numbers(trajectory))}
    columns["messages"] = [_openai(message, in_parts) for message in messages]
    columns["message_turns"] = [turn if (turn := turn_of.get(at, -1)) in turns else -1 for at in numbers]
    if tools:
        columns["tools"] = tools
    return columns | {"outcome": outcome_columns(trajectory.outcome), "metadata": metadata}


def _identity(row: Columns) -> bytes:
    """Digest of what a row trains."""
    digest = blake2b(digest_size=16)
    if "loss_mask" in row:
        digest.update(np.asarray(row["input_ids"], np.int64).tobytes())
        digest.update(b"|")
        digest.update(np.asarray(row["loss_mask"], np.int8).tobytes())
        digest.update(orjson.dumps([image["image"] for image in row.get("images", ())]))
    else:
        digest.update(orjson.dumps([row["messages"], [turn >= 0 for turn in row["message_turns"]]]))
    return digest.digest()


def _openai(message: Message, in_parts: bool) -> dict[str, Any]:
    """A message in OpenAI's form. With `in_parts` every content is a list, since all rows of a file need one type."""
    content: Any = message.text
    if in_parts:
        parts = [message.content] if isinstance(message.content, str) else message.content
        content = [
            {"type": "image", "text": None}
            if isinstance(part, ImagePart)
            else {"type": "text", "text": part if isinstance(part, str) else part.text}
            for part in parts
        ]
    calls = [
        {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": json_text(call.arguments)}}
        for call in message.tool_calls
    ]
    more = {
        "reasoning_content": message.reasoning,
        "tool_calls": calls,
        "tool_call_id": message.tool_call_id,
        "name": message.name,
    }
    return {"role": message.role, "content": content} | {key: value for key, value in more.items() if value}
