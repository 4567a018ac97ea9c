from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from slow_cases import each_once

from engine.train import logprobs as module
from engine.train.logprobs import chunked_logprobs

VOCAB, HIDDEN, MAX_BLOCK_TOKENS = 37, 6, 11


def reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    banned: tuple[int, ...] = (),
    vocab: int | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """By the book, with all logits at once; entropy over the ids that may be sampled."""
    logits = hidden @ weight.T
    if bias is not None:
        logits = logits + bias
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    allowed = torch.tensor([i for i in range(weight.shape[0]) if i not in banned and i < (vocab or weight.shape[0])])
    chances = (logits / temperature)[:, allowed].log_softmax(-1)
    spread = torch.full((len(labels), weight.shape[0]), -torch.inf, dtype=hidden.dtype)
    spread = spread.index_copy(1, allowed, chances)
    return spread.gather(1, labels[:, None])[:, 0], -(chances.exp() * chances).sum(-1)


def tensors(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    hidden = torch.randn(MAX_BLOCK_TOKENS, HIDDEN, dtype=dtype, generator=made) * 3
    weight = torch.randn(VOCAB, HIDDEN, dtype=dtype, generator=made)
    bias = torch.randn(VOCAB, dtype=dtype, generator=made)
    return hidden, weight, torch.randint(0, 30, (MAX_BLOCK_TOKENS,), generator=made), bias


RULES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.3, "banned": (30, 33), "vocab": 35},
    {"vocab": 31},
    {"softcap": 4.0, "temperature": 0.8, "banned": (31,)},
]
CHUNK_ELEMENTS = [1, 7, VOCAB, 100, MAX_BLOCK_TOKENS * VOCAB, 1 << 20]


@pytest.mark.parametrize(
    ("rules", "how"), each_once(RULES, list(itertools.product(CHUNK_ELEMENTS, (False, True), (False, True)))), ids=str
)
def test_values_and_gradients_are_autograds(rules: dict[str, Any], how: tuple[int, bool, bool]) -> None:
    chunk_elements, biased, entropy = how
    hidden, weight, labels, bias = tensors()
    inputs = [hidden.requires_grad_(), weight.requires_grad_(), *([bias.requires_grad_()] if biased else [])]
    weigh = torch.linspace(-1, 2, MAX_BLOCK_TOKENS, dtype=torch.float64)
    wanted = reference(hidden, weight, labels, bias if biased else None, **rules)
    settings = {"temperature": 1.0, "banned": ()} | rules
    got = chunked_logprobs(
        hidden,
        weight,
        labels,
        chunk_elements=chunk_elements,
        bias=bias if biased else None,
        entropy=entropy,
        **settings,
    )
    losses = []
    for logprobs, entropies in (wanted, got):
        loss = (logprobs * weigh).sum()
        if entropy:
            assert entropies is not None
            loss = loss + (entropies * weigh.flip(0)).sum()
        losses.append(torch.autograd.grad(loss, inputs))
    torch.testing.assert_close(got[0], wanted[0], rtol=0, atol=1e-10)
    if entropy:
        torch.testing.assert_close(got[1], wanted[1], rtol=0, atol=1e-10)
    else:
        assert got[1] is None
    for one, other in zip(*losses, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-10)


