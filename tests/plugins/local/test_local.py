"""Replies of the local backend are those of transformers, and what earlier turns computed is used again."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from local_kit import Opener, ask, greedy, prompts, recomputed

from engine.backends.backend import Backend


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
