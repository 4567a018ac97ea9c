"""Images and refusals of the rows for SkyRL and AReaL; neither library is needed."""

from __future__ import annotations

import asyncio
import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vision_kit
from training_rows import row_of

from engine.errors import BackendError, TrainError
from engine.plugins.local.spec import LocalBackendSpec
from engine.plugins.trainers import areal, skyrl
from engine.plugins.trainers.areal.backend import ArealBackend
from engine.plugins.trainers.areal.workflow import refuse_blind
from engine.plugins.trainers.handover import BatchSums, HandedRow
from engine.plugins.trainers.pixels import Pixels
from engine.plugins.trainers.skyrl.backend import SkyRLBackend
from engine.schemas.generation import GenerateRequest, SamplingParams
from engine.schemas.message import ImagePart
from engine.schemas.model import ModelSpec
from engine.store.rows.row import TrainingRow
from engine.tokens.images import digest_of
from engine.tokens.loading import load_format

ACTOR = SimpleNamespace(reward_bias=0.0, reward_scaling=1.0, reward_clip=20.0)


def seeing(folder: Path, family: str) -> tuple[Pixels, str]:
    """What makes the images of a tiny model, and the digest of an image in its bank."""
    vision = load_format(ModelSpec(path=str(vision_kit.BUILDERS[family](folder))), folder).vision
    assert vision is not None
    data = vision_kit.square("red")
    digest = digest_of(data)
    vision.bank.put(digest, data, "image/png")
    return Pixels(vision, folder), digest


def episodes(form: Any, folder: Path) -> Any:
    """What an AReaL backend reads of its rollouts."""
    spec = SimpleNamespace(backend=LocalBackendSpec(kind="local"))
    return SimpleNamespace(spec=spec, context=None, format=form, pixels=Pixels(form.vision, folder))


def row(
    seen: Sequence[int] = (8,), images: Sequence[str] = (), after: Sequence[int] = (10,), **more: Any
) -> TrainingRow:
    """A row whose two trained tokens are around the tokens of an image, or around one token."""
    count = len(seen)
    columns: dict[str, Any] = {
        "input_ids": [5, 6, 7, *seen, 9, *after],
        "loss_mask": [0, 0, 1, *[0] * count, 1, *[0] * len(after)],
        "logprobs": [-0.5] * (4 + count + len(after)),
        "weight_versions": [-1, -1, 2, *[-1] * count, 3, *[-1] * len(after)],
        "advantages": [9, 9, 1.5, *[9] * count, -2.0, *[9] * len(after)],
        "images": [{"image": digest} for digest in images],
    }
    return row_of(columns, **more)


@pytest.mark.slow
def test_image_tensors_of_each_row(tmp_path: Path) -> None:
    pixels, digest = seeing(tmp_path / "model", "qwen2_5_vl")
    rows = [row(pixels.vision.bank.picture(digest).ids.tolist(), [digest]), row()]
    whole = pixels.vision.tensors([[digest]])
    handed = [HandedRow.of(each) for each in rows]
    output = skyrl.generator_output([handed[0], handed[0]], pixels=pixels)
    for name in ("pixel_values", "image_grid_thw"):
        first, second = output[name]
        assert torch.equal(first, torch.from_numpy(whole[name]))
        assert first is second
    assert output["rewards"] == [[1.5, *[0.0] * 4, -2.0, 0.0]] * 2
    assert "pixel_values" not in skyrl.generator_output([handed[1]], pixels=pixels)

    made = areal.trajectory(rows, [1.0, 0.0], actor=ACTOR, pixels=pixels)
    first, second = pickle.loads(pickle.dumps(made["multi_modal_input"]))
    assert isinstance(first, dict)
    assert list(first) == list(whole)
    for name, value in first.items():
        assert torch.equal(value, torch.from_numpy(whole[name]))
        assert torch.equal(value, first[name])
    assert list(second) == ["image_grid_thw"]
    assert second["image_grid_thw"].shape == (0, 3)
    assert second.get("pixel_values") is None
    assert made["mm_token_type_ids"].tolist() == [[0, 0, 0, 1, 1, 1, 1, 0, 0], [0] * 9]
    assert made["engine_images"].tolist() == [pixels.sum(rows[0].branch.input_ids, (digest,)), 0]


