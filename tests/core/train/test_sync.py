"""Weights into the model in this process, and tensors for another one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from generate_requests import generate_request
from hypothesis import given
from hypothesis import strategies as st
from slow_cases import slow_after
from transformers import AutoConfig, AutoModelForCausalLM

from engine.backends.local.backend import LocalBackend
from engine.backends.sglang.client import SGLangBackend
from engine.errors import TrainError
from engine.plugins.weights.shared_tensors import SharedBuffer, buckets, buffer_bytes
from engine.schemas.backend import LocalBackendSpec, SGLangBackendSpec
from engine.schemas.episode import EpisodeSpec
from engine.schemas.generation import Generation, SamplingParams
from engine.schemas.model import ModelSpec
from engine.schemas.train import TrainSpec
from engine.tokens.loading import load_format
from engine.train.policy import Policy
from engine.train.sync import open_sync

PROMPT = [5, 6, 7, 8, 9, 10, 11]


def spec_of(model: Path, train: dict[str, Any], backend: dict[str, Any] | None = None) -> EpisodeSpec:
    return EpisodeSpec.model_validate(
        {
            "spec": "episode/v1",
            "name": "demo",
            "model": {"path": str(model)},
            "backend": backend or {"kind": "local"},
            "tasks": {"source": "inline", "rows": [{"id": "t0"}]},
            "train": train,
        }
    )


def policy_of(model: Path, train: dict[str, Any]) -> Policy:
    return Policy.load(
        model, TrainSpec.model_validate({"device": "cpu", **train}), temperature=1.0, vocab=None, vision=None
    )


def nudge(policy: Policy, size: float = 0.05) -> None:
    """As a step of training: every trained parameter is another one, adapters not zero."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)


request = partial(
    generate_request,
    sampling=SamplingParams(temperature=1.0, ignore_eos=True),
    max_new_tokens=16,
    stop_token_ids=[],
    seed=7,
)


def by_transformers(folder: Path, prompt: list[int], generation: Generation) -> torch.Tensor:
    """Log-probs [tokens] of a reply under a folder's weights."""
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    output = generation.output_ids.tolist()
    with torch.inference_mode():
        logits = net(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(output)), torch.tensor(output)]


def spans(generation: Generation) -> list[tuple[int, int, int]]:
    return [(span.version, span.start, span.end) for span in generation.versions]


@pytest.fixture
async def open_backend(tiny_model_dir: Path) -> AsyncIterator[Callable[..., Any]]:
    """Starts a local backend of the tiny model."""
    made: list[LocalBackend] = []

    async def start(dtype: str = "float32") -> LocalBackend:
        spec = LocalBackendSpec.model_validate({"dtype": dtype, "threads": 1, "device": "cpu"})
        made.append(LocalBackend(lambda: tiny_model_dir, str, spec))
        await made[-1].start()
        return made[-1]

    yield start
    for backend in made:
        await backend.close()


