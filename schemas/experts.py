"""Arrays of the experts that a mixture-of-experts model chose for each token.

A choice is an unsigned integer below the number of experts, in one byte for up to 256 experts and in two bytes for
more. Layers without experts have zeros.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

BYTE, TWO_BYTES = np.dtype("<u1"), np.dtype("<u2")


def expert_dtype(experts: int) -> np.dtype[Any]:
    """The number type of choices among `experts` experts."""
    return BYTE if experts <= 256 else TWO_BYTES


def pack_experts(array: np.ndarray) -> dict[str, Any]:
    """Convert an array [tokens, layers, top_k] to `{shape, dtype, data}`; `data`: little-endian bytes in C order."""
    packed = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return {"shape": list(array.shape), "dtype": array.dtype.name, "data": packed.tobytes()}


def unpack_experts(packed: Mapping[str, Any]) -> np.ndarray:
    """Convert `{shape, dtype, data}` to an array [tokens, layers, top_k]; `data` is bytes, or base64 text.

    Raises:
        ValueError: the data are not those of such an array.
    """
    try:
        dtype, shape, data = np.dtype(packed["dtype"]).newbyteorder("<"), tuple(packed["shape"]), packed["data"]
        packed_bytes = base64.b64decode(data, validate=True) if isinstance(data, str) else data
        array = np.frombuffer(packed_bytes, dtype).reshape(shape)
    except (KeyError, TypeError, binascii.Error) as error:
        raise ValueError(f"routed experts are {{shape, dtype, data}} with base64 data: {error}") from None
    return _experts(array)


def _experts(value: Any) -> np.ndarray:
    if isinstance(value, Mapping):
        return unpack_experts(value)
    array = np.asarray(value)
    if array.ndim != 3 or array.dtype.kind not in "ui":
        raise ValueError(
            f"routed experts are integers [tokens, layers, top_k], not {array.dtype} of shape {array.shape}"
        )
    if array.dtype.newbyteorder("=") in (BYTE.newbyteorder("="), TWO_BYTES.newbyteorder("=")):
        return np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    if array.size and not 0 <= array.min() <= array.max() < 1 << 16:
        raise ValueError(f"routed experts are in [0, 65536), not {array.min()} to {array.max()}")
    return array.astype(expert_dtype(int(array.max(initial=0)) + 1).newbyteorder("="))


def experts_as_text(array: np.ndarray) -> dict[str, Any]:
    """`pack_experts` of an array [tokens, layers, top_k], with `data` in base64, as in JSON."""
    packed = pack_experts(array)
    return packed | {"data": base64.b64encode(packed["data"]).decode()}


ExpertArray = Annotated[
    np.ndarray,
    BeforeValidator(_experts),
    PlainSerializer(experts_as_text, when_used="json"),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "shape": {"type": "array", "items": {"type": "integer"}},
                "dtype": {"enum": ["uint8", "uint16"]},
                "data": {"type": "string", "contentEncoding": "base64"},
            },
            "required": ["shape", "dtype", "data"],
        }
    ),
]
"""uint8 or uint16 array of shape [tokens, layers, top_k]."""