@pytest.mark.parametrize("chunk_elements", [7, 1 << 20])
def test_gradients_of_hidden_alone_are_made_on_the_way_forward(
    chunk_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, labels, _ = tensors()
    hidden.requires_grad_()
    weigh = torch.linspace(-1, 2, MAX_BLOCK_TOKENS, dtype=torch.float64)
    rules: dict[str, Any] = {"temperature": 1.3, "banned": (30, 33), "vocab": 35}
    (wanted,) = torch.autograd.grad((reference(hidden, weight, labels, **rules)[0] * weigh).sum(), hidden)
    logprobs, _ = chunked_logprobs(hidden, weight, labels, chunk_elements=chunk_elements, entropy=False, **rules)
    monkeypatch.setattr(module, "_blocks", None)  # no logits are made again
    (got,) = torch.autograd.grad((logprobs * weigh).sum(), hidden)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


def test_one_of_both_results_may_be_left_out_of_the_loss() -> None:
    hidden, weight, labels, _ = tensors()
    hidden.requires_grad_()
    for index in (0, 1):
        (wanted,) = torch.autograd.grad(reference(hidden, weight, labels)[index].sum(), hidden)
        found = chunked_logprobs(hidden, weight, labels, temperature=1.0, banned=(), chunk_elements=50, entropy=True)[
            index
        ]
        assert found is not None
        torch.testing.assert_close(torch.autograd.grad(found.sum(), hidden)[0], wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("chunk_elements", [40, 1 << 20])
def test_a_second_backward_pass_finds_the_same(chunk_elements: int) -> None:
    hidden, weight, labels, _ = tensors()
    weight.requires_grad_()
    logprobs, entropies = chunked_logprobs(
        hidden, weight, labels, temperature=1.0, banned=(), chunk_elements=chunk_elements, entropy=True
    )
    assert entropies is not None
    loss = logprobs.sum() + entropies.sum()
    first = torch.autograd.grad(loss, weight, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(loss, weight)[0], first, rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk_elements", [9, 1 << 20])
def test_logits_of_minus_infinity_leave_no_nan(chunk_elements: int) -> None:
    hidden, weight, labels, bias = tensors()
    bias[[31, 34]] = -torch.inf
    banned = (31, 34)
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    logprobs, entropies = chunked_logprobs(
        hidden, weight, labels, temperature=0.5, banned=(), chunk_elements=chunk_elements, bias=bias, entropy=True
    )
    finite = torch.where(bias.isinf(), 0.0, bias)
    wanted = reference(hidden, weight, labels, finite, temperature=0.5, banned=banned)
    assert entropies is not None
    torch.testing.assert_close(logprobs, wanted[0], rtol=0, atol=1e-10)
    torch.testing.assert_close(entropies, wanted[1], rtol=0, atol=1e-10)
    got = torch.autograd.grad(logprobs.sum() + entropies.sum(), inputs)
    for one, other in zip(got, torch.autograd.grad(wanted[0].sum() + wanted[1].sum(), inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_a_label_that_cannot_be_sampled_is_impossible_and_its_row_stays_finite() -> None:
    hidden, weight, labels, _ = tensors()
    hidden.requires_grad_()
    labels[2] = 33
    logprobs, _ = chunked_logprobs(
        hidden, weight, labels, temperature=1.0, banned=(33,), chunk_elements=20, entropy=False
    )
    assert torch.isneginf(logprobs).tolist() == [place == 2 for place in range(MAX_BLOCK_TOKENS)]
    assert torch.isfinite(torch.autograd.grad(logprobs.sum(), hidden)[0]).all()


def test_logits_that_are_no_numbers_stay_seen() -> None:
    hidden, weight, labels, _ = tensors()
    hidden[4] = torch.nan
    logprobs, _ = chunked_logprobs(
        hidden, weight, labels, temperature=1.0, banned=(3,), chunk_elements=20, entropy=False
    )
    assert logprobs.isnan().tolist() == [place == 4 for place in range(MAX_BLOCK_TOKENS)]


def test_large_logits_keep_their_entropy() -> None:
    hidden = torch.tensor([[3e4, 1.0]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [1.0, 0.5], [1.0, 1.0]])
    _, entropies = chunked_logprobs(
        hidden, weight, torch.tensor([0]), temperature=1.0, banned=(), chunk_elements=100, entropy=True
    )
    assert entropies is not None
    chances = torch.tensor([0.0, 0.5, 1.0]).softmax(0)
    torch.testing.assert_close(entropies, -(chances * chances.log()).sum()[None], rtol=1e-6, atol=1e-6)


def test_bfloat16_weights_get_gradients_that_were_summed_in_float32() -> None:
    made = torch.Generator().manual_seed(5)
    hidden = torch.randn(3000, 4, generator=made).bfloat16()
    weight = (torch.randn(8, 4, generator=made) * 0.1).bfloat16().requires_grad_()
    labels = torch.zeros(3000, dtype=torch.long)
    exact = weight.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(reference(hidden.double(), exact, labels)[0].sum(), exact)
    logprobs, _ = chunked_logprobs(hidden, weight, labels, temperature=1.0, banned=(), chunk_elements=64, entropy=False)
    assert logprobs.dtype == torch.float32
    (got,) = torch.autograd.grad(logprobs.sum(), weight)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), wanted, rtol=2e-2, atol=2.0)


def test_autocast_multiplies_in_bfloat16_and_sums_in_float32() -> None:
    hidden, weight, labels, _ = tensors(torch.float32)
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, _ = chunked_logprobs(
            hidden, weight, labels, temperature=0.9, banned=(), chunk_elements=64, entropy=False
        )
    wanted = reference(hidden, weight, labels, temperature=0.9)[0]
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, wanted, rtol=0, atol=0.15)
    for one, other in zip(
        torch.autograd.grad(logprobs.sum(), inputs), torch.autograd.grad(wanted.sum(), inputs), strict=True
    ):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.15)


def test_no_more_logits_exist_than_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    real = module._blocks

    def spy(*args: Any, **settings: Any) -> Any:
        for block in real(*args, **settings):
            made.append(block.logits.numel())
            yield block

    monkeypatch.setattr(module, "_blocks", spy)
    hidden, weight, labels, _ = tensors()
    chunked_logprobs(
        hidden, weight.requires_grad_(), labels, temperature=1.0, banned=(), chunk_elements=50, entropy=False
    )
    assert max(made) <= 50
    assert sum(made) == MAX_BLOCK_TOKENS * VOCAB


def test_without_gradients_nothing_is_kept() -> None:
    hidden, weight, labels, _ = tensors()
    weight.requires_grad_()
    with torch.no_grad():
        logprobs, _ = chunked_logprobs(
            hidden, weight, labels, temperature=1.0, banned=(), chunk_elements=1000, entropy=False
        )
    assert not logprobs.requires_grad
