from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.backends.base import Backend
from engine.backends.local.backend import LocalBackend
from engine.errors import BackendError, ContextOverflow, DeviceError
from engine.schemas.backend import LocalBackendSpec
from engine.schemas.generation import GenerateRequest, Generation, SamplingParams
from engine.schemas.message import ImagePart

VOCAB = 1000
END = 2
"""The fixture's `<|im_end|>`."""


@pytest.fixture(scope="module")
def reference(tiny_model_dir: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model_dir)


Opener = Callable[..., LocalBackend]


@pytest.fixture
async def opened(tiny_model_dir: Path, tokenizer: Any) -> AsyncIterator[Opener]:
    """Makes backends on the tiny model, float32, and closes them."""
    made: list[LocalBackend] = []

    def make(max_batch: int = 4, folder: Path = tiny_model_dir, **kwargs: Any) -> LocalBackend:
        kwargs.setdefault("stash_bytes", 1 << 24)
        spec = LocalBackendSpec(max_batch=max_batch, dtype="float32", device="cpu")
        made.append(LocalBackend(lambda: folder, tokenizer.decode, spec, **kwargs))
        return made[-1]

    yield make
    for backend in made:
        await backend.close()


def ask(
    ids: Any,
    episode: str = "a",
    *,
    turn: int = 0,
    most: int = 12,
    seed: int = 0,
    stop_ids: tuple[int, ...] = (),
    **more: Any,
) -> GenerateRequest:
    request = {name: more.pop(name) for name in ("banned_token_ids", "images", "adapter") if name in more}
    return GenerateRequest.read(
        {
            "episode_id": episode,
            "turn": turn,
            "input_ids": ids,
            "sampling": SamplingParams(**more),
            "max_new_tokens": most,
            "stop_token_ids": list(stop_ids),
            "seed": seed,
            **request,
        }
    )


def prompts(count: int, seed: int = 0, shortest: int = 3, longest: int = 70) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, int(rng.integers(shortest, longest))).astype(np.int32) for _ in range(count)]


def recomputed(model: Any, prompt: np.ndarray, reply: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Log-probs of a reply from one plain forward pass."""
    ids = torch.from_numpy(np.concatenate([prompt, reply]).astype(np.int64))
    with torch.inference_mode():
        logits = model(ids[None]).logits[0, len(prompt) - 1 : -1] / temperature
    found: np.ndarray = logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0].numpy()
    return found


def greedy(model: Any, prompt: np.ndarray, most: int) -> list[int]:
    """What transformers' own `generate` says."""
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, do_sample=False, eos_token_id=None
    )
    said: list[int] = out[0, len(prompt) :].tolist()
    return said


async def sampling(backend: LocalBackend) -> None:
    """Wait until a reply is under way."""
    for _ in range(4000):
        if backend.stats()["tokens"]:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("nothing was sampled within 20 seconds")


async def test_greedy_replies_equal_transformers_generate(opened: Opener, reference: Any) -> None:
    backend = opened(max_batch=4, prefill_tokens=16)
    assert isinstance(backend, Backend)
    await backend.start()
    given = prompts(10)
    replies = await asyncio.gather(
        *(backend.generate(ask(ids, f"e{i}", temperature=0.0)) for i, ids in enumerate(given))
    )
    for ids, reply in zip(given, replies, strict=True):
        assert reply.output_ids.tolist() == greedy(reference, ids, 12)
        assert reply.finish.type == "length"
        assert reply.prompt_tokens == len(ids)
        np.testing.assert_allclose(reply.logprobs, recomputed(reference, ids, reply.output_ids), atol=1e-4)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
async def test_logprobs_are_those_of_the_tempered_distribution(
    opened: Opener, reference: Any, temperature: float
) -> None:
    backend = opened(prefill_tokens=32)
    await backend.start()
    given = prompts(8, seed=1)
    requests = [ask(ids, f"e{i}", seed=i, temperature=temperature, top_p=0.8, top_k=40) for i, ids in enumerate(given)]
    for ids, reply in zip(given, await asyncio.gather(*map(backend.generate, requests)), strict=True):
        np.testing.assert_allclose(reply.logprobs, recomputed(reference, ids, reply.output_ids, temperature), atol=1e-4)


