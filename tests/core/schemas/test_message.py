"""Images come in many forms and leave as parts of a message."""

from __future__ import annotations

import io
from base64 import b64decode
from pathlib import Path

import pytest
from PIL import Image
from pydantic import ValidationError

from engine.schemas.base import adapter
from engine.schemas.environment import Reset, Step, ToolReply, UserTurn
from engine.schemas.message import ImagePart, Message, image_part
from engine.schemas.model import PromptMessage, RecoverSpec


def encoded(kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (3, 2), (200, 30, 30)).save(buffer, format=kind)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "WEBP"])
def test_bytes_are_kept_as_they_are_with_their_media_type(kind: str) -> None:
    data = encoded(kind)
    head, _, body = image_part(data).image.partition(",")
    assert head == f"data:image/{kind.lower()};base64"
    assert b64decode(body) == data


def test_bytes_of_no_known_kind_are_judged_by_who_opens_them() -> None:
    assert image_part(b"abc") == ImagePart(image="data:application/octet-stream;base64,YWJj")


def test_a_picture_loses_nothing() -> None:
    picture = Image.new("RGB", (3, 2))
    picture.putdata([(index, 2 * index, 255 - index) for index in range(6)])
    part = image_part(picture)
    back = Image.open(io.BytesIO(b64decode(part.image.partition(",")[2])))
    assert (part.image.partition(",")[0], back.mode, back.size) == ("data:image/png;base64", "RGB", (3, 2))
    assert back.tobytes() == picture.tobytes()
    assert image_part(picture) == part


@pytest.mark.parametrize("reference", ["sha256:ab", "a/b.png", "file:///a.png", "data:image/png;base64,AA=="])
def test_references_go_through(reference: str) -> None:
    assert image_part(reference) == ImagePart(image=reference)
    assert image_part(ImagePart(image=reference, width=4)) == ImagePart(image=reference, width=4)


def test_a_path_is_named() -> None:
    assert image_part(Path("a") / "b.png") == ImagePart(image="a/b.png")


def test_anything_else_is_refused() -> None:
    with pytest.raises(
        TypeError, match="a int is not an image; give a PIL image, a file's bytes, a path or a data: URI"
    ):
        image_part(3)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "video", "video": "a.mp4"}, "`type: video` are not supported, only `text` and `image`: show frames"),
        ({"type": "video_url", "video_url": {"url": "a.mp4"}}, "`type: video_url` are not supported"),
        ({"type": "input_audio", "input_audio": {}}, "`type: input_audio` are not supported, .*: write what is heard"),
        (
            {"type": "image_url", "image_url": {"url": "a.png"}},
            "`type: image_url` are not supported, .*: write the image as",
        ),
    ],
)
def test_other_parts_are_refused_wherever_something_is_said(part: dict[str, object], words: str) -> None:
    content = [part, {"type": "text", "text": "Look."}]
    message = {"role": "user", "content": content}
    for contract, value in (
        (Message, message),
        (PromptMessage, message),
        (UserTurn, {"content": content}),
        (ToolReply, {"content": content}),
        (Reset, {"messages": [message]}),
        (Step, {"event": "shown", "messages": [message]}),
        (RecoverSpec, {"wrong": content}),
    ):
        with pytest.raises(ValidationError, match=words):
            adapter(contract).validate_python(value)
