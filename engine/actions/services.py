"""What takes part in the episodes of one `Runner`: services, which start before the first episode and end after the
last.

    class Dice(EpisodeService):                             # made by a function that the hook `open_service` names
        async def open(self, task, objects):
            objects.environment = Game(self.table)          # also `sampler`, `user`, `toolbox`

A service is asked only for what it overrides, so one that does not read records costs a turn nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from engine.plugin import Hook
from engine.schemas.base import Struct
from engine.schemas.sections import used_plugins

if TYPE_CHECKING:
    from pathlib import Path

    from engine.actions.action import EpisodeObjects
    from engine.actions.calling.workers import Workers
    from engine.backends.backend import Backend
    from engine.backends.slots import Slots
    from engine.episode.episode import Episode
    from engine.schemas.environment import Task
    from engine.schemas.journal import Record
    from engine.spec.load import LoadedSpec
    from engine.tokens.template import ChatTemplate


class Cost(Struct, frozen=True, kw_only=True):
    """What a run, or a training with its evaluations, has cost; earlier launches included."""

    spent: float
    most: float | None = None
    """What it may cost; None: any amount."""


class ServiceInputs(Struct, frozen=True, kw_only=True):
    """What the services of one `Runner` are made from."""

    loaded: LoadedSpec
    template: ChatTemplate
    """The policy's chat format."""
    code: Workers
    """Runs the spec's code."""
    backend: Backend
    """The policy's backend, which its owner starts and closes."""
    slots: Slots
    """The generation slots of the policy."""
    folder: Path | None = None
    """The folder of the run, or of its training; None: nothing is stored."""
    given: Sequence[object] = ()
    """What the owner of the `Runner` gives; a service takes what is of its class."""
    training: bool = False
    """Whether the weights of the policy change while episodes run."""
    only_scripted: bool = False
    """Whether other models than scripted ones may not be used."""


class EpisodeService:
    """Takes part in the episodes of one `Runner`. A subclass defines what it needs."""

    order: ClassVar[int] = 0
    """Services with a lower number start first and close last."""

    def check(self) -> None:
        """Called before any service starts. Raises: EngineError: the spec cannot be run as things are."""

    async def start(self, backends: Sequence[Backend]) -> None:
        """Episodes begin soon. Raises: EngineError: it cannot work.

        Args:
            backends: The policy's backend, and those of the services that have started.
        """

    async def open(self, task: Task | None, objects: EpisodeObjects) -> None:
        """The objects of an episode are built; it may replace some of them. What it adds to `objects.opened` is closed
        with them.

        Raises:
            SpecCodeError: the episode fails with it.
        """

    def filter(self, episode: Episode, record: Record) -> Record | Awaitable[Record]:
        """Return the record that the episode is given and that is stored, in place of one that an action has returned.
        It is not asked for generations: what the model has sampled stays as it is. Raises: EngineError: the action
        fails with it."""
        return record

    def release(self, episode_id: str) -> None:
        """An attempt of an episode is over."""

    async def close(self) -> None:
        """No more episodes run. Called also where `start` was not, or failed."""

    @property
    def backends(self) -> Sequence[Backend]:
        """The backends that it has opened."""
        return ()

    def stats(self) -> dict[str, Any]:
        """Counts of its backends by name, for the end of the run. Read before `close`."""
        return {}

    @property
    def cost(self) -> Cost | None:
        """The costs that it counts; None if it counts none. Read after `close` too."""
        return None


OPEN_SERVICE: Hook[Callable[[ServiceInputs], EpisodeService | None]] = Hook("open_service")
"""Makes the service of a `Runner`; None if the spec needs none. Asked if the spec has a section, a backend or another
part of the plugin."""


def open_services(inputs: ServiceInputs) -> list[EpisodeService]:
    """The services that plugins give to the episodes of one `Runner`, not started, in their order."""
    opened = OPEN_SERVICE.made(used_plugins(inputs.loaded.spec), inputs)
    return sorted(opened, key=lambda service: service.order)
