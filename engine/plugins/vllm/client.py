"""vLLM servers as a backend.

vLLM's completions take ids and report ids, log-probs and the prompt's ids. They take no image with a prompt of ids, and the
weights stay those that the server was started with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.backends.http.client import key_headers, read_key
from engine.backends.servers.backend import ServersBackend
from engine.backends.servers.launched import launched_servers
from engine.backends.servers.pool import Pool, Server, servers_of
from engine.backends.weights import OwnWeights
from engine.errors import BackendError
from engine.plugins.vllm.checks import PATH, check_model_path, check_server, check_servers
from engine.plugins.vllm.spec import VLLMBackendSpec
from engine.plugins.vllm.wire import Encoder, decode
from engine.schemas.generation import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

    from engine.backends.servers.launched import LaunchedServers
    from engine.spec.load import LoadedSpec
    from engine.tokens.template import ChatTemplate


class VLLMBackend(ServersBackend):
    """Samples from one or more vLLM servers.

    backend = VLLMBackend.open(spec, chat_format, loaded)
    await backend.start()                           # reaches all servers, checks model, sampling and log-probs
    generation = await backend.generate(request)
    await backend.close()
    """

    declared = VLLMBackendSpec
    _spec: VLLMBackendSpec

    def __init__(
        self,
        spec: VLLMBackendSpec,
        format: ChatTemplate,
        *,
        sampling: SamplingParams,
        model: str,
        api_key: str | None = None,
        launched: LaunchedServers | None = None,
    ) -> None:
        """Nothing is opened yet.

        Args:
            spec: Servers, deadlines, retries.
            format: The model's chat format: vocabulary, context, decoding.
            sampling: The spec's sampling parameters, tested at the start.
            model: The model's name in the spec.
            api_key: Sent as a bearer token.
            launched: The servers of `spec.launch`, started with the backend and stopped with it.
        """
        pool = Pool(
            servers_of(spec, api_key, launched),
            health_timeout=spec.health_timeout,
            wait=spec.wait,
            admit=self._admit,
            probe="/v1/models",
        )
        super().__init__(
            spec,
            format,
            sampling=sampling,
            model=model,
            launched=launched,
            pool=pool,
            encoder=Encoder(vocab_size=format.vocab_size),
            decode=decode,
            path=PATH,
            abort_path=None,
            weights=OwnWeights(),
        )

    @classmethod
    def open(cls, spec: VLLMBackendSpec, format: ChatTemplate, loaded: LoadedSpec) -> VLLMBackend:
        """See `Backend.open`.

        Raises:
            BackendError: The variable of the API key is not set, a URL is invalid, or no server can report the log-probs of the
                spec's sampling.
        """
        sampling = loaded.spec.sampling
        if (conflict := spec.conflict(sampling)) is not None:
            raise BackendError(f"sampling: {conflict}", kind="unsupported_parameter")
        launched = launched_servers(spec, loaded)
        key = read_key(spec.api_key_env)
        try:
            return cls(spec, format, sampling=sampling, model=loaded.spec.model.path, api_key=key, launched=launched)
        except ValueError as error:
            raise BackendError(f"backend.urls: {error}", kind="bad_url") from None

    @classmethod
    async def check_weights(cls, spec: VLLMBackendSpec, folder: Path) -> None:
        """See `Backend.check_weights`."""
        await check_model_path(spec.urls, key_headers(read_key(spec.api_key_env)), folder)

    async def start(self) -> None:
        """Reach the servers, and check that they serve this model and accept this spec's sampling.

        Raises:
            OutageError: No server can be reached.
            BackendError: A server cannot be started (kind `launch`), or cannot serve this spec.
        """
        await self.launch()
        facts = await check_servers(self.pool, self._spec, self._format, self._sampling, self._model)
        self.vocab_size = facts.vocab_size
        self.context = facts.context
        self.encoder = Encoder(vocab_size=facts.vocab_size)
        self.pool.watch()

    async def check_sampling(self, sampling: SamplingParams) -> None:
        """See `Backend.check_sampling`."""
        await check_servers(self.pool, self._spec, self._format, sampling, self._model)

    def prepare(self, request: GenerateRequest) -> None:
        """See `ServersBackend.prepare`.

        Raises:
            BackendError: The request has images (kind `unsupported`).
        """
        if request.images:
            raise BackendError(
                "vLLM takes no images with a prompt of token ids: use `backend: {kind: sglang}` or `{kind: local}`",
                kind="unsupported",
            )

    async def _admit(self, server: Server) -> None:
        """Check a server that is back: it may serve another model now."""
        found = await check_server(server, self._spec, self._format, self._sampling, self._model)
        if self.context is None:  # the first check of all is still going on
            return
        if found.vocab_size < self.vocab_size or (found.context or self.context) < self.context:
            raise BackendError(f"{server.url} came back with a smaller vocabulary or context", kind="wrong_server")
