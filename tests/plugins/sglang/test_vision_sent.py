"""What a server is sent in an image's place: the pixels that the rows' tensors are made of."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from slow_cases import slow_but
from vision_code import GEO3K, pil
from vision_kit import square

from engine.errors import BackendError, ImageError
from engine.plugins.servers.http.reply import HttpReply
from engine.plugins.servers.pool import ImageFacts, Server
from engine.plugins.sglang.client import SGLangBackend
from engine.plugins.sglang.sample_prompt import check_images
from engine.plugins.sglang.spec import SGLangBackendSpec
from engine.schemas.model import ModelSpec
from engine.tokens.images import digest_of
from engine.tokens.loading import load_format
from engine.tokens.template import ChatTemplate

QWEN = pytest.mark.parametrize("family", slow_but(["qwen2_5_vl", "qwen3_vl"], "qwen3_vl"))


def form_of(folder: Path) -> ChatTemplate:
    return load_format(ModelSpec(path=str(folder)), folder)


def picture(mode: str, width: int, height: int, seed: int, kind: str = "PNG") -> bytes:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 4), np.uint8)
    image = Image.fromarray(values, "RGBA").convert("RGB") if mode != "RGBA" else Image.fromarray(values, "RGBA")
    buffer = io.BytesIO()
    image.convert(mode).save(buffer, kind)
    return buffer.getvalue()


@QWEN
def test_the_copy_has_the_grids_size_and_the_rows_tensors(vlm: Callable[[str], Path], family: str) -> None:
    """In every mode and format; at the grid's size no processor scales, so the server's pixels are the copy's."""
    vision = form_of(vlm(family)).vision
    assert vision is not None
    side = vision.processing.processor.image_processor.patch_size
    forms = [("RGB", "PNG"), ("RGBA", "PNG"), ("L", "PNG"), ("LA", "PNG"), ("P", "PNG"), ("1", "PNG"), ("I;16", "PNG")]
    forms += [("RGB", "JPEG"), ("L", "JPEG"), ("CMYK", "JPEG"), ("RGB", "WEBP"), ("P", "GIF"), ("RGB", "BMP")]

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(st.sampled_from(forms), st.integers(9, 300), st.integers(9, 300), st.integers(0, 9))
    def holds(form: tuple[str, str], width: int, height: int, seed: int) -> None:
        data = picture("RGB" if form[0] == "I;16" else form[0], width, height, seed, form[1])
        if form[0] == "I;16":
            buffer = io.BytesIO()
            Image.fromarray(np.arange(width * height, dtype=np.uint16).reshape(height, width)).save(buffer, "PNG")
            data = buffer.getvalue()
        digest = digest_of(data)
        vision.bank.put(digest, data, "image/png")
        copy = pil(vision.processing.scaled(data))
        _, rows, columns = vision.bank.picture(digest).grid
        assert (copy.mode, copy.size) == ("RGB", (columns * side, rows * side))
        found = vision.processing.processor.image_processor(images=[copy], return_tensors="np")
        for name, tensor in vision.bank.tensors(digest).items():
            np.testing.assert_array_equal(found[name], tensor)

    holds()


@QWEN
def test_figures_of_geometry3k_are_sent_as_they_are_exported(vlm: Callable[[str], Path], family: str) -> None:
    vision = form_of(vlm(family)).vision
    assert vision is not None
    for file in sorted(GEO3K.glob("*.png"))[::50]:
        digest = digest_of(file.read_bytes())
        vision.bank.put(digest, file.read_bytes(), "image/png")
        again = vision.processing.scaled(file.read_bytes())
        vision.bank.put(digest_of(again), again, "image/png")
        assert vision.processing.scaled(again) == again
        own, copied = vision.bank.tensors(digest), vision.bank.tensors(digest_of(again))
        assert all(np.array_equal(own[name], copied[name]) for name in own)


