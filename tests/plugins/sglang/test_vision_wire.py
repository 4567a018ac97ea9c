"""What a server is sent where a prompt holds images."""

from __future__ import annotations

import io
import json
import re
from base64 import b64decode
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from examples import examples
from generate_requests import generate_request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from vision_code import FIRST, SECOND, pil

from engine.errors import BackendError
from engine.plugins.sglang.wire import Encoder
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
    assert json.loads(b"[" + b"".join(sent.prompt) + b"]") == sent.ids.tolist()
    assert body["sampling_params"]["logit_bias"] == {str(token): -1e9 for token in vision.banned}
    longer = request(vision, [5, marker, 6, 7, 8, marker, 9], FIRST, SECOND)
    # what was sampled of an interrupted reply goes behind the prompt
    ids = np.append(longer.input_ids, np.int32(11))
    body = json.loads(b"".join(encoder.encode(longer, "b", ids, 8).pieces))
    assert body["input_ids"] == [5, marker, 6, 7, 8, marker, 9, 11]
    assert len(body["image_data"]) == 2
    encoder.forget("e")
    assert (encoder._known, encoder._used) == ({}, 0)


def hashes(vision: Vision, *images: bytes, features: str = "") -> list[str]:
    asked = request(vision, [vision.marker_id] * len(images), *images)
    sent = Encoder(vocab_size=10_000, vision=vision, features=lambda: features).encode(asked, "a", asked.input_ids, 8)
    body = json.loads(b"".join(sent.pieces))
    assert len(body["mm_hashes"]) == len(body["image_data"])
    found: list[str] = body["mm_hashes"]
    return found


@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(0, 55), st.integers(0, 55), st.integers(0, 2)), max_size=3))
def test_a_hash_stands_for_one_image_and_the_weights_that_encode_it(
    vision: Vision, changes: list[tuple[int, int, int]]
) -> None:
    """An image with another pixel, another size or at another place does not take it over."""
    pixels = np.full((56, 56, 3), 100, np.uint8)
    other = pixels.copy()
    for row, column, channel in changes:
        other[row, column, channel] ^= 1

    def file(array: np.ndarray, kind: str) -> bytes:
        buffer = io.BytesIO()
        Image.fromarray(array).save(buffer, kind)
        vision.bank.put(digest_of(buffer.getvalue()), buffer.getvalue(), f"image/{kind.lower()}")
        return buffer.getvalue()

    first, again, changed = file(pixels, "PNG"), file(pixels, "PNG"), file(other, "PNG")
    wide, tall = file(pixels[:28], "PNG"), file(pixels[:, :28], "PNG")  # the same values in the same number
    found = hashes(vision, first, again, changed, wide, tall)
    assert all(re.fullmatch("[0-9a-f]{16}", each) for each in found)
    assert found[0] == found[1]
    assert (found[0] == found[2]) == np.array_equal(pixels, other)
    assert len({found[0], *found[3:]}) == 3
    assert hashes(vision, tall, changed, first) == [found[4], found[2], found[0]]
    assert not set(found) & set(hashes(vision, first, changed, wide, tall, features="newer"))


def test_a_family_that_the_server_names_itself_has_no_hashes(vlm: Callable[[str], Path]) -> None:
    vision = load_format(ModelSpec(path=str(vlm("qwen3_vl"))), Path()).vision
    assert vision is not None
    vision.bank.put(digest_of(FIRST), FIRST, "image/png")
    asked = request(vision, [vision.marker_id], FIRST)
    body = json.loads(b"".join(Encoder(vocab_size=10_000, vision=vision).encode(asked, "a", asked.input_ids, 8).pieces))
    assert len(body["image_data"]) == 1
    assert "mm_hashes" not in body


def test_images_and_places_must_be_as_many(vision: Vision) -> None:
    asked = request(vision, [5, vision.marker_id], FIRST)
    asked = replace(asked, images=[*asked.images, ImagePart(image=digest_of(SECOND))])
    with pytest.raises(BackendError, match="2 images for 1 places in the prompt") as raised:
        Encoder(vocab_size=10_000, vision=vision).encode(asked, "a", asked.input_ids, 8)
    assert raised.value.kind == "bad_prompt"
