"""The base class of backends.

Invariants:
- Token ids go in, and token ids with log-probs, or a typed error, come out.
- A backend knows nothing of tools, rewards or machines.
- A trainer alone gives servers weights; after `follow(weights)` no request is answered with older ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from engine.schemas.base import Struct
from engine.schemas.generation import GenerateRequest, Generation, SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

    from engine.backends.outage import Outage
    from engine.backends.slots import Slots
    from engine.schemas.backend import BackendBase
    from engine.spec.load import LoadedSpec
    from engine.tokens.template import ChatTemplate


class ServerWeights(Struct, frozen=True, kw_only=True):
    """The weights that a trainer has given to servers."""

    version: int
    prefixes: str | None = None
    """Name of the weights that computed the cached prefixes that requests may use; None: all of them."""


class GivenWeights:
    """Which weights the servers were given. These are given none: a subclass says what they are given."""

    expected: str | None = None
    """Name of the weights that every request sent from now on must be sampled with; None: any."""
    prefixes: str | None = None
    """Name of the weights that computed the cached prefixes that requests may use from now on; None: all of them."""

    def accepts(self, version: str, expected: str) -> bool:
        """Whether a reply may be sampled with the weights `version`, if `expected` was expected when it was
        requested."""
        return version == expected


class PolicyAdapter(Struct, frozen=True, kw_only=True):
    """The LoRA adapter under training: requests that name no adapter are sampled with it."""

    name: str
    version: int


class Sampler(Protocol):
    """Samples replies for episodes: ids in; ids with log-probs, or a typed error, out."""

    @property
    def generate(self) -> Callable[[GenerateRequest], Awaitable[Generation]]:
        """See `Backend.generate`."""
        ...

    @property
    def checks_replies(self) -> bool:
        """See `Backend.checks_replies`."""
        ...


class Backend(ABC):
    """What samples replies. `engine.backends.registry.open_backend` makes one; all episodes of a run share it.

    backend = open_backend(loaded, chat_format)
    await backend.start()
    generation = await backend.generate(request)
    backend.release("task-1/0")                 # the episode has ended
    await backend.close()
    """

    declared: type[BackendBase]
    """Its config class, which declares its capabilities: `backend.declared.exact_ids`."""
    checks_replies: bool = False
    """Once it has started: it gives no reply that `ChatTemplate.check_sampled` would refuse for a model without images,
    so none is checked twice."""
    context: int | None = None
    """Longest sequence in tokens, prompt and reply together, where the backend has a limit of its own."""
    outage: Outage | None = None
    """For backends with servers: whether requests wait until a server is back, and the deadlines that wait with
    them."""
    logs: Path | None = None
    """Folder for the logs of servers that the backend starts. The command sets it before `start`; None: a folder of the
    cache."""
    training: bool = False
    """Whether a training uses the backend, and sends it weights. It sets this before `start`: servers that an earlier
    training, which was killed in the middle of a push, left paused are continued."""

    @classmethod
    @abstractmethod
    def open(cls, spec: Any, format: ChatTemplate, loaded: LoadedSpec) -> Backend:
        """Make the backend of a spec. Nothing is loaded or reached before `start`.

        Args:
            spec: The config, an instance of `declared`.
            format: The model's chat format.
            loaded: The spec as a whole; its `backend` is `spec`.

        Raises:
            BackendError: The spec asks for something that this backend does not have.
        """

    @classmethod  # noqa: B027  (the empty methods are defaults)
    async def check_weights(cls, spec: Any, folder: Path) -> None:
        """Check that the backend would sample with the weights in `folder`. Only servers can have other ones.

        Raises:
            BackendError: A server cannot be asked, or has other weights (kind `wrong_server`).
        """

    async def start(self) -> None:  # noqa: B027
        """Load weights, or reach the servers and check them.

        Raises:
            BackendError: It cannot serve this spec; the message says what to change.
        """

    def spread(self, number: int) -> None:  # noqa: B027
        """Prefer other servers than the other processes of the run, which have other numbers. Called before `start`."""

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one reply. Cancelling the call aborts the work.

        Raises:
            ContextOverflow: The prompt leaves no room for one token.
            OutageError: No server has replied for `backend.wait`.
            BackendError: No reply; `retryable` says whether another try may succeed.
        """

    async def generate_in_slot(self, request: GenerateRequest, slots: Slots) -> Generation:
        """`generate`, as soon as a slot is free, which is held until the reply is there."""
        async with slots:
            return await self.generate(request)

    async def check_sampling(self, sampling: SamplingParams) -> None:  # noqa: B027
        """Check that the started backend can sample in another way than the spec's. Capabilities of its kind are not
        checked here.

        Raises:
            OutageError: No server can be reached.
            BackendError: A server refuses it (kind `bad_sampling`).
        """

    def server_weights(self, version: int) -> ServerWeights:
        """What other processes that use the same servers `follow`, after this one has pushed `version`."""
        return ServerWeights(version=version)

    def follow(self, weights: ServerWeights) -> None:  # noqa: B027
        """A trainer in another process gives the servers their weights: requests sent from now on are not answered with
        older ones."""

    def release(self, episode_id: str) -> None:  # noqa: B027
        """Drop what is cached for an episode that has ended."""

    async def close(self) -> None:  # noqa: B027
        """End threads and connections. Calls in flight raise `BackendError`."""

    def stats(self) -> dict[str, Any]:
        """Counts since the start; JSON values only."""
        return {}


class SlotSampler:
    """Samples from a backend, which holds one of the slots for each reply."""

    __slots__ = ("checks_replies", "generate")

    def __init__(self, backend: Backend, slots: Slots) -> None:
        self.checks_replies = backend.checks_replies
        self.generate: Callable[[GenerateRequest], Awaitable[Generation]] = partial(
            backend.generate_in_slot, slots=slots
        )
        """See `Backend.generate`."""
