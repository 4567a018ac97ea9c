"""Rows for fine-tuning that have messages and no ids, because a chat API sampled them, rendered for the model that is
trained.

Invariants:
- The tokens of a trained reply are what the chat template writes for it after its prompt, up to and with its stop
  token.
- Each reply that a row names in `message_turns` is trained in exactly one rendered row, or counted as left out.
- Replies share a row as long as the template shows what is before a reply as the row has it; else a new row begins.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from engine.errors import EngineError
from engine.schemas.message import Message, ToolCall
from engine.spec.rows.row import ListRows, Rows
from engine.tokens.conversation import Conversation

if TYPE_CHECKING:
    from engine.store.rows.columns import Columns
    from engine.tokens.template import ChatTemplate

_KEPT = ("run_id", "task_id", "episode_id", "branch", "trainable", "messages", "outcome", "metadata")


def rendered(rows: Rows, template: Callable[[], ChatTemplate], left_out: Counter[str]) -> Rows:
    """The rows with ids: as they are if the first one has some, else rendered, in memory.

    Args:
        rows: The rows of one file.
        template: Returns the chat format of the model that is trained.
        left_out: Counts replies that cannot be rendered, by reason.

    Raises:
        RowFault: A row cannot be read.
    """
    if not len(rows) or not _is_text(rows.row(0).fields):
        return rows
    return ListRows([made for row in rows for made in _rendered(row.fields, template(), left_out)])


def _is_text(fields: Any) -> bool:
    return isinstance(fields, dict) and "input_ids" not in fields and {"messages", "message_turns"} <= fields.keys()


def _rendered(fields: Any, template: ChatTemplate, left_out: Counter[str]) -> list[Columns]:
    if not _is_text(fields):  # the check of columns names what it lacks
        return [fields]
    turns = fields["message_turns"]
    trained = [at for at, turn in enumerate(turns) if turn >= 0]
    if any(isinstance(message["content"], list) for message in fields["messages"]):
        left_out["replies of a chat API to images"] += len(trained)
        return []
    messages = [_message(message) for message in fields["messages"]]
    tools = json.loads(fields["tools"]) if fields.get("tools") else None
    rows: list[Columns] = []
    ids: list[int] = []
    for at in trained:
        try:
            prompt, reply = _reply(messages[: at + 1], tools, template)
        except EngineError as error:
            left_out[f"replies that the chat template refuses ({error})"] += 1
            continue
        if not reply:
            left_out["replies that the chat template does not show whole after their prompt"] += 1
            continue
        if not rows or prompt[: len(ids)] != ids:
            unchanged = {name: fields[name] for name in _KEPT if name in fields}
            rows.append({**unchanged, "input_ids": [], "loss_mask": [], "turn_ids": []})
            ids = []
        columns, new = rows[-1], len(prompt) - len(ids)
        columns["input_ids"] = ids = prompt + reply
        columns["loss_mask"] += [0] * new + [1] * len(reply)
        columns["turn_ids"] += [-1] * new + [turns[at]] * len(reply)
    return rows


def _reply(
    messages: Sequence[Message], tools: list[dict[str, Any]] | None, template: ChatTemplate
) -> tuple[list[int], list[int]]:
    """Ids of the prompt, and of the newest message as the reply to it; an empty reply if the template writes it
    otherwise."""
    prompt, sequence = (_ids(part, tools, template) for part in (messages[:-1], messages))
    said = sequence[len(prompt) :]
    ends = [at for at, token in enumerate(said) if token in template.stop_token_ids]
    return (prompt, said[: ends[0] + 1]) if sequence[: len(prompt)] == prompt and ends else (prompt, [])


def _ids(messages: Sequence[Message], tools: list[dict[str, Any]] | None, template: ChatTemplate) -> list[int]:
    return template.render_views(Conversation.begun(template, messages, tools or ()).thread.views(), tools)


def _message(given: dict[str, Any]) -> Message:
    """A message of a row, which is in OpenAI's form."""
    calls = [
        ToolCall(id=call["id"], name=call["function"]["name"], arguments=json.loads(call["function"]["arguments"]))
        for call in given.get("tool_calls") or ()
    ]
    return Message(
        role=given["role"],
        content=given["content"],
        reasoning=given.get("reasoning_content"),
        tool_calls=calls,
        tool_call_id=given.get("tool_call_id"),
        name=given.get("name"),
    )
