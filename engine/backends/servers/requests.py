"""A server -> an error that says what to change, where its replies to test requests before the first episode are wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
import structlog

from engine.backends.http.reply import HttpFailure, HttpReply, error_text
from engine.backends.servers.pool import Server
from engine.backends.servers.wire import EncodedRequest, PromptEncoder, ReplyError, ReplyPart
from engine.errors import BackendError, OutageError
from engine.schemas.generation import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from engine.backends.servers.pool import Pool
    from engine.schemas.backend import ServersSpec
    from engine.tokens.template import ChatTemplate

Facts = TypeVar("Facts")

log = structlog.get_logger(__name__)

TRIAL_SECONDS = 120.0
"""Time limit of a test request in seconds: a first request may compile a grammar or load an adapter."""
SAMPLE_TEXT = "Wie viel ist 17 × 25? <answer>425</answer>\n\tdef f(x): return x ** 2  # naïve 𝒙\n"
"""Text that both tokenizers encode."""


async def ask(server: Server, path: str, body: dict[str, Any] | bytes) -> HttpReply:
    """Send a test request. Returns its reply, whatever its status.

    Raises:
        BackendError: no reply in time (kind `unreachable`).
    """
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    try:
        async with asyncio.timeout(TRIAL_SECONDS):
            return await server.http.request("POST", path, data)
    except TimeoutError:
        raise BackendError(f"{server.url} did not answer within {TRIAL_SECONDS:g} s", kind="unreachable") from None
    except HttpFailure as failure:
        raise BackendError(f"{server.url}: {failure}", kind="unreachable") from None


async def check_tokenizer(server: Server, format: ChatTemplate) -> None:
    """Check that a server's tokenizer gives one text the same ids as the spec's. A server that does not tokenize is not checked.

    Raises:
        BackendError: It gives others (kind `wrong_server`), or cannot be reached.
    """
    try:
        reply = await server.json("POST", "/tokenize", {"prompt": SAMPLE_TEXT, "add_special_tokens": False})
    except BackendError as error:
        if error.kind == "unreachable":
            raise
        log.info("the server does not tokenize; its tokenizer is not compared", url=server.url, reason=str(error))
        return
    theirs, ours = reply.get("tokens"), list(format.encode(SAMPLE_TEXT))
    if theirs != ours:
        raise BackendError(
            f"{server.url} has another tokenizer than the spec's model: for one text it writes {theirs}, ours {ours}",
            kind="wrong_server",
        )


async def check_each(
    pool: Pool, servers: Sequence[Server], check: Callable[[Server], Awaitable[Facts]], kind: str
) -> list[Facts]:
    """Check all servers at once. One that cannot be reached is left out until it is back, if another one is available.

    Args:
        pool: The pool of the servers.
        servers: Its servers, or those behind its router, which the pool does not choose from.
        check: Checks one server.
        kind: The servers' name in a message.

    Returns:
        What `check` returned for the servers that can be reached.

    Raises:
        OutageError: No server can be reached.
        BackendError: As `check` raises it.
    """
    found: list[Facts] = []
    absent: list[BackendError] = []
    outcomes = await asyncio.gather(*(check(server) for server in servers), return_exceptions=True)
    for server, outcome in zip(servers, outcomes, strict=True):
        if isinstance(outcome, BackendError) and (outcome.refused or outcome.kind == "unreachable"):
            absent.append(outcome)
            if server in pool.servers:
                pool.failed(server, str(outcome))
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            found.append(outcome)
    if not found:
        raise OutageError(f"no {kind} server can be reached: " + "; ".join(map(str, absent)), kind="unreachable")
    return found


def check_stop_ids(server: Server, format: ChatTemplate, vocab_size: int) -> None:
    """Check that the ids at which the model stops are in a server's vocabulary.

    Raises:
        BackendError: They are not (kind `wrong_server`).
    """
    outside = [token for token in format.stop_token_ids if token >= vocab_size]
    if outside:
        raise BackendError(
            f"{server.url} serves a vocabulary of {vocab_size} ids; the spec's model stops at {outside}",
            kind="wrong_server",
        )


async def try_sampling(
    server: Server,
    path: str,
    encoder: PromptEncoder,
    decode: Callable[[bytes, EncodedRequest, int], ReplyPart],
    *,
    spec: ServersSpec,
    format: ChatTemplate,
    sampling: SamplingParams,
    echo: str,
) -> None:
    """Sample one token with the spec's own sampling; the reply must pass all checks of a turn's reply.

    Args:
        server: The server.
        path: Path of its sampling requests.
        encoder: Writes the request.
        decode: Reads and checks the reply, given the request and the size of the vocabulary.
        spec: The adapter, and whether a server that does not report its prompt is used.
        format: The model's chat format.
        sampling: The spec's sampling.
        echo: What a message says of the field that asks for the prompt: `(return_token_ids): install vllm 0.10.2`.

    Raises:
        BackendError: The server refuses the sampling (kind `bad_sampling`), sends a reply that cannot be used (`bad_reply`), or
            does not report its prompt (`wrong_server`).
    """
    request = GenerateRequest(
        episode_id="trial",
        turn=0,
        input_ids=np.array((list(format.encode("Hello")) or [0])[:8], dtype=np.int32),
        sampling=sampling.model_copy(update={"min_new_tokens": None}),
        max_new_tokens=1,
        stop_token_ids=list(format.stop_token_ids),
        seed=0,
        adapter=spec.adapter,
        experts_from=0 if spec.asks_experts else None,
    )
    sent = encoder.encode(request, f"trial-{id(server):x}", request.input_ids, 1)
    reply = await ask(server, path, b"".join(sent.pieces))
    if reply.status != 200:
        raise BackendError(
            f"{server.url} refuses this spec's sampling ({reply.status}): {error_text(reply)}", kind="bad_sampling"
        )
    try:
        part = decode(reply.body, sent, encoder.vocab_size)
    except ReplyError as error:
        raise BackendError(f"{server.url} sent a reply that cannot be used: {error}", kind="bad_reply") from None
    if part.echoed:
        return
    if spec.unchecked_prompts == "refuse":
        raise BackendError(
            f"{server.url} does not report the prompt that it computed on {echo} or later, or set "
            "`backend.unchecked_prompts: allow`",
            kind="wrong_server",
        )
    log.warning("prompts are not compared: the server does not report them", url=server.url)
