"""Images in the requests of chat APIs."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path

from generate_requests import generate_request
from vision_code import FIRST
from vision_kit import BUILDERS

from engine.plugins.chat_apis.openai import OpenAIBackend
from engine.plugins.chat_apis.spec import OpenAIBackendSpec
from engine.schemas.message import ImagePart, Message, TextPart
from engine.schemas.model import ModelSpec
from engine.tokens.images import digest_of
from engine.tokens.loading import load_format


def test_an_openai_endpoint_is_shown_images_of_the_run_store_as_urls(tmp_path: Path) -> None:
    form = load_format(ModelSpec(path=str(BUILDERS["qwen2_5_vl"](tmp_path / "model"))), Path())
    assert form.vision is not None
    form.vision.bank.put(digest_of(FIRST), FIRST, "image/png")
    backend = OpenAIBackend(OpenAIBackendSpec(url="http://127.0.0.1:1/v1", model="m"), form)
    said = Message(role="user", content=[ImagePart(image=digest_of(FIRST)), TextPart(text="What is it?")])
    assert backend.body(generate_request([5], messages=[said]), [said])["messages"] == [
        {
            "role": "user",
            "content": [
                {
                    "type": "image_url",
                    "image_url": {"url": f"data:image/png;base64,{b64encode(FIRST).decode()}"},
                },
                {"type": "text", "text": "What is it?"},
            ],
        }
    ]
