"""Sampling of many sequences with images in one batch, beside the same requests one at a time."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from generate_requests import generate_request
from PIL import Image
from slow_cases import slow_but
from vision_code import FIRST, SECOND, THIRD

from engine.errors import BackendError
from engine.plugins.local.backend import LocalBackend
from engine.plugins.local.kv import PromptImages
from engine.plugins.local.spec import LocalBackendSpec
from engine.plugins.local.vision import place_images
from engine.schemas.generation import GenerateRequest, Generation, SamplingParams
from engine.schemas.message import ImagePart
from engine.schemas.model import ModelSpec
from engine.tokens.images import digest_of
from engine.tokens.loading import load_format
from engine.tokens.template import ChatTemplate

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3"]
SHOWN: list[list[bytes]] = [[FIRST], [], [FIRST, SECOND, THIRD], [FIRST, FIRST], [THIRD], [SECOND, FIRST], [], [FIRST]]
"""The images of each episode's first prompt: of three sizes, none to three in a prompt, one twice in a row."""


def form_of(folder: Path) -> ChatTemplate:
    form = load_format(ModelSpec(path=str(folder)), Path())
    assert form.vision is not None
    for data in (FIRST, SECOND, THIRD):
        form.vision.bank.put(digest_of(data), data, "image/png")
    return form


def ask(form: ChatTemplate, episode: int, turn: int, ids: Sequence[int], images: Sequence[bytes]) -> GenerateRequest:
    """A request; each marker in `ids` stands for one image."""
    assert form.vision is not None
    digests = [digest_of(data) for data in images]
    expanded, placed = form.vision.expand(ids, digests)
    return generate_request(
        expanded,
        SamplingParams(top_p=0.9 if episode % 3 == 0 else 1.0),
        episode=str(episode),
        turn=turn,
        max_new_tokens=9 + episode,
        stop_token_ids=[],
        banned_token_ids=form.vision.banned,
        seed=100 * episode + turn,
        images=[ImagePart(image=digest) for digest in digests],
        image_spans=[(start, start + len(picture.ids)) for picture, start in placed],
    )


def first_prompt(form: ChatTemplate, episode: int) -> list[int]:
    """Half of the prompts begin with the same text. Text stands before and after each image."""
    assert form.vision is not None
    ids = list(range(20, 50)) if episode % 2 else [5]
    for number, _ in enumerate(SHOWN[episode]):
        ids += [form.vision.marker_id, 60 + number]
    return [*ids, 70 + episode, 8]


def opened(folder: Path, form: ChatTemplate, *, max_batch: int, **options: object) -> LocalBackend:
    spec = LocalBackendSpec(
        max_batch=max_batch, dtype="float32", device="cpu", deterministic=bool(options.pop("same", 0))
    )
    assert form.vision is not None
    return LocalBackend(lambda: folder, form.decode, spec, vocab=form.vocab_size, vision=form.vision, **options)


async def play(
    folder: Path, form: ChatTemplate, *, max_batch: int, together: bool, restart: bool = False, **options: object
) -> tuple[list[list[Generation]], dict[str, object]]:
    """Two turns of every episode; every other one shows a further image before the second."""
    backend = opened(folder, form, max_batch=max_batch, **options)
    await backend.start()

    async def turn(number: int, requests: list[GenerateRequest]) -> list[Generation]:
        calls = [backend.generate(request) for request in requests]
        return list(await asyncio.gather(*calls)) if together else [await call for call in calls]

    assert form.vision is not None
    episodes = range(len(SHOWN))
    first = await turn(0, [ask(form, each, 0, first_prompt(form, each), SHOWN[each]) for each in episodes])
    if restart:
        await backend.close()
        backend = opened(folder, form, max_batch=max_batch, **options)
        await backend.start()
    again = []
    for each in episodes:
        ids = [*first_prompt(form, each), *first[each].output_ids.tolist(), 9]
        more = [form.vision.marker_id, 11, 12] if each % 2 == 0 else [13, 14]
        again.append(ask(form, each, 1, [*ids, *more], [*SHOWN[each], *([SECOND] if each % 2 == 0 else [])]))
    second = await turn(1, again)
    stats = backend.stats()
    await backend.close()
    return [first, second], stats


