"""Images on a real SGLang server: what it expands is ours, and its log-probs are transformers'."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generate_requests import generate_request
from recompute import apart
from safetensors.torch import load_file, save_file
from test_policy_vision import open_policy
from test_vision_wire import request
from vision_code import FIRST, MACHINE, SECOND, THIRD

from engine.plugins.servers import sessions
from engine.plugins.servers.wire import EncodedRequest
from engine.plugins.sglang.client import SGLangBackend
from engine.plugins.sglang.spec import SGLangBackendSpec
from engine.plugins.sglang.wire import Encoder
from engine.schemas.generation import GenerateRequest, SamplingParams
from engine.schemas.message import ImagePart, Message, TextPart
from engine.schemas.model import ModelSpec
from engine.schemas.trajectory import ImageSpan
from engine.store.rows.row import TrainingRow
from engine.tokens.conversation import Conversation
from engine.tokens.images import digest_of
from engine.tokens.loading import load_format
from engine.train.packing import pack_rows

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
SCRIPT = Path(__file__).parents[3] / "scripts" / "sglang_cpu.sh"


@contextmanager
def serving(model: Path, state: Path) -> Iterator[str]:
    """The URL of a server with this model, until the block ends."""
    python = Path(subprocess.run([SCRIPT, "python"], capture_output=True, text=True, check=True).stdout.strip())
    if not python.exists():
        message = f"SGLang is not installed ({python} is not there): run scripts/sglang_cpu.sh install"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    environment = {**os.environ, "SGLANG_CPU_STATE": str(state), "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
    flags = ["--deterministic", "--mm-attention-backend", "sdpa"]
    started = subprocess.run(
        [SCRIPT, "start", model, *flags], env=environment, capture_output=True, text=True, check=False
    )
    if started.returncode:
        pytest.fail(f"the SGLang server did not start:\n{started.stderr[-4000:]}")
    url = started.stdout.strip().splitlines()[-1]
    try:
        yield url
    finally:
        port = url.rpartition(":")[2]
        subprocess.run([SCRIPT, "stop", "--port", port], env=environment, capture_output=True, check=False)


@pytest.mark.parametrize("family", [pytest.param("qwen2_5_vl", marks=pytest.mark.exhaustive), "qwen3_vl"])
async def test_episodes_are_exact_to_the_pixel(
    make_spec: Any, run_spec: Any, vlm: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, family: str
) -> None:
    """Figures of Geometry3K and pictures of every form, on a server whose own processor scales otherwise."""
    with serving(vlm(family), tmp_path_factory.mktemp("sglang")) as url:
        backend = {"kind": "sglang", "urls": [url], "timeout": "2m", "verify": True}
        ran = await run_spec(
            make_spec(
                family,
                environment={"use": "vision_code:Gallery"},
                machine=MACHINE,
                backend=backend,
                tasks={"source": "inline", "rows": [{"id": name} for name in "abc"], "id": "id"},
            )
        )
        figures = await run_spec(
            make_spec(
                family,
                environment={"use": "vision_code:Figures"},
                machine=MACHINE,
                backend=backend,
                tasks={
                    "source": "inline",
                    "rows": [{"id": str(at), "first": at} for at in range(0, 300, 60)],
                    "id": "id",
                },
            )
        )
    assert ran.stats["certificate"] == {"turns_checked": 12, "turns_unchecked": 0, "prompt_mismatches": 0}
    assert ran.stats["seeded"] is True
    for trajectory in ran.trajectories.values():
        assert trajectory.outcome.failure is None
        assert len(trajectory.turns) == 4
        shown = [digest_of(data) for data in (FIRST, SECOND, THIRD, FIRST)]
        assert [image.image for image in trajectory.branches[-1].images] == shown
        for branch in trajectory.branches:
            assert not np.isin(branch.input_ids[branch.loss_mask == 1], ran.vision.banned).any()
    bank = ran.vision.bank
    assert (bank.looked, bank.processed) == (
        4,
        1,
    )  # the picture of the check of log-probs, which alone needs a tensor here
    assert figures.stats["certificate"] == {"turns_checked": 15, "turns_unchecked": 0, "prompt_mismatches": 0}
    for made in (ran, figures):
        assert made.stats["verified"]["tokens"] > 20
        assert made.stats["verified"]["largest"] < 1e-4
    images = figures.stats["images"]
    assert images["server_processors"] == ["auto"]
    assert images["unscaled_gap"] > 1e-4  # sent as it came, the probe's picture would have had other pixels
    for made in (ran, figures):
        off, count, rows = apart(made.store, made.vision, vlm(family))
        assert off < 1e-4
        assert count == sum(int(row["loss_mask"].sum()) for row in rows)


def other_tower(model: Path, folder: Path) -> Path:
    """A copy of a model whose vision tower has other weights."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    draw = torch.Generator().manual_seed(0)
    for name in weights:
        if "visual" in name:
            weights[name] = weights[name] + 0.05 * torch.randn(weights[name].shape, generator=draw)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


