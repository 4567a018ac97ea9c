"""A sample prompt, on which a server's ids, pixels and log-probs are compared with those of the model's files.

A server decodes, scales and normalises images with its own processor (torchvision, or Pillow with
`--image-processor-backend=pil`), and scales differently from the processor of the rows. Images are therefore sent at
the size of their grid (`Vision.scaled`), at which no processor scales. Two other differences are checked before the
first episode: the server's image settings, and the ids of one prompt with an image, which must equal the tape's.

`backend.verify` compares log-probs too, which covers weights, precision, positions, and the pixels of an image: the
server computes them from the image that it is sent, and this process takes them from the tensors of the exported rows.
"""

from __future__ import annotations

import asyncio
import io
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from engine.errors import BackendError
from engine.plugins.servers.http.reply import error_text
from engine.plugins.servers.pool import ImageFacts, Server
from engine.plugins.sglang.wire import HASHED_BY_SERVER
from engine.schemas.base import Struct
from engine.schemas.message import ImagePart, Message, TextPart
from engine.tokens.catalogue import no_bars
from engine.tokens.conversation import Conversation
from engine.tokens.images import digest_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from engine.plugins.servers.http.reply import HttpReply
    from engine.tokens.tape import IntVector
    from engine.tokens.template import ChatTemplate
    from engine.tokens.vision import Vision

    Generate = Callable[[Server, dict[str, Any]], Awaitable[HttpReply]]


def refuse_family(vision: Vision) -> None:
    """Refuse a model whose images cannot be sent at their final size.

    Raises:
        BackendError: Kind `unsupported_model`.
    """
    if not vision.family.served:
        raise BackendError(
            "the sglang backend sends images at the size to which the model's processor scales them, so that the "
            "server gets the pixels of the rows; this model splits images into tiles, so that size does not exist: use "
            "`backend: {kind: local}`, or a Qwen-VL model",
            kind="unsupported_model",
        )


async def check_images(server: Server, details: dict[str, Any], format: ChatTemplate, generate: Generate) -> ImageFacts:
    """Check that a server processes images as the exported rows have them.

    Args:
        server: The server.
        details: The reply of its `/server_info`.
        format: The model's chat format; it has `vision`.
        generate: Sends a body to the server's `/generate`.

    Raises:
        BackendError: Kind `wrong_server`: it has its own image settings, refuses an image, or expands it to other ids.
    """
    vision = format.vision
    assert vision is not None
    config = details.get("mm_process_config")
    if isinstance(config, dict) and config.get("image"):
        raise BackendError(
            f"{server.url} runs with --mm-process-config, whose image settings {config['image']} the rows' processor "
            "does not have: write them into the model's preprocessor_config.json instead, for both",
            kind="wrong_server",
        )
    if details.get("mm_preprocess_cache_size_mb") and vision.family.kind not in HASHED_BY_SERVER:
        raise BackendError(
            f"{server.url} runs with --mm-preprocess-cache-size-mb, with which SGLang 0.5.23 ends at a request that "
            "names its images (`mm_hashes`): start it without",
            kind="wrong_server",
        )
    wanted, ids, digest = sample_prompt(format)
    assert digest is not None
    seen, scaled = await ask_logprobs(server, generate, ids, vision.bank.scaled_uri(digest))
    if seen != wanted.tolist():
        raise BackendError(
            f"{server.url} expands a prompt with an image to {len(seen)} tokens, and the model's own processor to "
            f"{len(wanted)}: its preprocessor_config.json or pixel limits differ from those of the spec's model",
            kind="wrong_server",
        )
    unscaled = (await ask_logprobs(server, generate, ids, vision.bank.data_uri(digest)))[1]
    gap = float(np.abs(scaled - unscaled).max()) if len(scaled) == len(unscaled) else float("inf")
    pil = details.get("disable_fast_image_processor") or False
    return ImageFacts(
        processor="pil" if pil else str(details.get("image_processor_backend", "unknown")), unscaled_gap=gap
    )


def sample_prompt(format: ChatTemplate) -> tuple[IntVector, list[int], str | None]:
    """Make the prompt for the comparison, with an image if the model takes images.

    Returns:
        Its ids on the tape, shape [tokens]; the ids for the server; the image's digest, None without an image.
    """
    text, vision = TextPart(text="What is it? 17 × 25 = 425, naïve."), format.vision
    if vision is None:
        ids = Conversation.begun(format, [Message(role="user", content=text.text)]).prompt()
        return ids, ids.tolist(), None
    from PIL import Image

    # noise of 150 x 110 pixels: every processor must scale it, and each scales it differently
    noise, buffer = np.random.default_rng(0).integers(0, 256, (110, 150, 3), np.uint8), io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG")
    digest = digest_of(buffer.getvalue())
    vision.bank.put(digest, buffer.getvalue(), "image/png")
    conversation = Conversation.begun(format, [Message(role="user", content=[ImagePart(image=digest), text])])
    ids = conversation.prompt()
    return ids, vision.compact(ids, conversation.tapes[0].placed_images()[1]).tolist(), digest


async def ask_logprobs(
    server: Server, generate: Generate, ids: list[int], uri: str | None
) -> tuple[list[int], np.ndarray]:
    """Ask a server for a prompt's ids, as it expands them, and their log-probs; the first is 0.

    Args:
        server: The server.
        generate: Sends a body to its `/generate`.
        ids: The prompt, with one placeholder for the image.
        uri: The image. None: no image.

    Returns:
        Ids; float64 [tokens].

    Raises:
        BackendError: Kind `wrong_server`: the server refuses the prompt, or its reply has no ids or log-probs.
    """
    reply = await generate(
        server,
        {
            "input_ids": ids,
            **({} if uri is None else {"image_data": [uri]}),
            "return_logprob": True,
            "logprob_start_len": 0,
            "return_prompt_token_ids": True,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        },
    )
    if reply.status != 200:
        raise BackendError(
            f"{server.url} refuses a sample prompt ({reply.status}): {error_text(reply)}", kind="wrong_server"
        )
    try:
        decoded = msgspec.json.decode(reply.body)
        rows = decoded["meta_info"]["input_token_logprobs"]
        return list(decoded["prompt_token_ids"]), np.array([row[0] or 0.0 for row in rows])
    except (msgspec.DecodeError, KeyError, TypeError, IndexError) as error:
        raise BackendError(
            f"{server.url} does not return the ids and log-probs of a sample prompt: {error!r}",
            kind="wrong_server",
        ) from None


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
