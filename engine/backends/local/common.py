"""Base class of the local backends for text and for images: the model's folder, and the checks of a request."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from engine.backends.base import Backend, refuse_parameters
from engine.errors import BackendError, ContextOverflow
from engine.schemas.backend import LocalBackendSpec
from engine.schemas.generation import GenerateRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch

    from engine.spec.load import LoadedSpec
    from engine.tokens.format import ChatFormat


class LocalModelBackend(Backend):
    """A model in this process. Base class of `LocalBackend` (text) and `VisionBackend` (text and images)."""

    declared = LocalBackendSpec

    def __init__(
        self,
        folder: Callable[[], Path],
        decode: Callable[[Sequence[int]], str],
        spec: LocalBackendSpec,
        *,
        vocab: int | None = None,
        context: int | None = None,
    ) -> None:
        """
        Args:
            folder: Returns the model's folder, and downloads it if necessary; called in `start`.
            decode: Ids to text, with special tokens; used to find stop strings.
            spec: Device, precision, batch size.
            vocab: Number of ids that may be sampled; an embedding may be padded beyond them. Default: all rows of the embedding.
            context: Maximum length of a sequence in tokens; default: the model's own.
        """
        self._folder = folder
        self._decode = decode
        self._spec = spec
        self._vocab = vocab
        self.context = context

    @classmethod
    def _arguments(cls, spec: LocalBackendSpec, format: ChatFormat, loaded: LoadedSpec) -> dict[str, Any]:
        """Arguments of the constructor, for the model of a spec.

        Raises:
            BackendError: The spec's sampling sets a parameter that this backend does not have.
        """
        from engine.tokens.catalogue import resolve_model

        refuse_parameters(cls.declared, loaded.spec.sampling)
        model = loaded.spec.model
        contexts = [value for value in (format.context, model.context) if value]
        return {
            "folder": lambda: resolve_model(model.path, model.revision, loaded.base),
            "decode": format.decode,
            "spec": spec,
            "vocab": format.vocab_size,
            "context": min(contexts, default=None),
        }

    @abstractmethod
    async def update_weights(self, weights: Mapping[str, torch.Tensor] | Path, version: int) -> None:
        """Sample with new weights from the next token on.

        Args:
            weights: Every parameter by name, or a folder of safetensors.
            version: The weight version of tokens sampled from now on.

        Raises:
            BackendError: Kind `bad_weights`: names or shapes differ from the model's; the old weights then stay.
        """

    @abstractmethod
    def _rows(self) -> int:
        """Number of rows of the embedding; token ids are below it.

        Raises:
            BackendError: Kind `not_started`.
        """

    @abstractmethod
    def _check_images(self, request: GenerateRequest) -> None:
        """Check the request's images.

        Raises:
            BackendError: The model cannot take them.
        """

    def _check(self, request: GenerateRequest) -> int:
        """Check a request. Returns the maximum number of tokens to sample."""
        refuse_parameters(self.declared, request.sampling)
        self._check_images(request)
        if request.adapter is not None:
            raise BackendError(
                "the local backend does not support adapters: merge the adapter into the model",
                kind="unsupported_parameter",
            )
        ids = request.input_ids
        rows = self._rows()
        if not len(ids):
            raise BackendError("the prompt is empty: send at least one token", kind="bad_request")
        if int(ids.min()) < 0 or int(ids.max()) >= rows:
            raise BackendError(f"the prompt has ids outside the model's vocabulary [0, {rows})", kind="bad_request")
        for name, wrong in (
            ("logit_bias", [int(token) for token in request.sampling.logit_bias or {}]),
            ("banned_token_ids", request.banned_token_ids),
        ):
            if bad := [token for token in wrong if not 0 <= token < rows]:
                raise BackendError(
                    f"`{name}` has id {bad[0]}, outside the model's vocabulary [0, {rows})", kind="bad_request"
                )
        most = min(request.max_new_tokens, request.sampling.max_new_tokens or request.max_new_tokens)
        if self.context is None:
            return most
        if len(ids) + 1 > self.context:
            raise ContextOverflow(f"the prompt has {len(ids)} tokens, and the model's context is {self.context} tokens")
        return min(most, self.context - len(ids))
