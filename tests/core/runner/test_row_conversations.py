"""Episodes whose conversation and tools stand in their row."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.runner.replay import Replayer
from engine.tokens.loading import load_format

ADD = {
    "name": "add",
    "description": "Adds, as this row says it.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
CALL = {"tool_calls": [{"name": "add", "arguments": {"a": 17, "b": 25}}]}
FIELD = {"prompt": {"field": "messages"}, "machine": "tools", "user": None}


def rows(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"source": "inline", "id": "id", "rows": list(rows)}


def row(key: str, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"id": key, "messages": list(messages) or [{"role": "user", "content": "17 + 25?"}], **fields}


async def test_each_task_begins_with_its_own_messages(make_spec: Any, run_spec: Any) -> None:
    earlier = {"function": {"name": "add", "arguments": '{"a": 1, "b": 1}'}, "id": "x"}
    told = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "", "tool_calls": [earlier]},
        {"role": "tool", "content": "2", "tool_call_id": "x"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "17 + 25? {{not a field}} <|im_end|>"},
    ]
    ran = await run_spec(make_spec(["42", "42"], tasks=rows(row("a", *told), row("b")), **FIELD))
    long, short = ran.trajectories["a/0"], ran.trajectories["b/0"]
    assert [message.role for message in long.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
    ]
    assert long.messages[4].content == told[4]["content"]  # no template: a row's text is shown as it is
    assert [message.text for message in short.messages] == ["17 + 25?", "42"]
    assert long.branches[0].turn_ids.max() == 0  # examples are no turns
    end = ran.template.encode("<|im_end|>")
    assert len(end) == 1
    assert list(long.branches[0].input_ids).count(end[0]) == 7  # six messages and the list of tools, not the row's text
    replayer = Replayer(ran.loaded, load_format(ran.loaded.spec.model, ran.loaded.base), ran.store)
    assert (await replayer.check(long, ran.store.task("a"))).difference is None
    replayer.close()


async def test_the_tools_column_says_which_tools_a_task_has(make_spec: Any, run_spec: Any) -> None:
    """The row's schema is shown, the spec's tool answers, and tools that the row does not name are not there."""
    wait = {"tool_calls": [{"name": "wait", "arguments": {}}]}
    tasks = rows(row("a", tools=[ADD]), row("b", tools=json.dumps([])), row("c"))
    ran = await run_spec(make_spec([CALL, "42"], tasks=tasks, **FIELD))
    prompts = {key: ran.template.decode(found.branches[0].input_ids) for key, found in ran.trajectories.items()}
    assert "Adds, as this row says it." in prompts["a/0"]
    assert '"wait"' not in prompts["a/0"]
    assert "<tools>" not in prompts["b/0"]
    assert '"wait"' in prompts["c/0"]
    contents = {key: found.messages[2].text for key, found in ran.trajectories.items()}
    assert contents["a/0"] == contents["c/0"] == "42"
    assert contents["b/0"].startswith("There is no tool `add`.")
    ran = await run_spec(make_spec([wait, "42"], "other", tasks=rows(row("a", tools=[ADD])), **FIELD))
    assert ran.only.messages[2].text == "There is no tool `wait`. Tools: `add`."


async def test_a_tool_that_the_spec_does_not_have_is_the_specs_fault(make_spec: Any, run_spec: Any) -> None:
    other = {"type": "function", "function": {"name": "search"}}
    ran = await run_spec(make_spec(["42"], tasks=rows(row("a", tools=[other])), **FIELD))
    failure = ran.only.outcome.failure
    assert (failure.kind, failure.blame) == ("unknown_tool", "spec")
    assert "the row of task `a` has the tool `search`, which the spec does not have" in failure.message


async def test_where_no_tool_is_called_schemas_are_only_shown(make_spec: Any, run_spec: Any) -> None:
    """Data sets of calls are scored by what the model writes; nothing carries the calls out."""
    other = {"type": "function", "function": {"name": "search", "description": "Searches.", "parameters": {}}}
    changes = FIELD | {"machine": "single_turn", "tools": None}
    ran = await run_spec(make_spec(["42"], tasks=rows(row("a", tools=[other])), **changes))
    assert ran.only.outcome.failure is None
    assert "Searches." in ran.template.decode(ran.only.branches[0].input_ids)


@pytest.mark.parametrize("field", [{}, {"tools": None}, {"images": None}], ids=str)
async def test_a_stored_spec_asks_for_no_field_that_was_left_out(
    field: dict[str, Any], make_spec: Any, run_spec: Any
) -> None:
    """A replay or a resume of a run reads the spec that the run stored: rows without tools and images stay valid."""
    ran = await run_spec(make_spec(["42"], tasks=rows(row("a")), **FIELD | {"prompt": {"field": "messages", **field}}))
    stored = ran.store.header.loaded_spec()
    assert stored.spec.prompt.model_fields_set == {"field", *field}
    replayer = Replayer(stored, load_format(stored.spec.model, stored.base), ran.store)
    assert (await replayer.check(ran.only, ran.store.task("a"))).difference is None
    replayer.close()