def test_rows_without_trained_tokens_show_the_images_of_another() -> None:
    """SkyRL's model takes no micro-batch without patches; trained rows of both kinds are refused."""
    shown, blind = (HandedRow.of(row(images=images)) for images in (["a"], []))
    first, second = skyrl.rows.filled([HandedRow.empty(3), shown])
    assert second == shown
    assert (first.prompt_ids, first.completion_ids, first.images) == (shown.prompt_ids, shown.completion_ids, ("a",))
    assert not any(first.mask)
    assert not first.advantages.any()
    assert skyrl.rows.filled([blind, HandedRow.empty(3)])[0] is blind
    with pytest.raises(TrainError, match="1 of 2 trained rows have no image: SkyRL's model takes no micro-batch"):
        skyrl.rows.filled([shown, blind])


def test_experts_of_each_row() -> None:
    """They begin with the first token of the prompt, and rows without them have an empty list."""
    experts = np.arange(10, dtype=np.uint8).reshape(5, 1, 2)
    with_experts = HandedRow.of(row(routed_experts=experts))
    found = skyrl.generator_output([with_experts, HandedRow.empty(3)])
    assert found["rollout_expert_indices"] == [experts.tolist(), []]
    assert "rollout_expert_indices" not in skyrl.generator_output([HandedRow.empty(3)])


@pytest.mark.slow
def test_families_that_skyrl_does_not_take_are_refused(tmp_path: Path) -> None:
    backend = SkyRLBackend(None, LocalBackendSpec, context=None, model=None)
    backend.pixels, _ = seeing(tmp_path / "model", "smolvlm")
    with pytest.raises(BackendError, match="splits images into tiles"):
        asyncio.run(backend.start())


def test_rows_without_images_are_refused_where_several_processes_of_areal_train() -> None:
    refuse_blind([row(images=["a"], episode_id="e")], 2)
    with pytest.raises(TrainError, match="f has a row without an image, and AReaL's 2 training processes"):
        refuse_blind([row(images=["a"], episode_id="e"), row(episode_id="f")], 2)


def test_values_are_what_areal_subtracts() -> None:
    """Position t holds the value of token t + 1; the clipped reward is added at the last but one token."""
    rows = [row(), row(after=())]
    made = areal.trajectory(rows, [30.0, 0.5], actor=ACTOR)
    assert made["values"].tolist() == [[0.0, -1.5, 0.0, 2.0, 20.0, 0.0], [0.0, -1.5, 0.0, 2.5, 0.0, 0.0]]
    assert made["rewards"].tolist() == [30.0, 0.5]
    assert made["versions"].tolist() == [[-1, -1, 2, -1, 3, -1]] * 2
    assert made["attention_mask"].sum(1).tolist() == [6, 5]
    sums = BatchSums.of_rows([*map(HandedRow.of, rows)])
    assert (sums.tokens, sums.trained, sums.advantages) == (11, 4, 7.0)


def test_the_estimator_returns_the_rewards_by_token() -> None:
    rewards, mask = torch.tensor([[0.0, 1.5, -2.0]]), torch.tensor([[0, 1, 1]])
    advantages, returns = skyrl.identity_advantages(rewards, mask, index=["a"], gamma=0.5)
    assert advantages.tolist() == returns.tolist() == [[0.0, 1.5, -2.0]]


@pytest.mark.slow
def test_the_adapters_import_no_trainer() -> None:
    code = (
        "import sys; import engine.plugins.trainers.skyrl, engine.plugins.trainers.areal; "
        "sys.exit(bool({'skyrl', 'areal'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_missing_skyrl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skyrl", None)
    with pytest.raises(TrainError, match=r"SkyRL cannot be imported .*pip install 'episode-engine\[skyrl\]'"):
        skyrl.register_estimator()


