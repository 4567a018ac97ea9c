"""Checks of the servers before the first episode, so that a run does not fail at its hundredth turn.

For each server: its model, its context, its vocabulary, whether its tokenizer gives the same ids, and whether it accepts the
spec's sampling. For the last one a request is sent, whose reply must pass all checks of a turn's reply. The parameters that a
router drops are found with requests that SGLang must refuse: a normal answer means that the parameter was dropped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from engine.backends.http.reply import HttpReply, error_text
from engine.backends.servers.pool import Pool, Server
from engine.backends.servers.requests import ask, check_each, check_stop_ids, check_tokenizer, try_sampling
from engine.backends.sglang.images import check_images
from engine.backends.sglang.wire import Encoder, decode, sampling_fields
from engine.errors import BackendError, OutageError
from engine.schemas.base import Struct
from engine.schemas.generation import SamplingParams

if TYPE_CHECKING:
    from engine.schemas.backend import SGLangBackendSpec
    from engine.tokens.experts import ExpertLayout
    from engine.tokens.template import ChatTemplate

log = structlog.get_logger(__name__)

EXPERTS_FLAG = "--enable-return-routed-experts"
"""SGLang's flag of servers that report the experts of each token."""
_RANGE = re.compile(r"\[0, (\d+)\]")
_REFUSED: dict[str, dict[str, Any]] = {
    "sampling_seed": {"sampling_params": {"sampling_seed": 2**63}},
    "logit_bias": {"sampling_params": {"logit_bias": {"2147483647": 0.0}}},
    "stop_regex": {"sampling_params": {"stop_regex": ["x" * 300]}},
    "custom_params": {"sampling_params": {"custom_params": {"__sglang_reasoning_end_token_ids": []}}},
    "stop": {"sampling_params": {"stop": [f"stop {number}" for number in range(40)]}},
    "min_new_tokens": {"sampling_params": {"min_new_tokens": 9, "max_new_tokens": 1}},
    "top_p": {"sampling_params": {"top_p": 2.0}},
    "min_p": {"sampling_params": {"min_p": 2.0}},
    "frequency_penalty": {"sampling_params": {"frequency_penalty": 9.0}},
    "presence_penalty": {"sampling_params": {"presence_penalty": 9.0}},
    "repetition_penalty": {"sampling_params": {"repetition_penalty": 9.0}},
    "lora_path": {"lora_path": "there-is-no-such-adapter"},
}
"""Parameter -> a request that SGLang refuses because of it."""
_EXPERTS_PROBE = {"input_ids": [0, 0], "sampling_params": {"max_new_tokens": 1}, "return_routed_experts": True}
"""A request whose reply has the routed experts."""


class Facts(Struct, frozen=True, kw_only=True):
    """Facts about all servers together."""

    vocab_size: int
    """Ids below it may be sent."""
    context: int | None
    """Maximum length of prompt and reply together; a prompt must be shorter."""
    dropped: list[str]
    """Parameters that the router drops."""


class ServerInfo(Struct, frozen=True, kw_only=True):
    """Facts that one server reports; None: not reported."""

    vocab_size: int | None
    context: int | None


async def check_servers(
    pool: Pool,
    spec: SGLangBackendSpec,
    format: ChatTemplate,
    sampling: SamplingParams,
    model: str,
    headers: dict[str, str],
    layout: ExpertLayout | None = None,
) -> Facts:
    """Check all servers at once. A server that cannot be reached is left out until it is back, if another one is available.

    Raises:
        OutageError: No server can be reached.
        BackendError: A server has another model, or refuses this spec's sampling.
    """
    if spec.router:
        pool.workers = await _workers(pool.servers, headers)
    found = await check_each(
        pool, pool.workers, lambda server: check_server(server, spec, format, sampling, model, layout), "sglang"
    )
    versions = {server.version for server in pool.workers if server.version is not None}
    if len(versions) > 1:
        log.warning("sglang servers hold different weights", versions=sorted(versions))
    vocabularies = [item.vocab_size for item in found if item.vocab_size is not None]
    contexts = [item.context for item in found if item.context is not None]
    dropped = await _dropped(pool.servers, sampling, spec) if spec.router else []
    # an embedding may be padded beyond the tokenizer: a model can sample such ids, and takes them
    vocab_size = min(vocabularies, default=format.vocab_size)
    return Facts(vocab_size=vocab_size, context=min(contexts, default=None), dropped=dropped)


async def check_model_path(urls: Sequence[str], headers: dict[str, str], folder: Path) -> None:
    """Check that every server was started with the model in `folder`.

    Raises:
        OutageError: A server cannot be reached.
        BackendError: A server has another model (kind `wrong_server`), or refuses to answer.
    """
    for url in urls:
        server = Server(url, headers)
        try:
            info = await server.json("GET", "/model_info")
        except BackendError as error:
            raise OutageError(str(error), kind="unreachable") if error.refused else error from None
        finally:
            await server.http.close()
        served = info.get("model_path") if isinstance(info, dict) else None
        if Path(str(served)).resolve() != folder:  # noqa: ASYNC240  (before a run: nothing else waits)
            raise BackendError(
                f"{url} samples with the weights of {served}, not of {folder}: start it with --model-path {folder}, or "
                "evaluate in this process with --set 'backend={kind: local}'",
                kind="wrong_server",
            )