async def test_neighbours_have_no_say(opened: Opener) -> None:
    given = prompts(9, seed=2)
    crowd, lone = opened(max_batch=8, prefill_tokens=24), opened(max_batch=1, stash_bytes=0)
    await crowd.start()
    await lone.start()
    requests = [ask(ids, f"e{i}", seed=i, most=20, top_p=0.95 if i % 2 else None) for i, ids in enumerate(given)]
    together = await asyncio.gather(*map(crowd.generate, requests))
    for request, reply in zip(requests, together, strict=True):
        alone = await lone.generate(request)
        assert alone.output_ids.tolist() == reply.output_ids.tolist()
        np.testing.assert_allclose(alone.logprobs, reply.logprobs, atol=1e-4)


async def test_seeds_decide(opened: Opener) -> None:
    backend = opened()
    await backend.start()
    (ids,) = prompts(1)
    replies = [(await backend.generate(ask(ids, seed=seed))).output_ids.tolist() for seed in (7, 7, 8)]
    assert replies[0] == replies[1] != replies[2]


async def test_the_next_turn_computes_only_what_is_new(opened: Opener, reference: Any) -> None:
    backend = opened()
    await backend.start()
    context = prompts(1, seed=3)[0]
    for turn in range(4):
        reply = await backend.generate(ask(context, turn=turn, most=9, seed=turn))
        before = (
            0 if turn == 0 else len(context) - 6
        )  # the observation, and the newest token, whose keys are not there yet
        assert reply.cached_tokens == before
        np.testing.assert_allclose(reply.logprobs, recomputed(reference, context, reply.output_ids), atol=1e-4)
        context = np.concatenate([context, reply.output_ids, np.arange(5, 10, dtype=np.int32)])


async def test_a_branch_that_rewrites_history_keeps_what_is_still_true(opened: Opener, reference: Any) -> None:
    backend = opened(max_batch=1)
    await backend.start()
    first = np.arange(10, 60, dtype=np.int32)
    await backend.generate(ask(first))
    rewritten = np.concatenate([first[:30], np.arange(500, 520, dtype=np.int32)])
    reply = await backend.generate(ask(rewritten, turn=1))
    assert reply.cached_tokens == 30
    np.testing.assert_allclose(reply.logprobs, recomputed(reference, rewritten, reply.output_ids), atol=1e-4)


async def test_a_common_prefix_is_computed_once(opened: Opener, reference: Any) -> None:
    backend = opened(max_batch=8)
    await backend.start()
    shared = np.arange(10, 210, dtype=np.int32)
    given = [np.concatenate([shared, own]) for own in prompts(8, seed=4, shortest=5, longest=20)]
    replies = await asyncio.gather(*(backend.generate(ask(ids, f"e{i}", seed=i)) for i, ids in enumerate(given)))
    assert [reply.cached_tokens for reply in replies] == [0] + [200] * 7
    for ids, reply in zip(given, replies, strict=True):
        np.testing.assert_allclose(reply.logprobs, recomputed(reference, ids, reply.output_ids), atol=1e-4)
    again = await backend.generate(ask(given[0], "other"))
    assert again.cached_tokens == len(given[0]) - 1  # the last token's logits are always computed


async def test_episodes_without_a_row_are_stashed_and_brought_back(opened: Opener, reference: Any) -> None:
    backend = opened(max_batch=2)
    await backend.start()
    contexts = prompts(6, seed=5, shortest=20)
    cached = []
    for turn in range(3):
        for place, context in enumerate(contexts):
            reply = await backend.generate(ask(context, f"e{place}", turn=turn, seed=turn, most=4))
            cached.append((len(context) - reply.cached_tokens, turn))
            np.testing.assert_allclose(reply.logprobs, recomputed(reference, context, reply.output_ids), atol=1e-4)
            contexts[place] = np.concatenate([context, reply.output_ids, np.asarray([5, 6], dtype=np.int32)])
    assert {new for new, turn in cached if turn} == {3}  # two observed tokens, and the newest sampled one
    assert backend.stats()["stashed"] > 0
    for place in range(6):
        backend.release(f"e{place}")
    await backend.generate(ask([1], "last"))
    assert backend.stats()["stash_bytes"] == 0


