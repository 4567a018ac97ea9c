"""OpenAI-compatible chat endpoints, for evaluation: messages are sent, text and tool calls are returned.

Such an endpoint returns no token ids, so nothing here is exact and no row trains. It returns tool calls apart from the
text; they are written into the text as the spec's chat format writes calls, so that the engine reads one kind of reply.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import structlog

from engine.backends.base import Backend, refuse_parameters
from engine.backends.calls import write_calls
from engine.backends.http.client import HttpClient
from engine.backends.http.keys import key_headers, read_key
from engine.backends.http.outage import Outage
from engine.backends.http.refusal import UNAVAILABLE, refusal
from engine.backends.http.reply import HttpFailure
from engine.backends.http.retries import Tries
from engine.deadline import Deadlines
from engine.errors import BackendError, OutageError
from engine.schemas.backend import OpenAIBackendSpec
from engine.schemas.generation import FinishReason, GenerateRequest, Generation, SamplingParams
from engine.schemas.message import Message, TextPart
from engine.tokens.images import DIGEST

if TYPE_CHECKING:
    from engine.schemas.backend import OpenAIBackendSpec
    from engine.spec.load import LoadedSpec
    from engine.tokens.format import ChatFormat

log = structlog.get_logger(__name__)

_TOKEN_BYTES = 4096
_REST_BYTES = 4 << 20
_NO_IDS = np.zeros(0, dtype=np.int32)
_NO_LOGPROBS = np.zeros(0, dtype=np.float32)


class _Function(msgspec.Struct):
    name: str = ""
    arguments: str | dict[str, Any] = ""


class _Call(msgspec.Struct):
    function: _Function


class _Message(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_Call] | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None
    matched_stop: int | str | None = None


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Cached | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


_decoder = msgspec.json.Decoder(_Completion)


class OpenAIBackend(Backend):
    """Sends requests to `/chat/completions`."""

    declared = OpenAIBackendSpec

    def __init__(self, spec: OpenAIBackendSpec, format: ChatFormat, *, api_key: str | None = None) -> None:
        """Nothing is opened yet.

        Raises:
            ValueError: The URL is not the URL of a server.
        """
        self._spec = spec
        self._format = format
        self._http = HttpClient(spec.url, headers=key_headers(api_key))
        self._length_name = "max_tokens"
        self._closed = False
        self._counts: Counter[str] = Counter()
        self._deadlines = Deadlines(spec.timeout)
        self._try_deadlines = Deadlines(spec.try_timeout or spec.timeout / 2)
        self.outage: Outage = Outage(spec.wait)
        self.outage.clocks.add(self._deadlines)
        self.outage.clocks.add(self._try_deadlines)

    @classmethod
    def open(cls, spec: OpenAIBackendSpec, format: ChatFormat, loaded: LoadedSpec) -> OpenAIBackend:
        """See `Backend.open`.

        Raises:
            BackendError: The spec's sampling sets a parameter that the protocol does not have, the variable of the key is
                not set, or the URL is invalid.
        """
        refuse_parameters(cls.declared, loaded.spec.sampling)
        try:
            return cls(spec, format, api_key=read_key(spec.api_key_env))
        except ValueError as error:
            raise BackendError(f"backend.url: {error}", kind="bad_url") from None

    async def start(self) -> None:
        """Reach the endpoint. Its list of models is not checked, because many endpoints have none.

        Raises:
            OutageError: It cannot be reached.
            BackendError: It refuses the key.
        """
        try:
            async with asyncio.timeout(min(30.0, self._spec.timeout)):
                reply = await self._http.request("GET", "/models")
        except TimeoutError:
            raise OutageError(f"{self._spec.url} did not answer", kind="unreachable") from None
        except HttpFailure as failure:
            raise OutageError(f"{self._spec.url}: {failure}", kind="unreachable") from None
        if reply.status in (401, 403):
            raise refusal(self._spec.url, reply)
        if reply.status in UNAVAILABLE:
            raise OutageError(str(refusal(self._spec.url, reply)), kind="unreachable")

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one reply, as text; its arrays of ids and log-probs are empty.

        Raises:
            ContextOverflow: The conversation does not fit the model.
            OutageError: The endpoint has not replied to any request for `backend.wait`.
            BackendError: No usable reply; kinds `timeout`, `unreachable`, `rate_limited`, `unavailable`, `server_error`,
                `bad_reply`, `bad_request`, `unauthorized`, `not_found`, `closed`.
        """
        if request.messages is None:
            raise BackendError("an openai backend needs the messages of the request", kind="bad_request")
        began = time.perf_counter()
        try:
            with self._deadlines.begin():
                completion = await self._completion(request)
        except TimeoutError:
            raise BackendError(f"no reply within {self._spec.timeout:g} s", kind="timeout") from None
        choice, usage = completion.choices[0], completion.usage or _Usage()
        details = usage.prompt_tokens_details or _Cached()
        self._counts["turns"] += 1
        self._counts["prompt_tokens"] += usage.prompt_tokens
        self._counts["tokens"] += usage.completion_tokens
        return Generation(
            output_ids=_NO_IDS,
            logprobs=_NO_LOGPROBS,
            finish=_finish(choice),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=details.cached_tokens or 0,
            seconds=time.perf_counter() - began,
            text=self._text(choice.message),
        )

    async def close(self) -> None:
        """Close all connections. Calls in flight raise `BackendError`."""
        self._closed = True
        self.outage.end()
        await self._http.close()

    def stats(self) -> dict[str, Any]:
        """Counts since the start."""
        return {
            name: self._counts[name]
            for name in ("turns", "prompt_tokens", "tokens", "attempts", "retries", "bad_replies", "try_timeouts")
        } | self.outage.stats()

    async def _completion(self, request: GenerateRequest) -> _Completion:
        """The reply, after failed attempts were repeated. An attempt that the endpoint did not work on is not counted."""
        tries = Tries(self._spec.retries, self.outage)
        while True:
            if self.outage.closed:
                await self.outage.wait()
            try:
                completion = await self._attempt(request)
            except BackendError as error:
                if self._closed:
                    raise BackendError("the backend was closed", kind="closed") from None
                if error.refused:
                    self.outage.rest(str(error), error.retry_after)
                if not tries.another(error):
                    raise
                self._counts["retries"] += 1
                log.info("retrying", episode=request.episode_id, turn=request.turn, reason=str(error))
                if error.refused:
                    continue
            else:
                if self.outage.since is not None:
                    self.outage.served()
                return completion
            await asyncio.sleep(tries.pause)

    async def _attempt(self, request: GenerateRequest) -> _Completion:
        self._counts["attempts"] += 1
        try:
            body = msgspec.json.encode(self._body(request))
            with self._try_deadlines.begin():
                reply = await self._http.request("POST", "/chat/completions", body, most=_most(request))
        except HttpFailure as failure:
            message = f"{self._spec.url}: {failure}"
            raise BackendError(message, kind="unreachable", retryable=True, refused=not failure.sent) from None
        except TimeoutError:
            self._counts["try_timeouts"] += 1
            message = f"{self._spec.url} did not reply within {self._try_deadlines.seconds:g} s (`backend.try_timeout`)"
            raise BackendError(message, kind="timeout", retryable=True) from None
        if reply.status == 400 and self._length_name == "max_tokens" and b"max_completion_tokens" in reply.body:
            self._length_name = "max_completion_tokens"  # the newer name; some endpoints accept no other
            return await self._attempt(request)
        if reply.status != 200:
            raise refusal(self._spec.url, reply)
        try:
            completion = _decoder.decode(reply.body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._counts["bad_replies"] += 1
            message = f"{self._spec.url} sent a reply that cannot be used: {error}"
            raise BackendError(message, kind="bad_reply", retryable=True) from None
        if not completion.choices:
            self._counts["bad_replies"] += 1
            raise BackendError(f"{self._spec.url} sent a reply without choices", kind="bad_reply", retryable=True)
        return completion

    def _body(self, request: GenerateRequest) -> dict[str, Any]:
        assert request.messages is not None
        body: dict[str, Any] = {
            "model": self._spec.model,
            "messages": [_message(message, self._url_of) for message in request.messages],
            self._length_name: request.max_new_tokens,
            "seed": request.seed % 2**31,  # the range that every endpoint accepts
            **_sampling(request.sampling),
        }
        if request.tools:
            body["tools"] = request.tools
        return body

    def _url_of(self, image: str) -> str:
        """An image's reference in the form of the protocol: an image in the run store becomes a `data:` URL."""
        if image.startswith(DIGEST) and self._format.vision is not None:
            return self._format.vision.bank.data_uri(image)
        if not image.startswith(("data:", "http://", "https://")):
            raise BackendError("an openai backend takes images as data: or http(s) URLs", kind="unsupported")
        return image

    def _text(self, message: _Message) -> str:
        """The reply with its tool calls written as the spec's chat format writes them."""
        text = message.content or ""
        if not message.tool_calls:
            return text
        calls: list[tuple[str, dict[str, Any]]] = []
        for call in message.tool_calls:
            arguments: Any = call.function.arguments
            if isinstance(arguments, str):
                try:
                    arguments = msgspec.json.decode(arguments or "{}")
                except msgspec.DecodeError:
                    arguments = None
            if not isinstance(arguments, dict):
                return text + _as_written(message.tool_calls)
            calls.append((call.function.name, arguments))
        return self._format.decode(write_calls(self._format, text, calls))


def _as_written(calls: list[_Call]) -> str:
    """Calls whose arguments are not a JSON object, as they arrived: the engine then answers that they are malformed."""
    return "".join(
        f'\n<tool_call>\n{{"name": "{call.function.name}", "arguments": {call.function.arguments}}}\n</tool_call>'
        for call in calls
    )


def _most(request: GenerateRequest) -> int:
    """Maximum size of a reply in bytes: its tokens, with reasoning, and everything else."""
    return _REST_BYTES + _TOKEN_BYTES * request.max_new_tokens


def _finish(choice: _Choice) -> FinishReason:
    if choice.finish_reason == "length":
        return FinishReason(type="length")
    if choice.finish_reason in ("content_filter", "abort"):
        return FinishReason(type="abort", message=choice.finish_reason)
    return FinishReason(type="stop", matched=choice.matched_stop)


def _sampling(sampling: SamplingParams) -> dict[str, Any]:
    names = ("top_p", "frequency_penalty", "presence_penalty", "logit_bias")
    fields = {name: getattr(sampling, name) for name in names if getattr(sampling, name) is not None}
    fields["temperature"] = sampling.temperature
    if sampling.stop:
        fields["stop"] = sampling.stop
    return fields


def _message(message: Message, url_of: Callable[[str], str]) -> dict[str, Any]:
    """A message in the form of the protocol. Reasoning is left out: endpoints do not accept it."""
    made: dict[str, Any] = {"role": message.role, "content": _content(message, url_of)}
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": msgspec.json.encode(call.arguments).decode()},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    return made


def _content(message: Message, url_of: Callable[[str], str]) -> str | list[dict[str, Any]]:
    if isinstance(message.content, str):
        return message.content
    return [
        {"type": "text", "text": part.text}
        if isinstance(part, TextPart)
        else {"type": "image_url", "image_url": {"url": url_of(part.image)}}
        for part in message.content
    ]
