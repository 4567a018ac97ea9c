"""From a row to the tensors, positions and sum of its images; no trainer is needed."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import vision_kit

from engine.errors import TrainError
from engine.plugins.trainers.handover import BatchSums, HandedRow
from engine.plugins.trainers.pixels import Pixels, checksums_of, row_sum
from engine.schemas.model import ModelSpec
from engine.tokens.images import digest_of
from engine.tokens.loading import load_format
from engine.tokens.vision_families import kept_tensors

COLOURS = ("red", "green", "blue")


@pytest.fixture(scope="module")
def pixels(tmp_path_factory: pytest.TempPathFactory) -> Pixels:
    folder = vision_kit.build_qwen25(tmp_path_factory.mktemp("vlm") / "model")
    vision = load_format(ModelSpec(path=str(folder)), folder).vision
    assert vision is not None
    for number, colour in enumerate(COLOURS):
        data = vision_kit.square(colour, 56 + 28 * number)
        vision.bank.put(digest_of(data), data, "image/png")
    return Pixels(vision, folder)


def digests(*colours: str) -> tuple[str, ...]:
    return tuple(digest_of(vision_kit.square(each, 56 + 28 * COLOURS.index(each))) for each in colours)


def ids_of(pixels: Pixels, images: tuple[str, ...]) -> np.ndarray:
    """Text around the images' own tokens."""
    pieces = [np.array([5, 6], np.int32)]
    for digest in images:
        pieces += [pixels.vision.bank.picture(digest).ids, np.array([7], np.int32)]
    return np.concatenate(pieces)


@pytest.mark.slow
def test_a_row_has_the_processors_tensors_also_after_a_pickle(pixels: Pixels) -> None:
    images = digests("red", "blue", "red")
    row = pixels.row(ids_of(pixels, images), images)
    wanted = pixels.vision.tensors([images])
    for each in (row, pickle.loads(pickle.dumps(row)), copy.deepcopy(row)):
        assert list(each) == list(pixels.vision.family.names)
        assert {name: tensor.dtype for name, tensor in each.items()} == {
            "pixel_values": torch.float32,
            "image_grid_thw": torch.int64,
        }
        for name, tensor in each.items():
            assert torch.equal(tensor, torch.from_numpy(wanted[name]))
            assert torch.equal(tensor, each[name])
    without = pixels.row(ids_of(pixels, ()), ())
    assert not without
    assert dict(without.items()) == {}
    assert "image_bound" not in row
    with pytest.raises(KeyError):
        without["pixel_values"]


@pytest.mark.slow
def test_the_rows_of_a_pickle_share_the_bytes_of_an_image(pixels: Pixels) -> None:
    """Eight rows with one image are hardly larger than one, and an eighth of its floats."""
    (image,) = digests("blue")
    ids = ids_of(pixels, (image,))
    one, eight = (len(pickle.dumps([pixels.row(ids, (image,)) for _ in range(count)])) for count in (1, 8))
    grid = pixels.vision.bank.picture(image).grid
    size = grid[1] * grid[2] * 14 * 14 * 3
    assert size < one < size + 6000
    assert eight - one < 7 * 300


@pytest.mark.slow
def test_a_pickle_is_read_without_transformers(pixels: Pixels, tmp_path: Path) -> None:
    images = digests("red")
    (tmp_path / "row").write_bytes(pickle.dumps(pixels.row(ids_of(pixels, images), images)))
    code = (
        "import pickle, sys; row = pickle.load(open(sys.argv[1], 'rb')); row['pixel_values']; "
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, tmp_path / "row"], check=False).returncode == 0


@pytest.mark.slow
def test_pixels_that_changed_on_their_way_are_refused(pixels: Pixels) -> None:
    images = digests("red", "green")
    row = pickle.loads(pickle.dumps(pixels.row(ids_of(pixels, images), images)))
    tensors = row.images[images[1]].tensors()
    tensors["pixel_values"][0, 0] += 1
    row.images[images[1]] = kept_tensors(tensors)
    with pytest.raises(TrainError, match=f"the pixels of {images[1]} changed on their way"):
        row.tensors()


@pytest.mark.slow
def test_placeholders_and_images_that_do_not_fit_are_refused(pixels: Pixels) -> None:
    with pytest.raises(TrainError, match="a row has 0 placeholders, and its 1 images need 4") as caught:
        pixels.row([5, 6], digests("red"))
    assert caught.value.kind == "handover"


@pytest.mark.slow
def test_the_sum_over_images_finds_what_is_lost_swapped_or_moved(pixels: Pixels) -> None:
    """It is computed again from float tensors as trainers hold them; rows may come in another order."""
    images = [digests("red", "green"), digests("blue"), ()]
    ids = [ids_of(pixels, each) for each in images]
    handed = [
        HandedRow([int(row[0])], row[1:].tolist(), [], [], np.zeros(0), each)
        for row, each in zip(ids, images, strict=True)
    ]
    sums = BatchSums.of_rows(handed, pixels)

    def theirs(rows: list[tuple[np.ndarray, tuple[str, ...]]]) -> int:
        return sum(row_sum(row, checksums_of(pixels.vision.tensors([each]))) for row, each in rows)

    rows = list(zip(ids, images, strict=True))
    assert sums.images == theirs(rows) == theirs(rows[::-1])
    assert sums.images == sum(row_sum(row, checksums_of(pixels.row(row, each))) for row, each in rows)
    wrong = [
        [(ids[0], images[0][::-1]), *rows[1:]],  # swapped in a row
        [(ids[0], images[0][:1]), *rows[1:]],  # lost
        [(ids[0], digests("red", "red")), *rows[1:]],  # another one
        [(ids[0], images[1]), (ids[1], images[0]), rows[2]],  # swapped between rows
        rows[1:],  # a row less
    ]
    for each in wrong:
        changed = BatchSums(sums.tokens, sums.trained, sums.advantages, theirs(each))
        with pytest.raises(TrainError, match="images: lost, changed, or in another order or row"):
            sums.check(changed, "X", "a filter")


@pytest.mark.slow
def test_positions_are_those_of_the_model(pixels: Pixels) -> None:
    from transformers import AutoModel

    images = digests("red", "blue")
    ids = ids_of(pixels, images)
    found = pixels.positions(ids, images)
    assert found is not None
    model = AutoModel.from_pretrained(pixels._folder)
    types = torch.tensor(pixels.vision.token_types([ids.tolist()]))
    grids = torch.from_numpy(pixels.vision.grids(images))
    wanted, _ = model.get_rope_index(torch.tensor(ids[None], dtype=torch.long), types, grids)
    assert found.dtype == torch.int64
    assert torch.equal(found[1:], wanted[:, 0])
    assert found[0].tolist() == list(range(len(ids)))
    text = pixels.positions([5, 6, 7], ())
    assert text is not None
    assert text.tolist() == [[0, 1, 2]] * 4
