"""Chat APIs: messages and tools are sent, text and tool calls are returned. The base class of their backends.

Such an endpoint returns no token ids, so nothing here is exact and no row trains. Tool calls come back apart from the
text, and stay apart: text that only looks like a call is no call.

Invariant: each tool call that is sent has exactly one result, directly after its message, and each result that is sent
as one belongs to a call. APIs refuse everything else with status 400. So a call without a result of its own (an
environment read it, or nothing executed it) gets one that points to what follows, and the answer to a malformed call,
which the assistant message does not have as a call, is sent as a message of the user.
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import msgspec
import numpy as np
import structlog

from engine.backends.backend import Backend
from engine.backends.outage import Outage, Tries
from engine.backends.registry import refuse_parameters
from engine.deadline import Deadlines
from engine.errors import BackendError, OutageError
from engine.plugins.chat_apis.budget import Budget, Usage
from engine.plugins.chat_apis.spec import ApiBackendSpec
from engine.plugins.servers.http.client import HttpClient, key_headers, read_key
from engine.plugins.servers.http.reply import UNAVAILABLE, HttpFailure, HttpReply, refusal
from engine.plugins.servers.wire import ReplyError
from engine.schemas.generation import FinishReason, GenerateRequest, Generation
from engine.schemas.message import MalformedCall, Message, ToolCall
from engine.tokens.images import DIGEST
from engine.tokens.toolcalls import storable_call

if TYPE_CHECKING:
    from engine.spec.load import LoadedSpec
    from engine.tokens.template import ChatTemplate

log = structlog.get_logger(__name__)

NO_RESULT = "No result of its own: see the following messages."
_TOKEN_BYTES = 4096
_REST_BYTES = 4 << 20
_NO_IDS = np.zeros(0, dtype=np.int32)
_NO_LOGPROBS = np.zeros(0, dtype=np.float32)


class ApiAnswer(msgspec.Struct, frozen=True):
    """What an API replied."""

    text: str
    finish: FinishReason
    usage: Usage | None
    reasoning: str | None = None
    calls: list[tuple[str, Any]] = []
    """Name and arguments of each tool call; the arguments as an object or as JSON text."""
    signed: list[dict[str, Any]] | None = None
    """See `Generation.signed`."""


class ApiBackend(Backend):
    """Sends requests to a chat API. A subclass knows one protocol: `path`, `body`, `read`, and `headers` if it has its
    own."""

    path: ClassVar[str]
    """Where replies are requested, below the URL."""
    budget: Budget | None = None
    """What the run may cost. A backend whose config has `prices` asks before each request, and charges each reply."""

    def __init__(self, spec: Any, format: ChatTemplate, *, api_key: str | None = None) -> None:
        """Nothing is opened yet.

        Raises:
            ValueError: The URL is not the URL of a server.
        """
        self._spec: ApiBackendSpec = spec
        self._format = format
        self._http = HttpClient(spec.url, headers=self.headers(api_key))
        self._closed = False
        self._counts: Counter[str] = Counter()
        self._cost = 0.0
        self._pace = Pace(spec.requests_per_minute, spec.tokens_per_minute)
        self._deadlines = Deadlines(spec.timeout)
        self._try_deadlines = Deadlines(spec.try_timeout or spec.timeout / 2)
        self.outage: Outage = Outage(spec.wait)
        self.outage.clocks.add(self._deadlines)
        self.outage.clocks.add(self._try_deadlines)

    @classmethod
    def open(cls, spec: Any, format: ChatTemplate, loaded: LoadedSpec) -> Self:
        """See `Backend.open`.

        Raises:
            BackendError: The spec's sampling sets a parameter that the protocol does not have, the variable of the key
                is not set, or the URL is invalid.
        """
        refuse_parameters(spec, loaded.spec.sampling)
        try:
            return cls(spec, format, api_key=read_key(spec.api_key_env))
        except ValueError as error:
            raise BackendError(f"backend.url: {error}", kind="bad_url") from None

    # --- the protocol -------------------------------------------------------------------------------------

    def headers(self, api_key: str | None) -> dict[str, str]:
        """The headers of every request."""
        return key_headers(api_key)

    @abstractmethod
    def body(self, request: GenerateRequest, messages: list[Message]) -> dict[str, Any]:
        """The body of a request.

        Args:
            request: The request.
            messages: Its messages, with calls and results in pairs.

        Raises:
            BackendError: The protocol cannot say it.
        """

    @abstractmethod
    def read(self, body: bytes) -> ApiAnswer:
        """Read a reply with status 200.

        Raises:
            ReplyError, msgspec.DecodeError, UnicodeDecodeError: It is not of the API's form.
        """

    def adapts(self, reply: HttpReply, sent: bytes) -> bool:
        """Whether a refused request is to be sent once more, because its next body differs from the one that was
        sent."""
        return False

    def pause(self, reply: HttpReply) -> float | None:
        """Seconds for which no request should be sent, by the reply's headers other than `Retry-After`; None: they do
        not say."""
        return None

    # ------------------------------------------------------------------------------------------------------

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
            BudgetError: The run has cost what it may cost.
            BackendError: No usable reply; kinds `timeout`, `unreachable`, `rate_limited`, `unavailable`,
                `server_error`, `bad_reply`, `bad_request`, `unauthorized`, `not_found`, `closed`, `no_usage`.
        """
        if request.messages is None:
            raise BackendError(f"the {self._spec.kind} backend needs the messages of the request", kind="bad_request")
        await self._pace.take(_estimate(request))  # before the deadline begins
        began = time.perf_counter()
        try:
            with self._deadlines.begin():
                answer = await self._answer(request, request.messages)
        except TimeoutError:
            raise BackendError(f"no reply within {self._spec.timeout:g} s", kind="timeout") from None
        usage = answer.usage or Usage()
        if answer.usage is not None:
            self._pace.correct(_estimate(request), usage.prompt + usage.output)
        cost = self._charge(request, answer.usage)
        self._counts["turns"] += 1
        self._counts["prompt_tokens"] += usage.prompt
        self._counts["cached_tokens"] += usage.cached
        self._counts["cache_write_tokens"] += usage.cache_write
        self._counts["tokens"] += usage.output
        return Generation(
            output_ids=_NO_IDS,
            logprobs=_NO_LOGPROBS,
            finish=answer.finish,
            prompt_tokens=usage.prompt,
            cached_tokens=usage.cached,
            seconds=time.perf_counter() - began,
            text=answer.text,
            reasoning=answer.reasoning,
            signed=answer.signed,
            calls=[_read_call(f"call_{request.turn}_{index}", *call) for index, call in enumerate(answer.calls)],
            sampled_tokens=usage.output,
            cost=cost,
        )

    def _charge(self, request: GenerateRequest, usage: Usage | None) -> float:
        """The cost of a reply, after it was added to the budget; 0 without prices."""
        prices = self._spec.prices
        if prices is None:
            return 0.0
        if usage is None:
            raise BackendError(
                f"{self._spec.url} sent a reply without `usage`, so its cost is not known: remove `prices`, or use an "
                "endpoint that counts tokens",
                kind="no_usage",
            )
        cost = usage.cost(prices)
        self._cost += cost
        if self.budget is not None:
            self.budget.charge(cost, usage, episode=request.episode_id, turn=request.turn, model=self._spec.model)
        return cost

    async def close(self) -> None:
        """Close all connections. Calls in flight raise `BackendError`."""
        self._closed = True
        self.outage.end()
        await self._http.close()

    def stats(self) -> dict[str, Any]:
        """Counts since the start; with `prices` also the cost."""
        names = (
            *("turns", "prompt_tokens", "cached_tokens", "cache_write_tokens", "tokens"),
            *("attempts", "retries", "bad_replies", "try_timeouts"),
        )
        cost = {} if self._spec.prices is None else {"cost": self._cost}
        paced = {"paced_seconds": round(self._pace.waited, 3)}
        return {name: self._counts[name] for name in names} | cost | paced | self.outage.stats()

    async def _answer(self, request: GenerateRequest, messages: list[Message]) -> ApiAnswer:
        """The reply, after failed attempts were repeated. An attempt that the endpoint did not work on is not
        counted."""
        tries = Tries(self._spec.retries, self.outage)
        sent = paired(messages)
        while True:
            if self.outage.closed:
                await self.outage.wait()
            if self.budget is not None:
                self.budget.check()
            try:
                answer = await self._attempt(request, sent)
            except BackendError as error:
                if self._closed:
                    raise BackendError("the backend was closed", kind="closed") from None
                if error.refused:
                    self.outage.rest(str(error), error.retry_after)
                if not tries.another(error):
                    raise
                self._counts["retries"] += 1
                await self._pace.take(0 if error.refused else _estimate(request))
                log.info("retrying", episode=request.episode_id, turn=request.turn, reason=str(error))
                if error.refused:
                    continue
            else:
                if self.outage.since is not None:
                    self.outage.served()
                return answer
            await asyncio.sleep(tries.pause)

    async def _attempt(self, request: GenerateRequest, messages: list[Message]) -> ApiAnswer:
        self._counts["attempts"] += 1
        try:
            body = msgspec.json.encode(self.body(request, messages))
            most = _REST_BYTES + _TOKEN_BYTES * request.max_new_tokens  # with reasoning
            with self._try_deadlines.begin():
                reply = await self._http.request("POST", self.path, body, most=most)
        except HttpFailure as failure:
            message = f"{self._spec.url}: {failure}"
            raise BackendError(message, kind="unreachable", retryable=True, refused=not failure.sent) from None
        except TimeoutError:
            self._counts["try_timeouts"] += 1
            message = f"{self._spec.url} did not reply within {self._try_deadlines.seconds:g} s (`backend.try_timeout`)"
            raise BackendError(message, kind="timeout", retryable=True) from None
        if reply.status != 200:
            if self.adapts(reply, body):
                return await self._attempt(request, messages)
            if reply.retry_after is None:
                reply = msgspec.structs.replace(reply, retry_after=self.pause(reply))
            raise refusal(self._spec.url, reply)
        if seconds := self.pause(reply):
            self._pace.rest(seconds)
        try:
            return self.read(reply.body)
        except (ReplyError, msgspec.DecodeError, UnicodeDecodeError) as error:
            self._counts["bad_replies"] += 1
            message = f"{self._spec.url} sent a reply that cannot be used: {error}"
            raise BackendError(message, kind="bad_reply", retryable=True) from None

    def image_url(self, image: str) -> str:
        """An image's reference as a URL: an image in the run store becomes a `data:` URL.

        Raises:
            BackendError: Kind `unsupported`: it is a path.
        """
        if image.startswith(DIGEST) and self._format.vision is not None:
            return self._format.vision.bank.data_uri(image)
        if not image.startswith(("data:", "http://", "https://")):
            raise BackendError(
                f"the {self._spec.kind} backend takes images as data: or http(s) URLs", kind="unsupported"
            )
        return image


