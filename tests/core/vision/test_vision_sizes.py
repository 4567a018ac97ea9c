"""An image's tokens follow from its size, and its tensors from bytes, exactly as the model's own processor makes them."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple
from PIL import Image
from slow_cases import slow_but_each
from vision_kit import BUILDERS
from waiting import wait_until

from engine.errors import ImageError
from engine.schemas.model import ModelSpec
from engine.tokens.image_bank import ImageBank, PixelsAhead
from engine.tokens.images import digest_of
from engine.tokens.loading import load_format
from engine.tokens.vision import Vision
from engine.tokens.vision_families import PreparedImage, TiledSizes

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
SETTINGS: dict[str, dict[str, Any]] = {
    "small": {},
    "as published": {"min_pixels": None, "max_pixels": None, "size": {"shortest_edge": 3136, "longest_edge": 12845056}},
    "few pixels": {"min_pixels": 3136, "max_pixels": 8000},
    "odd patches": {"patch_size": 9, "merge_size": 3, "temporal_patch_size": 3},
    "unscaled values": {"do_rescale": False, "image_mean": [10.0, 20.0, 30.0], "image_std": [7.0, 8.0, 9.0]},
    "not normalised": {"do_normalize": False, "resample": 2},
}
TILED: dict[str, dict[str, Any]] = {
    "small": {},
    "odd edge": {"size": {"longest_edge": 150}, "max_image_size": {"longest_edge": 48}},
    "one tile": {"do_image_splitting": False},
    "not scaled first": {"do_resize": False},
    "as published": {"size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}},
}
CASES = [(family, name) for family in BUILDERS for name in (SETTINGS if family in QWEN else TILED)]
FORMS = [("RGB", "PNG"), ("RGBA", "PNG"), ("L", "PNG"), ("LA", "PNG"), ("P", "PNG"), ("1", "PNG"), ("I;16", "PNG")]
FORMS += [
    ("RGB", "JPEG"),
    ("turned", "JPEG"),
    ("CMYK", "JPEG"),
    ("RGB", "WEBP"),
    ("RGBA", "WEBP"),
    ("clear", "GIF"),
    ("RGB", "BMP"),
]


@pytest.fixture(scope="module")
def with_settings(vlm: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Vision]:
    """The vision of a family whose image processor has other settings."""

    def get(family: str, changes: dict[str, Any]) -> Vision:
        folder = tmp_path_factory.mktemp("changed") / "model"
        shutil.copytree(vlm(family), folder, ignore=shutil.ignore_patterns("*.safetensors"))
        file = folder / "preprocessor_config.json"
        merged = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({key: value for key, value in merged.items() if value is not None}))
        vision = load_format(ModelSpec(path=str(folder)), folder).vision
        assert vision is not None
        return vision

    return get


def encoded(mode: str, kind: str, width: int, height: int, seed: int) -> bytes:
    draw = np.random.default_rng(seed)
    image = Image.fromarray(draw.integers(0, 256, (height, width, 4), np.uint8), "RGBA")
    options: dict[str, Any] = {}
    if mode == "I;16":
        image = Image.fromarray(draw.integers(0, 1 << 16, (height, width), np.uint16))
    elif mode == "clear":
        image = image.convert("P")
        options["transparency"] = 3
    elif mode == "turned":
        image, exif = image.convert("RGB"), Image.Exif()
        exif[0x0112] = 6  # a camera that was held upright
        options["exif"] = exif
    elif mode != "RGBA":
        image = image.convert("RGB").convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def put(vision: Vision, data: bytes) -> str:
    vision.bank.put(digest_of(data), data, "image/png")
    return digest_of(data)


@pytest.mark.parametrize(("family", "name"), slow_but_each(8, CASES, several=True))
def test_tokens_and_tensors_are_the_processors_own(with_settings: Any, family: str, name: str) -> None:
    vision: Vision = with_settings(family, (SETTINGS if family in QWEN else TILED)[name])
    assert vision.processing.sized is not None
    side = 900 if name == "as published" else 400

    @settings(max_examples=examples(3 if name == "as published" else 25), deadline=None)
    @given(st.sampled_from(FORMS), st.integers(1, side), st.integers(1, side), st.integers(0, 9))
    def holds(form: tuple[str, str], width: int, height: int, seed: int) -> None:
        data = encoded(*form, width, height, seed)
        try:
            tensors, text, grid, count = vision.family.process(
                vision.processing.processor, Image.open(io.BytesIO(data))
            )
        except ValueError:  # more than 200 times as long as wide
            with pytest.raises(ImageError, match="the model's processor refuses an image of"):
                vision.bank.picture(put(vision, data))
            return
        picture = vision.bank.picture(put(vision, data))
        assert (picture.grid, picture.placeholders) == (grid, count)
        assert picture.ids.tolist() == vision._tokenizer.encode(text)
        found = vision.bank.tensors(picture.digest)
        assert found.keys() == tensors.keys()
        for key, tensor in tensors.items():
            assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape)
            np.testing.assert_array_equal(found[key], tensor)

    holds()


@pytest.mark.parametrize("family", BUILDERS)
def test_the_count_of_placeholders_over_many_sizes(with_settings: Any, family: str) -> None:
    """The processor's own pass over empty images of these sizes, with its published limits scaled down eight times."""
    small = {
        "min_pixels": None,
        "max_pixels": None,
        "size": {"shortest_edge": 784, "longest_edge": 200704},
        "patch_size": 4,
    }
    tiled = {"size": {"longest_edge": 182}, "max_image_size": {"longest_edge": 45}}
    vision: Vision = with_settings(family, small if family in QWEN else tiled)
    sized = vision.processing.sized
    assert sized is not None
    lengths = st.one_of(st.integers(1, 64), st.integers(1, 700))

    @settings(max_examples=examples(60), deadline=None)
    @given(lengths, lengths)
    def holds(width: int, height: int) -> None:
        image = Image.new("RGB", (width, height))
        try:
            _, text, grid, count = vision.family.process(vision.processing.processor, image)
        except ValueError:
            with pytest.raises(ValueError, match=r"ratio|whole squares|no pixels"):
                sized.plan(width, height)
            return
        plan = sized.plan(width, height)
        assert (plan.grid, plan.text, plan.placeholders) == (grid, text, count)

    holds()


