"""What a training row holds: one shape for JSONL, Parquet and Python, and the meaning of each column.

Values that have no fixed type (arguments of tool calls, fields of tasks, facts) are JSON texts, and rewards by name are a
list of `{name, value}`: every reader of Parquet has strings, structs and lists, and not all have maps. Keys that do not
apply are there and null.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import orjson

from engine.storable import stored_fields

if TYPE_CHECKING:
    from engine.schemas.environment import Task
    from engine.schemas.message import Message
    from engine.schemas.trajectory import Outcome

MEANINGS: dict[str, str] = {
    "run_id": "The run.",
    "task_id": "The task: episodes of one task are one group.",
    "episode_id": "The episode: `<task_id>/<sample_index>`.",
    "task_index": "Place of the task in its source, from 0.",
    "sample_index": "Which of the task's episodes, from 0.",
    "branch": "Which of the episode's exact sequences, from 0. There is more than one where the chat template rewrites history.",
    "seed": "The episode's seed.",
    "trainable": "Every id is known, no world's failure ended the episode, and something in this branch was sampled.",
    "input_ids": "What the model saw and sampled.",
    "loss_mask": "1 on sampled tokens, 0 elsewhere.",
    "logprobs": "The sampler's log-probabilities; 0.0 where `loss_mask` is 0.",
    "weight_versions": "The weights that sampled the token; -1 where `loss_mask` is 0.",
    "turn_ids": "The assistant turn, from 0, on sampled tokens; -1 elsewhere.",
    "token_rewards": "A turn's reward on its last sampled token, or spread over its sampled tokens, as `rewards.placement` says; 0.0 elsewhere.",
    "advantages": "The turn's advantage on each of its sampled tokens (with `bilevel_gae` the token's own), 0.0 elsewhere; null where the row is not trainable.",
    "turn_rewards": "Reward of every turn of the episode, whichever branch it is in.",
    "outcome": "How the episode ended.",
    "outcome.state": "The final state.",
    "outcome.event": "The event that led there.",
    "outcome.limit": "The limit that ended it, or null.",
    "outcome.failure": "What went wrong, or null.",
    "outcome.failure.kind": "Stable name, such as `tool_timeout`.",
    "outcome.failure.blame": "Whose fault: policy, tool, user, environment, backend, spec or engine.",
    "outcome.failure.message": "What happened, and what to do about it.",
    "outcome.failure.state": "Where the episode stood.",
    "outcome.failure.turn": "The newest assistant turn, from 0; -1 before the first.",
    "outcome.failure.trace": "Traceback of what a world raised, or null.",
    "outcome.solved": "A user, a tool or the environment called the task solved.",
    "outcome.solved_turn": "The newest assistant turn when it was first called so, from 0, or null.",
    "outcome.trainable": "False where the failure is not the policy's, or where ids are not known.",
    "outcome.reward": "Sum over turns and names.",
    "outcome.rewards": "Sum over turns for each name.",
    "outcome.rewards.name": "The reward's name.",
    "outcome.rewards.value": "Its sum.",
    "messages": "The whole conversation.",
    "messages.role": "system, user, assistant or tool.",
    "messages.content": "The text; of content in parts, its text parts joined.",
    "messages.parts": "Content of several parts, in order; null where it is text alone.",
    "messages.parts.type": "text or image.",
    "messages.parts.text": "Of a text part.",
    "messages.parts.image": "Of an image part: `sha256:<hex>`, its name in the run.",
    "messages.parts.mime": "Of an image part: its media type.",
    "messages.parts.width": "Of an image part: pixels across.",
    "messages.parts.height": "Of an image part: pixels down.",
    "messages.reasoning": "The model's reasoning, where its template keeps it apart, or null.",
    "messages.tool_calls": "Calls that the message makes, in order.",
    "messages.tool_calls.id": "`call_<turn>_<index>`.",
    "messages.tool_calls.name": "The tool's name.",
    "messages.tool_calls.arguments": "Arguments by name, as the JSON text of an object.",
    "messages.tool_call_id": "Of role tool: the call that this answers.",
    "messages.name": "Of role tool: the tool's name.",
    "images": "Images of this branch, in order.",
    "images.image": "`sha256:<hex>`; its tensors are in the folder `FILE.images` beside the file.",
    "images.start": "Its first token.",
    "images.end": "One past its last token.",
    "images.grid": "What the model's processor made of it: (t, h, w) in patches, or (rows, columns) of tiles.",
    "task_fields": "The task's fields, as the JSON text of an object.",
    "facts": "What the worlds told during the episode, as the JSON text of an object.",
    "metadata": "What the row was made from.",
    "metadata.spec": "The spec's name.",
    "metadata.model": "The policy's model, as the spec names it.",
    "metadata.engine_version": "The engine that ran the episode.",
    "metadata.created": "When the run began, Unix time in seconds.",
    "metadata.credit": "The credit method with its parameters, as the JSON text of an object.",
    "metadata.score": "The score by other rules that rewards are taken from, or null for the run's own.",
}
"""Every column by its path, in order, and what it holds. The types are in `parquet.arrow_schema`."""


def json_text(value: Any) -> str:
    """A value as JSON. What older runs hold and JSON has not (NaN, integers past 64 bits) is written as Python writes it."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        import json

        return json.dumps(value, default=str)


def message_row(message: Message) -> dict[str, Any]:
    """A message as a row holds it."""
    parts = None if isinstance(message.content, str) else message.content
    return {
        "role": message.role,
        "content": message.text,
        "parts": None if parts is None else [_PART | part.model_dump(mode="json") for part in parts],
        "reasoning": message.reasoning,
        "tool_calls": [
            {"id": call.id, "name": call.name, "arguments": json_text(call.arguments)} for call in message.tool_calls
        ],
        "tool_call_id": message.tool_call_id,
        "name": message.name,
    }


_PART: dict[str, Any] = dict.fromkeys(("type", "text", "image", "mime", "width", "height"))


def outcome_row(outcome: Outcome) -> dict[str, Any]:
    """An outcome as a row holds it."""
    rewards = [{"name": name, "value": value} for name, value in outcome.rewards.items()]
    return outcome.plain() | {"rewards": rewards}


def task_row(task: Task | None, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a task and of what was told in its episode. Without a task (inside a trainer) its own are null."""
    return {
        "task_index": None if task is None else task.index,
        "task_fields": None if task is None else json_text(stored_fields(task.fields)),
        "facts": json_text(facts),
    }
