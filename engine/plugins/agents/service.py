"""What agent programs add to the objects of each episode: the program, and a sampler that works ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.actions.services import EpisodeService
from engine.errors import SpecCodeError
from engine.plugins.agents.prefetch import PrefetchingSampler
from engine.plugins.agents.program import ServedPrograms
from engine.plugins.agents.spec import AgentSpec

if TYPE_CHECKING:
    from engine.actions.action import EpisodeObjects
    from engine.actions.services import ServiceInputs
    from engine.plugins.agents.agent_run import AgentRun
    from engine.schemas.environment import Task


@dataclass(slots=True)
class ProgramObjects:
    """The part of an episode's objects that belongs to its program."""

    run: AgentRun | None = None
    """The program, once it has been started."""
    sampler: PrefetchingSampler | None = None
    """The episode's sampler."""
    elsewhere: ServedPrograms | None = None
    """The programs that run elsewhere; None: the spec's own program is started."""


class AgentService(EpisodeService):
    """Opens the episodes of one spec.

    Args:
        agent: The spec's `agent`.
        elsewhere: The programs that run elsewhere, instead of the spec's.
    """

    def __init__(self, agent: AgentSpec, elsewhere: ServedPrograms | None) -> None:
        self._agent, self._elsewhere = agent, elsewhere

    def check(self) -> None:
        """Refuse a spec without a program where none runs elsewhere. Raises: SpecCodeError."""
        if self._agent.elsewhere and self._elsewhere is None:
            raise SpecCodeError(
                "`agent` has neither `run` nor `use`, so its programs run elsewhere: open episodes with `engine serve --api`",
                blame="spec",
                kind="agent_elsewhere",
            )

    async def open(self, task: Task | None, objects: EpisodeObjects) -> None:
        """Let the program's requests be sampled ahead."""
        program = objects.part(ProgramObjects)
        program.elsewhere = self._elsewhere
        if objects.sampler is not None:
            objects.sampler = program.sampler = PrefetchingSampler(objects.sampler)


def open_service(inputs: ServiceInputs) -> AgentService | None:
    """The hook `open_service`."""
    agent = AgentSpec.section_of(inputs.loaded.spec)
    if agent is None:
        return None
    return AgentService(agent, next((item for item in inputs.given if isinstance(item, ServedPrograms)), None))
