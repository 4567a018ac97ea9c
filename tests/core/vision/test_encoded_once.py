"""A training encodes a distinct image once in a forward pass, with the gradients of a computation that shares nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import vision_kit
from test_policy_vision import open_policy
from vision_code import FIRST, SECOND, THIRD

from engine.schemas.model import ModelSpec
from engine.schemas.trajectory import ImageSpan
from engine.store.rows.row import TrainingRow
from engine.tokens.images import digest_of
from engine.tokens.loading import load_format
from engine.tokens.vision import Vision
from engine.train.packing import Pack, pack_rows
from engine.train.policy import Policy

Part = str | bytes
FOREST: list[list[Part]] = [
    ["one", FIRST, "a question about it", "REPLY", SECOND, "and then", "OTHER"],
    ["one", FIRST, "a question about it", "REPLY", THIRD, "or this", FIRST, "ANSWER"],
    ["one", FIRST, "a question about it", "ANSWER"],
    ["two", THIRD, "beside", FIRST, "REPLY"],
    ["text alone", "ANSWER"],
]
"""Rows: a tree of three, in which an image is shown again after its siblings part, and two others. Words in capitals are trained."""
MODES: dict[str, dict[str, Any]] = {
    "all weights": {},
    "gradient checkpointing": {"memory": {"gradient_checkpointing": True}},
    "LoRA": {"lora": {"rank": 2}},
    "LoRA and gradient checkpointing": {"lora": {"rank": 2}, "memory": {"gradient_checkpointing": True}},
    "a frozen tower": {"freeze": ["visual|vision_model|connector"]},
}
FORMS: dict[str, Callable[[Sequence[TrainingRow]], list[Pack]]] = {
    "one pack, shared prefixes": lambda rows: pack_rows(rows, 10_000, share_prefixes=True, min_shared_tokens=1),
    "one pack": lambda rows: pack_rows(rows, 10_000, share_prefixes=False),
    "micro-batches": lambda rows: pack_rows(rows, 90, share_prefixes=True, min_shared_tokens=1),
    "a row a pass": lambda rows: pack_rows(rows, 1, share_prefixes=True),
}


def row_of(vision: Vision, parts: Sequence[Part], name: Callable[[bytes], str]) -> TrainingRow:
    """A row; `name` gives the digest under which an image is shown."""
    text = np.setdiff1d(np.arange(20, 220), vision.banned)
    pieces: list[np.ndarray] = []
    placed, start = [], 0
    for part in parts:
        if isinstance(part, str):
            ids = text[[ord(letter) for letter in part]]
        else:
            digest = name(part)
            vision.bank.put(digest, part, "image/png")
            picture = vision.bank.picture(digest)
            ids = picture.ids
            placed.append(ImageSpan(image=digest, start=start, end=start + len(ids), grid=list(picture.grid)))
        pieces.append(ids)
        start += len(ids)
    trained = [
        np.full(len(ids), isinstance(part, str) and part.isupper()) for part, ids in zip(parts, pieces, strict=True)
    ]
    return TrainingRow.of_tokens(np.concatenate(pieces), np.concatenate(trained), images=placed)


def opened(folder: Path, **spec: Any) -> tuple[Policy, list[int]]:
    """A policy in float64, and a list to which each call of its vision tower adds how many images (or tiles) it has."""
    vision = load_format(ModelSpec(path=str(folder)), folder).vision
    policy = open_policy(folder, vision, **spec)
    policy.model.double()
    policy.net.dtype = torch.float64
    with torch.no_grad():  # an adapter begins with a matrix of zeros, whose partner would have no gradient
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    encoded: list[int] = []

    def count(_module: Any, _args: Any, inputs: dict[str, Any]) -> None:
        grids = inputs.get("grid_thw")
        encoded.append(len(inputs["pixel_values"] if grids is None else grids))

    policy.model.get_encoder("image").register_forward_pre_hook(count, with_kwargs=True)
    return policy, encoded


def gradients(policy: Policy, packs: Sequence[Pack]) -> dict[str, torch.Tensor]:
    """Of the sum of the log-probs, by name."""
    for _, parameter in policy.named_parameters():
        parameter.grad = None
    for pack in packs:
        policy.forward(pack, entropy=False)[0].sum().backward()
    return {name: parameter.grad for name, parameter in policy.named_parameters() if parameter.grad is not None}


def sizes(vision: Vision, packs: Sequence[Pack]) -> Iterator[int]:
    """How much a tower must encode in each pass: distinct images; the tiles of distinct images, where there are tiles."""
    for pack in packs:
        if grids := {image.image: image.grid for image in pack.images}:
            yield len(grids) if vision.family.served else sum(rows * columns + 1 for rows, columns in grids.values())


def check_shared(folder: Path, forms: Iterable[str], **spec: Any) -> None:
    """Compare forms of packs of the forest with rows in which each image stands for itself."""
    policy, encoded = opened(folder, **spec)
    vision = policy.net.vision
    assert vision is not None
    numbers = iter(range(100))
    alone = [row_of(vision, parts, lambda data: f"{digest_of(data)}:{next(numbers)}") for parts in FOREST]
    rows = [row_of(vision, parts, digest_of) for parts in FOREST]
    packs = FORMS["a row a pass"](alone)
    assert sum(len(pack.images) for pack in packs) == 8
    wanted = gradients(policy, packs)
    assert encoded == list(sizes(vision, packs))
    assert any("lora_" in name for name in wanted) == ("lora" in spec)
    assert any("visual" in name or "vision_model" in name for name in wanted) == ("freeze" not in spec)
    for form in forms:
        encoded.clear()
        packs = FORMS[form](rows)
        found = gradients(policy, packs)
        assert encoded == list(sizes(vision, packs)), form
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            assert (found[name] - gradient).norm() <= 1e-6 * gradient.norm().clamp_min(1e-3), (form, name)
    (whole,) = FORMS["one pack, shared prefixes"](rows)
    assert len({image.image for image in whole.images}) == 3
    assert len(whole.images) == 6  # one of the prefix, and five after it
    assert 1 < len(FORMS["micro-batches"](rows)) < len(rows)


def test_a_distinct_image_is_encoded_once_in_a_pass(vlm: Callable[[str], Path]) -> None:
    check_shared(vlm("qwen2_5_vl"), ["one pack, shared prefixes", "micro-batches"])


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", vision_kit.BUILDERS)
def test_it_is_encoded_once_in_every_kind_of_training(vlm: Callable[[str], Path], family: str, mode: str) -> None:
    check_shared(vlm(family), FORMS, **MODES[mode])