@pytest.mark.parametrize("lora", slow_after(1, [{"rank": 4, "target_modules": ["q_proj", "down_proj"]}, None]))
async def test_the_next_reply_is_sampled_with_what_was_pushed(
    open_backend: Callable[..., Any], tiny_model_dir: Path, tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    train = {"lora": lora}
    backend, policy = await open_backend(), policy_of(tiny_model_dir, train)
    before = await backend.generate(request(PROMPT))
    nudge(policy)
    pushed = await open_sync(spec_of(tiny_model_dir, train), backend, tmp_path, lora=lora is not None).push(policy, 3)
    assert pushed.bytes == 4 * sum(parameter.numel() for parameter in policy_of(tiny_model_dir, {}).parameters())
    assert pushed.metrics().keys() == {"sync/bytes", "sync/pause_seconds"}
    after = await backend.generate(request(PROMPT))
    policy.save(tmp_path / "model")
    assert (spans(before), spans(after)) == ([(0, 0, 16)], [(3, 0, 16)])
    assert before.output_ids.tolist() != after.output_ids.tolist()
    apart = torch.tensor(after.logprobs) - by_transformers(tmp_path / "model", PROMPT, after)
    assert float(apart.abs().max()) < 1e-4


async def test_weights_are_cast_to_the_samplers_precision(
    open_backend: Callable[..., Any], tiny_model_dir: Path, tmp_path: Path
) -> None:
    backend, policy = await open_backend("bfloat16"), policy_of(tiny_model_dir, {})
    nudge(policy)
    await open_sync(spec_of(tiny_model_dir, {}), backend, tmp_path, lora=False).push(policy, 1)
    own = backend._worker.packed.model.state_dict()
    wanted = policy.weights("model")
    assert own.keys() >= wanted.keys()
    for name, tensor in wanted.items():
        assert own[name].dtype == torch.bfloat16
        assert torch.equal(own[name], tensor.to(torch.bfloat16))
        assert own[name].data_ptr() != tensor.data_ptr()


@pytest.mark.slow
async def test_a_push_in_the_middle_of_a_reply_gives_it_two_versions(
    open_backend: Callable[..., Any], tiny_model_dir: Path, tmp_path: Path
) -> None:
    backend, policy = await open_backend(), policy_of(tiny_model_dir, {})
    sync = open_sync(spec_of(tiny_model_dir, {}), backend, tmp_path, lora=False)
    reply = asyncio.create_task(backend.generate(request(PROMPT, max_new_tokens=600)))
    while backend.stats()["tokens"] < 5:  # noqa: ASYNC110  it has no event for that
        await asyncio.sleep(0.01)
    await sync.push(policy, 1)
    (old, *_), (new, *_) = spans(await reply)
    assert (old, new) == (0, 1)


async def test_weights_of_another_model_are_refused_and_the_old_ones_stay(
    open_backend: Callable[..., Any], tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = AutoConfig.from_pretrained(tiny_model_dir)
    config.intermediate_size = 96
    other = tmp_path / "other"
    AutoModelForCausalLM.from_config(config).save_pretrained(other)
    backend = await open_backend()
    with pytest.raises(
        TrainError, match=r"did not take version 1: the new weights do not fit the model: .* of another shape"
    ) as caught:
        await open_sync(spec_of(other, {}), backend, tmp_path, lora=False).push(policy_of(other, {}), 1)
    assert caught.value.kind == "weights_not_taken"
    assert spans(await backend.generate(request(PROMPT))) == [(0, 0, 16)]


async def test_a_model_that_sees_takes_weights_too(tmp_path: Path) -> None:
    from engine.tokens.tiny_vlm import build

    folder = build(tmp_path / "vlm")
    chat = load_format(ModelSpec(path=str(folder)), folder)
    assert chat.vision is not None
    policy = Policy.load(folder, TrainSpec(device="cpu"), temperature=1.0, vocab=chat.vocab_size, vision=chat.vision)
    nudge(policy, 0.01)
    backend = LocalBackend(
        lambda: folder,
        chat.decode,
        LocalBackendSpec(device="cpu", dtype="float32"),
        vocab=chat.vocab_size,
        vision=chat.vision,
    )
    await backend.start()
    try:
        await open_sync(spec_of(folder, {}), backend, tmp_path, lora=False).push(policy, 2)
        assert spans(await backend.generate(request(PROMPT))) == [(2, 0, 16)]
        own = backend._worker.packed.model.state_dict()  # type: ignore[union-attr]
        assert all(torch.equal(own[name], tensor) for name, tensor in policy.weights("model").items())
    finally:
        await backend.close()


@pytest.mark.parametrize("method", ["disk", "adapter"])
async def test_a_way_for_servers_is_not_for_the_local_backend(
    open_backend: Callable[..., Any], tiny_model_dir: Path, tmp_path: Path, method: str
) -> None:
    spec = spec_of(tiny_model_dir, {"weight_sync": {"method": method}})
    with pytest.raises(
        TrainError, match=f"`train.weight_sync.method: {method}`: the `local` backend takes only `auto` or `tensors`"
    ) as caught:
        open_sync(spec, await open_backend(), tmp_path, lora=True)
    assert caught.value.kind == "train_setup"


# -- servers, before anything is sent to them


def serving(model: Path, url: str) -> SGLangBackend:
    return SGLangBackend(
        SGLangBackendSpec(urls=[url]),
        load_format(ModelSpec(path=str(model)), model),
        sampling=SamplingParams(),
        model=str(model),
    )


@pytest.mark.parametrize(
    ("url", "lora", "backend", "weight_sync", "said"),
    [
        (
            "http://192.0.2.1:30000",
            None,
            {},
            {"method": "tensors"},
            r"http://192\.0\.2\.1:30000 is not on this host: use `disk`",
        ),
        (
            "http://127.0.0.1:30000",
            None,
            {},
            {"method": "adapter"},
            r"`train\.weight_sync\.method: adapter` needs `train\.lora`",
        ),
        (
            "http://127.0.0.1:30000",
            None,
            {"adapter": "tutor"},
            {},
            r"`backend\.adapter: tutor` cannot be used with `train`",
        ),
        (
            "http://127.0.0.1:30000",
            {},
            {},
            {"method": "collective"},
            r"`train\.weight_sync\.method: collective` sends all weights, but only an adapter is trained",
        ),
        (
            "http://127.0.0.1:30000",
            None,
            {"router": True},
            {"method": "collective"},
            r"`train\.weight_sync\.method: collective` needs the servers themselves in `backend\.urls`",
        ),
        (
            "http://127.0.0.1:30000",
            None,
            {},
            {"method": "collective", "address": "192.0.2.1"},
            r"`train\.weight_sync\.address: 192\.0\.2\.1` is not an address of this host",
        ),
    ],
)
async def test_a_way_that_cannot_be_gone_is_an_error_at_the_start(
    tiny_model_dir: Path,
    tmp_path: Path,
    url: str,
    lora: Any,
    backend: dict[str, Any],
    weight_sync: dict[str, Any],
    said: str,
) -> None:
    spec = spec_of(tiny_model_dir, {"weight_sync": weight_sync}, {"kind": "sglang", "urls": [url], **backend})
    with pytest.raises(TrainError, match=said) as caught:
        open_sync(spec, serving(tiny_model_dir, url), tmp_path, lora=lora is not None)
    assert caught.value.kind == "train_setup"


@pytest.mark.parametrize(
    ("lora", "weight_sync", "kind"),
    [
        (False, {}, "DiskSync"),
        (True, {}, "AdapterSync"),
        (True, {"method": "disk"}, "DiskSync"),
        (False, {"method": "tensors"}, "TensorSync"),
        (False, {"method": "collective"}, "CollectiveSync"),
    ],
)
async def test_auto_is_the_adapter_where_there_is_one_else_the_disk(
    tiny_model_dir: Path, tmp_path: Path, lora: bool, weight_sync: dict[str, Any], kind: str
) -> None:
    url = "http://localhost:30000"
    spec = spec_of(tiny_model_dir, {"weight_sync": weight_sync}, {"kind": "sglang", "urls": [url]})
    assert type(open_sync(spec, serving(tiny_model_dir, url), tmp_path, lora=lora)).__name__ == kind


async def test_trainings_that_share_a_folder_have_their_own_places_in_it(tiny_model_dir: Path, tmp_path: Path) -> None:
    url = "http://127.0.0.1:30000"
    spec = spec_of(tiny_model_dir, {"weight_sync": {"folder": str(tmp_path)}}, {"kind": "sglang", "urls": [url]})
    sync = open_sync(spec, serving(tiny_model_dir, url), Path("runs/demo-train-1"), lora=False)
    assert sync._folder == (tmp_path / "demo-train-1").resolve()  # type: ignore[attr-defined]


# -- tensors for another process


@given(sizes=st.lists(st.integers(0, 9), max_size=20), most=st.integers(1, 30))
def test_buckets_keep_every_tensor_in_order_and_hold_no_more_than_they_may(sizes: list[int], most: int) -> None:
    weights = {f"w{n}": torch.zeros(size, dtype=torch.uint8) for n, size in enumerate(sizes)}
    pieces = list(buckets(weights, most))
    assert [name for piece in pieces for name, _ in piece] == list(weights)
    for piece in pieces:
        assert sum(tensor.nbytes for _, tensor in piece) <= most or len(piece) == 1


@pytest.mark.slow
def test_another_process_reads_what_was_shared() -> None:
    tensors = [
        ("a", torch.arange(12.0).reshape(3, 4).t()),
        ("b", torch.tensor([1.5, -2.0], dtype=torch.bfloat16)),
        ("c", torch.tensor(7)),
    ]
    strategy = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    buffer = SharedBuffer(buffer_bytes(tensors))
    assert torch.multiprocessing.get_sharing_strategy() == strategy  # type: ignore[no-untyped-call]
    read = (
        "import base64, pickle, sys, torch\n"
        "for line in sys.stdin:\n"
        "    found = pickle.loads(base64.b64decode(line))\n"
        "    print([(name, str(tensor.dtype), tensor.float().tolist()) for name, tensor in found], flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", read], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        for piece in (tensors, tensors[::-1], tensors[1:]):  # one after the other, in the same place
            buffer.write(piece)
            for _ in range(2):  # two readers of each
                reader.stdin.write(f"{buffer.serialize()}\n")
                wanted = [(name, str(tensor.dtype), tensor.float().tolist()) for name, tensor in piece]
                assert reader.stdout.readline() == f"{wanted}\n"
    assert reader.returncode == 0


def test_more_than_shared_memory_has_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(TrainError, match=r"--shm-size\), or use `train.weight_sync.method: disk`") as caught:
        SharedBuffer(1 << 50)
    assert caught.value.kind == "train_setup"
