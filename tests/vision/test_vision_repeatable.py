"""`deterministic: true` for a model that sees: a second turn has the same bits in a process that made no first one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from vision_code import FIRST, SECOND

from engine.backends.local.vision import VisionModel
from engine.backends.stops import StopStrings
from engine.schemas.backend import LocalBackendSpec
from engine.schemas.generation import GenerateRequest, Generation, SamplingParams
from engine.schemas.message import ImagePart
from engine.schemas.model import ModelSpec
from engine.tokens.images import digest_of
from engine.tokens.loading import load_format


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_second_turn_is_the_same_after_a_kill(vlm: Callable[[str], Path], family: str) -> None:
    form = load_format(ModelSpec(path=str(vlm(family))), Path())
    vision = form.vision
    assert vision is not None
    for data in (FIRST, SECOND):
        vision.bank.put(digest_of(data), data, "image/png")

    def opened() -> VisionModel:
        return VisionModel(vlm(family), LocalBackendSpec(device="cpu", dtype="float32", deterministic=True), vision)

    def reply(model: VisionModel, turn: int, ids: list[int], *images: bytes) -> Generation:
        digests = [digest_of(data) for data in images]
        expanded, placed = vision.expand(ids, digests)
        request = GenerateRequest.read({"episode_id": "e", "turn": turn, "input_ids": expanded, "sampling": SamplingParams(), "max_new_tokens": 24, "stop_token_ids": [], "banned_token_ids": vision.banned, "seed": turn, "images": [ImagePart(image=digest) for digest in digests], "image_spans": [(start, start + len(picture.ids)) for picture, start in placed]})  # fmt: skip
        return model.reply(
            request, 24, form.vocab_size, StopStrings(form.decode, []), time.perf_counter(), threading.Event()
        )

    model, marker = opened(), vision.marker_id
    first = reply(model, 0, [5, marker, 6, 7], FIRST)
    ids = [5, marker, 6, 7, *first.output_ids.tolist(), 8, marker, 9]
    second, again = reply(model, 1, ids, FIRST, SECOND), reply(opened(), 1, ids, FIRST, SECOND)
    assert second.output_ids.tolist() == again.output_ids.tolist()
    assert second.logprobs.tobytes() == again.logprobs.tobytes()
    assert np.isfinite(second.logprobs).all()
