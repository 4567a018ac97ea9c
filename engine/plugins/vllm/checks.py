"""Checks of the servers before the first episode, so that a run does not fail at its hundredth turn.

For each server: its model, its context, its vocabulary, whether its tokenizer gives the same ids, whether it accepts the spec's
sampling and reports its prompt, and which log-probs it reports. vLLM was started with one `--logprobs-mode`: `raw_logprobs`
(its default) are those of softmax(logits); `processed_logprobs` are those after temperature, biases, penalties, top-k, top-p
and min-p. Rows hold log-probs after temperature, biases and penalties, and before top-k, top-p and min-p.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import structlog

from engine.backends.http.reply import error_text
from engine.backends.servers.pool import Pool, Server
from engine.backends.servers.requests import ask, check_each, check_stop_ids, check_tokenizer, try_sampling
from engine.backends.servers.wire import ReplyError
from engine.errors import BackendError, OutageError
from engine.plugins.vllm.wire import Encoder, decode
from engine.schemas.backend import changes_distribution, cuts_distribution
from engine.schemas.generation import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from engine.plugins.vllm.spec import VLLMBackendSpec
    from engine.tokens.template import ChatTemplate

log = structlog.get_logger(__name__)

PATH = "/v1/completions"
_VOCABULARY = re.compile(r"[Vv]ocabulary size: (\d+)")
_FORCED = 100.0
"""Logit bias that leaves one token with a probability of about 1."""


class Facts(NamedTuple):
    """Facts about one server, or about all of them together."""

    vocab_size: int
    """Ids below it may be sent."""
    context: int | None
    """Maximum length of prompt and reply together; None: not reported."""


async def check_servers(
    pool: Pool, spec: VLLMBackendSpec, format: ChatTemplate, sampling: SamplingParams, model: str
) -> Facts:
    """Check all servers at once. A server that cannot be reached is left out until it is back, if another one is available.

    Raises:
        OutageError: No server can be reached.
        BackendError: A server has another model, or cannot sample as this spec asks.
    """
    found = await check_each(
        pool, pool.servers, lambda server: check_server(server, spec, format, sampling, model), "vLLM"
    )
    contexts = [facts.context for facts in found if facts.context is not None]
    return Facts(min(facts.vocab_size for facts in found), min(contexts, default=None))


async def check_server(
    server: Server, spec: VLLMBackendSpec, format: ChatTemplate, sampling: SamplingParams, model: str
) -> Facts:
    """Check one server: at the start, and when it is back after a failure, since it may serve another model then.

    Raises:
        BackendError: It cannot be reached (kind `unreachable`), or cannot serve this spec.
    """
    served = await _models(server)
    base = served[0]
    names = [str(entry.get("id")) for entry in served]
    if spec.adapter is not None and spec.adapter not in names:
        raise BackendError(
            f"{server.url} has no adapter {spec.adapter!r}; it has {', '.join(names)}: start it with --enable-lora "
            f"--lora-modules {spec.adapter}=FOLDER",
            kind="wrong_server",
        )
    root = str(base.get("root") or base.get("id"))
    if _last(root) != _last(model):
        log.warning("the server's model has another name than the spec's", url=server.url, server=root, spec=model)
    await check_tokenizer(server, format)
    vocab_size = await _vocab_size(server) or format.vocab_size
    check_stop_ids(server, format, vocab_size)
    await try_sampling(
        server,
        PATH,
        Encoder(vocab_size=vocab_size),
        decode,
        spec=spec,
        format=format,
        sampling=sampling,
        echo="(return_token_ids): install vllm 0.10.2",
    )
    await _check_logprobs(server, sampling, vocab_size)
    context = base.get("max_model_len")
    return Facts(vocab_size, int(context) if context else None)


async def check_model_path(urls: list[str], headers: dict[str, str], folder: Path) -> None:
    """Check that every server was started with the model in `folder`.

    Raises:
        OutageError: A server cannot be reached.
        BackendError: A server has another model (kind `wrong_server`), or refuses to answer.
    """
    for url in urls:
        server = Server(url, headers)
        try:
            served = await _models(server)
        except BackendError as error:
            raise OutageError(str(error), kind="unreachable") if error.refused else error from None
        finally:
            await server.http.close()
        root = served[0].get("root")
        if Path(str(root)).resolve() != folder:  # noqa: ASYNC240  (before a run: nothing else waits)
            raise BackendError(
                f"{url} samples with the weights of {root}, not of {folder}: start it with `vllm serve {folder}`, or "
                "evaluate in this process with --set 'backend={kind: local}'",
                kind="wrong_server",
            )


async def _models(server: Server) -> list[dict[str, Any]]:
    """The models that a server lists: the base model, then its adapters."""
    reply = await server.json("GET", "/v1/models")
    data = reply.get("data") if isinstance(reply, dict) else None
    if not isinstance(data, list) or not data or not all(isinstance(entry, dict) for entry in data):
        raise BackendError(f"{server.url} is no vLLM server: /v1/models says {reply!r}"[:300], kind="wrong_server")
    return sorted(data, key=lambda entry: entry.get("parent") is not None)


async def _vocab_size(server: Server) -> int | None:
    """The size of the vocabulary, from the error message for an id outside of it."""
    body = {"prompt": [0], "max_tokens": 1, "logit_bias": {"2147483647": 0.0}}
    reply = await ask(server, PATH, body)
    match = _VOCABULARY.search(error_text(reply)) if reply.status == 400 else None
    return int(match.group(1)) if match else None


async def _check_logprobs(server: Server, sampling: SamplingParams, vocab_size: int) -> None:
    """Check that the server's log-probs are those that rows hold, where the two modes differ.

    Raises:
        BackendError: They are not (kind `bad_sampling`); the message says with which argument to start the server.
    """
    changed, cut = changes_distribution(sampling), cuts_distribution(sampling)
    if not changed and not cut:
        return
    processed = await _processed(server, vocab_size)
    if changed and not processed:
        raise BackendError(
            f"{server.url} reports log-probs without `sampling.{changed[0]}`: start it with "
            f"--logprobs-mode processed_logprobs, or leave `{changed[0]}` out",
            kind="bad_sampling",
        )
    if cut and processed:
        raise BackendError(
            f"{server.url} reports log-probs of the tokens that `sampling.{cut[0]}` leaves: start it without "
            f"--logprobs-mode processed_logprobs, or leave `{cut[0]}` out",
            kind="bad_sampling",
        )


async def _processed(server: Server, vocab_size: int) -> bool:
    """Whether log-probs are those after logit biases, and so after temperature and penalties.

    Two tokens are forced, one after the other, each by a logit bias: after the bias each one's probability is about 1, and
    before it at most one of them is above one half.
    """
    likely = []
    encoder = Encoder(vocab_size=vocab_size)
    for token in (vocab_size // 2, vocab_size // 2 + 1):
        request = GenerateRequest(
            episode_id="probe",
            turn=0,
            input_ids=np.zeros(1, dtype=np.int32),
            sampling=SamplingParams(temperature=0.0, logit_bias={str(token): _FORCED}, ignore_eos=True),
            max_new_tokens=1,
            stop_token_ids=[],
            seed=0,
        )
        sent = encoder.encode(request, f"probe-{token}", request.input_ids, 1)
        reply = await ask(server, PATH, b"".join(sent.pieces))
        try:
            if reply.status != 200:
                raise ReplyError(f"status {reply.status}: {error_text(reply)}")
            part = decode(reply.body, sent, vocab_size)
            if part.ids.tolist() != [token]:
                raise ReplyError(f"a logit bias of {_FORCED:g} did not force token {token}")
        except ReplyError as error:
            raise BackendError(
                f"{server.url}: it cannot be found out which log-probs it reports: {error}", kind="bad_sampling"
            ) from None
        likely.append(float(part.logprobs[0]) > math.log(0.5))
    return all(likely)


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
