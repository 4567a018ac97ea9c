"""What a backend is, and which one a spec asks for.

Token ids in, token ids out: a backend knows nothing of messages, tools or rewards. Nothing heavy is imported
before a backend of that kind is opened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from engine.errors import BackendError
from engine.schemas.generation import GenerateRequest, Generation, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.spec.load import LoadedSpec
    from engine.tokens.format import ChatFormat


@runtime_checkable
class Backend(Protocol):
    """Something that replies. Opened by `open_backend`, started once, shared by every episode.

    A backend may also have `release(episode_id: str) -> None` (the episode is over: what is kept for it may go)
    and `context: int | None` (the longest sequence that it takes, where that is less than the model's).
    """

    kind: str
    """As in the spec: `local`, `sglang`, `openai`, `scripted`."""
    trainable: bool
    """Replies carry exact token ids and log-probs. False where a backend answers in text alone."""

    async def start(self) -> None:
        """Make ready: load weights, reach servers.

        Raises:
            BackendError: It cannot serve this spec; the message says what to change.
        """
        ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """One reply. Cancelling the call aborts the work.

        Raises:
            ContextOverflow: The prompt leaves no room for one token.
            BackendError: No reply; `retryable` says whether another try may bring one.
        """
        ...

    async def close(self) -> None:
        """Give everything back. Calls still in flight raise `BackendError`."""
        ...

    def stats(self) -> dict[str, Any]:
        """Counts since the start, JSON values only."""
        ...


def open_backend(loaded: LoadedSpec, format: ChatFormat) -> Backend:
    """The backend that the spec names, not yet started.

    Raises:
        BackendError: The spec asks it for something that it cannot do.
    """
    spec = loaded.spec.backend
    if spec.kind == "local":
        from engine.backends.local import open_local

        return open_local(spec, format, loaded)
    if spec.kind == "scripted":
        from engine.backends.scripted import open_scripted

        return open_scripted(spec, format, loaded)
    if spec.kind == "sglang":
        from engine.backends.sglang import open_sglang

        return open_sglang(spec, format, loaded)
    from engine.backends.openai import open_openai

    return open_openai(spec, format, loaded)


def refuse_parameters(kind: str, sampling: SamplingParams, unsupported: Iterable[str]) -> None:
    """Raise where `sampling` sets a parameter that a backend of this kind does not have.

    Raises:
        BackendError: Kind `unsupported_parameter`; names every one of them.
    """
    default = SamplingParams()
    given = [name for name in unsupported if getattr(sampling, name) != getattr(default, name)]
    if given:
        names = ", ".join(f"`sampling.{name}`" for name in given)
        raise BackendError(
            f"the {kind} backend does not support {names}: leave it out, or use `backend: {{kind: sglang}}`",
            kind="unsupported_parameter",
        )
