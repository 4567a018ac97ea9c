"""SGLang servers as a backend: weights, adapters, images and colocation."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from typing import TYPE_CHECKING, Any, Self

import structlog
from msgspec.structs import asdict

from engine.backends.backend import ServerWeights
from engine.errors import BackendError
from engine.plugins.servers.checks import CheckedServers
from engine.plugins.servers.pool import Server
from engine.plugins.servers.sessions import Sessions
from engine.plugins.sglang.checks import EXPERTS_FLAG, ask_worker, dropped_by, workers_of
from engine.plugins.sglang.control import Control, FollowedWeights
from engine.plugins.sglang.routing import layout_of
from engine.plugins.sglang.sample_prompt import check_images, refuse_family
from engine.plugins.sglang.spec import SGLangBackendSpec
from engine.plugins.sglang.wire import DEFAULT_VERSION, SGLANG, Encoder
from engine.schemas.generation import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from engine.plugins.sglang.sample_prompt import ServerDifference
    from engine.spec.load import LoadedSpec
    from engine.tokens.image_bank import ImageBank
    from engine.tokens.template import ChatTemplate

log = structlog.get_logger(__name__)


class SGLangBackend(CheckedServers):
    """Samples from one or more SGLang servers.

    backend = SGLangBackend.open(spec, chat_format, loaded)
    await backend.start()                           # reaches all servers, checks model and sampling
    generation = await backend.generate(request)
    await backend.control.update_weights_from_disk("step-10/", version=10)
    await backend.close()                           # has the servers stop what is still running
    """

    declared = SGLangBackendSpec
    dialect = SGLANG
    _spec: SGLangBackendSpec

    def __init__(self, *args: Any, **options: Any) -> None:
        """As `ServersBackend`."""
        super().__init__(*args, **options)
        self.control = Control(self.pool)
        self.weights: Control | FollowedWeights = self.control
        if self._spec.sessions:
            self.sessions = Sessions(lambda: self.weights.features)
            self.at_close.append(self.sessions.close)
        self.dropped: list[str] = []
        """Parameters that the router drops."""
        self.verified: ServerDifference | None = None
        """Difference between the servers' log-probs and those of the model's files; None without `spec.verify`."""
        self._folder: Callable[[], Path] | None = None
        """Finds the model's files, for `spec.verify`."""

    @classmethod
    def open(cls, spec: SGLangBackendSpec, format: ChatTemplate, loaded: LoadedSpec) -> Self:
        """See `Backend.open`.

        Raises:
            BackendError: The variable of the API key is not set, a URL is invalid, the model's images cannot be served,
                or it has no experts to report (kind `no_experts`).
        """
        from engine.tokens.catalogue import resolve_model

        if format.vision is not None:
            refuse_family(format.vision)
        backend = super().open(spec, format, loaded)
        model = loaded.spec.model
        backend._folder = lambda: resolve_model(model.path, model.revision, loaded.base)
        if spec.asks_experts:
            backend._layout = layout_of(backend._folder())
        return backend

    @classmethod
    async def served_model(cls, server: Server) -> str:
        """See `CheckedServers.served_model`.

        Raises:
            BackendError: It cannot be reached, is another kind of server, or does not generate (kind `wrong_server`).
        """
        info = await server.json("GET", "/model_info")
        if not isinstance(info, dict) or "model_path" not in info:
            raise BackendError(
                f"{server.url} is no SGLang server: /model_info says {info!r}"[:300], kind="wrong_server"
            )
        if info.get("is_generation") is False:
            raise BackendError(
                f"{server.url} serves {info['model_path']}, which does not generate", kind="wrong_server"
            )
        server.version = info.get("weight_version")
        return str(info["model_path"])

    async def start(self) -> None:
        """See `CheckedServers.start`.

        Raises:
            OutageError: No server can be reached.
            BackendError: A server cannot be started (kind `launch`), or cannot serve this spec.
        """
        await super().start()
        if self._spec.verify and self._folder is not None:
            from engine.plugins.sglang.sample_prompt import verify_servers

            healthy = [server for server in self.pool.workers if server.healthy]
            given = {server.url: server.version for server in healthy if server.version not in (None, DEFAULT_VERSION)}
            if given:  # by a training that goes on: not those of the spec's files
                log.warning("not verified: servers were given other weights since they started", versions=given)
            else:
                self.verified = await verify_servers(healthy, self._format, self._folder, ask_worker)

    async def _launch(self) -> None:
        await super()._launch()
        await self.control.memory.prepare(self.logs)
        if self.training:
            await self.control.wake_all()

    def _new_encoder(self, vocab_size: int) -> Encoder:
        return Encoder(
            vocab_size=vocab_size,
            seeded=any(server.seeded for server in self.pool.workers),
            echo=self.dialect.echo not in self.dropped,
            vision=self._format.vision,
            layout=self._layout,
            own_prefixes=self._spec.routed_experts == "exact",
            features=lambda: self.weights.features,
        )

    async def check_servers(self, sampling: SamplingParams) -> tuple[int, int | None]:
        """See `CheckedServers.check_servers`. Behind a router its workers are checked, and what it drops is found out.

        Raises:
            OutageError: No server can be reached.
            BackendError: A server has another model, or refuses this spec's sampling.
        """
        if self._spec.router:
            self.pool.workers = await workers_of(self.pool.servers, self._headers)
        sizes = await super().check_servers(sampling)
        versions = {server.version for server in self.pool.workers if server.version is not None}
        if len(versions) > 1:
            log.warning("sglang servers hold different weights", versions=sorted(versions))
        if self._spec.router:
            self.dropped = await dropped_by(self.pool.servers, sampling, self._spec)
        return sizes

    async def check_settings(self, server: Server, sampling: SamplingParams) -> int | None:
        """See `CheckedServers.check_settings`.

        Raises:
            BackendError: It cannot be reached, or its flags do not suit this spec.
        """
        details = await server.json("GET", "/server_info")
        server.seeded = bool(details.get("enable_deterministic_inference"))
        if server.seeded and sampling.min_p:
            raise BackendError(
                f"{server.url} runs with --enable-deterministic-inference, where a request with `sampling.min_p` ends "
                "the whole server: leave it out, or start the server without the flag",
                kind="bad_sampling",
            )
        if self._layout is not None and details.get("enable_return_routed_experts") is False:
            raise BackendError(
                f"{server.url} does not report routed experts: start it with {EXPERTS_FLAG}, or remove "
                "`backend.routed_experts`",
                kind="wrong_server",
            )
        if self.sessions is not None and details.get("dp_size", 1) > 1:
            raise BackendError(
                f"{server.url} runs with --dp-size, and each of its parts has its own sessions: remove "
                "`backend.sessions`, or start one server for each part",
                kind="wrong_server",
            )
        context = details.get("max_req_input_len")
        return int(context) if context else None

    async def check_replies(self, server: Server, sampling: SamplingParams, vocab_size: int) -> None:
        """See `CheckedServers.check_replies`."""
        if self._format.vision is not None:
            details = await server.json("GET", "/server_info")
            server.images = await check_images(server, details, self._format, ask_worker)

    def prepare(self, request: GenerateRequest) -> Awaitable[None] | None:
        """See `ServersBackend.prepare`.

        Raises:
            BackendError: The router drops a key that the request needs (kind `unsupported`), or its adapter was
                unloaded (kind `bad_request`).
        """
        if request.banned_token_ids and "logit_bias" in self.dropped:
            raise BackendError(
                "the router drops logit_bias, so ids cannot be banned; name the servers themselves", kind="unsupported"
            )
        if request.adapter is not None and request.adapter in self.control.unloaded:
            raise BackendError(f"the adapter {request.adapter!r} was unloaded", kind="bad_request")
        if not request.images or (vision := self._format.vision) is None:
            return None
        start = 0 if self.sessions is None else self.sessions.covers(request)
        images = request.images[bisect_left(request.image_spans, (start, 0)) :]
        unscaled = [image.image for image in images if not vision.bank.is_scaled(image.image)]
        return self._scale_images(vision.bank, unscaled) if unscaled else None

    async def _scale_images(self, bank: ImageBank, images: list[str]) -> None:
        """Scale images in a thread, so that the encoder finds them. Raises: ImageError: One cannot be sent exactly."""
        for image in images:
            await asyncio.to_thread(bank.scaled_uri, image)

    def server_weights(self, version: int) -> ServerWeights:
        """See `Backend.server_weights`."""
        return ServerWeights(version=version, prefixes=self.weights.prefixes)

    def follow(self, weights: ServerWeights) -> None:
        """See `Backend.follow`."""
        if not isinstance(self.weights, FollowedWeights):
            self.weights = FollowedWeights()
        self.weights.follow(weights)

    def stats(self) -> dict[str, Any]:
        """Counts since the start, and the certificate of the prompts."""
        facts_of_images = [server.images for server in self.pool.workers if server.images is not None]
        images = {
            "sent": "scaled",
            "server_processors": sorted({facts.processor for facts in facts_of_images}),
            "unscaled_gap": max((facts.unscaled_gap for facts in facts_of_images), default=None),
        }
        return {
            **super().stats(),
            "seeded": any(server.seeded for server in self.pool.workers),
            "dropped_by_router": list(self.dropped),
            **({} if self._format.vision is None else {"images": images}),
            **({} if self.verified is None else {"verified": asdict(self.verified)}),
        }

    async def _wake(self, server: Server) -> None:
        """Have a server that is out sample again, for its health check. A router keeps the health of its servers
        itself."""
        if not self._spec.router and self.weights is self.control:
            await self.control.wake(server)

    async def _admit(self, server: Server) -> None:
        """Check a server that is back, and give it the weights and adapters of the others."""
        if not self._spec.router:
            await super()._admit(server)
            await (self.weights.check if isinstance(self.weights, FollowedWeights) else self.weights.catch_up)(server)