class Answering(BaseHTTPRequestHandler):
    """The part of an SGLang server that is asked before the first episode: it expands a prompt as the model's own processor does."""

    vision: Any
    says: dict[str, Any]

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        (digest,) = list(self.vision.bank._pictures)
        ids = self.vision.expand(body["input_ids"], [digest])[0].tolist()
        rows = [[-1.0, token, None] for token in ids]
        self._answer({"prompt_token_ids": ids, "meta_info": {"input_token_logprobs": rows}} | self.says)

    def _answer(self, value: dict[str, Any]) -> None:
        data = json.dumps({name: each for name, each in value.items() if each is not None}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("says", "words"),
    [
        ({}, None),
        (
            {"prompt_token_ids": None},
            "does not return the ids.*SGLang 0.5.23 or newer.*0.5.10.post1, which AReaL 1.0.4",
        ),
        ({"prompt_token_ids": [1, 2]}, "expands a prompt with an image to 2 tokens"),
    ],
    ids=["keeps_ids", "has_no_echo", "tokenises_again"],
)
def test_servers_of_areal_that_tokenise_prompts_with_images_again_are_refused(
    tmp_path: Path, says: dict[str, Any], words: str | None
) -> None:
    folder = vision_kit.build_qwen25(tmp_path / "model")
    form = load_format(ModelSpec(path=str(folder)), folder)
    assert form.vision is not None
    handler = type("Handler", (Answering,), {"vision": form.vision, "says": says})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        engine = SimpleNamespace(addresses=[f"127.0.0.1:{server.server_port}"])
        backend = ArealBackend(engine, episodes(form, folder))
        try:
            if words is None:
                asyncio.run(backend.start())
                return
            with pytest.raises(BackendError, match=words) as caught:
                asyncio.run(backend.start())
            assert caught.value.kind == "wrong_server"
        finally:
            server.shutdown()


@pytest.mark.slow
def test_a_model_whose_images_are_tiles_is_refused_under_areal(tmp_path: Path) -> None:
    folder = vision_kit.build_smolvlm(tmp_path / "model")
    form = load_format(ModelSpec(path=str(folder)), folder)
    assert form.vision is not None
    backend = ArealBackend(SimpleNamespace(addresses=[]), episodes(form, folder))
    with pytest.raises(BackendError, match="splits images into tiles"):
        asyncio.run(backend.start())


class Renderer:
    """The part of SkyRL's client that encodes images: `pixels` are what it makes of each, `length` their placeholders."""

    def __init__(self, pixels: torch.Tensor, length: int) -> None:
        self.pixels, self.length, self.rendered, self.down = pixels, length, 0, True

    async def render_chat_completion(self, request_payload: dict[str, Any]) -> dict[str, Any]:
        self.rendered += 1
        if self.down:
            self.down = False
            raise ConnectionError("the server restarts")
        places = [{"offset": 0, "length": self.length}]
        return {"features": {"mm_hashes": {"image": ["hash"]}, "mm_placeholders": {"image": places}, "kwargs_data": {"image": ["data"]}}}  # fmt: skip

    async def generate(self, batch: dict[str, Any], model: str | None) -> dict[str, Any]:
        (self.features,) = batch["mm_features"]
        return {"response_ids": [[5]], "response_logprobs": [[-1.0]], "stop_reasons": ["stop"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "brighter", "words"),
    [
        (0, 0.01, None),
        (1, 0.0, "expands an image to 5 placeholders, and the model's own processor to 4"),
        (0, 0.05, "other pixels of an image than the rows have"),
    ],
    ids=["rounded", "other_size", "other_pixels"],
)
def test_skyrl_encodes_an_image_once_and_compares_it_with_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int, brighter: float, words: str | None
) -> None:
    """An encoding that failed is tried again. SkyRL's decoder of vLLM's features is replaced: it needs vLLM."""
    pixels, digest = seeing(tmp_path / "model", "qwen2_5_vl")
    picture = pixels.vision.bank.picture(digest)
    made = torch.from_numpy(pixels.vision.bank.tensors(digest)["pixel_values"]) + brighter
    monkeypatch.setitem(
        sys.modules, "skyrl.backends.renderer", SimpleNamespace(decode_mm_kwargs=lambda data: {"pixel_values": made})
    )
    client = Renderer(made, picture.placeholders + more)
    backend = SkyRLBackend(client, LocalBackendSpec, context=None, model=None)
    backend.pixels = pixels
    request = GenerateRequest(
        episode_id="t/0", turn=0, input_ids=np.array([7, *picture.ids], np.int32), sampling=SamplingParams(),
        max_new_tokens=3, stop_token_ids=[5], seed=1, images=[ImagePart(image=digest)] * 2,
        image_spans=[(1, 1 + len(picture.ids)), (1, 1 + len(picture.ids))],
    )  # fmt: skip

    async def sample() -> None:
        with pytest.raises(ConnectionError):
            await backend.sample(request)
        for _ in range(2):
            await backend.sample(request)

    if words is None:
        asyncio.run(sample())
        assert client.features["mm_hashes"] == {"image": ["hash", "hash"]}
        assert client.rendered == 2  # one failed
        return
    with pytest.raises(BackendError, match=words) as caught:
        asyncio.run(sample())
    assert caught.value.kind == "wrong_server"