@pytest.mark.parametrize("family", slow_but(FAMILIES, "qwen3_vl"))
async def test_a_batch_gives_the_ids_and_log_probs_of_one_at_a_time(vlm: Callable[[str], Path], family: str) -> None:
    """Also where a prompt is computed in pieces, and where an image has more tokens than a pass is given."""
    form = form_of(vlm(family))
    alone, one = await play(vlm(family), form, max_batch=1, together=False, stash_bytes=0)
    among, many = await play(vlm(family), form, max_batch=5, together=True, prefill_tokens=12)
    assert int(many["steps"]) < int(one["steps"]) / 2  # type: ignore[call-overload]
    for turn, expected in zip(among, alone, strict=True):
        for found, wanted in zip(turn, expected, strict=True):
            assert found.output_ids.tolist() == wanted.output_ids.tolist()
            np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=1e-4)


@pytest.mark.slow  # by default: test_local_repeatable, and the case below
@pytest.mark.parametrize("family", FAMILIES)
async def test_deterministic_replies_are_the_same_bits_in_any_batch_and_after_a_restart(
    vlm: Callable[[str], Path], family: str
) -> None:
    form = form_of(vlm(family))
    alone, _ = await play(vlm(family), form, max_batch=1, together=False, same=True)
    among, _ = await play(vlm(family), form, max_batch=5, together=True, restart=True, same=True, prefill_tokens=12)
    for turn, expected in zip(among, alone, strict=True):
        for found, wanted in zip(turn, expected, strict=True):
            assert found.cached_tokens == 0
            assert found.output_ids.tolist() == wanted.output_ids.tolist()
            assert found.logprobs.tobytes() == wanted.logprobs.tobytes()


async def test_cached_tokens_of_an_image_are_reused_for_the_same_image_only(vlm: Callable[[str], Path]) -> None:
    """Another image of the same size has the same ids. Its reply is that of a backend that never saw the first one."""
    folder = vlm("qwen2_5_vl")
    form = form_of(folder)
    vision = form.vision
    assert vision is not None
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), "black").save(buffer, "PNG")
    other = buffer.getvalue()
    vision.bank.put(digest_of(other), other, "image/png")
    ids = [*range(20, 50), vision.marker_id, 60, 61]
    red, black = ask(form, 1, 0, ids, [FIRST]), ask(form, 1, 0, ids, [other])
    assert red.input_ids.tolist() == black.input_ids.tolist()
    backend, fresh = (opened(folder, form, max_batch=2) for _ in range(2))
    await backend.start()
    await fresh.start()
    seen = await backend.generate(red)
    again = await backend.generate(red)
    found, wanted = await backend.generate(black), await fresh.generate(black)
    assert again.cached_tokens == len(red.input_ids) - 1
    assert backend.stats()["images_computed"] == 2
    assert found.cached_tokens == 30
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=1e-4)
    assert found.output_ids.tolist() == wanted.output_ids.tolist()
    assert not np.allclose(found.logprobs[:1], seen.logprobs[:1], atol=1e-4)
    await backend.close()
    await fresh.close()