def paired(messages: Sequence[Message]) -> list[Message]:
    """The messages, with calls and results in pairs; all texts are kept."""
    sent: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        if message.role == "tool":
            sent.append(_as_user(message))
            continue
        sent.append(message)
        if not message.tool_calls:
            continue
        results: dict[str | None, Message] = {}
        others: list[Message] = []
        called = {call.id for call in message.tool_calls}
        while at < len(messages) and messages[at].role == "tool":
            result = messages[at]
            at += 1
            if result.tool_call_id in called and result.tool_call_id not in results:
                results[result.tool_call_id] = result
            else:
                others.append(_as_user(result))
        for call in message.tool_calls:
            missing = Message(role="tool", content=NO_RESULT, tool_call_id=call.id, name=call.name)
            sent.append(results.get(call.id, missing))
        sent += others
    return sent


def _as_user(message: Message) -> Message:
    return replace(message, role="user", tool_call_id=None, name=None)


def _read_call(id_: str, name: str, arguments: Any) -> ToolCall | MalformedCall:
    """A call, read; or malformed if its arguments are not a JSON object."""
    read, problem = arguments, ""
    if isinstance(arguments, str):
        try:
            read = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, UnicodeError) as error:
            read, problem = None, f": {error}"
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    raw = f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'
    if isinstance(read, dict):
        return storable_call(id_, name, read, raw)
    return MalformedCall(raw=raw, problem=f"The arguments of `{name}` are not a JSON object{problem}.")


