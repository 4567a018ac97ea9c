"""`backend.verify`: a server's log-probs beside those of the model's files, from the rows' own pixels."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from vision_code import pil

from engine.errors import BackendError
from engine.plugins.servers.http.reply import HttpReply
from engine.plugins.servers.pool import Server
from engine.plugins.sglang.sample_prompt import verify_servers
from engine.schemas.model import ModelSpec
from engine.tokens.loading import load_format
from engine.tokens.template import ChatTemplate


class Told(Server):
    """A server whose `/server_info` names a precision."""

    def __init__(self, dtype: str) -> None:
        super().__init__("http://127.0.0.1:1")
        self.dtype = dtype

    async def json(self, method: str, path: str, body: Any = None, *, timeout: float = 30.0) -> Any:  # noqa: ASYNC109
        assert (method, path) == ("GET", "/server_info")
        return {"dtype": self.dtype}


class Serving:
    """Answers as a server with this model does: its own processor over the image that it was sent, and a plain pass."""

    def __init__(
        self, form: ChatTemplate, folder: Path, *, change: Callable[[Any], None] | None = None, shade: int = 0
    ) -> None:
        kind: Any = AutoModelForCausalLM if form.vision is None else AutoModelForImageTextToText
        self.model = kind.from_pretrained(folder, dtype=torch.float32).eval()
        if change is not None:
            change(self.model)
        self.template, self.shade = form, shade

    async def __call__(self, server: Server, body: dict[str, Any]) -> HttpReply:
        ids, inputs = np.array(body["input_ids"], np.int32), {}
        vision = self.template.vision
        if vision is not None:
            (uri,) = body["image_data"]
            image = pil(b64decode(uri.partition(",")[2])).point(lambda value: value + self.shade)
            tensors, _, _, count = vision.family.process(vision.processing.processor, image)
            (at,) = np.flatnonzero(ids == vision.marker_id)
            ids = np.concatenate([ids[:at], np.full(count, vision.placeholder_id, np.int32), ids[at + 1 :]])
            inputs = {name: torch.from_numpy(array) for name, array in tensors.items()}
            inputs["mm_token_type_ids"] = torch.tensor(vision.token_types([ids.tolist()]))
        tokens = torch.from_numpy(ids.astype(np.int64))[None]
        with torch.inference_mode():
            found = self.model(input_ids=tokens, **inputs).logits[0, :-1].log_softmax(-1)
        values = [None, *found.gather(1, tokens[0, 1:, None])[:, 0].tolist()]
        rows = [[value, int(token), None] for value, token in zip(values, ids, strict=True)]
        if vision is not None:  # as SGLang: an image's placeholders are ids of its own there
            rows = [[-9.0, *row[1:]] if row[1] == vision.placeholder_id else row for row in rows]
        reply = {"prompt_token_ids": ids.tolist(), "meta_info": {"input_token_logprobs": rows}}
        return HttpReply(200, msgspec.json.encode(reply))


@pytest.fixture
def opened(vlm: Callable[[str], Path], tiny_model_dir: Path) -> Callable[[str], tuple[ChatTemplate, Path]]:
    def get(family: str) -> tuple[ChatTemplate, Path]:
        folder = tiny_model_dir if family == "text" else vlm(family)
        return load_format(ModelSpec(path=str(folder)), folder), folder

    return get


@pytest.mark.parametrize("family", ["text", "qwen3_vl"])
async def test_a_server_of_the_same_model_and_pixels_is_certified(
    opened: Callable[[str], tuple[ChatTemplate, Path]], family: str
) -> None:
    form, folder = opened(family)
    found = await verify_servers([Told("float32"), Told("bfloat16")], form, lambda: folder, Serving(form, folder))
    assert found.tokens > 20
    assert found.largest < 1e-5


def shift(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", ["text", "qwen3_vl"])
async def test_other_weights_are_refused(opened: Callable[[str], tuple[ChatTemplate, Path]], family: str) -> None:
    form, folder = opened(family)
    with pytest.raises(
        BackendError, match=r"differ from those of the model's files by .* it has other weights"
    ) as raised:
        await verify_servers([Told("float32")], form, lambda: folder, Serving(form, folder, change=shift))
    assert raised.value.kind == "wrong_server"


@pytest.mark.parametrize("family", ["qwen3_vl"])
async def test_pixels_that_are_a_few_grey_levels_off_are_refused(
    opened: Callable[[str], tuple[ChatTemplate, Path]], family: str
) -> None:
    """As a server whose processor scales or normalises otherwise has them: text would not show it."""
    form, folder = opened(family)
    with pytest.raises(BackendError, match="after an image: it has other weights, or processes images differently"):
        await verify_servers([Told("float32")], form, lambda: folder, Serving(form, folder, shade=20))


async def test_files_that_are_no_model_say_so(
    opened: Callable[[str], tuple[ChatTemplate, Path]], tmp_path: Path
) -> None:
    form, folder = opened("text")
    with pytest.raises(BackendError, match=r"`backend.verify`: the model cannot be loaded or run") as raised:
        await verify_servers([Told("float32")], form, lambda: tmp_path, Serving(form, folder))
    assert raised.value.kind == "unsupported_model"
