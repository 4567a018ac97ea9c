"""Images through verl: its own queue, agent loop workers, training worker and FSDP engine on a CPU; only its servers
are replaced."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_moe
import torch
import vision_kit
import yaml
from pixel_kit import FOUR_TURNS
from training_rows import row_of
from verl_gallery import spec_of
from verl_python import call_verl, run_verl

from engine.plugins.local.spec import LocalBackendSpec
from engine.plugins.sglang.sample_prompt import sample_prompt
from engine.plugins.trainers.pixels import Pixels
from engine.plugins.trainers.verl.backend import VerlBackend
from engine.schemas.generation import GenerateRequest, SamplingParams
from engine.schemas.message import ImagePart
from engine.schemas.model import ModelSpec
from engine.schemas.train import TrainSpec
from engine.store import RunStore
from engine.store.images import stored_images
from engine.store.loader import vision_of
from engine.store.rows.export import export_rows
from engine.tokens.loading import load_format
from engine.train.packing import pack_rows
from engine.train.policy import Policy

SCRIPT = Path(__file__).parents[2] / "kit" / "verl_images.py"
MODULES = "verl_on_cpu,engine.plugins.trainers.verl.trainer"
FORGETFUL = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and not loop.last %}{{- 'Said.' }}
{%- elif message.content is string %}{{- message.content }}
{%- else %}{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{- part.text }}{% endif %}
{%- endfor %}{% endif %}{{- '<|im_end|>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
"""Rewrites history, so that each turn is a row of its own."""
LOOP = "engine.plugins.trainers.verl.agent_loop.EngineAgentLoop"
RAY = pytest.mark.timeout(1200)
"""Starting verl and Ray's processes takes half a minute on quiet cores, and minutes on busy ones."""


def ran(
    way: str, folder: Path, monkeypatch: pytest.MonkeyPatch, template: str | None = None, **changes: Any
) -> dict[str, Any]:
    """What `verl_images.py` found, with changes of the spec."""
    model = vision_kit.build_qwen25(folder / "model", template)
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec_of(str(model)) | changes))
    out = folder / "out"
    out.mkdir()
    loop = {"name": "engine", "_target_": LOOP, "spec": str(folder / "spec.yaml"), "folder": str(out)}
    (folder / "loop.yaml").write_text(yaml.safe_dump([loop]))
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", MODULES)
    words = [str(folder / "loop.yaml")] if way == "loop" else []
    run_verl(SCRIPT, way, str(folder / "spec.yaml"), str(out), *words)
    found: dict[str, Any] = json.loads((out / "found.json").read_text())
    return found


def ours(model: Path, rows: Sequence[Any], vision: Any) -> list[np.ndarray]:
    """The log-probs of each row's trained tokens by the engine's own training pass, over all ids as verl has them."""
    vision.banned = []
    policy = Policy.load(
        model, TrainSpec(device="cpu", precision="float32"), temperature=1.0, vocab=None, vision=vision
    )
    found: list[np.ndarray] = [np.zeros(0)] * len(rows)
    with torch.no_grad():
        for pack in pack_rows(list(map(row_of, rows)), 1000, share_prefixes=True):
            values = policy.forward(pack, entropy=False)[0].numpy()
            for row in pack.rows:
                found[row] = values[(pack.row == row).numpy()]
    return found


def check(found: dict[str, Any], folder: Path, store: RunStore) -> list[Any]:
    """Compare verl's rows and log-probs with those of the run store, and return the stored rows in verl's order."""
    stored: dict[str, list[Any]] = {}
    for row in export_rows(store):
        stored.setdefault(row["episode_id"], []).append(row)
    vision = vision_of(store)
    assert vision is not None
    vision.bank.read_from(stored_images(store))
    pixels = Pixels(vision, folder / "model")
    rows = [stored[name][int(key.rsplit("_")[-1])] for key, name in zip(found["keys"], found["episodes"], strict=True)]
    for place, row in enumerate(rows):
        digests = [image["image"] for image in row["images"]]
        assert found["ids"][place] == row["input_ids"].tolist()
        positions = pixels.positions(row["input_ids"], digests)
        assert positions is not None
        assert found["positions"][place] == positions.tolist()
        tensors = vision.tensors([digests])
        assert found["tensors"][place].keys() == tensors.keys()
        for name, values in found["tensors"][place].items():
            assert np.array_equal(np.array(values, tensors[name].dtype), tensors[name])
    wanted = ours(folder / "model", rows, vision)

    def apart(place: int, logprobs: list[float]) -> float:
        """The largest difference of verl's log-probs, and of the sampler's, from ours."""
        trained = np.flatnonzero(rows[place]["loss_mask"] == 1)
        sampled = rows[place]["logprobs"][trained]
        return float(max(np.abs(each - wanted[place]).max() for each in (np.array(logprobs)[trained - 1], sampled)))

    gaps = [apart(place, logprobs) for place, logprobs in enumerate(found["all"])]
    gaps += [apart(found["keys"].index(key), logprobs) for key, logprobs in found["equal"].items()]
    gaps += [apart(place, logprobs) for place, logprobs in enumerate(found["one"])]
    assert max(gaps) < 1e-5
    assert len(found["equal"]) > 2
    return rows


