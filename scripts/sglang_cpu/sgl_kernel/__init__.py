"""Stand-in for SGLang's kernel package, of which no CPU build is published.

SGLang's torch-native CPU path calls two functions of it, written here in torch, and reads a few
operator names at import, declared here without an implementation. Every other name is a function that
raises when it is called, so a path that would need a real kernel fails loudly and never computes
something else.

Invariant: `convert_weight_packed` is never declared; SGLang takes its plain torch path by its absence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

_library = torch.library.Library("sgl_kernel", "FRAGMENT")
for _name in (
    "fused_sigmoid_mul_cpu",
    "fused_moe_router_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "rmsnorm_cpu",
    "fused_qkvzba_split_reshape_cat_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
):
    _library.define(f"{_name}(Tensor a) -> Tensor")


def _murmur_mix(h: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Mix 32-bit keys into 32-bit hashes; both int64 tensors with values in [0, 2**32)."""
    low = 0xFFFFFFFF
    key = (key * 0xCC9E2D51) & low
    key = ((key << 15) | (key >> 17)) & low
    h = h ^ ((key * 0x1B873593) & low)
    h = ((h << 13) | (h >> 19)) & low
    return (h * 5 + 0xE6546B64) & low


def _murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (32 bits) of seed, position and column, by which SGLang draws with a request's own seed.

    Args:
        seed: uint64 [rows]; its low and then its high word are hashed.
        positions: int [rows].
        col_indices: int [columns].

    Returns:
        uint32 [rows, columns].
    """
    low = 0xFFFFFFFF
    seed = seed.view(torch.int64)[:, None]
    position, column = positions.to(torch.int64)[:, None], col_indices.to(torch.int64)[None, :]
    h = torch.zeros((1, 1), dtype=torch.int64)
    for key in (seed & low, (seed >> 32) & low, position & low, column & low):
        h = _murmur_mix(h, key)
    h = h ^ 16
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & low
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & low
    return (h ^ (h >> 16)).to(torch.uint32)


_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_library.impl("murmur_hash32_cpu", _murmur_hash32, "CPU")


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int | None = None,
) -> None:
    """Write the cache slots of each request into its row of the table, in order.

    Args:
        req_pool_indices: rows of `req_to_token`, int [requests].
        req_to_token: the table, int [rows, positions]; changed in place.
        start_offset: first position to write, int [requests].
        end_offset: one past the last position to write, int [requests].
        out_cache_loc: the slots of all requests one after another, int [sum(end - start)].
        pool_len: positions of a row; implied by the table.
    """
    used = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in rows:
        count = end - start
        req_to_token[row, start:end] = out_cache_loc[used : used + count].to(req_to_token.dtype)
        used += count


def _without_pinning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return made


def _allow_pinning_without_an_accelerator() -> None:
    """SGLang's LoRA code pins host memory always; without an accelerator torch refuses to."""
    if torch.cuda.is_available():
        return
    for name in ("tensor", "empty", "zeros", "full", "arange"):
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_args, **_kwargs: self  # type: ignore[method-assign]


_allow_pinning_without_an_accelerator()


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU stand-in")

    return absent
