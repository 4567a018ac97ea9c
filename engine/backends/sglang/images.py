"""Checks that a server's model gets the same pixels as are in the exported rows.

A server decodes, scales and normalises images with its own processor (torchvision, or Pillow with
`--image-processor-backend=pil`), and scales differently from the processor of the rows. Images are therefore sent at
the size of their grid (`Vision.scaled`), at which no processor scales. Two other differences are checked before the
first
episode: the server's image settings, and the ids of one prompt with an image, which must equal the tape's.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from engine.backends.http.reply import error_text
from engine.backends.servers.pool import ImageFacts, Server
from engine.backends.sglang.wire import HASHED_BY_SERVER
from engine.errors import BackendError
from engine.schemas.message import ImagePart, Message, TextPart
from engine.tokens.conversation import Conversation
from engine.tokens.images import digest_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from engine.backends.http.reply import HttpReply
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
    data = _noise_image()
    digest = digest_of(data)
    vision.bank.put(digest, data, "image/png")
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


def _noise_image() -> bytes:
    """Make a PNG of noise, 150 x 110 pixels. Every processor must scale it, and each scales it differently."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (110, 150, 3), np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()