def test_an_image_that_would_be_scaled_twice_is_refused(vlm: Callable[[str], Path]) -> None:
    vision = form_of(vlm("qwen2_5_vl")).vision
    assert vision is not None
    data = square("red", 24, 1965)  # 28 x 2016 when it is scaled: more pixels than this processor's most, 50,176
    vision.bank.put(digest_of(data), data, "image/png")
    assert vision.bank.picture(digest_of(data)).grid == (1, 144, 2)
    with pytest.raises(
        ImageError,
        match="24 x 1965 pixels cannot be sent to a server exactly: a copy of 28 x 2016 pixels is scaled again",
    ) as raised:
        vision.bank.scaled_uri(digest_of(data))
    assert raised.value.kind == "image_refused"


@pytest.mark.parametrize("family", ["smolvlm", "idefics3"])
def test_a_model_that_cuts_images_into_tiles_is_refused_on_a_server(vlm: Callable[[str], Path], family: str) -> None:
    with pytest.raises(BackendError, match="splits images into tiles, so that size does not exist") as raised:
        SGLangBackend.open(SGLangBackendSpec(urls=["http://127.0.0.1:1"]), form_of(vlm(family)), None)  # type: ignore[arg-type]
    assert raised.value.kind == "unsupported_model"


class Asked:
    """Answers as a server does: the prompt expanded by `form`, and a log-prob a token that depends on the image's bytes."""

    def __init__(self, form: ChatTemplate, **changes: Any) -> None:
        self.template = form
        self.changes = changes
        self.bodies: list[dict[str, Any]] = []

    async def __call__(self, server: Server, body: dict[str, Any]) -> HttpReply:
        self.bodies.append(body)
        vision = self.template.vision
        assert vision is not None
        (digest,) = list(vision.bank._pictures)
        ids = vision.expand(body["input_ids"], [digest])[0].tolist()
        rows = [[-1.0 - 0.25 * (len(self.bodies) - 1), token, None] for token in ids]
        reply = {"prompt_token_ids": ids, "meta_info": {"input_token_logprobs": rows}} | self.changes
        return HttpReply(200, msgspec.json.encode(reply))


async def test_the_probe_sends_the_scaled_image_and_says_how_far_the_unscaled_one_is(
    vlm: Callable[[str], Path],
) -> None:
    form = form_of(vlm("qwen3_vl"))
    asked = Asked(form)
    facts = await check_images(Server("http://127.0.0.1:1"), {"image_processor_backend": "auto"}, form, asked)
    assert facts == ImageFacts(processor="auto", unscaled_gap=0.25)
    scaled, unscaled = (body["image_data"][0] for body in asked.bodies)
    assert (scaled.startswith("data:image/png;base64,"), scaled != unscaled) == (True, True)
    assert [body["logprob_start_len"] for body in asked.bodies] == [0, 0]
    pil_facts = await check_images(
        Server("http://127.0.0.1:1"), {"disable_fast_image_processor": True}, form, Asked(form)
    )
    assert pil_facts.processor == "pil"


@pytest.mark.parametrize(
    ("details", "changes", "words"),
    [
        ({"mm_process_config": {"image": {"max_pixels": 9}}}, {}, "--mm-process-config, whose image settings"),
        ({}, {"prompt_token_ids": [1, 2]}, "expands a prompt with an image to 2 tokens, and the model's own"),
        ({}, {"meta_info": {}}, "does not return the ids and log-probs"),
    ],
)
async def test_a_server_that_sees_other_pixels_is_refused(
    vlm: Callable[[str], Path], details: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    form = form_of(vlm("qwen3_vl"))
    with pytest.raises(BackendError, match=words) as raised:
        await check_images(Server("http://127.0.0.1:1"), details, form, Asked(form, **changes))
    assert raised.value.kind == "wrong_server"


async def test_a_server_that_names_images_itself_is_refused_where_requests_name_them(
    vlm: Callable[[str], Path],
) -> None:
    details = {"mm_preprocess_cache_size_mb": 256}
    form = form_of(vlm("qwen2_5_vl"))
    with pytest.raises(BackendError, match="runs with --mm-preprocess-cache-size-mb"):
        await check_images(Server("http://127.0.0.1:1"), details, form, Asked(form))
    form = form_of(vlm("qwen3_vl"))
    await check_images(Server("http://127.0.0.1:1"), details, form, Asked(form))
