"""`backend.verify`: compares one prompt's log-probs from the server with those computed here from the model's files.

The comparison covers weights, precision, positions, and the pixels of an image, which the server computes from the
image that it is sent, and this process takes from the tensors of the exported rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.backends.servers.pool import Server
from engine.backends.sglang.images import ask_logprobs, sample_prompt
from engine.errors import BackendError
from engine.schemas.base import Struct
from engine.tokens.catalogue import no_bars

if TYPE_CHECKING:
    from engine.backends.sglang.images import Generate
    from engine.tokens.tape import IntVector
    from engine.tokens.template import ChatTemplate

MAX_GAP = {"float32": 1e-3}
"""Maximum mean difference, in nats, by the servers' `--dtype`."""
MAX_HALF = 0.15
"""Maximum mean difference for 16-bit weights, in nats."""


class ServerDifference(Struct, frozen=True, kw_only=True):
    """Difference between a server's log-probs and those computed here, in nats."""

    largest: float
    mean: float
    tokens: int


async def verify_servers(
    servers: Sequence[Server], format: ChatTemplate, folder: Callable[[], Path], generate: Generate
) -> ServerDifference:
    """Compare each server with the model's files. Returns the largest difference.

    Args:
        servers: The servers to check.
        format: The model's chat format.
        folder: Returns the folder of the model's files, and downloads them if necessary.
        generate: Sends a body to a server's `/generate`.

    Raises:
        BackendError: Kind `wrong_server`: a server's ids or log-probs differ. Kind `unsupported_model`: the files
            cannot be loaded here.
    """
    wanted, ids, digest = sample_prompt(format)
    uri = None if digest is None or format.vision is None else format.vision.bank.scaled_uri(digest)
    try:
        ours = await asyncio.to_thread(lambda: _recompute(folder(), format, wanted, digest))
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise BackendError(
            f"`backend.verify`: the model cannot be loaded or run in this process: {error}", kind="unsupported_model"
        ) from error
    compared = np.ones(len(wanted) - 1, bool)
    if (
        format.vision is not None
    ):  # at placeholders a server returns the log-probs of its ours ids, which differ from ours
        compared = wanted[1:] != format.vision.placeholder_id
    worst = ServerDifference(largest=0.0, mean=0.0, tokens=int(compared.sum()))
    for server in servers:
        seen, theirs = await ask_logprobs(server, generate, ids, uri)
        if seen != wanted.tolist():
            raise BackendError(
                f"`backend.verify`: {server.url} expands a prompt of {len(wanted)} tokens to {len(seen)}",
                kind="wrong_server",
            )
        off = np.abs(theirs[1:] - ours)[compared]
        difference = ServerDifference(largest=float(off.max()), mean=float(off.mean()), tokens=len(off))
        dtype = str((await server.json("GET", "/server_info")).get("dtype"))
        if not difference.mean <= MAX_GAP.get(dtype, MAX_HALF):
            raise BackendError(
                f"`backend.verify`: the log-probs of {server.url} ({dtype}) differ from those of the model's files by "
                f"{difference.mean:.2g} on average and {difference.largest:.2g} at most, over {difference.tokens} "
                "tokens"
                f"{'' if digest is None else ' after an image'}: it has other weights, or processes "
                f"{'prompts' if digest is None else 'images'} differently",
                kind="wrong_server",
            )
        worst = max(worst, difference, key=lambda difference: difference.largest)
    return worst


def _recompute(folder: Path, format: ChatTemplate, ids: IntVector, digest: str | None) -> np.ndarray:
    """Compute log-probs of `ids[1:]` with transformers, in float32: float64 [tokens - 1]."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    inputs: dict[str, Any] = {"input_ids": tokens}
    vision = format.vision
    if vision is not None and digest is not None:
        inputs |= {name: torch.from_numpy(array) for name, array in vision.tensors([[digest]]).items()}
        inputs["mm_token_type_ids"] = torch.tensor(vision.token_types([ids.tolist()]))
    kind: Any = AutoModelForCausalLM if vision is None else AutoModelForImageTextToText
    with no_bars():
        model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.inference_mode():
        logits = model(**inputs).logits[0, :-1].double()
    logprobs: np.ndarray = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0].numpy()
    return logprobs
