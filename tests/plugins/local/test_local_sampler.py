from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from generate_requests import generate_request
from hypothesis import given
from hypothesis import strategies as st
from slow_cases import slow_but, slow_but_each

from engine.plugins.local.sampler import SamplingState, sample, uniforms
from engine.schemas.generation import SamplingParams

CPU = torch.device("cpu")


def state(
    vocab: int, *, seed: int = 0, stop_ids: tuple[int, ...] = (), banned: tuple[int, ...] = (), **sampling: Any
) -> SamplingState:
    changes = {"stop_token_ids": list(stop_ids), "banned_token_ids": list(banned), "seed": seed}
    request = generate_request([0], SamplingParams(**sampling), max_new_tokens=1, **changes)
    return SamplingState(request, vocab, CPU)


def draw(logits: torch.Tensor, count: int, **sampling: Any) -> tuple[np.ndarray, np.ndarray]:
    """`count` independent samples of one distribution: ids and log-probs."""
    one = state(len(logits), **sampling)
    return sample(logits.repeat(count, 1), [one] * count, list(range(count)))


def test_uniforms_are_pinned_for_ever() -> None:
    expected = ["0x1.4e0dba5e9a32fp-1", "0x1.6705460be8829p-1", "0x1.7906ac21d0e58p-2", "0x1.2bbe2b4004d83p-1"]
    assert [float(number).hex() for number in uniforms([0, 0, 1, 2**63 - 1], [0, 1, 0, 5])] == expected


def test_uniforms_are_uniform_and_independent_of_neighbouring_seeds() -> None:
    grid = uniforms(np.repeat(np.arange(200), 200).tolist(), np.tile(np.arange(200), 200).tolist())
    counts, _ = np.histogram(grid, bins=20, range=(0, 1))
    chi_square = float(((counts - 2000.0) ** 2 / 2000.0).sum())
    assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001
    by_seed = grid.reshape(200, 200)
    assert abs(np.corrcoef(by_seed[:-1].ravel(), by_seed[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(by_seed[:, :-1].ravel(), by_seed[:, 1:].ravel())[0, 1]) < 0.02


@pytest.mark.parametrize("vocab", slow_but([3, 256, 257, 1000], 257))
def test_samples_follow_the_distribution(vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(vocab) * 2
    ids, logprobs = draw(logits, 20_000, temperature=0.7)
    chances = (logits / 0.7).softmax(-1).double().numpy()
    np.testing.assert_allclose(logprobs, np.log(chances[ids]), atol=1e-5)
    top = np.argsort(-chances)[:8]
    found = np.bincount(ids, minlength=vocab)[top] / len(ids)
    np.testing.assert_allclose(found, chances[top], atol=4 * np.sqrt(0.25 / len(ids)))


@given(data=st.data(), vocab=st.integers(1, 700), seed=st.integers(0, 2**63 - 1))
def test_a_banned_token_is_never_drawn(data: st.DataObject, vocab: int, seed: int) -> None:
    allowed = data.draw(st.sets(st.integers(0, vocab - 1), min_size=1, max_size=5))
    banned = tuple(token for token in range(vocab) if token not in allowed)
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(seed % 2**31))
    ids, logprobs = draw(logits, 8, seed=seed, banned=banned)
    assert set(ids.tolist()) <= allowed
    left = logits[sorted(allowed)].log_softmax(-1)
    expected = [float(left[sorted(allowed).index(token)]) for token in ids.tolist()]
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def kept(chances: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The tokens that survive, straight from the definition."""
    order = np.argsort(-chances, kind="stable")
    left, mass = set(), 0.0
    for rank, token in enumerate(order.tolist()):
        if (not top_k or rank < top_k) and mass <= top_p and chances[token] >= min_p * chances[order[0]]:
            left.add(token)
        mass += float(chances[token])
    return left


@pytest.mark.parametrize(
    ("filters", "spread"),
    slow_but_each(
        5,
        product(
            [
                (5, 1.0, 0.0),
                (0, 0.6, 0.0),
                (0, 1.0, 0.2),
                (40, 0.9, 0.01),
                (0, 0.9999, 0.0),
                (600, 1.0, 0.0),
                (1, 1.0, 0.0),
            ],
            [3.0, 0.3],
        ),
        several=True,
    ),
)
def test_filters_keep_what_their_definition_keeps(filters: tuple[int, float, float], spread: float) -> None:
    top_k, top_p, min_p = filters
    torch.manual_seed(1)
    count = 1000
    logits = (torch.randn(3000) * spread).double().float()
    ids, logprobs = draw(logits, count, top_k=top_k or -1, top_p=top_p, min_p=min_p)
    chances = logits.double().softmax(-1).numpy()
    survivors = kept(chances, top_k, top_p, min_p)
    assert set(ids.tolist()) <= survivors
    np.testing.assert_allclose(logprobs, np.log(chances[ids]), atol=1e-5)  # of the uncut distribution
    share = chances.copy()
    share[[token for token in range(3000) if token not in survivors]] = 0
    share /= share.sum()
    best = int(share.argmax())
    assert abs((ids == best).mean() - share[best]) < 4 * np.sqrt(0.25 / count)


def test_temperature_zero_is_greedy_with_log_probs_at_one() -> None:
    logits = torch.tensor([0.5, 2.0, 1.0])
    ids, logprobs = draw(logits, 3, temperature=0.0, top_p=0.1)
    assert ids.tolist() == [1, 1, 1]
    np.testing.assert_allclose(logprobs, float(logits.log_softmax(-1)[1]), atol=1e-6)


def test_penalties_are_sglangs() -> None:
    logits = torch.tensor([1.0, 2.0, -1.0, 0.5])
    one = state(4, temperature=0.0, frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=2.0)
    for token in (1, 1, 2):
        one.count(token)
    edited = logits.clone()
    one.edit(edited, 3)
    assert edited.tolist() == [1.0, (2.0 - 2 * 0.5 - 0.25) / 2.0, (-1.0 - 0.5 - 0.25) * 2.0, 0.5]


def test_biases_bans_and_the_least_length() -> None:
    one = state(3, logit_bias={"1": -1.5}, banned=(0,), stop_ids=(2,), min_new_tokens=2)
    early, late = torch.zeros(5), torch.zeros(5)
    one.edit(early, 1)
    one.edit(late, 2)
    assert early.tolist() == [float("-inf"), -1.5, float("-inf"), float("-inf"), float("-inf")]
    assert late.tolist() == [float("-inf"), -1.5, 0.0, float("-inf"), float("-inf")]


def test_a_row_that_is_no_distribution_spoils_no_other() -> None:
    logits = torch.zeros(3, 600)
    logits[1] = float("nan")
    logits[2] = float("-inf")
    _, logprobs = sample(logits, [state(600), state(600, top_p=0.5), state(600)], [0, 0, 0])
    assert np.isfinite(logprobs).tolist() == [True, False, False]
    np.testing.assert_allclose(logprobs[0], -np.log(600), atol=1e-5)
