"""SGLang's own chat endpoint as an `openai` backend with tools: a model that has learned one episode runs it there.

With `--tool-call-parser` the server returns calls apart from the text; without, the engine reads them in the text.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import engine_here, trajectories_of
from transformers import AutoModelForCausalLM
from written_specs import save_spec

from engine.plugins.sft.rendered_rows import rendered
from engine.schemas.model import ModelSpec
from engine.spec.rows.row import ListRows
from engine.store import list_runs
from engine.tokens.loading import load_format
from engine.tokens.template import ChatTemplate

Running = Any
PARSERS: dict[str, list[str]] = {"parser": ["--tool-call-parser", "qwen25"], "text": []}
SYSTEM = {"role": "system", "content": "Be exact."}
CASES = {
    "good": ("What is 17 plus 4?", '{"a":17,"b":4}', "21"),
    "wrong": ("What is x plus 4?", '{"a":"x","b":4}', None),
}
"""Question, arguments of the call, and its result; a result of None is an error that the engine reports."""

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "properties": {
                "a": {"description": "The one.", "type": "integer"}, "b": {"description": "The other.", "type": "integer"},
            },
            "required": ["a", "b"],
            "type": "object",
        },
    },
}  # fmt: skip
SERVED_TOOL = TOOL | {"defer_loading": None}
"""The tool as SGLang gives it to the chat template: with a field of its own."""


def spec_of(folder: Path, model: Path, question: str, **backend: Any) -> Path:
    spec = {
        "spec": "episode/v1",
        "name": "chat-tools",
        "model": {"path": str(model), "tool_calls": "hermes"},
        "backend": {"kind": "openai", "url": "http://127.0.0.1:1/v1", "model": "m", **backend},
        "sampling": {"temperature": 0.0},
        "limits": {"turn_tokens": 64, "assistant_turns": 3},
        "tasks": {"source": "inline", "rows": [{"id": "t"}], "id": "id"},
        "prompt": [SYSTEM, {"role": "user", "content": question}],
        "tools": [{"use": "code_for_tests:add"}],
        "machine": "tools",
    }
    return save_spec(folder / "spec.yaml", spec)


@pytest.fixture(scope="module")
def learned(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return teach(tiny_model_dir, tmp_path_factory.mktemp("learned"))


def teach(tiny_model_dir: Path, folder: Path) -> Path:
    """The tiny model after it has learned to call the tool and to give the result."""
    form = load_format(ModelSpec(path=str(tiny_model_dir), tool_calls="hermes"), tiny_model_dir)
    rows = []
    for question, arguments, result in CASES.values():
        call = {"type": "function", "id": "call_0_0", "function": {"name": "add", "arguments": arguments}}
        said = [
            SYSTEM,
            {"role": "user", "content": question},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        if result is not None:
            said += [
                {"role": "tool", "content": result, "tool_call_id": "call_0_0", "name": "add"},
                {"role": "assistant", "content": f"It is {result}."},
            ]
        turns = [-1, -1, 0, -1, 1][: len(said)]
        rows += [
            {"messages": said, "message_turns": turns, "tools": json.dumps([tool])} for tool in (TOOL, SERVED_TOOL)
        ]
    left_out: Counter[str] = Counter()
    found = [row.fields for row in rendered(ListRows(rows), lambda: form, left_out)]
    assert left_out == {}
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(400):
        total = torch.zeros(())
        for row in found:
            ids = torch.tensor([row["input_ids"]])
            labels = torch.where(torch.tensor([row["loss_mask"]]) == 1, ids, -100)
            total = total + model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        if float(total.detach()) < 0.03:
            break
    model.save_pretrained(folder)
    for file in tiny_model_dir.iterdir():
        if not (folder / file.name).exists():
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture(scope="module", params=["parser", pytest.param("text", marks=pytest.mark.exhaustive)])
def served(request: Any, server_of: Any, learned: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with server_of(learned, tmp_path_factory.mktemp("served"), *PARSERS[request.param]) as server:
        yield server


def test_an_episode_with_tools_runs_at_the_chat_endpoint(served: Running, learned: Path, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, learned, CASES["good"][0], url=f"{served.url}/v1", prices={"input": 1e6, "output": 1e6})
    code, _, err = engine_here("run", spec, "-q", cwd=tmp_path)
    assert code == 0, err
    (trajectory,) = trajectories_of(list_runs(tmp_path / "runs")[-1])
    assert [turn.event for turn in trajectory.turns] == ["tool_calls", "answered"]
    assert [(m.role, m.text) for m in trajectory.messages[2:]] == [
        ("assistant", ""), ("tool", "21"), ("assistant", "It is 21."),
    ]  # fmt: skip
    (call,) = trajectory.messages[2].tool_calls
    assert (call.id, call.name, call.arguments) == ("call_0_0", "add", {"a": 17, "b": 4})
    assert not trajectory.outcome.trainable
    form: ChatTemplate = load_format(ModelSpec(path=str(learned), tool_calls="hermes"), learned)
    first, second = trajectory.turns
    shown = [len(form.render(trajectory.messages[:count], [SERVED_TOOL])) for count in (2, 4)]
    assert [first.prompt_tokens, second.prompt_tokens] == shown
    assert all(turn.cost == turn.prompt_tokens + turn.reply_tokens for turn in trajectory.turns)


def test_arguments_of_a_wrong_type_reach_the_tool_s_check(served: Running, learned: Path, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, learned, CASES["wrong"][0], url=f"{served.url}/v1")
    code, _, err = engine_here("run", spec, "-q", "--set", "limits.assistant_turns=1", cwd=tmp_path)
    assert code == 0, err
    (trajectory,) = trajectories_of(list_runs(tmp_path / "runs")[-1])
    (call,) = trajectory.messages[2].tool_calls
    assert call.arguments == {"a": "x", "b": 4}
    assert "integer" in trajectory.messages[3].text