async def test_features_of_an_image_are_its_own_and_of_the_newest_weights(
    vlm: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With hashes and without, for images that the server has seen, and after updates of the tower that computed what it keeps."""
    model = vlm("qwen2_5_vl")
    form = load_format(ModelSpec(path=str(model)), model)
    vision = form.vision
    assert vision is not None
    shown = {"red": (FIRST,), "blue": (SECOND,), "both": (SECOND, FIRST), "red again": (FIRST,)}
    for data in (FIRST, SECOND):
        vision.bank.put(digest_of(data), data, "image/png")
    picture = form.encode("<|vision_start|><|image_pad|><|vision_end|>What is it?")
    asked = {name: request(vision, picture * len(images), *images) for name, images in shown.items()}
    models = [model, other_tower(model, tmp_path / "other")]

    async def logprobs(backend: SGLangBackend, weights: Path) -> dict[str, np.ndarray]:
        """Of each reply, after a comparison with those of the model."""
        policy = open_policy(weights, vision)
        found = {}
        for name, wanted in asked.items():
            made = await backend.generate(wanted)
            ids = np.concatenate([wanted.input_ids, made.output_ids])
            spans = [
                ImageSpan(image=image.image, start=start, end=end, grid=list(vision.bank.picture(image.image).grid))
                for image, (start, end) in zip(wanted.images, wanted.image_spans, strict=True)
            ]
            row = TrainingRow.of_tokens(ids, np.arange(len(ids)) >= len(wanted.input_ids), images=spans)
            with torch.no_grad():
                own = policy.forward(pack_rows([row], 10_000, share_prefixes=False)[0], entropy=False)[0].numpy()
            np.testing.assert_allclose(made.logprobs, own, atol=1e-4, err_msg=name)
            found[name] = made.logprobs
        return found

    with serving(model, tmp_path / "state") as url:
        backend = SGLangBackend(
            SGLangBackendSpec(urls=[url]), form, sampling=SamplingParams(temperature=1.0), model=str(model)
        )
        try:
            await backend.start()
            hashed = await logprobs(backend, model)
            with monkeypatch.context() as patch:
                encode = backend.encoder._with_images
                patch.setattr(
                    backend.encoder,
                    "_with_images",
                    lambda *args: (encode(*args)[0], encode(*args)[1].partition(b',"mm_hashes"')[0]),
                )
                plain = await logprobs(backend, model)
            for name in shown:
                np.testing.assert_allclose(hashed[name], plain[name], atol=1e-5, err_msg=name)
            for version, weights in enumerate([models[1], models[0]], 1):
                await backend.control.update_weights_from_disk(str(weights), version)
                pushed = await logprobs(backend, weights)
                assert (abs(hashed["red"][0] - pushed["red"][0]) < 1e-4) == (weights == model)
        finally:
            await backend.close()


@pytest.mark.parametrize("family", [pytest.param("qwen2_5_vl", marks=pytest.mark.exhaustive), "qwen3_vl"])
async def test_a_session_has_its_images_at_the_places_of_whole_prompts(
    vlm: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
) -> None:
    """Turns with no image, one and several; each is sent once."""
    monkeypatch.setattr(sessions, "LEAST_TOKENS", 8)
    model = vlm(family)
    form = load_format(ModelSpec(path=str(model)), model)
    assert form.vision is not None
    for data in (FIRST, SECOND, THIRD):
        form.vision.bank.put(digest_of(data), data, "image/png")
    greedy = SamplingParams(temperature=0.0)
    with serving(model, tmp_path_factory.mktemp("sglang")) as url:
        one, other = (
            SGLangBackend(SGLangBackendSpec(urls=[url], sessions=kept), form, sampling=greedy, model=str(model))
            for kept in (True, False)
        )
        await asyncio.gather(one.start(), other.start())
        assert one.sessions is not None
        sent: list[tuple[int, int]] = []
        encode = Encoder.encode

        def counted(encoder: Encoder, asked: GenerateRequest, *args: Any, **options: Any) -> EncodedRequest:
            made = encode(encoder, asked, *args, **options)
            if encoder is one.encoder:
                sent.append((made.in_session, b"".join(made.pieces).count(b"data:image")))
            return made

        monkeypatch.setattr(Encoder, "encode", counted)
        conversation = Conversation(form, [])
        ends = []
        try:
            for turn, shown in enumerate([(), (FIRST,), (SECOND, FIRST), (), (THIRD,), (), (SECOND,)]):
                parts = [ImagePart(image=digest_of(data)) for data in shown]
                said = Message(role="user", content=[*parts, TextPart(text="What is it?")])
                (conversation.add if turn else conversation.open)([said])
                ids, tape = conversation.prompt(), conversation.tape
                assert tape is not None
                images, spans = tape.placed_images()
                asked = generate_request(
                    ids,
                    greedy,
                    turn=turn,
                    max_new_tokens=12,
                    stop_token_ids=form.stop_token_ids,
                    banned_token_ids=form.vision.banned,
                    images=images,
                    image_spans=spans,
                )
                await asyncio.gather(*one.sessions._tasks)
                here, there = [await backend.generate(asked) for backend in (one, other)]
                assert here.output_ids.tolist() == there.output_ids.tolist()
                np.testing.assert_allclose(here.logprobs, there.logprobs, atol=1e-4)
                assert (here.prompt_tokens, here.prompt_unchecked) == (len(ids), False)
                conversation.reply(here, turn)
                ends.append(len(ids) + len(here.output_ids))
        finally:
            await asyncio.gather(one.close(), other.close())
    assert sent == [(0, 0), (0, 1), (ends[1], 2), (ends[2], 0), (ends[3], 1), (ends[4], 0), (ends[5], 1)]
    assert one.stats()["attempts"] == 7
