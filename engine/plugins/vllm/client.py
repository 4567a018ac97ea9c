"""vLLM servers as a backend.

vLLM's completions take ids and report ids, log-probs and the prompt's ids. They take no image with a prompt of ids, and
the weights stay those that the server was started with. vLLM fills in each parameter that a request leaves out with the
value of the model's `generation_config.json`, so every parameter is sent.

vLLM was started with one `--logprobs-mode`: `raw_logprobs` (its default) are those of softmax(logits);
`processed_logprobs` are those after temperature, biases, penalties, top-k, top-p and min-p. Rows hold log-probs after
temperature, biases and penalties, and before top-k, top-p and min-p. So the mode is found out before the first episode.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Self

import msgspec
import numpy as np

from engine.errors import BackendError
from engine.plugins.servers.checks import CheckedServers, ask
from engine.plugins.servers.dialect import Dialect, ReplyFields
from engine.plugins.servers.http.reply import error_text
from engine.plugins.servers.wire import EncodedRequest, ReplyError, RequestEncoder, read_reply
from engine.plugins.vllm.spec import VLLMBackendSpec
from engine.schemas.backend import changes_distribution, cuts_distribution
from engine.schemas.generation import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from engine.plugins.servers.pool import Server
    from engine.spec.load import LoadedSpec
    from engine.tokens.template import ChatTemplate

_TOKEN = "token_id:"


class _LogProbs(msgspec.Struct):
    token_logprobs: list[float | None]
    tokens: list[str]


class _Choice(msgspec.Struct):
    logprobs: _LogProbs
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage


_decoder = msgspec.json.Decoder(_Reply)
_ids_decoder = msgspec.json.Decoder(list[int])


def reply_fields(body: bytes | bytearray, sent: EncodedRequest) -> ReplyFields:
    """See `Dialect.fields`. A server before 0.10.2 has ids only in the names of the log-probs."""
    reply = _decoder.decode(body)
    choice, usage = reply.choices[0], reply.usage
    echo, names, ids = bytes(choice.prompt_token_ids), choice.logprobs.tokens, choice.token_ids
    same = echo[:1] == b"[" and sent.is_prompt(echo, 1, len(echo) - 1) and echo[-1:] == b"]"
    if ids is None:
        ids = [int(name.removeprefix(_TOKEN)) for name in names]
    matched = choice.stop_reason
    if matched is None and ids:  # the end-of-text token of the model's own configuration
        matched = ids[-1]
    cached = usage.prompt_tokens_details
    return ReplyFields(
        ids=ids,
        logprobs=choice.logprobs.token_logprobs,
        logprob_ids=ids if names == [f"{_TOKEN}{token}" for token in ids] else None,
        finish=str(choice.finish_reason),
        matched=matched if choice.finish_reason == "stop" else None,
        message="aborted" if choice.finish_reason == "abort" else None,
        echoed=same or echo not in (b"", b"null"),
        echo=None if same or echo in (b"", b"null") else _ids_decoder.decode(echo),
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=(cached.cached_tokens or 0) if cached is not None else 0,
    )


VLLM = Dialect(
    servers="vLLM",
    path="/v1/completions",
    probe="/v1/models",
    start="`vllm serve {folder}`",
    prompt="prompt",
    rid="request_id",
    length="max_tokens",
    seed="seed",
    prefixes="cache_salt",
    adapter="model",
    echo="return_token_ids",
    echo_since="vllm 0.10.2",
    always={"logprobs": 0, "return_tokens_as_token_ids": True},  # log-probs of the sampled token alone
    names={
        "min_new_tokens": "min_tokens",
        "json_schema": "structured_outputs.json",
        "regex": "structured_outputs.regex",
        "ebnf": "structured_outputs.grammar",
        "structural_tag": "structured_outputs.structural_tag",
        "no_stop_trim": None,
    },
    defaults={
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_tokens": 0,
        "ignore_eos": False,
        "stop_token_ids": [],
        "stop": [],
        # Stop strings are looked for in the text, in which the marks of the chat format are special tokens.
        "skip_special_tokens": False,
    },
    ban=-100.0,  # the lowest one that vLLM takes
    ignore_eos_needs_no_ids=True,
    fields=reply_fields,
    lowest=-9999.0,
    vocabulary=re.compile(r"[Vv]ocabulary size: (\d+)"),
)
"""vLLM's completions."""

