"""From logits to token ids and their log-probs.

The conventions are SGLang's: log-probs are those of softmax(logits / temperature) after bans, biases and
penalties, and before top-k, top-p and min-p; temperature 0 is greedy, with log-probs at temperature 1.

Invariant: a token depends only on its row's logits, its request's seed and its place in the reply, and not on other
rows of the batch. A hash of (seed, place) gives one uniform number; the inverse of the row's distribution function
turns it into a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.schemas.generation import GenerateRequest

BLOCK = 256
"""Size of a block of the vocabulary in the two-level inversion of a distribution."""
FIRST_SORTED = 256
"""Number of most probable tokens that are sorted first for top-k, top-p and min-p."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def _mix(value: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014, fig. 14), on uint64."""
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    mixed: np.ndarray = value ^ (value >> np.uint64(31))
    return mixed


def uniforms(seeds: Sequence[int], places: Sequence[int]) -> np.ndarray:
    """A uniform number in [0, 1) for each (seed, place): float64 [rows], 53 random bits."""
    key = _mix(np.asarray(seeds, dtype=np.uint64) + _GOLDEN)
    bits = _mix(key + (np.asarray(places, dtype=np.uint64) + np.uint64(1)) * _GOLDEN)
    numbers: np.ndarray = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


class SamplingState:
    """Sampling parameters of one request, and the counts of its sampled tokens."""

    def __init__(self, request: GenerateRequest, vocab: int, device: torch.device) -> None:
        """`vocab`: number of ids that may be sampled; a padded embedding has more."""
        params = request.sampling
        self.seed = request.seed
        self.temperature = params.temperature
        self.top_k = params.top_k if params.top_k is not None and params.top_k > 0 else 0
        self.top_p = params.top_p if params.top_p is not None else 1.0
        self.min_p = params.min_p or 0.0
        self.frequency = params.frequency_penalty or 0.0
        self.presence = params.presence_penalty or 0.0
        self.repetition = params.repetition_penalty or 1.0
        self.min_new = params.min_new_tokens or 0
        self.vocab = vocab
        self.counts: dict[int, int] = {}
        bias = {int(token): value for token, value in (params.logit_bias or {}).items()}
        bias |= dict.fromkeys(request.banned_token_ids, float("-inf"))
        self._bias = _pairs(bias, device)
        self._stop = _pairs({token: float("-inf") for token in request.stop_token_ids if token < vocab}, device)

    @property
    def filters(self) -> bool:
        """Whether top-k, top-p or min-p truncates the distribution."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    def edit(self, logits: torch.Tensor, place: int) -> None:
        """Apply penalties, biases and bans to one row [vocab], in place."""
        if self.counts and (self.frequency or self.presence or self.repetition != 1.0):
            seen = torch.tensor(list(self.counts), device=logits.device)
            times = torch.tensor(list(self.counts.values()), dtype=logits.dtype, device=logits.device)
            found = logits[seen] - self.frequency * times - self.presence
            logits[seen] = torch.where(found < 0, found * self.repetition, found / self.repetition)
        if self._bias is not None:
            logits[self._bias[0]] += self._bias[1]
        if place < self.min_new and self._stop is not None:
            logits[self._stop[0]] = self._stop[1]
        if self.vocab < len(logits):
            logits[self.vocab :] = float("-inf")

    def count(self, token: int) -> None:
        """Count a sampled token for the penalties."""
        if self.frequency or self.presence or self.repetition != 1.0:
            self.counts[token] = self.counts.get(token, 0) + 1


def _pairs(values: dict[int, float], device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
    if not values:
        return None
    return torch.tensor(list(values), device=device), torch.tensor(list(values.values()), device=device)


def sample(
    logits: torch.Tensor, states: Sequence[SamplingState], places: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Sample one token per row.

    Args:
        logits: float32 [rows, vocab]; overwritten.
        states: The sampling state of each row.
        places: Number of tokens in each row's reply so far.

    Returns:
        Ids, int64 [rows], and log-probs, float32 [rows]; nan where the model's logits are not a distribution.
    """
    for row, (state, place) in enumerate(zip(states, places, strict=True)):
        state.edit(logits[row], place)
    temperatures = [state.temperature or 1.0 for state in states]
    if any(value != 1.0 for value in temperatures):
        logits /= torch.tensor(temperatures, device=logits.device)[:, None]
    best = logits.max(dim=-1)
    rows, vocab = logits.shape
    weights = torch.zeros((rows, -(-vocab // BLOCK) * BLOCK), device=logits.device)
    torch.exp(logits - best.values[:, None], out=weights[:, :vocab])
    blocks = weights.view(rows, -1, BLOCK)
    block_sums = blocks.sum(-1).double().cumsum(-1)
    total = block_sums[:, -1]
    draws = torch.from_numpy(uniforms([state.seed for state in states], places)).to(logits.device)
    target = torch.minimum(draws * total, torch.nextafter(total, torch.zeros_like(total)))
    ids = best.indices.clone()
    free = [row for row, state in enumerate(states) if state.temperature > 0 and not state.filters]
    if free:
        picked = torch.tensor(free, device=logits.device)
        ids[picked] = _invert(blocks[picked] if len(free) < rows else blocks, block_sums[picked], target[picked])
    cut = [row for row, state in enumerate(states) if state.filters]
    if cut:
        picked = torch.tensor(cut, device=logits.device)
        chances = weights[picked, :vocab].double() / total[picked, None]
        ids[picked] = _filtered(chances, [states[row] for row in cut], draws[picked])
    ids.clamp_(0, vocab - 1)  # a row of nan gives an arbitrary id; its log-prob is nan
    logprobs = ((logits.gather(1, ids[:, None])[:, 0] - best.values).double() - total.log()).float()
    return ids.cpu().numpy(), logprobs.cpu().numpy()


def sample_each(
    logits: torch.Tensor, states: Sequence[SamplingState], places: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Sample each row separately, so that sums over a row do not depend on the number of rows.

    `logits` has shape [rows, vocabulary]; the arrays of the result have shape [rows].
    """
    ids, logprobs = zip(
        *(
            sample(logits[row : row + 1].clone(), states[row : row + 1], places[row : row + 1])
            for row in range(len(states))
        ),
        strict=True,
    )
    return np.concatenate(ids), np.concatenate(logprobs)


def _invert(blocks: torch.Tensor, block_sums: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Find the first token whose cumulative weight exceeds `target`: first its block, then its index in the block.

    Args:
        blocks: Weights, float32 [rows, blocks, BLOCK].
        block_sums: Cumulative sums of the blocks, float64 [rows, blocks].
        target: float64 [rows], in [0, sum of the row's weights).
    """
    at = torch.searchsorted(block_sums, target[:, None], right=True).clamp_max(block_sums.shape[1] - 1)
    before = torch.where(at > 0, block_sums.gather(1, (at - 1).clamp_min(0)), 0.0)
    inside = blocks.gather(1, at[:, :, None].expand(-1, 1, BLOCK))[:, 0]
    # Block sums are float32 and these are float64. If they disagree at a block's end, the block's last weight is taken.
    cumulated = inside.double().cumsum(-1)
    end = torch.nextafter(cumulated[:, -1:], cumulated.new_zeros(()))
    rest = torch.minimum((target[:, None] - before).clamp_min(0), end)
    return (at * BLOCK + torch.searchsorted(cumulated, rest, right=True))[:, 0]


def _filtered(chances: torch.Tensor, states: Sequence[SamplingState], draws: torch.Tensor) -> torch.Tensor:
    """Sample rows with top-k, top-p or min-p; each of the three is computed on the full distribution.

    Only the most probable tokens are sorted. Their number is increased until all remaining tokens are known to be
    excluded.
    """
    rows, vocab = chances.shape
    ids = torch.empty(rows, dtype=torch.long, device=chances.device)
    open_rows = list(range(rows))
    width = min(vocab, FIRST_SORTED)
    while open_rows:
        top = chances[open_rows].topk(width, dim=-1)
        before = top.values.cumsum(-1) - top.values
        again = []
        for place, row in enumerate(open_rows):
            state, values = states[row], top.values[place]
            keep = (before[place] <= state.top_p) & (values >= state.min_p * values[0])
            if state.top_k:
                keep[state.top_k :] = False
            if width < vocab and bool(keep[-1]):
                again.append(row)
                continue
            cumulated = (values * keep).cumsum(-1)
            at = torch.searchsorted(cumulated, draws[row] * cumulated[-1], right=True)
            ids[row] = top.indices[place, at.clamp_max(int(keep.sum()) - 1)]
        open_rows, width = again, min(vocab, width * 8)
    return ids
