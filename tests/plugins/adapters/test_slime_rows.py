"""The conversation that slime's own `_build_messages` makes of a row, and ours: run with `SLIME_SOURCE=<checkout of slime>`."""

from __future__ import annotations

import ast
import copy
import enum
import logging
import os
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.plugins.adapters.row_presets import SlimeRows
from engine.schemas.message import Message, TextPart
from engine.spec.conversation import RowError, conversation_of


@pytest.fixture(scope="module")
def build_messages() -> Any:
    """The function, cut out of its file: importing the file needs Ray."""
    source = os.environ.get("SLIME_SOURCE")
    if source is None:
        pytest.skip("SLIME_SOURCE names no checkout of slime")
    folder = Path(source) / "slime" / "utils"
    types = ast.parse((folder / "types.py").read_text()).body
    data = ast.parse((folder / "data.py").read_text()).body
    wanted = [node for node in types if isinstance(node, ast.ClassDef) and node.name.startswith("MultimodalType")]
    function = [node for node in data if isinstance(node, ast.FunctionDef) and node.name == "_build_messages"]
    names: dict[str, Any] = {"re": re, "logger": logging.getLogger(), "dataclass": dataclass, "Enum": enum.Enum}
    exec(compile(ast.Module([*wanted, *function], []), "slime", "exec"), names)
    return names["_build_messages"]


def told(message: Message | dict[str, Any]) -> tuple[str, list[str]]:
    if isinstance(message, dict):
        content = message["content"]
        parts = [content] if isinstance(content, str) else [part.get("text", part.get("image")) for part in content]
        return message["role"], [part for part in parts if part]
    content = [TextPart(text=message.content)] if isinstance(message.content, str) else message.content
    return message.role, [text for part in content if (text := part.text if isinstance(part, TextPart) else part.image)]


def test_rows_with_images_say_the_same(build_messages: Any) -> None:
    draw = random.Random(0)
    source = SlimeRows(name="slime", multimodal_keys={"image": "images"}).conversation
    for _ in range(1_000):
        text = "".join(draw.choices(["<image>", "a ", "\n", "b<"], k=draw.randint(0, 6)))
        chat = [{"role": "system", "content": "s"}, {"role": "user", "content": text}]
        row = {"input": draw.choice([text, chat]), "images": [f"{at}.png" for at in range(draw.randint(1, 3))]}
        try:
            theirs = [
                told(message) for message in build_messages(copy.deepcopy(row), "input", True, {"image": "images"})
            ]
        except AssertionError:  # another number of marks than of images
            with pytest.raises(RowError):
                conversation_of(row, source)
            continue
        assert [told(message) for message in conversation_of(row, source)] == theirs
