"""Plays one scenario: one episode, driven by the executor as in a run, with its journal kept in memory.

Invariant: the result depends only on the spec, the scenario and the tokenizer. Nothing is written to disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.actions.objects import ObjectBuilder
from engine.actions.record_filters import ImageStorer, MemoryImages, record_filters
from engine.actions.services import EpisodeService, ServiceInputs, open_services
from engine.backends.backend import SlotSampler
from engine.backends.scripted import ScriptedBackend
from engine.backends.slots import Slots
from engine.episode.compiled import CompiledSpec, compile_spec
from engine.episode.executor import Executor
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
    from engine.actions.calling.workers import Workers
    from engine.plugins.scenarios.schema import Scenario
    from engine.schemas.environment import Task
    from engine.schemas.trajectory import Trajectory
    from engine.tokens.template import ChatTemplate

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


async def play(
    specs: ScenarioSpecs, scenarios: ScenarioSet, index: int, template: ChatTemplate, workers: Workers
) -> Played:
    """Play one scenario.

    Raises:
        EngineError: it cannot be played: it does not match the spec, or a reply cannot be written in the chat format.
    """
    scenario = scenarios.file.scenarios[index]
    loaded = specs.loaded(scenarios, index)
    check_scenario(loaded, resolved_machine(loaded.spec), scenarios, index)
    task = specs.task(loaded, scenarios, index)
    backend = ScriptedBackend(_script(scenario), template)
    await backend.start()
    # No scenario waits for a model.
    slots = Slots(1)
    compiled = compile_spec(loaded, template, workers, context=backend.context)
    inputs = ServiceInputs(
        loaded=loaded, template=template, code=workers, backend=backend, slots=slots, only_scripted=True
    )
    services = open_services(inputs)
    builder = ObjectBuilder(loaded, compiled.machine, workers, sampler=SlotSampler(backend, slots), services=services)
    scripted = _ScenarioEpisode(compiled, builder, services, workers, scenario)
    async with AsyncExitStack() as ending:
        for service in services:
            ending.push_async_callback(service.close)
            await service.start([backend])
        return await scripted.play(task, scenarios, index)


def _script(scenario: Scenario) -> Script:
    """Return the script of replies; a scenario without replies has an empty script, and fails if a reply is requested."""
    return Script.model_construct(replies=list(scenario.replies), cases=[], exhausted="error")


class _ScenarioEpisode:
    """One episode of a scenario."""

    def __init__(
        self,
        compiled: CompiledSpec,
        builder: ObjectBuilder,
        services: Sequence[EpisodeService],
        workers: Workers,
        scenario: Scenario,
    ) -> None:
        self._compiled = compiled.with_actions(
            script_actions(compiled.actions, scenario, compiled.spec.limits.episode_seconds)
        )
        self._builder = builder
        self._workers = workers
        self._scenario = scenario
        self._watcher = Watcher(compiled.machine.resolved)
        self._journal = MemoryJournal()
        images = MemoryImages()
        storer = ImageStorer(compiled.template, images, images.fetch, compiled.spec)
        filters = record_filters(compiled.spec, compiled.template, services, storer)
        self._executor = Executor(self._compiled, watch=self._watcher, filters=filters)

    async def play(self, task: Task, scenarios: ScenarioSet, index: int) -> Played:
        """Run the episode to its end."""
        broken: EngineError | None = None
        try:
            objects = await self._builder.open(task)
        except EngineError as error:
            objects, broken = self._builder.none(), error
        try:
            if broken is None:
                check_tools(list(objects.toolbox.tools) if objects.toolbox else [], scenarios, index)
                script_objects(objects, self._scenario, self._workers)
            tools = objects.toolbox.schemas if objects.toolbox else []
            episode = self._compiled.episode(task, self._scenario.sample, tools)
            if broken is None or not await self._executor.fail(episode, self._journal, broken):
                await self._executor.run(episode, objects, self._journal)
            trajectory = episode.trajectory("scenario", exact=True)
        finally:
            await self._builder.close(objects)
        limits = [entry.record.limit for entry in self._journal.entries if isinstance(entry.record, LimitRecord)]
        states = [self._compiled.machine.initial, *(dest for _, _, dest in trajectory.path)]
        return Played(trajectory, limits, states, self._watcher.taken, self._opening(task))

    def _opening(self, task: Task) -> int:
        """How many messages the prompt of a task has."""
        source = self._compiled.spec.conversation
        return len(self._compiled.spec.messages if source is None else conversation_of(task.fields, source))
