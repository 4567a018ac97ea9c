"""The routed experts of a reply (`return_routed_experts`).

SGLang keeps the choices of each token beside its place in the key/value cache, so tokens of a cached prefix have those
with which the cached values were computed. It reports the tokens from `routed_experts_start_len` up to the last but one
of prompt and reply, as base64 of int32 [tokens, layers, top_k], with zeros for layers without experts.

Invariant: experts are accepted only if they are those of all requested tokens, below the number of experts, and if the
first two of each token and layer differ. A server whose kernels do not record choices reports zeros, and is refused by
the last check.
"""

from __future__ import annotations

import base64
import binascii
import json
from pathlib import Path

import numpy as np

from engine.errors import BackendError
from engine.plugins.servers.wire import EncodedRequest, ReplyError
from engine.schemas.experts import expert_dtype
from engine.tokens.experts import ExpertLayout, expert_layout


def layout_of(folder: Path) -> ExpertLayout:
    """Read the experts of a model from its `config.json`.

    Raises:
        BackendError: Kind `no_experts`: it has none.
    """
    try:
        layout = expert_layout(json.loads((folder / "config.json").read_text("utf-8")))
    except (OSError, ValueError) as error:
        raise BackendError(f"backend.routed_experts: {folder}/config.json: {error}", kind="no_experts") from None
    if layout is None:
        raise BackendError(
            f"backend.routed_experts: the model in {folder} has no experts, so no routing is reported: remove the key",
            kind="no_experts",
        )
    return layout


def routed_experts(text: str | None, sent: EncodedRequest, sampled: int) -> np.ndarray | None:
    """Read the experts of a reply.

    Args:
        text: `meta_info.routed_experts`.
        sent: The request.
        sampled: Tokens of the reply.

    Returns:
        uint8 or uint16 [tokens, layers, top_k]; None for a reply that was aborted before its first token.

    Raises:
        ReplyError: They are missing, or not those of the requested tokens.
    """
    layout, start = sent.layout, sent.experts_from
    assert layout is not None
    assert start is not None
    if text is None:
        if not sampled:
            return None
        raise ReplyError("it has no routed experts: start the server with --enable-return-routed-experts")
    try:
        flat = np.frombuffer(base64.b64decode(text, validate=True), "<i4")
    except (ValueError, binascii.Error) as error:
        raise ReplyError(f"its routed experts are not base64 of int32: {error}") from None
    shape = (max(len(sent.ids) + sampled - 1 - start, 0), layout.layers, layout.top_k)
    if len(flat) != shape[0] * shape[1] * shape[2]:
        raise ReplyError(
            f"it has {len(flat)} routed experts where {shape[0]} tokens × {shape[1]} layers × {shape[2]} were requested"
        )
    return checked_experts(flat.reshape(shape), layout)


def checked_experts(choices: np.ndarray, layout: ExpertLayout) -> np.ndarray:
    """Experts that a server reports, integers [tokens, layers, top_k], as rows hold them: uint8 or uint16.

    Raises:
        ReplyError: They are not choices of a model with this layout.
    """
    if choices.shape[1:] != (layout.layers, layout.top_k):
        raise ReplyError(
            f"its routed experts have the shape {choices.shape} and not [tokens, {layout.layers}, {layout.top_k}]"
        )
    dtype = expert_dtype(layout.experts).newbyteorder("=")
    if choices.min(initial=0) < 0 or choices.max(initial=0) >= layout.experts:
        raise ReplyError(f"it routes a token to an expert outside [0, {layout.experts})")
    experts = choices.astype(dtype)
    if layout.top_k > 1:
        same = experts[:, :, 0] == experts[:, :, 1]  # the first two alone: sorting all would take 25 µs a token
        if (same if len(layout.sparse) == layout.layers else same[:, list(layout.sparse)]).any():
            raise ReplyError(
                "it routes a token to one expert twice in one layer: the server does not record its choices"
            )
    return experts