_FORCED = 100.0
"""Logit bias that leaves one token with a probability of about 1."""


class VLLMBackend(CheckedServers):
    """Samples from one or more vLLM servers.

    backend = VLLMBackend.open(spec, chat_format, loaded)
    await backend.start()                           # reaches all servers, checks model, sampling and log-probs
    generation = await backend.generate(request)
    await backend.close()
    """

    declared = VLLMBackendSpec
    dialect = VLLM

    @classmethod
    def open(cls, spec: VLLMBackendSpec, format: ChatTemplate, loaded: LoadedSpec) -> Self:
        """See `Backend.open`.

        Raises:
            BackendError: The variable of the API key is not set, a URL is invalid, or no server can report the
                log-probs of the spec's sampling.
        """
        if (conflict := spec.conflict(loaded.spec.sampling)) is not None:
            raise BackendError(f"sampling: {conflict}", kind="unsupported_parameter")
        return super().open(spec, format, loaded)

    @classmethod
    async def served_model(cls, server: Server) -> str:
        """See `CheckedServers.served_model`."""
        base = (await _models(server))[0]
        return str(base.get("root") or base.get("id"))

    async def check_settings(self, server: Server, sampling: SamplingParams) -> int | None:
        """See `CheckedServers.check_settings`.

        Raises:
            BackendError: It cannot be reached, or does not have the spec's adapter (kind `wrong_server`).
        """
        served = await _models(server)
        names, adapter = [str(entry.get("id")) for entry in served], self._spec.adapter
        if adapter is not None and adapter not in names:
            raise BackendError(
                f"{server.url} has no adapter {adapter!r}; it has {', '.join(names)}: start it with --enable-lora "
                f"--lora-modules {adapter}=FOLDER",
                kind="wrong_server",
            )
        context = served[0].get("max_model_len")
        return int(context) if context else None

    async def check_replies(self, server: Server, sampling: SamplingParams, vocab_size: int) -> None:
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


async def _models(server: Server) -> list[dict[str, Any]]:
    """The models that a server lists: the base model, then its adapters."""
    reply = await server.json("GET", "/v1/models")
    data = reply.get("data") if isinstance(reply, dict) else None
    if not isinstance(data, list) or not data or not all(isinstance(entry, dict) for entry in data):
        raise BackendError(f"{server.url} is no vLLM server: /v1/models says {reply!r}"[:300], kind="wrong_server")
    return sorted(data, key=lambda entry: entry.get("parent") is not None)


async def _processed(server: Server, vocab_size: int) -> bool:
    """Whether log-probs are those after logit biases, and so after temperature and penalties.

    Two tokens are forced, one after the other, each by a logit bias: after the bias each one's probability is about 1,
    and before it at most one of them is above one half.
    """
    likely = []
    encoder = RequestEncoder(VLLM, vocab_size=vocab_size)
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
        reply = await ask(server, VLLM.path, b"".join(sent.pieces))
        try:
            if reply.status != 200:
                raise ReplyError(f"status {reply.status}: {error_text(reply)}")
            part = read_reply(VLLM, reply.body, sent, vocab_size)
            if part.ids.tolist() != [token]:
                raise ReplyError(f"a logit bias of {_FORCED:g} did not force token {token}")
        except ReplyError as error:
            raise BackendError(
                f"{server.url}: it cannot be found out which log-probs it reports: {error}", kind="bad_sampling"
            ) from None
        likely.append(float(part.logprobs[0]) > math.log(0.5))
    return all(likely)
