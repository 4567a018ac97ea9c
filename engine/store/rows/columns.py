"""The columns of a training row: one shape for JSONL, Parquet and Python, and the meaning of each column.

Values that have no fixed type (arguments of tool calls, fields of tasks, facts) are JSON texts, and rewards by name are
a list of `{name, value}`: every reader of Parquet supports strings, structs and lists, and not all support maps. A key
that does not apply is present with the value null.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from engine.schemas.message import Message
    from engine.schemas.trajectory import Outcome

Columns = dict[str, Any]
"""A row as a dict: arrays as NumPy."""

MEANINGS: dict[str, str] = {
    "run_id": "The run.",
    "task_id": "The task: episodes of one task are one group.",
    "episode_id": "The episode: `<task_id>/<sample_index>`.",
    "task_index": "Position of the task in its source, from 0.",
    "sample_index": "Index of the episode among the episodes of its task, from 0.",
    "branch": "Index of the branch (an exact token sequence) in the episode, from 0. There is more than one if the "
    "chat template rewrites history.",
    "seed": "The episode's seed.",
    "trainable": "Whether the row may be trained on: every id is known, any failure is the policy's, and this branch "
    "has sampled tokens.",
    "input_ids": "The token ids of the branch: what the model saw and sampled.",
    "loss_mask": "1 on sampled tokens, 0 elsewhere.",
    "logprobs": "The sampler's log-probabilities; 0.0 where `loss_mask` is 0.",
    "weight_versions": "The weight version that sampled the token; -1 where `loss_mask` is 0.",
    "turn_ids": "The assistant turn, from 0, on sampled tokens; -1 elsewhere.",
    "token_rewards": "A turn's reward on its last sampled token, or spread over its sampled tokens, as "
    "`rewards.placement` says; 0.0 elsewhere.",
    "advantages": "The turn's advantage on each of its sampled tokens (with `bilevel_gae` the token's own), 0.0 "
    "elsewhere; null where the row is not trainable.",
    "unchecked_prompts": "Number of turns of this row whose prompt the server did not report, so that it could not be "
    "compared; 0 for the local backend.",
    "turn_rewards": "Reward of every turn of the episode, also of turns in other branches.",
    "outcome": "How the episode ended.",
    "outcome.state": "The final state.",
    "outcome.event": "The event that led there.",
    "outcome.limit": "The limit that ended it, or null.",
    "outcome.failure": "The failure, or null.",
    "outcome.failure.kind": "Stable name of the failure, such as `tool_timeout`; those of the guard are "
    "`bridge_differs`, `prompt_differs` and `unguarded` (exactness.md).",
    "outcome.failure.blame": "Who caused it: policy, tool, user, environment, backend, spec or engine.",
    "outcome.failure.message": "What happened, and how to fix it.",
    "outcome.failure.state": "The state in which it happened.",
    "outcome.failure.turn": "The newest assistant turn, from 0; -1 before the first.",
    "outcome.failure.trace": "Traceback of the exception that an environment, tool or user raised, or null.",
    "outcome.solved": "Whether a user, a tool or the environment reported the task as solved.",
    "outcome.solved_turn": "The newest assistant turn when the task was first reported as solved, from 0, or null.",
    "outcome.trainable": "False if the failure is not the policy's, or if token ids are not known.",
    "outcome.reward": "Sum over turns and names.",
    "outcome.rewards": "Sum over turns for each name.",
    "outcome.rewards.name": "The reward's name.",
    "outcome.rewards.value": "Its sum.",
    "messages": "The whole conversation.",
    "messages.role": "system, user, assistant or tool.",
    "messages.content": "The text; for content in parts, the joined text parts.",
    "messages.parts": "The parts of the content, in order; null if it is only text.",
    "messages.parts.type": "text or image.",
    "messages.parts.text": "Of a text part.",
    "messages.parts.image": "Of an image part: `sha256:<hex>`, its digest in the run.",
    "messages.parts.mime": "Of an image part: its media type.",
    "messages.parts.width": "Of an image part: width in pixels.",
    "messages.parts.height": "Of an image part: height in pixels.",
    "messages.reasoning": "The model's reasoning, if its template separates it from the content, or null.",
    "messages.tool_calls": "The tool calls of the message, in order.",
    "messages.tool_calls.id": "`call_<turn>_<index>`.",
    "messages.tool_calls.name": "The tool's name.",
    "messages.tool_calls.arguments": "Arguments by name, as the JSON text of an object.",
    "messages.tool_call_id": "Of role tool: the call that this answers.",
    "messages.name": "Of role tool: the tool's name.",
    "images": "Images of this branch, in order.",
    "images.image": "`sha256:<hex>`; its tensors are in the folder `FILE.images` beside the file.",
    "images.start": "Its first token.",
    "images.end": "One past its last token.",
    "images.grid": "The grid that the model's processor made: (t, h, w) in patches, or (rows, columns) of tiles.",
    "routed_experts": "With `backend.routed_experts`: the experts that the sampler chose for the first tokens of the "
    "row, up to the last but one that the model read; else null. In Python an array [tokens, layers, top_k].",
    "routed_experts.shape": "Tokens, layers (all of the model; those without experts have zeros), experts of a token.",
    "routed_experts.dtype": "`uint8` up to 256 experts, `uint16` for more.",
    "routed_experts.data": "The array's little-endian bytes in C order; in JSONL as base64.",
    "task_fields": "The task's fields, as the JSON text of an object.",
    "facts": "The facts that environment, tools and user returned during the episode, as the JSON text of an object. "
    "In a run with reviews also `review`: `rated`, `rating`, `tags`, `notes`, `by`.",
    "metadata": "The origin of the row.",
    "metadata.spec": "The spec's name.",
    "metadata.model": "The policy's model, as the spec names it.",
    "metadata.engine_version": "The version of the engine that ran the episode.",
    "metadata.created": "When the run began, Unix time in seconds.",
    "metadata.credit": "The credit method with its parameters, as the JSON text of an object.",
    "metadata.score": "The label of the score that the rewards are taken from, or null for the run's own rules.",
}
"""The meaning of every column, by its path, in order. The types are in `export.arrow_schema`."""


def json_text(value: Any) -> str:
    """Return a value as JSON. Values that JSON does not have (NaN, integers beyond 64 bits) are written as Python's
    `json` writes them."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        import json

        return json.dumps(value, default=str)


def message_columns(message: Message) -> Columns:
    """Return a message in the form of a row."""
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


_PART: Columns = dict.fromkeys(("type", "text", "image", "mime", "width", "height"))


def outcome_columns(outcome: Outcome) -> Columns:
    """Return an outcome in the form of a row."""
    rewards = [{"name": name, "value": value} for name, value in outcome.rewards.items()]
    return outcome.plain() | {"rewards": rewards}
