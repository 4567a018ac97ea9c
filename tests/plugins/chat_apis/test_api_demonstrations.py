"""Episodes of a chat API as data: `engine run`, `engine export --format sft`, and a training on the rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_server import ApiServer
from chat_kit import TEMPLATES
from command_line import engine_here
from written_specs import save_spec

from engine.plugins.sft.demonstrations import Demonstrations
from engine.plugins.sft.rendered_rows import rendered
from engine.schemas.model import ModelSpec
from engine.spec.load import load_spec
from engine.spec.rows.row import ListRows
from engine.tokens.loading import load_format
from engine.tokens.template import ChatTemplate
from engine.train.metrics import read_metrics

PROMPT = [{"role": "system", "content": "Be exact."}, {"role": "user", "content": "What is {{a}} plus 4?"}]


def api_spec(folder: Path, model: Path, server: ApiServer, **changes: Any) -> Path:
    spec: dict[str, Any] = {
        "spec": "episode/v1",
        "name": "api",
        "model": {"path": str(model), "tool_calls": "hermes"},
        "backend": {"kind": "anthropic", "url": server.url, "model": "m"},
        "tasks": {"source": "inline", "rows": [{"id": f"t{n}", "a": n} for n in range(3)], "id": "id"},
        "prompt": PROMPT,
        "tools": [{"use": "code_for_tests:add"}],
        "machine": "tools",
    }
    return save_spec(folder / "spec.yaml", spec | changes)


def exported(folder: Path, model: Path, broken: bool = False, **changes: Any) -> list[dict[str, Any]]:
    with ApiServer(broken=broken) as server:
        code, _, err = engine_here("run", api_spec(folder, model, server, **changes), "-q", cwd=folder)
        assert code == 0, err
    code, _, err = engine_here("export", "latest", "--format", "sft", "--out", folder / "sft.jsonl", cwd=folder)
    assert code == 0, err
    return [json.loads(line) for line in (folder / "sft.jsonl").read_text().splitlines()]


def sft_spec(folder: Path, model: Path, **changes: Any) -> Path:
    spec = yaml.safe_load((folder / "spec.yaml").read_text()) | {
        "backend": {"kind": "local", "dtype": "float32"},
        "train": {"kind": "sft", "data": {"path": "sft.jsonl"}, "steps": 2, "optimizer": {"lr": 0.003}},
    }
    spec["model"] = {"path": str(model)} | changes
    return save_spec(folder / "sft.yaml", spec)


@pytest.mark.slow
def test_episodes_of_an_api_are_trained_on(tiny_model_dir: Path, tmp_path: Path) -> None:
    rows = exported(tmp_path, tiny_model_dir)
    assert [row["episode_id"] for row in rows] == ["t0/0", "t1/0", "t2/0"]
    assert all("input_ids" not in row for row in rows)
    (line,) = (tmp_path / "runs").glob("*/tools.jsonl")
    schemas = json.loads(line.read_text())["tools"]
    assert [json.loads(row["tools"]) for row in rows] == [schemas] * 3
    assert [tool["function"]["name"] for tool in schemas] == ["add"]
    spec = sft_spec(tmp_path, tiny_model_dir)
    code, _, err = engine_here("train", spec, "-q", "--run-name", "warm", cwd=tmp_path)
    assert code == 0, err
    losses = [line["loss"] for line in read_metrics(tmp_path / "runs" / "warm")]
    assert losses[1] < losses[0]

    loaded = load_spec(spec)
    form = load_format(ModelSpec(path=str(tiny_model_dir)), tmp_path)
    data = Demonstrations(loaded)
    assert data.left_out == {}
    (row,) = data.rows([0])
    trained = [[int(id_) for id_ in row.branch.input_ids[row.branch.turn_ids == turn]] for turn in (0, 1)]
    assert (row.branch.loss_mask == (row.branch.turn_ids >= 0)).all()
    calls = ['{"name": "add", "arguments": {"a": 17, "b": 4}}', '{"name": "add", "arguments": {"a": 1, "b": 1}}']
    texts = [form.decode(ids) for ids in trained]
    assert [text.count(call) for text, call in [(texts[0], calls[0]), (texts[0], calls[1])]] == [1, 1]
    assert texts[1].startswith("It is 21.")
    assert all(ids[-1] in form.stop_token_ids for ids in trained)
    assert '"name": "add", "description": "Add two numbers."' in form.decode(row.branch.input_ids)


def test_a_turn_with_a_malformed_call_is_not_trained(tiny_model_dir: Path, tmp_path: Path) -> None:
    exported(tmp_path, tiny_model_dir, broken=True)
    data = Demonstrations(load_spec(sft_spec(tmp_path, tiny_model_dir)))
    assert {int(turn) for row in data.rows(range(3)) for turn in row.branch.turn_ids} == {-1, 1}


QUESTION = {"role": "user", "content": "What is 17 plus 4?"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}},
    }
]
CALL = {"type": "function", "id": "call_0_0", "function": {"name": "add", "arguments": '{"a":17,"b":4}'}}
ROW: dict[str, Any] = {
    "run_id": "r", "task_id": "t", "episode_id": "t/0", "branch": 0, "trainable": True, "outcome": None, "tools": json.dumps(TOOLS),
    "messages": [
        {"role": "system", "content": "Be exact."}, QUESTION,
        {"role": "assistant", "content": "So:", "reasoning_content": "I add.", "tool_calls": [CALL]},
        {"role": "tool", "content": "21", "tool_call_id": "call_0_0", "name": "add"},
        {"role": "assistant", "content": "It is 21.", "reasoning_content": "Done."},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Hm."},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "I am."},
    ],
    "message_turns": [-1, -1, 0, -1, 1, -1, -1, -1, 3],
}  # fmt: skip


@pytest.mark.parametrize(("name", "count"), [("qwen3", 2), pytest.param("qwen2_5", 1, marks=pytest.mark.slow)])
def test_each_reply_is_trained_once_as_the_template_of_the_model_writes_it(
    name: str, count: int, shipped: Callable[[str], ChatTemplate]
) -> None:
    """Qwen3 leaves out the reasoning of replies before the newest question, so the reply to that begins a row."""
    form = shipped(name)
    left_out: Counter[str] = Counter()
    found = [row.fields for row in rendered(ListRows([ROW]), lambda: form, left_out)]
    assert left_out == {}
    assert len(found) == count
    trained = Counter(turn for row in found for turn in sorted({*row["turn_ids"]} - {-1}))
    assert trained == {0: 1, 1: 1, 3: 1}
    for row in found:
        assert [turn >= 0 for turn in row["turn_ids"]] == [bool(mask) for mask in row["loss_mask"]]
        for turn in {*row["turn_ids"]} - {-1}:
            at = ROW["message_turns"].index(turn)
            before = _template(form, ROW["messages"][:at], add_generation_prompt=True)
            whole = _template(form, ROW["messages"][: at + 1])
            start = row["turn_ids"].index(turn)
            end = start + row["turn_ids"].count(turn)
            assert form.decode(row["input_ids"][:start]) == before
            reply = form.decode(row["input_ids"][start:end])
            assert whole.startswith(before + reply)
            assert reply.endswith("<|im_end|>")


@pytest.mark.parametrize("template", [*TEMPLATES])
def test_what_a_template_does_not_show_is_counted_and_the_rest_is_trained(template: str, formats: Any) -> None:
    """Each trained reply is in one row, or left out with a reason."""
    form, left_out = formats(template), Counter[str]()
    found = [row.fields for row in rendered(ListRows([ROW]), lambda: form, left_out)]
    trained = Counter(turn for row in found for turn in sorted({*row["turn_ids"]} - {-1}))
    assert trained.total() + left_out.total() == 3
    assert set(trained.values()) <= {1}
    for row in found:
        assert len(row["input_ids"]) == len(row["loss_mask"]) == len(row["turn_ids"])
        for turn in {*row["turn_ids"]} - {-1}:
            ids = [id_ for id_, of in zip(row["input_ids"], row["turn_ids"], strict=True) if of == turn]
            assert ROW["messages"][ROW["message_turns"].index(turn)]["content"] in form.decode(ids)
            assert [id_ in form.stop_token_ids for id_ in ids] == [False] * (len(ids) - 1) + [True]


def test_replies_to_images_are_counted(formats: Any) -> None:
    parts = [{"role": "user", "content": [{"type": "image", "text": None}]}, {"role": "assistant", "content": "a"}]
    left_out: Counter[str] = Counter()
    row = ROW | {"messages": parts, "message_turns": [-1, 0]}
    assert list(rendered(ListRows([row]), lambda: formats("plain"), left_out)) == []
    assert left_out == {"replies of a chat API to images": 1}


def _template(form: Any, messages: list[dict[str, Any]], **how: Any) -> str:
    views = [_as_template_input(message) for message in messages]
    return str(form.tokenizer.apply_chat_template(views, tools=TOOLS, tokenize=False, **how))


def _as_template_input(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        call | {"function": call["function"] | {"arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return message | ({"tool_calls": calls} if calls else {})


@pytest.mark.slow  # importing trl takes seconds
def test_trl_renders_the_rows_with_their_tools(tiny_model_dir: Path, tmp_path: Path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    exported(tmp_path, tiny_model_dir)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    loaded = datasets.load_dataset(
        "json", data_files=str(tmp_path / "sft.jsonl"), split="train", cache_dir=str(tmp_path / "cache")
    )
    trainer = trl.SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32),
        args=trl.SFTConfig(output_dir=str(tmp_path), max_length=None, report_to="none", use_cpu=True, bf16=False),
        train_dataset=loaded,
        processing_class=tokenizer,
    )
    for row in trainer.train_dataset:
        text = tokenizer.decode(row["input_ids"])
        assert '"name": "add", "description": "Add two numbers."' in text
        assert "It is 21." in text