@pytest.mark.slow
@pytest.mark.trainers
@RAY
def test_verls_own_pass_over_the_rows_gives_the_engines_log_probs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine episodes of one to four turns, with images in prompt, tool result and user turn, or without. All rows,
    rows of one length and a single row are fetched. Exchanged images stop the training before the update. One step of
    verl trains the vision tower too."""
    found = ran("manager", tmp_path, monkeypatch)
    rows = check(found, tmp_path, RunStore.open(tmp_path / "out" / "rollouts", readonly=True))
    assert sorted({len(row["images"]) for row in rows}) == [0, 2, 4]
    groups: dict[str, list[str]] = {}
    for key, held in zip(found["keys"], found["held"], strict=True):
        groups.setdefault(key.partition("_")[0], []).extend(held)
    for group, held in groups.items():  # each image is stored once
        shown = {
            image["image"]
            for key, row in zip(found["keys"], rows, strict=True)
            if key.startswith(group)
            for image in row["images"]
        }
        assert sorted(held) == sorted(shown)
    assert found["said"].pop("restored") == ""
    assert len(found["said"]) == 4
    for said in found["said"].values():
        assert "images: lost, changed, or in another order or row" in said
    step = found["step"]
    assert 0 < step["grad_norm"][0] < 1000
    assert [name for name, moved in step["moved"].items() if not moved] == []
    assert any("visual" in name for name in step["moved"])
    assert step["all"] != found["all"]


@pytest.mark.slow
@pytest.mark.trainers
@RAY
@pytest.mark.parametrize(
    ("way", "changes", "template", "count"),
    [
        pytest.param("loop", {}, FORGETFUL, 23, marks=pytest.mark.exhaustive),
        pytest.param("loop", FOUR_TURNS, None, 13, marks=pytest.mark.exhaustive),
        ("manager", FOUR_TURNS, None, 13),
    ],
    ids=["a_row_for_each_turn", "a_window_in_the_loop", "a_window"],
)
def test_several_rows_of_an_episode_have_their_own_images(
    way: str, changes: dict[str, Any], template: str | None, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the manager and by verl's own agent loop workers: with a template that rewrites history each turn is a row, and
    with a window of images two turns are. Other rows of the prompt may hold a row's images."""
    found = ran(way, tmp_path, monkeypatch, template, **changes)
    store = tmp_path / "out" / ("process-0/rollouts" if way == "loop" else "rollouts")
    rows = check(found, tmp_path, RunStore.open(store, readonly=True))
    assert len(rows) == count
    if changes:
        assert sorted(len(row["images"]) for row in rows) == [0] * 3 + [2] * 10
    for group in ("uid-0", "uid-1"):
        held = [
            each
            for key, every in zip(found["keys"], found["held"], strict=True)
            if key.startswith(group)
            for each in every
        ]
        assert len(held) == len(set(held)) == 4


