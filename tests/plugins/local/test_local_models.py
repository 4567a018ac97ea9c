"""Models of the local backend: new weights, folders that hold none, attention it does not have, and a real model."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_kit import VOCAB, Opener, ask, greedy, recomputed, sampling

from engine.errors import BackendError, EngineError
from engine.plugins.local.backend import LocalBackend
from engine.plugins.local.spec import LocalBackendSpec


async def test_new_weights_take_over_inside_a_reply(opened: Opener, tiny_model_dir: Path, reference: Any) -> None:
    from transformers import AutoModelForCausalLM

    backend = opened()
    await backend.start()
    prompt = np.arange(10, 40, dtype=np.int32)
    changed = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    call = asyncio.create_task(backend.generate(ask(prompt, most=200)))
    await sampling(backend)
    await backend.update_weights(changed.state_dict(), 3)
    reply = await call
    first, second = reply.versions
    assert (first.version, first.start, second.version, second.end) == (0, 0, 3, 200)
    assert first.end == second.start
    old = recomputed(reference, prompt, reply.output_ids)
    new = recomputed(changed, prompt, reply.output_ids)
    np.testing.assert_allclose(reply.logprobs[: first.end], old[: first.end], atol=1e-4)
    np.testing.assert_allclose(reply.logprobs[second.start :], new[second.start :], atol=1e-4)
    again = await backend.generate(ask(prompt, "b"))
    assert again.cached_tokens == len(prompt) - 1  # of the new weights
    np.testing.assert_allclose(again.logprobs, recomputed(changed, prompt, again.output_ids), atol=1e-4)


async def test_weights_from_a_folder_and_weights_that_do_not_fit(
    opened: Opener, tiny_model_dir: Path, tmp_path: Path
) -> None:
    backend = opened()
    await backend.start()
    await backend.update_weights(tiny_model_dir, 5)
    assert (await backend.generate(ask([7, 8]))).versions[0].version == 5
    for weights, why in (
        ({"model.norm.weight": torch.ones(3)}, "1 of another shape, such as 'model.norm.weight'"),
        ({"nonsense": torch.ones(3)}, "1 unknown, such as 'nonsense'"),
        ({"model.norm.weight": torch.ones(64)}, "26 missing, such as"),
        (tmp_path, "has no safetensors files"),
    ):
        with pytest.raises(BackendError, match=why):
            await backend.update_weights(weights, 6)
    assert (await backend.generate(ask([7, 8], "b"))).versions[0].version == 5


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"device": "warp"}, "is not a device"), ({"device": "cuda:9"}, "torch finds no CUDA device")],
)
async def test_a_device_that_is_not_there_is_named(
    tiny_model_dir: Path, tokenizer: Any, changes: dict[str, Any], why: str
) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA devices")
    with pytest.raises(EngineError, match=why):
        await LocalBackend(lambda: tiny_model_dir, tokenizer.decode, LocalBackendSpec(**changes)).start()


async def test_a_folder_without_a_model_is_refused(tiny_tokenizer_dir: Path, tokenizer: Any) -> None:
    with pytest.raises(BackendError, match="is not a causal model with standard attention") as caught:
        await LocalBackend(lambda: tiny_tokenizer_dir, tokenizer.decode, LocalBackendSpec()).start()
    assert caught.value.kind == "unsupported_model"


def save_model(folder: Path, config: Any) -> Any:
    """A model with random weights of another architecture, saved in `folder`."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return model.eval()


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
    "max_position_embeddings": 512,
}


async def test_a_sliding_window_is_kept_to(opened: Opener, tmp_path: Path) -> None:
    from transformers import MistralConfig

    model = save_model(tmp_path, MistralConfig(**SIZES, sliding_window=8))
    backend = opened(folder=tmp_path, prefill_tokens=16)
    await backend.start()
    context = np.arange(10, 60, dtype=np.int32)
    for turn in range(2):
        reply = await backend.generate(ask(context, turn=turn, most=20))
        np.testing.assert_allclose(reply.logprobs, recomputed(model, context, reply.output_ids), atol=1e-4)
        context = np.concatenate([context, reply.output_ids, context[:9]])


