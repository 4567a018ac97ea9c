"""SGLang servers as a backend: weights, adapters, images and colocation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog
from msgspec.structs import asdict

from engine.backends.http.client import key_headers, read_key
from engine.backends.servers.backend import ServersBackend
from engine.backends.servers.launched import LaunchedServers, launched_servers
from engine.backends.servers.pool import Pool, Server, servers_of
from engine.backends.sglang.checks import ask_worker, check_model_path, check_server, check_servers
from engine.backends.sglang.control import Control
from engine.backends.sglang.images import refuse_family
from engine.backends.sglang.routing import layout_of
from engine.backends.sglang.wire import DEFAULT_VERSION, Encoder, decode
from engine.backends.weights import ServerWeights
from engine.errors import BackendError
from engine.schemas.backend import SGLangBackendSpec
from engine.schemas.generation import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from engine.backends.sglang.verify import ServerDifference
    from engine.schemas.backend import SGLangBackendSpec
    from engine.spec.load import LoadedSpec
    from engine.tokens.experts import ExpertLayout
    from engine.tokens.template import ChatTemplate

log = structlog.get_logger(__name__)


class SGLangBackend(ServersBackend):
    """Samples from one or more SGLang servers.

    backend = SGLangBackend.open(spec, chat_format, loaded)
    await backend.start()                           # reaches all servers, checks model and sampling
    generation = await backend.generate(request)
    await backend.control.update_weights_from_disk("step-10/", version=10)
    await backend.close()                           # has the servers stop what is still running
    """

    declared = SGLangBackendSpec
    _spec: SGLangBackendSpec
    encoder: Encoder

    def __init__(
        self,
        spec: SGLangBackendSpec,
        format: ChatTemplate,
        *,
        sampling: SamplingParams,
        model: str,
        api_key: str | None = None,
        folder: Callable[[], Path] | None = None,
        launched: LaunchedServers | None = None,
        layout: ExpertLayout | None = None,
    ) -> None:
        """Nothing is opened yet.

        Args:
            spec: Servers, deadlines, retries.
            format: The model's chat format: vocabulary, context, decoding.
            sampling: The spec's sampling parameters, tested at the start.
            model: The model's name in the spec.
            api_key: Sent as a bearer token.
            folder: Finds the model's files, for `spec.verify`.
            launched: The servers of `spec.launch`, started with the backend and stopped with it.
            layout: The model's experts, with `spec.routed_experts`.
        """
        self._folder = folder
        self._headers = key_headers(api_key)
        self._layout = layout
        pool = Pool(
            servers_of(spec, api_key, launched),
            health_timeout=spec.health_timeout,
            wait=spec.wait,
            admit=self._admit,
            wake=self._wake,
        )
        self.control = Control(pool)
        super().__init__(
            spec,
            format,
            sampling=sampling,
            model=model,
            launched=launched,
            pool=pool,
            encoder=Encoder(vocab_size=format.vocab_size, vision=format.vision, layout=layout),
            decode=decode,
            path="/generate",
            abort_path="/abort_request",
            weights=self.control,
        )
        self.dropped: list[str] = []
        """Parameters that the router drops."""
        self.verified: ServerDifference | None = None
        """Difference between the servers' log-probs and those of the model's files; None without `spec.verify`."""

    @classmethod
    def open(cls, spec: SGLangBackendSpec, format: ChatTemplate, loaded: LoadedSpec) -> SGLangBackend:
        """See `Backend.open`.

        Raises:
            BackendError: The variable of the API key is not set, a URL is invalid, the model's images cannot be served, or it has no
                experts to report (kind `no_experts`).
        """
        from engine.tokens.catalogue import resolve_model

        if format.vision is not None:
            refuse_family(format.vision)

        def folder() -> Path:
            return resolve_model(loaded.spec.model.path, loaded.spec.model.revision, loaded.base)

        launched = launched_servers(spec, loaded)
        try:
            return cls(
                spec,
                format,
                sampling=loaded.spec.sampling,
                model=loaded.spec.model.path,
                api_key=read_key(spec.api_key_env),
                folder=folder,
                launched=launched,
                layout=layout_of(folder()) if spec.asks_experts else None,
            )
        except ValueError as error:
            raise BackendError(f"backend.urls: {error}", kind="bad_url") from None

    @classmethod
    async def check_weights(cls, spec: SGLangBackendSpec, folder: Path) -> None:
        """Check that every server samples with the weights in `folder`.

        Raises:
            OutageError: A server cannot be reached.
            BackendError: A server has other weights (kind `wrong_server`), or refuses to answer.
        """
        await check_model_path(spec.urls, key_headers(read_key(spec.api_key_env)), folder)

    @property
    def workers(self) -> list[Server]:
        """Servers that take control calls: those of `backend.urls`, or those behind the router."""
        return self.pool.workers

    async def start(self) -> None:
        """Reach the servers, and check that they serve this model and accept this spec's sampling.

        Raises:
            OutageError: No server can be reached.
            BackendError: A server cannot be started (kind `launch`), or cannot serve this spec.
        """
        await self.launch()
        await self.control.memory.prepare(self.logs)
        if self.training:
            await self.control.wake_all()
        facts = await check_servers(
            self.pool, self._spec, self._format, self._sampling, self._model, self._headers, self._layout
        )
        self.vocab_size = facts.vocab_size
        self.context = facts.context
        self.dropped = facts.dropped
        self.encoder = Encoder(
            vocab_size=facts.vocab_size,
            seeded=any(server.seeded for server in self.workers),
            echo="return_prompt_token_ids" not in facts.dropped,
            vision=self._format.vision,
            layout=self._layout,
            own_prefixes=self._spec.routed_experts == "exact",
            features=lambda: self.control.features,
        )
        if self._spec.verify and self._folder is not None:
            from engine.backends.sglang.verify import verify_servers

            there = [server for server in self.workers if server.healthy]
            given = {server.url: server.version for server in there if server.version not in (None, DEFAULT_VERSION)}
            if given:  # by a training that goes on: not those of the spec's files
                log.warning("not verified: servers were given other weights since they started", versions=given)
            else:
                self.verified = await verify_servers(there, self._format, self._folder, ask_worker)
        self.pool.watch()

    def prepare(self, request: GenerateRequest) -> Awaitable[None] | None:
        """See `ServersBackend.prepare`.

        Raises:
            BackendError: The router drops a key that the request needs (kind `unsupported`), or its adapter was unloaded (kind
                `bad_request`).
        """
        if request.banned_token_ids and "logit_bias" in self.dropped:
            raise BackendError(
                "the router drops logit_bias, so ids cannot be banned; name the servers themselves", kind="unsupported"
            )
        if request.adapter is not None and request.adapter in self.control.unloaded:
            raise BackendError(f"the adapter {request.adapter!r} was unloaded", kind="bad_request")
        return self.encoder.scale_images(request) if request.images else None

    def server_weights(self, version: int) -> ServerWeights:
        """See `Backend.server_weights`."""
        return ServerWeights(version=version, prefixes=self.control.prefixes)

    def follow(self, weights: ServerWeights) -> None:
        """See `Backend.follow`."""
        self.control.follow(weights)

    def stats(self) -> dict[str, Any]:
        """Counts since the start, and the certificate of the prompts."""
        return {
            **super().stats(),
            "seeded": self.encoder.seeded,
            "dropped_by_router": list(self.dropped),
            **({} if self._format.vision is None else {"images": self._images()}),
            **({} if self.verified is None else {"verified": asdict(self.verified)}),
        }

    def _images(self) -> dict[str, Any]:
        """How servers processed images; see images.py."""
        known = [server.images for server in self.workers if server.images is not None]
        return {
            "sent": "scaled",
            "server_processors": sorted({facts.processor for facts in known}),
            "unscaled_gap": max((facts.unscaled_gap for facts in known), default=None),
        }

    async def check_sampling(self, sampling: SamplingParams) -> None:
        """See `Backend.check_sampling`."""
        await check_servers(self.pool, self._spec, self._format, sampling, self._model, self._headers, self._layout)

    async def _wake(self, server: Server) -> None:
        """Have a server that is out sample again, for its health check. A router keeps the health of its servers itself."""
        if not self._spec.router:
            await self.control.wake(server)

    async def _admit(self, server: Server) -> None:
        """Check a server that is back, because it may serve another model now, and give it the weights and adapters of the others."""
        if self._spec.router:
            return
        found = await check_server(server, self._spec, self._format, self._sampling, self._model, self._layout)
        if self.context is not None and (  # None: the first check of all is still going on
            (found.vocab_size or self.vocab_size) < self.vocab_size or (found.context or self.context) < self.context
        ):
            raise BackendError(f"{server.url} came back with a smaller vocabulary or context", kind="wrong_server")
        await self.control.catch_up(server)