@pytest.mark.parametrize(
    ("family", "changes"),
    [("qwen2_5_vl", {"do_convert_rgb": False}), ("qwen3_vl", {"do_resize": False}), ("smolvlm", {"do_pad": False})],
)
def test_a_processor_that_cannot_be_told_from_the_size_is_asked(
    with_settings: Any, family: str, changes: dict[str, Any]
) -> None:
    vision: Vision = with_settings(family, changes)
    assert vision.processing.sized is None
    if family == "smolvlm":
        return  # without a mask, this family's tensors are incomplete
    data = encoded("RGB", "PNG", 64, 128, 0)
    picture = vision.bank.picture(put(vision, data))
    tensors, _, grid, count = vision.family.process(vision.processing.processor, Image.open(io.BytesIO(data)))
    assert (picture.grid, picture.placeholders) == (grid, count)
    np.testing.assert_array_equal(vision.bank.tensors(picture.digest)["pixel_values"], tensors["pixel_values"])
    assert vision.bank.processed == 1


def test_a_processor_that_differs_from_its_sizes_is_asked(vlm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another version of the library may: what is computed from sizes is compared before it is used."""
    plan = TiledSizes.plan
    monkeypatch.setattr(TiledSizes, "plan", lambda self, width, height: plan(self, width + 40, height))
    vision = load_format(ModelSpec(path=str(vlm("smolvlm"))), vlm("smolvlm")).vision
    assert vision is not None
    assert vision.processing.sized is None


@pytest.mark.parametrize(("family", "part"), [("qwen2_5_vl", 8), ("smolvlm", 4)])
def test_pixels_are_kept_as_bytes(vlm: Any, family: str, part: int) -> None:
    vision = load_format(ModelSpec(path=str(vlm(family))), vlm(family)).vision
    assert vision is not None
    digest = put(vision, encoded("RGB", "PNG", 200, 150, 0))
    floats = vision.bank.tensors(digest)["pixel_values"].nbytes
    assert vision.bank._prepared._used * part == floats


# --- many images --------------------------------------------------------------------------------------------


@pytest.fixture
def vision(vlm: Callable[[str], Path]) -> Vision:
    found = load_format(ModelSpec(path=str(vlm("qwen2_5_vl"))), vlm("qwen2_5_vl")).vision
    assert found is not None
    return found


@pytest.fixture
def ahead(vision: Vision) -> Iterator[ImageBank]:
    """A bank whose worker processes start at once."""
    bank = ImageBank(vision.processing, after=0.0)
    bank._ahead = PixelsAhead(2)
    yield bank
    if bank._ahead._workers is not None:
        bank._ahead._workers.shutdown()


def shown(bank: ImageBank, count: int) -> list[str]:
    found = []
    for number in range(count):
        data = encoded(*FORMS[number % len(FORMS)], 60 + number, 90 - number, number)
        bank.put(digest_of(data), data, "image/png")
        found.append(digest_of(data))
    return found


def test_workers_scale_expected_images_to_the_same_tensors(
    vision: Vision, ahead: ImageBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled_here: list[str] = []
    make = vision.processing.make
    digests = shown(ahead, 20)
    ahead.expect(digests)
    wait_until(ahead._ahead._begun[digests[0]].done)
    wanted = [vision.bank.tensors(digest) for digest in shown(vision.bank, 20)]

    def make_here(digest: str, data: bytes) -> PreparedImage:
        scaled_here.append(digest)
        return make(digest, data)

    monkeypatch.setattr(vision.processing, "make", make_here)
    for digest, own in zip(digests, wanted, strict=True):
        np.testing.assert_array_equal(ahead.tensors(digest)["pixel_values"], own["pixel_values"])
    assert digests[0] not in scaled_here
    assert ahead._ahead._workers is not None
    assert len(ahead._ahead._workers.workers) == 2
    assert ahead.processed == 20


@pytest.mark.slow  # by default: tests/plugins/preparing has a worker that dies
def test_a_worker_that_dies_costs_time_only(vision: Vision, ahead: ImageBank) -> None:
    digests = shown(ahead, 12)
    ahead.expect(digests)
    for number, (digest, again) in enumerate(zip(digests, shown(vision.bank, 12), strict=True)):
        if number in (1, 5):
            assert ahead._ahead._workers is not None
            for worker in list(ahead._ahead._workers.workers):
                worker.process.kill()
        np.testing.assert_array_equal(ahead.tensors(digest)["pixel_values"], vision.bank.tensors(again)["pixel_values"])


def test_an_image_that_no_worker_can_decode_is_an_error_here(ahead: ImageBank) -> None:
    whole = encoded("RGB", "PNG", 100, 100, 0)
    cut = whole[: len(whole) // 2]
    good = shown(ahead, 1)
    ahead.put(digest_of(cut), cut, "image/png")
    ahead.expect([digest_of(cut), *good])
    with pytest.raises(ImageError, match="an image cannot be decoded"):
        ahead.tensors(digest_of(cut))
    ahead.tensors(good[0])


def test_images_that_are_expected_anew_or_never_asked_for(vision: Vision, ahead: ImageBank) -> None:
    digests = shown(ahead, 20)
    ahead.expect(digests[:10])
    ahead.expect(digests[5:])
    for digest in (digests[19], digests[0], digests[7]):
        vision.bank.put(digest, *astuple(ahead.source(digest)))
        np.testing.assert_array_equal(
            ahead.tensors(digest)["pixel_values"], vision.bank.tensors(digest)["pixel_values"]
        )


def test_other_processes_get_bytes(vision: Vision, vlm: Any) -> None:
    digests = shown(vision.bank, 3)
    ready = {"pixel_values": np.ones((4, 8), np.float32), "image_grid_thw": np.array([[1, 2, 2]])}
    vision.bank.read_tensors_from({"sha256:file": ready}.get)
    sent = vision.bank.sent([*digests, digests[0], "sha256:file"])
    assert tuple(map(list, sent)) == (digests, ["sha256:file"])
    other = load_format(ModelSpec(path=str(vlm("qwen2_5_vl"))), vlm("qwen2_5_vl")).vision
    assert other is not None
    other.bank.receive(sent)
    for digest in (*digests, "sha256:file"):
        np.testing.assert_array_equal(
            other.bank.tensors(digest)["pixel_values"], vision.bank.tensors(digest)["pixel_values"]
        )
    assert (other.bank.looked, other.bank.processed) == (0, 3)


def test_a_worker_imports_no_torch() -> None:
    import subprocess

    code = "import sys, engine.tokens.pixels; sys.exit(sum(name in sys.modules for name in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