def _estimate(request: GenerateRequest) -> int:
    """Tokens that a request may have, with its reply."""
    return len(request.input_ids) + request.max_new_tokens


# Limits of requests and tokens a minute: over any time `t`, at most `limit * (1 + t / 60)` requests, and tokens as
# estimated, are sent; a request that is larger than a minute's tokens is sent alone, when a whole minute's are free.
_MINUTE = 60.0
_ROUNDING = 1e-6
"""Seconds below which a wait is an error of rounding."""


class _Bucket:
    """Amounts that become free at a constant rate, up to those of one minute."""

    __slots__ = ("_at", "_free", "_limit")

    def __init__(self, limit: int, now: float) -> None:
        self._limit = self._free = float(limit)
        self._at = now

    def seconds(self, amount: float, now: float) -> float:
        """Seconds until `amount` is free; of more than a minute's, until all of it is."""
        self._free = min(self._limit, self._free + (now - self._at) * self._limit / _MINUTE)
        self._at = now
        return max(0.0, (min(amount, self._limit) - self._free) * _MINUTE / self._limit)

    def take(self, amount: float) -> None:
        """Take an amount (or give it back, if negative); what is missing has to become free first."""
        self._free = min(self._limit, self._free - amount)


class Pace:
    """Makes requests wait, first come, first served, so that the limits of an API are kept.

        pace = Pace(requests=500, tokens=30_000)
        await pace.take(1200)           # an estimate: prompt and longest reply
        pace.correct(1200, 800)         # what the API counted

    Args:
        requests: Requests a minute; None: any number.
        tokens: Tokens a minute; None: any number.
        clock: The time in seconds.
        sleep: Waits for some seconds.
    """

    def __init__(
        self,
        requests: int | None,
        tokens: int | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._requests = None if requests is None else _Bucket(requests, clock())
        self._tokens = None if tokens is None else _Bucket(tokens, clock())
        self._turn = asyncio.Lock()
        self._rests_until = 0.0
        self.waited = 0.0
        """Seconds that requests waited, the waiting in line not counted."""

    async def take(self, tokens: int) -> None:
        """Wait until a request with so many tokens may be sent."""
        if self._requests is None and self._tokens is None and self._rests_until <= self._clock():
            return
        async with self._turn:
            while True:
                now = self._clock()
                wants = ((self._requests, 1), (self._tokens, tokens))
                waits = [bucket.seconds(amount, now) for bucket, amount in wants if bucket is not None]
                seconds = max([self._rests_until - now, *waits])
                if seconds <= _ROUNDING:
                    break
                self.waited += seconds
                await self._sleep(seconds)
            if self._requests is not None:
                self._requests.take(1)
            if self._tokens is not None:
                self._tokens.take(tokens)

    def rest(self, seconds: float) -> None:
        """Let no request begin for some seconds, because the API said that nothing is left of a limit."""
        self._rests_until = max(self._rests_until, self._clock() + seconds)

    def correct(self, estimated: int, counted: int) -> None:
        """Replace an estimate by what the API counted."""
        if self._tokens is not None:
            self._tokens.take(counted - estimated)
