"""Whole conversations from a row: every form that data sets have is read, and a bad row is named by its number."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from engine.errors import SpecError
from engine.schemas.message import ImagePart, Message, TextPart, ToolCall
from engine.schemas.model import PromptField
from engine.spec.conversation import conversation_of, tools_of
from engine.spec.load import load_spec
from engine.spec.tasks import load_tasks

pytestmark = pytest.mark.usefixtures("in_folder")

PNG = b"\x89PNG\r\n\x1a\n the rest of a file"
URI = f"data:image/png;base64,{b64encode(PNG).decode()}"
FIELD = PromptField(field="messages")
HEAD = "spec: episode/v1\nname: demo\nmodel: {path: org/m}\nprompt: {field: messages}\n"


def read(messages: Any, **fields: Any) -> list[Message]:
    return conversation_of({"messages": messages, **fields}, FIELD)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def shown(content: Any, **fields: Any) -> Any:
    return read(user(content), **fields)[0].content


def test_text_roles_calls_and_results() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": null}'}}
    rows = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]},
        {"role": "assistant", "content": None, "reasoning_content": "I add.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "2", "tool_calls": None},
        {"role": "user", "content": "And now?"},
    ]
    assert read(rows) == [
        Message(role="system", content="Be brief."),
        Message(role="user", content=[TextPart(text="1 + 1?")]),
        Message(
            role="assistant",
            reasoning="I add.",
            tool_calls=[ToolCall(id="c1", name="add", arguments={"a": 1, "b": None})],
        ),
        Message(role="tool", content="2", tool_call_id="c1", name="add"),
        Message(role="user", content="And now?"),
    ]


def test_a_text_is_one_message_of_the_user() -> None:
    assert read("1 + 1?") == [Message(role="user", content="1 + 1?")]


IMAGES = [
    ("x/1.png", "x/1.png"),
    ("https://h/1.png", "https://h/1.png"),
    ("file:///x/1.png", "file:///x/1.png"),
    (URI, URI),
    ({"bytes": PNG, "path": None}, URI),
    ({"bytes": PNG, "path": "1.png"}, URI),
    ({"bytes": None, "path": "1.png"}, "1.png"),
    ({"image": "1.png", "max_pixels": 50176}, "1.png"),
    ({"type": "image", "image": "1.png"}, "1.png"),
    ({"url": "https://h/1.png"}, "https://h/1.png"),
    (PNG, URI),
]
"""(image of a row, its reference)"""


@pytest.mark.parametrize(("image", "reference"), IMAGES)
def test_marks_stand_for_the_images_of_the_row(image: Any, reference: str) -> None:
    assert shown("Look: <image>. And <image>?", images=[image, "2.png"]) == [
        TextPart(text="Look: "),
        ImagePart(image=reference),
        TextPart(text=". And "),
        ImagePart(image="2.png"),
        TextPart(text="?"),
    ]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "https://h/1.png", "detail": "low"}},
        {"type": "image_url", "image_url": "https://h/1.png"},
        {"type": "image", "image": "https://h/1.png"},
        {"type": "image", "url": "https://h/1.png"},
        {"type": "image", "text": None, "image": "https://h/1.png"},
        {"type": "image"},
        {"type": "image", "text": None},
    ],
)
def test_image_parts(part: dict[str, Any]) -> None:
    images = {"images": ["https://h/1.png"]} if part.keys() <= {"type", "text"} else {}
    found = shown([part, {"type": "text", "text": "What is it?", "image": None}], **images)
    assert found == [ImagePart(image="https://h/1.png"), TextPart(text="What is it?")]


def test_without_images_a_mark_is_text() -> None:
    assert shown("Write <image> here.") == "Write <image> here."
    assert shown("Write <image> here.", images=None) == "Write <image> here."


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "there is no field `messages`; its fields: a"),
        ({"messages": []}, "`messages` must be a list of messages, or a text; it is empty"),
        ({"messages": 3}, "`messages` must be a list of messages, or a text; it is a int"),
        ({"messages": ["x"]}, "`messages[0]` must be a message `{role, content}`; it is a str"),
        (
            {"messages": [{"role": "human", "content": "x"}]},
            "`messages[0].role` must be one of system, developer, user, assistant, tool; it is 'human'",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "weight": 1}]},
            "`messages[0]` has the key `weight`, which no message has; remove it from the data",
        ),
        ({"messages": user(3)}, "`messages[0].content` must be a text or a list of parts; it is a int"),
        (
            {"messages": user([{"type": "video", "video": "x"}])},
            "`messages[0].content[0]` must be a part of `type: text` or `type: image`; its type is 'video'",
        ),
        (
            {"messages": user("<image> <image>"), "images": ["1.png"]},
            "`messages[0].content` shows image 2, and `images` has 1",
        ),
        (
            {"messages": user("no mark"), "images": ["1.png"]},
            "`images` has 1 images, and the messages show 0: mark each place with `<image>`",
        ),
        ({"messages": user("<image>"), "images": [3]}, "`images[0]` is no image: give a path, a URL, a data: URI or"),
        (
            {"messages": [*user("x"), {"role": "assistant", "content": "y"}]},
            "`messages` ends with a message of the assistant, and the model replies next; remove that message from the row",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}, *user("x")]},
            "`messages[0].tool_calls[0].arguments` is no JSON: ",
        ),
        (
            {"messages": user("x"), "tools": [{"type": "function", "function": {}}]},
            "`tools[0]` needs the function's `name`",
        ),
        ({"messages": user("x"), "tools": "no"}, "`tools` is no JSON: "),
    ],
)
def test_a_bad_row_is_named_by_its_number(fields: dict[str, Any], words: str) -> None:
    good = {"a": 0, "messages": user("x")}
    Path("rows.jsonl").write_text("\n".join(json.dumps(row) for row in (good, good, {"a": 0, **fields})))
    Path("s.yaml").write_text(HEAD + "tasks: {source: jsonl, path: rows.jsonl}\n")
    with pytest.raises(SpecError) as caught:
        list(load_tasks(load_spec("s.yaml")))
    assert str(caught.value).startswith(f"{Path.cwd()}/rows.jsonl:3:1: error[tasks.bad-row] row 3: {words}")


SCHEMA = {
    "name": "add",
    "description": "Add.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}


@pytest.mark.parametrize(
    "tools",
    [
        [{"type": "function", "function": SCHEMA}],
        [SCHEMA],
        json.dumps([SCHEMA]),
        [json.dumps(SCHEMA)],
        [{"type": "function", "function": {**SCHEMA, "strict": None}}],
        [{"type": "function", **SCHEMA}],
    ],
)
def test_schemas_of_tools_in_every_form(tools: Any) -> None:
    assert tools_of({"tools": tools}, FIELD) == [{"type": "function", "function": SCHEMA}]


def test_a_row_without_tools_has_those_of_the_spec() -> None:
    assert tools_of({}, FIELD) is None
    assert tools_of({"tools": None}, FIELD) is None
    assert tools_of({"tools": []}, FIELD) == []


def test_dotted_names_reach_into_rows() -> None:
    row = {
        "extra": {"id": "k", "chat": user("x")},
        "reward_model": {"ground_truth": "4"},
        "images": [{"path": "a.png"}],
    }
    Path("rows.jsonl").write_text(json.dumps(row))
    Path("s.yaml").write_text(
        HEAD + "tasks: {source: jsonl, path: rows.jsonl, id: extra.id, "
        "map: {messages: extra.chat, answer: reward_model.ground_truth, picture: images.0.path}}\n"
    )
    (task,) = load_tasks(load_spec("s.yaml"))
    assert task.id == "k"
    assert task.fields == {"messages": user("x"), "answer": "4", "picture": "a.png"}


def test_parquet_images_become_references_with_the_same_bytes() -> None:
    """Hugging Face's `{bytes, path}` structs, also those that no conversation shows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "messages": user("<image>?"),
            "images": [{"bytes": PNG, "path": "a.png"}],
            "thumb": {"bytes": PNG, "path": None},
        }
    ]
    pq.write_table(pa.Table.from_pylist(rows), "rows.parquet")
    Path("s.yaml").write_text(HEAD + "tasks: {source: parquet, path: rows.parquet}\n")
    (task,) = load_tasks(load_spec("s.yaml"))
    assert task.fields["images"] == [URI]
    assert task.fields["thumb"] == URI
    assert conversation_of(task.fields, FIELD)[0].content == [ImagePart(image=URI), TextPart(text="?")]