async def test_an_attention_that_it_does_not_have_is_refused_at_the_start(opened: Opener, tmp_path: Path) -> None:
    from transformers import MambaConfig

    save_model(tmp_path, MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4))
    with pytest.raises(
        BackendError,
        match=r"is not a causal model with standard attention: Mamba.*serve it with `backend: {kind: sglang}`",
    ) as caught:
        await opened(folder=tmp_path).start()
    assert caught.value.kind == "unsupported_model"


SPEC = """
spec: episode/v1
name: tiny
model: {path: model, context: 60}
backend: {kind: local, device: cpu, dtype: float32, max_batch: 3}
tasks: {source: inline, rows: [{id: a}]}
machine: single_turn
"""


async def test_a_spec_opens_it(tmp_path: Path, tiny_model_dir: Path) -> None:
    from engine.backends.registry import open_backend
    from engine.spec.load import load_spec
    from engine.tokens.loading import load_format

    (tmp_path / "model").symlink_to(tiny_model_dir)
    (tmp_path / "spec.yaml").write_text(SPEC)
    loaded = load_spec(tmp_path / "spec.yaml")
    backend = open_backend(loaded, load_format(loaded.spec.model, loaded.base))
    await backend.start()
    reply = await backend.generate(ask(np.arange(3, 53, dtype=np.int32), most=30))
    assert len(reply.output_ids) == 10
    assert backend.stats()["dtype"] == "float32"
    await backend.close()
    (tmp_path / "spec.yaml").write_text(SPEC + "sampling: {ebnf: 'root ::= x'}\n")
    with pytest.raises(BackendError, match=r"the local backend does not support `sampling\.ebnf`"):
        open_backend(load_spec(tmp_path / "spec.yaml"), load_format(loaded.spec.model, loaded.base))


def test_opening_imports_no_torch() -> None:
    code = "import sys, engine.backends.backend, engine.plugins.local, engine.plugins.doctor.command; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.model
async def test_the_real_model_replies_as_transformers_generate_does(smollm_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm_dir)
    model = AutoModelForCausalLM.from_pretrained(smollm_dir, dtype=torch.float32).eval()
    backend = LocalBackend(
        lambda: smollm_dir, tokenizer.decode, LocalBackendSpec(dtype="float32", device="cpu", max_batch=4)
    )
    await backend.start()
    questions = [
        "What is 17 plus 25?",
        "Name a fruit.",
        "Say hello.",
        "What is the capital of France?",
        "Count to five.",
    ]
    given = [
        np.asarray(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            ),
            dtype=np.int32,
        )
        for text in questions
    ]
    replies = await asyncio.gather(
        *(backend.generate(ask(ids, f"e{i}", most=16, temperature=0.0)) for i, ids in enumerate(given))
    )
    for ids, reply in zip(given, replies, strict=True):
        assert reply.output_ids.tolist() == greedy(model, ids, 16)
        np.testing.assert_allclose(reply.logprobs, recomputed(model, ids, reply.output_ids), atol=2e-4)
    await backend.close()


@pytest.mark.model
async def test_in_bfloat16_the_real_model_stays_close_to_float32(smollm_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm_dir)
    model = AutoModelForCausalLM.from_pretrained(smollm_dir, dtype=torch.float32).eval()
    backend = LocalBackend(
        lambda: smollm_dir, tokenizer.decode, LocalBackendSpec(dtype="bfloat16", device="cpu", max_batch=4)
    )
    await backend.start()
    prompt = np.asarray(tokenizer.encode("The quick brown fox jumps over the lazy dog, and then"), dtype=np.int32)
    replies = await asyncio.gather(*(backend.generate(ask(prompt, f"e{i}", seed=i, most=24)) for i in range(6)))
    apart = [np.abs(reply.logprobs - recomputed(model, prompt, reply.output_ids)) for reply in replies]
    assert float(np.mean(np.concatenate(apart))) < 0.05
    await backend.close()
