"""Checks of servers before the first episode, so that a run does not fail at its hundredth turn: their replies to test
requests."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec
import numpy as np
import structlog

from engine.errors import BackendError, OutageError
from engine.plugins.servers.backend import ServersBackend
from engine.plugins.servers.http.client import key_headers, read_key
from engine.plugins.servers.http.reply import HttpReply, error_text
from engine.plugins.servers.launched import launched_servers
from engine.plugins.servers.pool import Server
from engine.plugins.servers.wire import ReplyError, RequestEncoder, read_reply
from engine.schemas.generation import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from engine.spec.load import LoadedSpec
    from engine.tokens.template import ChatTemplate

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
    return await server.ask("POST", path, data, timeout=TRIAL_SECONDS)


class CheckedServers(ServersBackend):
    """Servers that are checked before the first episode, and when one is back. A subclass knows one kind."""

    @classmethod
    def open(cls, spec: Any, format: ChatTemplate, loaded: LoadedSpec) -> Self:
        """See `Backend.open`.

        Raises:
            BackendError: The variable of the API key is not set, or a URL is invalid.
        """
        launched, key = launched_servers(spec, loaded), read_key(spec.api_key_env)
        try:
            return cls(
                spec,
                format,
                sampling=loaded.spec.sampling,
                model=loaded.spec.model.path,
                api_key=key,
                launched=launched,
            )
        except ValueError as error:
            raise BackendError(f"backend.urls: {error}", kind="bad_url") from None

    @classmethod
    async def check_weights(cls, spec: Any, folder: Path) -> None:
        """Check that every server was started with the model in `folder`.

        Raises:
            OutageError: A server cannot be reached.
            BackendError: A server has another model (kind `wrong_server`), or refuses to answer.
        """
        headers = key_headers(read_key(spec.api_key_env))
        for url in spec.urls:
            server = Server(url, headers)
            try:
                served = await cls.served_model(server)
            except BackendError as error:
                raise OutageError(str(error), kind="unreachable") if error.refused else error from None
            finally:
                await server.http.close()
            if Path(served).resolve() != folder:  # noqa: ASYNC240  (before a run: nothing else waits)
                raise BackendError(
                    f"{url} samples with the weights of {served}, not of {folder}: start it with "
                    f"{cls.dialect.start.format(folder=folder)}, or evaluate in this process with --set "
                    "'backend={kind: local}'",
                    kind="wrong_server",
                )

    @classmethod
    @abstractmethod
    async def served_model(cls, server: Server) -> str:
        """The model that a server was started with: its folder or name.

        Raises:
            BackendError: It cannot be reached, or is another kind of server (kind `wrong_server`).
        """

    @abstractmethod
    async def check_settings(self, server: Server, sampling: SamplingParams) -> int | None:
        """Check how a server was started. Returns the maximum length of prompt and reply together; None: it is not
        reported.

        Raises:
            BackendError: It cannot be reached, or cannot serve this spec.
        """

    async def check_replies(self, server: Server, sampling: SamplingParams, vocab_size: int) -> None:
        """Check what else a server reports, after it has sampled a token.

        Raises:
            BackendError: It reports something else than rows need.
        """

    async def check_server(self, server: Server, sampling: SamplingParams) -> tuple[int, int | None]:
        """Check one server: at the start, and when it is back after a failure, since it may serve another model then.
        Returns its vocabulary, below which ids may be sent, and its context, None where that is not reported.

        Raises:
            BackendError: It cannot be reached (kind `unreachable`), or cannot serve this spec.
        """
        served = await self.served_model(server)
        if served.rstrip("/").rpartition("/")[2] != self._model.rstrip("/").rpartition("/")[2]:
            log.warning(
                "the server's model has another name than the spec's", url=server.url, server=served, spec=self._model
            )
        context = await self.check_settings(server, sampling)
        vocab_size = await self._check_ids(server)
        await self._try_sampling(server, sampling, vocab_size)
        await self.check_replies(server, sampling, vocab_size)
        return vocab_size, context

    async def _check_ids(self, server: Server) -> int:
        """Check that a server's tokenizer and vocabulary are those of the spec's model. Returns the number of its ids.

        A server that does not tokenize, or does not say how many ids it has, is not checked. An embedding may be padded
        beyond the
        tokenizer: a model can sample such ids, and takes them.
        """
        ours = list(self._format.encode(SAMPLE_TEXT))
        try:
            reply = await server.json("POST", "/tokenize", {"prompt": SAMPLE_TEXT, "add_special_tokens": False})
        except BackendError as error:
            if error.kind == "unreachable":
                raise
            log.info("the server does not tokenize; its tokenizer is not compared", url=server.url, reason=str(error))
        else:
            if (theirs := reply.get("tokens")) != ours:
                raise BackendError(
                    f"{server.url} has another tokenizer than the spec's model: for one text it writes {theirs}, ours "
                    f"{ours}",
                    kind="wrong_server",
                )
        refused = await ask(server, self.dialect.path, self.dialect.test_body(logit_bias={"2147483647": 0.0}))
        match = self.dialect.vocabulary.search(error_text(refused)) if refused.status == 400 else None
        vocab_size = self._format.vocab_size if match is None else int(match[1]) + self.dialect.first_id
        outside = [token for token in self._format.stop_token_ids if token >= vocab_size]
        if outside:
            raise BackendError(
                f"{server.url} serves a vocabulary of {vocab_size} ids; the spec's model stops at {outside}",
                kind="wrong_server",
            )
        return vocab_size

    async def _try_sampling(self, server: Server, sampling: SamplingParams, vocab_size: int) -> None:
        """Sample one token with the spec's own sampling; the reply must pass all checks of a turn's reply."""
        request = GenerateRequest(
            episode_id="trial",
            turn=0,
            input_ids=np.array((list(self._format.encode("Hello")) or [0])[:8], dtype=np.int32),
            sampling=sampling.model_copy(update={"min_new_tokens": None}),
            max_new_tokens=1,
            stop_token_ids=list(self._format.stop_token_ids),
            seed=0,
            adapter=self._spec.adapter,
            experts_from=0 if self._spec.asks_experts else None,
        )
        encoder = RequestEncoder(self.dialect, vocab_size=vocab_size, layout=self._layout)
        sent = encoder.encode(request, f"trial-{id(server):x}", request.input_ids, 1)
        reply = await ask(server, self.dialect.path, b"".join(sent.pieces))
        if reply.status != 200:
            raise BackendError(
                f"{server.url} refuses this spec's sampling ({reply.status}): {error_text(reply)}", kind="bad_sampling"
            )
        try:
            part = read_reply(self.dialect, reply.body, sent, encoder.vocab_size)
        except ReplyError as error:
            raise BackendError(f"{server.url} sent a reply that cannot be used: {error}", kind="bad_reply") from None
        if part.echoed:
            return
        if self._spec.unchecked_prompts == "refuse":
            raise BackendError(
                f"{server.url} does not report the prompt that it computed on ({self.dialect.echo}): install "
                f"{self.dialect.echo_since} or "
                "later, or set `backend.unchecked_prompts: allow`",
                kind="wrong_server",
            )
        log.warning("prompts are not compared: the server does not report them", url=server.url)

    async def check_servers(self, sampling: SamplingParams) -> tuple[int, int | None]:
        """Check all servers at once. A server that cannot be reached is left out until it is back, if another one is
        available. Returns their smallest vocabulary and context.

        Raises:
            OutageError: No server can be reached.
            BackendError: A server has another model, or refuses this spec's sampling.
        """
        pool = self.pool
        sizes: list[tuple[int, int | None]] = []
        absent: list[BackendError] = []
        outcomes = await asyncio.gather(
            *(self.check_server(server, sampling) for server in pool.workers), return_exceptions=True
        )
        for server, outcome in zip(pool.workers, outcomes, strict=True):
            if isinstance(outcome, BackendError) and (outcome.refused or outcome.kind == "unreachable"):
                absent.append(outcome)
                if server in pool.servers:
                    pool.failed(server, str(outcome))
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                sizes.append(outcome)
        if not sizes:
            raise OutageError(
                f"no {self.dialect.servers} server can be reached: " + "; ".join(map(str, absent)), kind="unreachable"
            )
        contexts = [context for _, context in sizes if context is not None]
        return min(vocab_size for vocab_size, _ in sizes), min(contexts, default=None)

    async def check_sampling(self, sampling: SamplingParams) -> None:
        """See `Backend.check_sampling`."""
        await self.check_servers(sampling)

    async def start(self) -> None:
        """Reach the servers, and check that they serve this model and accept this spec's sampling.

        Raises:
            OutageError: No server can be reached.
            BackendError: A server cannot be started (kind `launch`), or cannot serve this spec.
        """
        await self._launch()
        self.vocab_size, self.context = await self.check_servers(self._sampling)
        self.encoder = self._new_encoder(self.vocab_size)
        self.checks_replies = self.vocab_size <= self._format.vocab_size
        self.pool.watch()

    async def _launch(self) -> None:
        """Start the servers of `backend.launch`, if there are any. Raises: BackendError: One does not start (kind
        `launch`)."""
        if self._launched is not None:
            await self._launched.start(self.logs)

    def _new_encoder(self, vocab_size: int) -> RequestEncoder:
        return RequestEncoder(self.dialect, vocab_size=vocab_size)

    async def _admit(self, server: Server) -> None:
        """Check a server that is back, because it may serve another model now."""
        vocab_size, context = await self.check_server(server, self._sampling)
        if self.context is not None and (  # None: the first check of all is still going on
            vocab_size < self.vocab_size or (context or self.context) < self.context
        ):
            raise BackendError(f"{server.url} came back with a smaller vocabulary or context", kind="wrong_server")
