"""Plays one scenario: one episode, driven by the executor as in a run, with its journal kept in memory.

Invariant: what comes out depends on the spec, the scenario and the tokenizer alone. Nothing is written to disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from engine.actions.base import Services, World
from engine.actions.images import ImageDesk, MemoryImages
from engine.actions.registry import build_actions
from engine.actions.slots import Slots
from engine.actions.voice import Cast
from engine.actions.workers import Workers
from engine.actions.world import WorldBuilder
from engine.backends.scripted import ScriptedBackend
from engine.episode import Episode, limit_variables
from engine.errors import EngineError
from engine.executor import Executor
from engine.machine.compile import EpisodeMachine
from engine.machine.presets import resolve_machine
from engine.rewards.rules import compile_rules
from engine.scenarios.coverage import Edge, Watcher
from engine.scenarios.load import ScenarioSet, Stages, check_scenario, check_tools
from engine.scenarios.worlds import script_actions, script_world
from engine.schemas.journal import JournalEntry, LimitRecord
from engine.schemas.script import Script
from engine.tokens.conversation import Conversation

if TYPE_CHECKING:
    from engine.machine.presets import ResolvedMachine
    from engine.schemas.environment import Task
    from engine.schemas.scenario import Scenario
    from engine.schemas.trajectory import Trajectory
    from engine.spec.load import LoadedSpec
    from engine.store.codec import Draft, Written
    from engine.tokens.format import ChatFormat

THREADS = 8
"""Most threads for a scenario's synchronous worlds."""


@dataclass(frozen=True)
class Played:
    """What came of a scenario."""

    trajectory: Trajectory
    limits: list[str]
    """Limits that were met, in order."""
    states: list[str]
    """States that the episode came to, the first included."""
    taken: list[Edge]
    prompt: int
    """How many of the messages are the spec's own `prompt`."""


async def play(stages: Stages, scenarios: ScenarioSet, index: int, form: ChatFormat, workers: Workers) -> Played:
    """Play one scenario.

    Raises:
        EngineError: it cannot be played: it does not fit the spec, or a reply cannot be written.
    """
    scenario = scenarios.file.scenarios[index]
    loaded = stages.loaded(scenarios, index)
    resolved = resolve_machine(loaded.spec.machine)
    check_scenario(loaded, resolved, scenarios, index)
    task = stages.task(loaded, scenarios, index)
    backend = ScriptedBackend(_script(scenario), form)
    await backend.start()
    slots = Slots(1)
    cast = Cast(loaded, form, backend, slots, only=("scripted",))  # no scenario waits for a model
    services = Services(loaded.spec, form, backend, workers, slots, cast)
    stage = _Stage(loaded, resolved, services, scenario)
    await cast.start()
    try:
        return await stage.play(task, scenarios, index)
    finally:
        await cast.close()


def _script(scenario: Scenario) -> Script:
    """The replies; a scenario without any is asked for none, or fails as one that has too few."""
    return Script.model_construct(replies=list(scenario.replies), cases=[], exhausted="error")


class _Stage:
    """Everything that one episode needs."""

    def __init__(self, loaded: LoadedSpec, resolved: ResolvedMachine, services: Services, scenario: Scenario) -> None:
        spec = loaded.spec
        self._spec = spec
        self._services = services
        self._scenario = scenario
        self._machine = EpisodeMachine(resolved)
        self._worlds = WorldBuilder(services, loaded.base)
        self._watcher = Watcher(resolved)
        self._journal: list[JournalEntry] = []
        seconds = spec.limits.episode_seconds
        self._executor = Executor(
            self._machine,
            script_actions(build_actions(resolved.states, services, loaded.base), scenario, seconds),
            compile_rules(spec.rewards.reassign),
            episode_seconds=seconds,
            append=self._append,
            watch=self._watcher,
            settle=ImageDesk(services.format, images := MemoryImages(), images.fetch).settle,
        )

    async def _append(self, episode_id: str, entry: Draft, written: Written) -> None:
        self._journal.append(JournalEntry(**asdict(entry)))

    async def play(self, task: Task, scenarios: ScenarioSet, index: int) -> Played:
        """The episode, to its end."""
        broken: EngineError | None = None
        try:
            world = await self._worlds.open(task)
        except EngineError as error:
            world, broken = World(), error
        try:
            if broken is None:
                check_tools(list(world.toolbox.tools) if world.toolbox else [], scenarios, index)
                script_world(world, self._scenario, self._services.workers)
            episode = self._episode(task, world)
            if broken is None:
                ending = await self._executor.run(episode, world)
            else:
                ending = await self._executor.run_failed(episode, world, broken)
            if ending is not None:
                await self._append(episode.id, *ending)
            trajectory = episode.trajectory("scenario", exact=True)
        finally:
            await self._worlds.close(world)
        limits = [entry.record.limit for entry in self._journal if isinstance(entry.record, LimitRecord)]
        states = [self._machine.initial, *(dest for _, _, dest in trajectory.path)]
        return Played(trajectory, limits, states, self._watcher.taken, len(self._spec.prompt))

    def _episode(self, task: Task, world: World) -> Episode:
        schemas = [tool.shape.schema for tool in world.toolbox.tools.values()] if world.toolbox else []
        conversation = Conversation(self._services.format, schemas, self._spec.model.history)
        sample, seed = self._scenario.sample, self._spec.rollout.seed
        return Episode(task, sample, seed, conversation, self._machine.initial, limit_variables(self._spec.limits))