async def check_server(
    server: Server,
    spec: SGLangBackendSpec,
    format: ChatTemplate,
    sampling: SamplingParams,
    model: str,
    layout: ExpertLayout | None = None,
) -> ServerInfo:
    """Check one server: at the start, and when it is back after a failure, since it may serve another model then.

    Raises:
        BackendError: It cannot be reached (kind `unreachable`), or cannot serve this spec.
    """
    info = await server.json("GET", "/model_info")
    if not isinstance(info, dict) or "model_path" not in info:
        raise BackendError(f"{server.url} is no sglang server: /model_info says {info!r}"[:300], kind="wrong_server")
    if info.get("is_generation") is False:
        raise BackendError(f"{server.url} serves {info['model_path']}, which does not generate", kind="wrong_server")
    server.version = info.get("weight_version")
    if str(info["model_path"]).rstrip("/").rpartition("/")[2] != model.rstrip("/").rpartition("/")[2]:
        log.warning(
            "the server's model has another name than the spec's", url=server.url, server=info["model_path"], spec=model
        )
    details = await server.json("GET", "/server_info")
    server.seeded = bool(details.get("enable_deterministic_inference"))
    if server.seeded and sampling.min_p:
        raise BackendError(
            f"{server.url} runs with --enable-deterministic-inference, where a request with `sampling.min_p` ends the "
            "whole server: leave it out, or start the server without the flag",
            kind="bad_sampling",
        )
    await check_tokenizer(server, format)
    if format.vision is not None:
        server.images = await check_images(server, details, format, ask_worker)
    vocab_size = await _vocab_size(server)
    if vocab_size is not None:
        check_stop_ids(server, format, vocab_size)
    if layout is not None and details.get("enable_return_routed_experts") is False:
        raise BackendError(
            f"{server.url} does not report routed experts: start it with {EXPERTS_FLAG}, or remove `backend.routed_experts`",
            kind="wrong_server",
        )
    await try_sampling(
        server,
        "/generate",
        Encoder(vocab_size=vocab_size or format.vocab_size, layout=layout),
        decode,
        spec=spec,
        format=format,
        sampling=sampling,
        echo="(return_prompt_token_ids): install sglang 0.5.23",
    )
    context = details.get("max_req_input_len")
    return ServerInfo(vocab_size=vocab_size, context=int(context) if context else None)


async def _vocab_size(server: Server) -> int | None:
    """The size of the vocabulary, from the error message for an id outside of it."""
    reply = await ask_worker(server, {"input_ids": [0], **_REFUSED["logit_bias"]})
    match = _RANGE.search(error_text(reply)) if reply.status == 400 else None
    return int(match.group(1)) + 1 if match else None


async def ask_worker(server: Server, body: dict[str, Any] | bytes) -> HttpReply:
    """Send a test request to `/generate`; see `ask`."""
    return await ask(server, "/generate", body)


# -- the router


async def _workers(routers: list[Server], headers: dict[str, str]) -> list[Server]:
    """The servers behind the routers. Control calls go to them, because a router refuses such calls."""
    urls: list[str] = []
    for router in routers:
        try:
            listed = await router.json("GET", "/workers")
        except BackendError as error:
            if error.refused:
                raise OutageError(f"no sglang server can be reached: {error}", kind="unreachable") from None
            raise
        rows: list[Any] = (listed.get("workers") or listed.get("urls") or []) if isinstance(listed, dict) else listed
        urls += [row if isinstance(row, str) else row["url"] for row in rows]
    if not urls:
        names = ", ".join(router.url for router in routers)
        raise OutageError(f"the router at {names} has no workers; start them first", kind="unreachable")
    return [Server(url, headers) for url in dict.fromkeys(urls)]


async def _dropped(routers: list[Server], sampling: SamplingParams, spec: SGLangBackendSpec) -> list[str]:
    """The parameters that the routers drop.

    Raises:
        BackendError: The spec sets one of them, or a router answers with an error.
    """
    dropped: set[str] = set()
    for router in routers:
        for name, body in _REFUSED.items():
            probe = {"input_ids": [0], **body}
            probe["sampling_params"] = {"max_new_tokens": 1, **body.get("sampling_params", {})}
            if (await ask_worker(router, probe)).status == 200:
                dropped.add(name)
        reply = await ask_worker(
            router, {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}, "return_prompt_token_ids": True}
        )
        if reply.status != 200:
            raise BackendError(
                f"the router {router.url} answered {reply.status}: {error_text(reply)}", kind="wrong_server"
            )
        if b'"prompt_token_ids"' not in reply.body:
            dropped.add("return_prompt_token_ids")
        if spec.asks_experts and b'"routed_experts"' not in (await ask_worker(router, _EXPERTS_PROBE)).body:
            dropped.add("return_routed_experts")
    used = set(sampling_fields(sampling)) | ({"lora_path"} if spec.adapter else set()) | {"return_routed_experts"}
    needed = sorted(dropped & used)
    if needed:
        raise BackendError(
            f"the router does not pass on {', '.join(needed)}, which this spec sets: "
            "name the servers themselves in `urls` and leave `router` out",
            kind="bad_sampling",
        )
    if dropped:
        log.warning(
            "the router drops parameters; prompts are not compared where return_prompt_token_ids is among them",
            dropped=sorted(dropped),
        )
    return sorted(dropped)