@pytest.mark.slow
@pytest.mark.trainers
@RAY
@pytest.mark.parametrize("way", ["manager", pytest.param("loop", marks=pytest.mark.exhaustive)])
def test_verl_gets_the_experts_that_its_servers_report(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """int16 [tokens, layers, k] for all tokens of a row, as verl's Megatron engine replays them; the last token has
    none and gets zeros."""
    spec = spec_of(str(tiny_moe.build(tmp_path / "model"))) | {
        "backend": {"kind": "local", "routed_experts": True},
        "prompt": [{"role": "user", "content": "Say {{id}}."}],
        "user": {"use": "code_for_training:Listener"},
        "machine": "tools_and_user",
    }
    del spec["environment"]
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    (tmp_path / "out").mkdir()
    loop = {"name": "engine", "_target_": LOOP, "spec": str(tmp_path / "spec.yaml"), "folder": str(tmp_path / "out")}
    (tmp_path / "loop.yaml").write_text(yaml.safe_dump([loop]))
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", MODULES)
    words = [str(tmp_path / "loop.yaml")] if way == "loop" else []
    run_verl(SCRIPT, "routed", str(tmp_path / "spec.yaml"), str(tmp_path / "out"), *words)
    found = json.loads((tmp_path / "out" / "found.json").read_text())
    store = tmp_path / "out" / ("process-0/rollouts" if way == "loop" else "rollouts")
    rows = {row["episode_id"]: row for row in export_rows(RunStore.open(store, readonly=True))}
    assert found["dtype"] == "torch.int16"
    assert len(found["episodes"]) == len(rows) == 9
    for name, size, experts in zip(found["episodes"], found["sizes"], found["experts"], strict=True):
        stored = rows[name]["routed_experts"]
        assert len(experts) == size == len(stored) + 1
        assert experts[:-1] == stored.tolist()
        assert not np.any(experts[-1])


SNIPPET = """
import json, torch, verl
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from engine.errors import TrainError
from engine.plugins.trainers.verl import fixes

def batch(sizes):
    rows = [torch.arange(4 * size).view(4, size) + 100 * place for place, size in enumerate(sizes)]
    column = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    return rows, TensorDict({"position_ids": column}, batch_size=len(rows))

def right(sizes):
    rows, data = batch(sizes)
    tu.maybe_fix_3d_position_ids(data)
    try:
        same = all(map(torch.equal, data["position_ids"].unbind(), rows))
        chosen = tu.index_select_tensor_dict(data, list(range(len(rows)))[::-1])["position_ids"].unbind()
        packed = data["position_ids"].values()
        return same and all(map(torch.equal, chosen, rows[::-1])) and torch.equal(packed, torch.cat(rows, 1))
    except RuntimeError:
        return False

SIZES = [[5, 7], [5, 5], [5], [4], [4, 4], [8, 8], [16], [3, 4], [1], [2, 2, 2, 2]]
try:
    fixes.check_applied()
    said = ""
except TrainError as error:
    said = str(error)
before = [right(sizes) for sizes in SIZES]
fixes.apply()
fixes.apply()
fixes.check_applied()
print(json.dumps([said, before, [right(sizes) for sizes in SIZES]]))
"""


@pytest.mark.slow
@pytest.mark.trainers
def test_rows_of_one_length_are_repaired_and_a_process_without_the_repair_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "")
    said, before, after = json.loads(call_verl("-c", SNIPPET).splitlines()[-1])
    assert said.startswith("rows with images need a repair of verl in each of its processes")
    assert "export VERL_USE_EXTERNAL_MODULES=engine.plugins.trainers.verl.trainer" in said
    assert before == [True, False, False, True, False, False, False, True, False, False]
    assert all(after)


@pytest.mark.slow
@pytest.mark.parametrize("server", ["vllm", "sglang"])
async def test_servers_get_images_at_the_size_of_their_grid(server: str, tmp_path: Path) -> None:
    """vLLM's with expanded ids, SGLang's with one placeholder for each image."""
    folder = vision_kit.build_qwen25(tmp_path / "model")
    format = load_format(ModelSpec(path=str(folder)), folder)
    assert format.vision is not None
    ids, compact, digest = sample_prompt(format)
    assert digest is not None
    spans = [
        (
            int(np.flatnonzero(ids == format.vision.marker_id)[0]),
            int(np.flatnonzero(ids == format.vision.marker_id)[-1]) + 1,
        )
    ]
    sent: dict[str, Any] = {}

    class Client:
        async def generate(self, request_id: str, **words: Any) -> Any:
            sent.update(words)
            return SimpleNamespace(
                token_ids=[5],
                log_probs=[-1.0],
                stop_reason="completed",
                extra_fields={"global_steps": 1},
                routed_experts=None,
            )

    backend = VerlBackend(Client(), LocalBackendSpec, context=None)
    backend.compact, backend.pixels = server == "sglang", Pixels(format.vision, folder)
    request = GenerateRequest(
        episode_id="t/0", turn=0, input_ids=ids, sampling=SamplingParams(), max_new_tokens=3, stop_token_ids=[], seed=1,
        images=[ImagePart(image=digest)], image_spans=spans, banned_token_ids=format.vision.banned,
    )  # fmt: skip
    await backend.generate(request)
    assert sent["prompt_ids"] == (compact if server == "sglang" else ids.tolist())
    assert "logit_bias" not in sent["sampling_params"]
    (image,) = sent["image_data"]
    _, rows, columns = format.vision.bank.picture(digest).grid
    assert image.size == (columns * 14, rows * 14)
    tensors = format.vision.processing.processor.image_processor(images=[image], return_tensors="np")
    assert np.array_equal(tensors["pixel_values"], format.vision.tensors([[digest]])["pixel_values"])
