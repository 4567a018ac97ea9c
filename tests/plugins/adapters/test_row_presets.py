"""Data files of verl and slime, as their own scripts write them, load by a named preset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.errors import SpecError
from engine.schemas.message import ImagePart, Message, TextPart
from engine.spec.conversation import conversation_of, tools_of
from engine.spec.load import LoadedSpec, load_spec
from engine.spec.tasks import load_tasks

pytestmark = pytest.mark.usefixtures("in_folder")

HEAD = "spec: episode/v1\nname: demo\nmodel: {path: org/m}\n"
PNG = b"\x89PNG\r\n\x1a\n the rest of a file"


def loaded(tasks: str) -> LoadedSpec:
    Path("s.yaml").write_text(f"{HEAD}tasks: {{{tasks}}}\n")
    return load_spec("s.yaml")


def opening(spec: LoadedSpec, fields: dict[str, Any]) -> list[Message]:
    assert spec.spec.conversation is not None
    return conversation_of(fields, spec.spec.conversation)


def verl_row(at: int, **extra: Any) -> dict[str, Any]:
    """As `examples/data_preprocess/geo3k_multiturn_w_tool.py` writes it."""
    return {
        "data_source": "hiyouga/geometry3k",
        "prompt": [
            {"role": "system", "content": "You are a math expert."},
            {"role": "user", "content": "<image>Find x."},
        ],
        "images": [{"bytes": PNG, "path": None}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(at)},
        "extra_info": {"split": "train", "index": at, "answer": str(at), "question": "Find x.", **extra},
    }


def test_a_parquet_file_of_verl() -> None:
    kwargs = {"calc_geo3k_reward": {"create_kwargs": {"ground_truth": "0"}}}
    rows = [
        verl_row(0, need_tools_kwargs=True, tools_kwargs=kwargs),
        verl_row(7, interaction_kwargs={"name": "gsm8k", "ground_truth": "7"}),
    ]
    pq.write_table(pa.Table.from_pylist(rows), "train.parquet")
    spec = loaded("source: parquet, path: train.parquet, preset: verl, id: extra_info.index")
    first, second = load_tasks(spec)
    assert [first.id, second.id] == ["0", "7"]
    assert (first.fields["index"], first.fields["ground_truth"]) == (0, "0")
    assert first.fields["tools_kwargs"] == kwargs
    assert first.fields["interaction_kwargs"] == {}
    assert second.fields["interaction_kwargs"] == {"name": "gsm8k", "ground_truth": "7"}
    assert second.fields["tools_kwargs"] == {}
    system, user = opening(spec, first.fields)
    assert system == Message(role="system", content="You are a math expert.")
    assert isinstance(user.content, list)
    assert isinstance(user.content[0], ImagePart)
    assert user.content[1] == TextPart(text="Find x.")


def test_a_row_of_verl_without_extra_info() -> None:
    Path("a.jsonl").write_text(json.dumps({"question": "1 + 1?", "images": None, "extra_info": None}))
    spec = loaded("source: jsonl, path: a.jsonl, preset: {name: verl, prompt_key: question}")
    (task,) = load_tasks(spec)
    assert (task.fields["extra_info"], task.fields["index"]) == ({}, 0)
    assert opening(spec, task.fields) == [Message(role="user", content="1 + 1?")]


SLIME = "{name: slime, input_key: text, label_key: answer, multimodal_keys: {image: pictures}}"


def slime_rows() -> None:
    schema = {"type": "function", "function": {"name": "add", "parameters": {}}}
    rows: list[dict[str, Any]] = [
        {
            "text": "<image> 1 + 1?",
            "answer": "2",
            "pictures": ["a.png"],
            "metadata": None,
            "tools": json.dumps([schema]),
        },
        {"text": [{"role": "user", "content": "Write <image>."}], "answer": "4", "metadata": {"k": 1}},
        {
            "text": "<image><image>",
            "answer": "6",
            "pictures": [{"type": "image", "image": "b.png", "max_pixels": 9}, "c.png"],
        },
    ]
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_file_of_slime() -> None:
    slime_rows()
    spec = loaded(f"source: jsonl, path: a.jsonl, preset: {SLIME}")
    first, second, third = load_tasks(spec)
    assert [task.fields["label"] for task in (first, second, third)] == ["2", "4", "6"]
    assert [second.fields["metadata"], third.fields["metadata"]] == [{"k": 1}, {}]
    assert first.fields["metadata"] == {"tools": first.fields["tools"]}
    assert spec.spec.conversation is not None
    assert [tool["function"]["name"] for tool in tools_of(first.fields, spec.spec.conversation) or []] == ["add"]
    assert opening(spec, first.fields)[0].content == [ImagePart(image="a.png"), TextPart(text=" 1 + 1?")]
    assert opening(spec, second.fields)[0].content == "Write <image>."
    assert opening(spec, third.fields)[0].content == [ImagePart(image="b.png"), ImagePart(image="c.png")]


@pytest.mark.parametrize(("part", "expected"), [("@[1:3]", [1, 2]), ("@[-1:]", [2]), ("@[:1]", [0])])
def test_slimes_part_of_a_file(part: str, expected: list[int]) -> None:
    slime_rows()
    found = load_tasks(loaded(f"source: jsonl, path: 'a.jsonl{part}', preset: {SLIME}"))
    assert [task.index for task in found] == expected


def test_what_a_preset_needs_is_named_with_the_row() -> None:
    Path("a.jsonl").write_text('{"text": "x", "answer": 1}\n{"text": "x"}\n')
    with pytest.raises(SpecError, match=r"row 2: there is no field `answer`, which `tasks\.preset\.label_key` names"):
        load_tasks(loaded(f"source: jsonl, path: a.jsonl, preset: {SLIME}"))
    with pytest.raises(SpecError, match="an episode shows no `video`, only text and images"):
        loaded("source: jsonl, path: a.jsonl, preset: {name: slime, multimodal_keys: {video: v}}")