async def test_new_weights_in_the_middle_compute_the_images_again(vlm: Callable[[str], Path]) -> None:
    """A reply that is being sampled goes on with the new weights; with equal weights it is the reply of no update."""
    folder = vlm("qwen3_vl")
    form = form_of(folder)
    request = ask(form, 0, 0, first_prompt(form, 2), SHOWN[2])
    request = GenerateRequest.read(
        {**{name: getattr(request, name) for name in request.__struct_fields__}, "max_new_tokens": 60}
    )
    backend = opened(folder, form, max_batch=2)
    await backend.start()
    plain = await backend.generate(request)
    call = asyncio.create_task(backend.generate(request))
    for _ in range(20_000):
        if backend.stats()["tokens"] >= 63:
            break
        await asyncio.sleep(0.001)
    assert backend._worker is not None
    weights = {name: value.clone() for name, value in backend._worker.packed.model.state_dict().items()}
    await backend.update_weights(weights, 1)
    found = await call
    stats = backend.stats()
    await backend.close()
    assert found.output_ids.tolist() == plain.output_ids.tolist()
    np.testing.assert_allclose(found.logprobs, plain.logprobs, atol=1e-4)
    assert [span.version for span in found.versions] == [0, 1]
    assert stats["images_computed"] == 3 + 3


async def test_images_without_spans_are_refused(vlm: Callable[[str], Path]) -> None:
    folder = vlm("qwen2_5_vl")
    form = form_of(folder)
    backend = opened(folder, form, max_batch=2)
    await backend.start()
    request = ask(form, 0, 0, first_prompt(form, 0), SHOWN[0])
    fields = {name: getattr(request, name) for name in request.__struct_fields__}
    with pytest.raises(BackendError, match="the number of images differs") as caught:
        await backend.generate(GenerateRequest.read({**fields, "image_spans": []}))
    assert caught.value.kind == "bad_request"
    await backend.close()


async def test_deterministic_prompts_are_never_split(vlm: Callable[[str], Path], tmp_path: Path) -> None:
    """Also if all prompts of a step together are longer than the model's context."""
    folder = shutil.copytree(vlm("qwen2_5_vl"), tmp_path / "short")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 100
    (folder / "config.json").write_text(json.dumps(config))
    form = form_of(folder)
    backend = opened(folder, form, max_batch=8, same=True, prefill_tokens=60)
    await backend.start()
    assert backend._worker is not None
    model = backend._worker.packed
    passes: list[int] = []
    true, here = model._forward_packed, threading.Event()

    def counted(chunks: Any, wanted: Any) -> Any:
        here.wait(60)
        passes.extend(len(chunk.ids) for chunk in chunks if len(chunk.ids) > 1)
        return true(chunks, wanted)

    model._forward_packed = counted  # type: ignore[method-assign]
    requests = [ask(form, each, 0, first_prompt(form, each), SHOWN[each]) for each in range(8)]
    calls = [asyncio.ensure_future(backend.generate(request)) for request in requests]
    await asyncio.sleep(0)  # all requests are queued; at most the first one is in a pass
    here.set()
    await asyncio.gather(*calls)
    await backend.close()
    assert sorted(passes) == sorted(len(request.input_ids) for request in requests)


def test_a_prompt_is_split_between_images_only(vlm: Callable[[str], Path]) -> None:
    placed = PromptImages(np.zeros(20, np.int32), np.zeros(20, np.int32), ["a", "b"], [(3, 7), (7, 9)])
    assert [placed.whole(length) for length in range(12)] == [0, 1, 2, 3, 3, 3, 3, 7, 7, 9, 10, 11]
    assert (placed.end(3), placed.end(7), placed.end(9)) == (7, 9, 9)
    assert placed.within(0, 7) == ["a"]
    assert placed.within(3, 20) == ["a", "b"]
    form = form_of(vlm("smolvlm"))
    assert form.vision is not None
    request = ask(form, 0, 0, [5, form.vision.marker_id, 6], [SECOND])
    marks: dict[str, int] = {"other": -1}
    marked = place_images(form.vision, request.input_ids, ["x"], request.image_spans, marks)
    assert marked is not None
    assert marks == {"other": -1, "x": -2}
    changed = marked.marked != request.input_ids
    assert np.array_equal(changed, request.input_ids == form.vision.placeholder_id)  # tokens around tiles stay
    assert set(marked.marked[changed].tolist()) == {-2}
