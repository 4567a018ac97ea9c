"""Plays one scenario: one episode, driven by the executor as in a run, with its journal kept in memory.

Invariant: the result depends only on the spec, the scenario and the tokenizer. Nothing is written to disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.actions.base import EpisodeObjects
from engine.actions.images import ImageStorer, MemoryImages
from engine.backends.scripted import ScriptedBackend
from engine.episode.compiled import EpisodeFactory
from engine.errors import EngineError
from engine.machine.machine import resolved_machine
from engine.plugins.scenarios.coverage import Edge, Watcher
from engine.plugins.scenarios.load import ScenarioSet, ScenarioSpecs, check_scenario, check_tools
from engine.plugins.scenarios.scripted import script_actions, script_objects
from engine.schemas.journal import LimitRecord
from engine.schemas.script import Script
from engine.spec.conversation import conversation_of
from engine.store.journal import MemoryJournal

if TYPE_CHECKING:
    from engine.actions.workers import Workers
    from engine.machine.machine import ResolvedMachine
    from engine.plugins.scenarios.schema import Scenario
    from engine.schemas.environment import Task
    from engine.schemas.trajectory import Trajectory
    from engine.tokens.format import ChatFormat

THREADS = 8
"""Maximum number of threads for the synchronous code of a scenario's spec."""


@dataclass(frozen=True)
class Played:
    """The result of a scenario."""

    trajectory: Trajectory
    limits: list[str]
    """The limits that were reached, in order."""
    states: list[str]
    """The states that the episode entered, including the first."""
    taken: list[Edge]
    prompt: int
    """Number of messages that come from the spec's `prompt`."""


async def play(specs: ScenarioSpecs, scenarios: ScenarioSet, index: int, form: ChatFormat, workers: Workers) -> Played:
    """Play one scenario.

    Raises:
        EngineError: it cannot be played: it does not match the spec, or a reply cannot be written in the chat format.
    """
    scenario = scenarios.file.scenarios[index]
    loaded = specs.loaded(scenarios, index)
    resolved = resolved_machine(loaded.spec)
    check_scenario(loaded, resolved, scenarios, index)
    task = specs.task(loaded, scenarios, index)
    backend = ScriptedBackend(_script(scenario), form)
    await backend.start()
    # No scenario waits for a model.
    factory = EpisodeFactory(loaded, form, backend, workers, role_backends="scripted")
    scripted = _ScenarioEpisode(factory, resolved, form, workers, scenario)
    await factory.roles.start()
    try:
        return await scripted.play(task, scenarios, index)
    finally:
        await factory.roles.close()


def _script(scenario: Scenario) -> Script:
    """Return the script of replies; a scenario without replies has an empty script, and fails if a reply is requested."""
    return Script.model_construct(replies=list(scenario.replies), cases=[], exhausted="error")


class _ScenarioEpisode:
    """One episode of a scenario."""

    def __init__(
        self, factory: EpisodeFactory, resolved: ResolvedMachine, form: ChatFormat, workers: Workers, scenario: Scenario
    ) -> None:
        self._factory = factory
        self._workers = workers
        self._scenario = scenario
        self._watcher = Watcher(resolved)
        self._journal = MemoryJournal()
        images = MemoryImages()
        self._executor = factory.executor(
            actions=script_actions(factory.actions, scenario, factory.spec.limits.episode_seconds),
            watch=self._watcher,
            images=ImageStorer(form, images, images.fetch, factory.spec),
        )

    async def play(self, task: Task, scenarios: ScenarioSet, index: int) -> Played:
        """Run the episode to its end."""
        broken: EngineError | None = None
        try:
            objects = await self._factory.object_builder.open(task)
        except EngineError as error:
            objects, broken = EpisodeObjects(), error
        try:
            if broken is None:
                check_tools(list(objects.toolbox.tools) if objects.toolbox else [], scenarios, index)
                script_objects(objects, self._scenario, self._workers)
            episode = self._factory.episode(task, self._scenario.sample, objects)
            if broken is None:
                await self._executor.run(episode, objects, self._journal)
            else:
                await self._executor.run_failed(episode, objects, self._journal, broken)
            trajectory = episode.trajectory("scenario", exact=True)
        finally:
            await self._factory.object_builder.close(objects)
        limits = [entry.record.limit for entry in self._journal.entries if isinstance(entry.record, LimitRecord)]
        states = [self._factory.machine.initial, *(dest for _, _, dest in trajectory.path)]
        return Played(trajectory, limits, states, self._watcher.taken, self._opening(task))

    def _opening(self, task: Task) -> int:
        """How many messages the prompt of a task has."""
        source = self._factory.spec.conversation
        return len(self._factory.spec.messages if source is None else conversation_of(task.fields, source))
