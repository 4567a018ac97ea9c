"""Tensors that have sizes and no content, for a step that is made to count its memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

_KEEPS_CONTENT = frozenset([torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
"""Number types of indices and masks, whose values decide about shapes."""
_AT = torch.ops.aten


class SizesOnly(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Within it, tensors of weights and activations have no content, and those of indices, masks and positions have.

    An operation whose tensors all have content is computed; its result has content. Any other is not computed. New tensors have content
    if they hold integers. So a model may look at token ids, positions and the grids of images, as vision models do.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, Tensor)]
        computed = all(_has_content(each) for each in tensors) if tensors else _makes_integers(func, args, given)
        if computed and torch.device(given.get("device") or "cpu").type == "cpu":
            return func(*args, **given)
        if func is _AT.index.Tensor or func is _AT.index_put.default or func is _AT.index_put_.default:
            args = (args[0], _as_numbers(args[1]), *args[2:])
        return super().__torch_dispatch__(func, types, args, given)


def _has_content(tensor: Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta


def _makes_integers(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    dtype = kwargs.get("dtype")
    if dtype is not None:
        return dtype in _KEEPS_CONTENT
    return func.overloadpacket is _AT.arange and all(isinstance(each, int) for each in args)


def _as_numbers(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Indices without masks: the shape of the result follows from the indices, and from a mask only with its content."""
    found: list[Tensor | None] = []
    for each in indices:
        if each is not None and each.dtype == torch.bool and _has_content(each):
            found += each.nonzero(as_tuple=True)
        else:
            found.append(each)
    return found


@contextmanager
def experts_in_any_dtype() -> Iterator[None]:
    """Within it, grouped products of experts are computed by an operation of transformers that knows its sizes for every number type.

    The sizes of torch's own are known for bfloat16 alone. Both take the same memory.
    """
    from transformers.integrations import moe

    own = getattr(moe, "_can_use_grouped_mm", None)
    if own is None:
        yield
        return
    moe._can_use_grouped_mm = lambda *_arguments: False
    try:
        yield
    finally:
        moe._can_use_grouped_mm = own