async def test_stashes_stay_within_their_budget(opened: Opener) -> None:
    per_token = 2 * 2 * 2 * 16 * 4  # keys and values, layers, key heads, head width, bytes
    backend = opened(max_batch=1, stash_bytes=per_token * 60)
    await backend.start()
    for place in range(8):
        await backend.generate(ask(np.arange(place * 50 + 3, place * 50 + 23, dtype=np.int32), f"e{place}", most=2))
        assert backend.stats()["stash_bytes"] <= per_token * 60
    stats = backend.stats()
    assert (stats["stashed"], stats["evicted"]) == (7, 5)  # 21 tokens each: two fit


async def test_rows_grow_without_losing_what_they_hold(opened: Opener, reference: Any) -> None:
    backend = opened(max_batch=2)
    await backend.start()
    short, long = np.arange(3, 40, dtype=np.int32), (np.arange(900) % 990 + 5).astype(np.int32)
    first, second = await asyncio.gather(
        backend.generate(ask(short, "s", most=40)), backend.generate(ask(long, "l", most=30))
    )
    np.testing.assert_allclose(first.logprobs, recomputed(reference, short, first.output_ids), atol=1e-4)
    np.testing.assert_allclose(second.logprobs, recomputed(reference, long, second.output_ids), atol=1e-4)


async def sampled(backend: LocalBackend, **more: Any) -> Generation:
    return await backend.generate(ask(np.arange(10, 40, dtype=np.int32), most=30, **more))


async def test_a_stop_id_ends_a_reply_and_stays(opened: Opener) -> None:
    backend = opened()
    await backend.start()
    free = (await sampled(backend)).output_ids.tolist()
    stop = free[7]
    at = free.index(stop)
    cut = await sampled(backend, stop_ids=(stop,))
    assert cut.output_ids.tolist() == free[: at + 1]
    assert (cut.finish.type, cut.finish.matched) == ("stop", stop)
    ignored = await sampled(backend, stop_ids=(stop,), ignore_eos=True)
    assert ignored.output_ids.tolist() == free
    late = await sampled(backend, stop_ids=(stop,), min_new_tokens=at + 2)
    assert stop not in late.output_ids[: at + 2].tolist()
    assert len(late.output_ids) >= at + 2


async def test_a_stop_string_ends_a_reply_with_its_whole_token(opened: Opener, tokenizer: Any) -> None:
    backend = opened()
    await backend.start()
    free = (await sampled(backend)).output_ids.tolist()
    texts = [tokenizer.decode(free[: at + 1]) for at in range(len(free))]
    at = next(at for at in range(5, len(free)) if len(texts[at]) > len(texts[at - 1]) and "�" not in texts[at][-6:])
    string = texts[at][-4:-1] or texts[at][-1]
    first = next(place for place, text in enumerate(texts) if string in text)
    cut = await sampled(backend, stop=[string])
    assert cut.output_ids.tolist() == free[: first + 1]
    assert (cut.finish.type, cut.finish.matched) == ("stop", string)


async def test_banned_and_biased_ids(opened: Opener) -> None:
    backend = opened()
    await backend.start()
    best = (await sampled(backend, temperature=0.0)).output_ids.tolist()
    banned = sorted(set(best))
    other = await sampled(backend, temperature=0.0, banned_token_ids=banned)
    assert not set(other.output_ids.tolist()) & set(banned)
    forced = await sampled(backend, logit_bias={"77": 1e4})
    assert forced.output_ids.tolist() == [77] * 30
    np.testing.assert_allclose(forced.logprobs, 0.0, atol=1e-6)


async def test_a_padded_embedding_is_never_sampled(opened: Opener) -> None:
    backend = opened(vocab=40)
    await backend.start()
    assert int((await sampled(backend)).output_ids.max()) < 40


async def test_everything_banned_is_an_error_and_no_hang(opened: Opener) -> None:
    backend = opened(vocab=3)
    await backend.start()
    with pytest.raises(BackendError, match="not a distribution") as caught:
        await sampled(backend, banned_token_ids=[0, 1, 2])
    assert caught.value.kind == "bad_logits"
    assert len((await sampled(backend)).output_ids) == 30


