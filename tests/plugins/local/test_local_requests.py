"""Which requests the local backend refuses, and how replies end: by stops, limits, cancellation, or a failed pass."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from local_kit import VOCAB, Opener, ask, prompts, recomputed, sampled, sampling

from engine.errors import BackendError, ContextOverflow
from engine.schemas.generation import GenerateRequest, Generation
from engine.schemas.message import ImagePart


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
