"""What a server is sent where a prompt holds images."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from generate_requests import generate_request
from vision_code import FIRST, SECOND, pil

from engine.backends.sglang.request_body import Encoder
from engine.errors import BackendError
from engine.schemas.generation import GenerateRequest
from engine.schemas.message import ImagePart
from engine.schemas.model import ModelSpec
from engine.tokens.images import digest_of
from engine.tokens.loading import load_format
from engine.tokens.vision import Vision


@pytest.fixture
def vision(vlm: Callable[[str], Path]) -> Vision:
    made = load_format(ModelSpec(path=str(vlm("qwen2_5_vl"))), Path()).vision
    assert made is not None
    for data in (FIRST, SECOND):
        made.bank.put(digest_of(data), data, "image/png")
    return made


def request(vision: Vision, ids: list[int], *images: bytes) -> GenerateRequest:
    digests = [digest_of(data) for data in images]
    expanded, placed = vision.expand(ids, digests)
    return generate_request(
        expanded,
        banned_token_ids=vision.banned,
        seed=1,
        images=[ImagePart(image=digest) for digest in digests],
        image_spans=[(start, start + len(picture.ids)) for picture, start in placed],
    )


def test_one_placeholder_an_image_is_sent_and_the_expanded_ids_are_expected(vision: Vision) -> None:
    encoder = Encoder(vocab_size=10_000, vision=vision)
    marker = vision.marker_id
    first = request(vision, [5, marker, 6], FIRST)
    sent = encoder.encode(first, "a", first.input_ids, 8)
    body = json.loads(b"".join(sent.pieces))
    assert body["input_ids"] == [5, marker, 6]
    (uri,) = body["image_data"]
    assert uri == vision.bank.scaled_uri(digest_of(FIRST))
    assert pil(b64decode(uri.partition(",")[2])).size == (56, 56)  # the grid's 4 x 4 patches of 14 pixels
    assert sent.ids.tolist() == [5, marker, marker, marker, marker, 6]
    assert json.loads(b"[" + sent.prompt + b"]") == sent.ids.tolist()
    assert body["sampling_params"]["logit_bias"] == {str(token): -1e9 for token in vision.banned}
    longer = request(vision, [5, marker, 6, 7, 8, marker, 9], FIRST, SECOND)
    # what was sampled of an interrupted reply goes behind the prompt
    ids = np.append(longer.input_ids, np.int32(11))
    body = json.loads(b"".join(encoder.encode(longer, "b", ids, 8).pieces))
    assert body["input_ids"] == [5, marker, 6, 7, 8, marker, 9, 11]
    assert len(body["image_data"]) == 2
    encoder.forget("e")
    assert (encoder._known, encoder._used) == ({}, 0)


def test_images_and_places_must_be_as_many(vision: Vision) -> None:
    asked = request(vision, [5, vision.marker_id], FIRST)
    asked = replace(asked, images=[*asked.images, ImagePart(image=digest_of(SECOND))])
    with pytest.raises(BackendError, match="2 images for 1 places in the prompt") as raised:
        Encoder(vocab_size=10_000, vision=vision).encode(asked, "a", asked.input_ids, 8)
    assert raised.value.kind == "bad_prompt"


def test_an_openai_endpoint_is_shown_images_of_the_run_store_as_urls(
    vlm: Callable[[str], Path], vision: Vision
) -> None:
    from engine.backends.openai import OpenAIBackend
    from engine.schemas.backend import OpenAIBackendSpec
    from engine.schemas.message import Message, TextPart

    form = load_format(ModelSpec(path=str(vlm("qwen2_5_vl"))), Path())
    form.vision = vision
    backend = OpenAIBackend(OpenAIBackendSpec(url="http://127.0.0.1:1/v1", model="m"), form)
    said = Message(role="user", content=[ImagePart(image=digest_of(FIRST)), TextPart(text="What is it?")])
    asked = replace(request(vision, [5]), messages=[said])
    assert backend.body(asked, [said])["messages"] == [
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