async def test_the_context_caps_a_reply(opened: Opener) -> None:
    backend = opened(context=40)
    await backend.start()
    assert backend.context == 40
    reply = await backend.generate(ask(np.arange(3, 38, dtype=np.int32), most=30))
    assert (len(reply.output_ids), reply.finish.type) == (5, "length")
    last = await backend.generate(ask(np.arange(3, 42, dtype=np.int32), most=30))
    assert len(last.output_ids) == 1
    with pytest.raises(ContextOverflow, match="the prompt has 40 tokens, and the model's context is 40 tokens"):
        await backend.generate(ask(np.arange(3, 43, dtype=np.int32)))


@pytest.mark.parametrize(
    ("request_", "kind"),
    [
        (ask([1, VOCAB]), "bad_request"),
        (ask([-1]), "bad_request"),
        (ask([]), "bad_request"),
        (ask([1], logit_bias={"1000": 1.0}), "bad_request"),
        (ask([1], banned_token_ids=[1000]), "bad_request"),
        (ask([1], regex="a+"), "unsupported_parameter"),
        (ask([1], stop_regex=["a+"]), "unsupported_parameter"),
        (ask([1], adapter="lora"), "unsupported_parameter"),
        (ask([1], images=[ImagePart(image="sha256:0")]), "unsupported_parameter"),
    ],
)
async def test_what_cannot_be_done_is_refused_before_it_is_queued(
    opened: Opener, request_: GenerateRequest, kind: str
) -> None:
    backend = opened()
    await backend.start()
    with pytest.raises(BackendError) as caught:
        await backend.generate(request_)
    assert (caught.value.kind, caught.value.retryable) == (kind, False)
    assert backend.stats()["requests"] == 0


async def test_cancelling_frees_the_row(opened: Opener) -> None:
    backend = opened(max_batch=1)
    await backend.start()
    long = asyncio.create_task(backend.generate(ask([5, 6, 7], "long", most=3000, stop_ids=())))
    await sampling(backend)
    queued = asyncio.create_task(backend.generate(ask([5, 6], "queued")))
    await asyncio.sleep(0)
    for task in (long, queued):
        task.cancel()
    ends = await asyncio.gather(long, queued, return_exceptions=True)
    assert [type(end) for end in ends] == [asyncio.CancelledError] * 2
    reply = await asyncio.wait_for(backend.generate(ask([5, 6, 7], "next")), 120)
    assert len(reply.output_ids) == 12
    assert backend.stats()["cancelled"] == 2


async def test_closing_fails_what_is_in_flight(opened: Opener) -> None:
    backend = opened(max_batch=1)
    await backend.start()
    calls = [asyncio.create_task(backend.generate(ask([5, 6], f"e{i}", most=3000))) for i in range(3)]
    await sampling(backend)
    await backend.close()
    for end in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(end, BackendError)
        assert end.kind == "closed"
    with pytest.raises(BackendError, match="the local backend was closed"):
        await backend.generate(ask([5]))
    backend.release("e0")
    await backend.close()


async def test_a_failed_pass_fails_its_requests_and_no_more(
    opened: Opener, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(max_batch=2)
    await backend.start()
    ids = prompts(1)[0]
    await backend.generate(ask(ids, "kept"))
    assert backend._worker is not None
    packed, forward = backend._worker.packed, backend._worker.packed.forward

    def broken(*_: Any) -> Any:
        monkeypatch.setattr(packed, "forward", forward)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(packed, "forward", broken)
    ends = await asyncio.gather(
        *(backend.generate(ask(ids, f"e{i}", seed=i)) for i in range(4)), return_exceptions=True
    )
    failed = [end for end in ends if isinstance(end, BackendError)]
    assert [(end.kind, str(end)) for end in failed] == [
        ("step_failed", "the model's forward pass failed: RuntimeError: out of memory")
    ] * len(failed)
    assert 1 <= len(failed) <= 2
    replies = [end for end in ends if isinstance(end, Generation)]
    assert len(replies) == 4 - len(failed)
    for reply in replies:
        np.testing.assert_allclose(reply.logprobs, recomputed(reference, ids, reply.output_ids), atol=1e-4)


async def test_unstarted_it_says_so(opened: Opener) -> None:
    with pytest.raises(BackendError, match="has not been started"):
        await opened().generate(ask([1]))


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
    with pytest.raises(DeviceError, match=why):
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
    code = "import sys, engine.backends.base, engine.backends.local, engine.cli.models; print('torch' in sys.modules)"
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
