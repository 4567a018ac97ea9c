"""Builds the parts of one spec's episodes: services, machine, objects, actions, executors and the episodes themselves.

    factory = EpisodeFactory(loaded, format, backend, Workers())
    executor = factory.executor()
    objects = await factory.object_builder.open(task)
    episode = factory.episode(task, sample, objects)
    await executor.run(episode, objects, journal)

The runner, replay and scenarios build episodes only here; the trainer does so through the runner. Their differences
are arguments, so an option of the spec has the same effect in all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from engine.actions.base import Action, Services
from engine.actions.cut_texts import TextCutter
from engine.actions.objects import ObjectBuilder
from engine.actions.registry import build_actions
from engine.actions.role_models import RoleModels
from engine.episode.episode import Episode
from engine.episode.executor import Executor
from engine.limits import limit_variables
from engine.machine.machine import Machine, resolved_machine
from engine.rewards.rules import compile_rules
from engine.tokens.conversation import Conversation

if TYPE_CHECKING:
    from pathlib import Path

    from engine.actions.base import EpisodeObjects
    from engine.actions.images import ImageStorer
    from engine.actions.role_models import RoleBackends
    from engine.actions.workers import Workers
    from engine.agents.program import ProgramBodies
    from engine.backends.base import Backend
    from engine.deadline import PausableClocks
    from engine.episode.executor import Watch
    from engine.schemas.environment import Task
    from engine.spec.load import LoadedSpec
    from engine.tokens.format import ChatFormat


class EpisodeFactory:
    """Builds the episodes of one spec. All of them share it; it holds no state of an episode.

    Args:
        loaded: The spec.
        format: The policy's chat format.
        backend: The policy's backend, started and closed by the caller.
        workers: Threads and worker processes for the spec's code; closed by the caller.
        slots: Maximum number of generations of the policy in flight.
        role_backends: Backends that may serve model-played users and judges; without one, calls of the role fail.
        training: The weights of the policy change while episodes run.
        programs: Agent programs that run elsewhere, instead of the spec's.
        folder: The folder of the run or training; None: nothing is stored.

    Raises:
        EngineError: the spec's code cannot be imported, or its machine or rules are invalid.
    """

    def __init__(
        self,
        loaded: LoadedSpec,
        format: ChatFormat,
        backend: Backend,
        workers: Workers,
        *,
        slots: int = 1,
        role_backends: RoleBackends = "any",
        training: bool = False,
        programs: ProgramBodies | None = None,
        folder: Path | None = None,
    ) -> None:
        spec = loaded.spec
        self.spec = spec
        self._format = format
        generations = asyncio.Semaphore(slots)
        self.roles = RoleModels(loaded, format, backend, generations, allowed=role_backends, training=training)
        """Models of model-played users and judges; the caller who needs them calls `start` and `close`."""
        self.services = Services(spec, format, backend, workers, generations, self.roles, programs, folder)
        resolved = resolved_machine(spec)
        self.machine = Machine(resolved)
        self.object_builder = ObjectBuilder(self.services, loaded.base)
        self.actions = build_actions(resolved.states, self.services, loaded.base)
        """Actions by state; states without an action are left out."""
        self._rules = compile_rules(spec.rewards.reassign)
        self._limits = limit_variables(spec.limits)
        self._cut = None if spec.limits.tool_result_tokens is None else TextCutter(spec.limits, format).cut

    def executor(
        self,
        *,
        actions: Mapping[str, Action] | None = None,
        watch: Watch | None = None,
        images: ImageStorer | None = None,
        clocks: PausableClocks | None = None,
    ) -> Executor:
        """The executor that drives the episodes.

        Args:
            actions: By state, in place of the spec's actions.
            watch: Called at each transition.
            images: Stores the images that records bring.
            clocks: Paused while no server is reachable; the episodes' clocks are added to it.
        """
        return Executor(
            self.machine,
            self.actions if actions is None else actions,
            self._rules,
            episode_seconds=self.spec.limits.episode_seconds,
            watch=watch,
            store_images=None if images is None else images.store_images,
            clocks=clocks,
            cut=self._cut,
        )

    def episode(self, task: Task, sample: int, objects: EpisodeObjects) -> Episode:
        """Build a new episode in the machine's first state.

        Args:
            task: Its task.
            sample: Its index in the task's group, from 0.
            objects: Its objects; the prompt lists their tools.
        """
        rollout = self.spec.rollout
        schemas = objects.toolbox.schemas if objects.toolbox else []
        conversation = Conversation(self._format, schemas, self.spec.model.history)
        episode = Episode(
            task, sample, rollout.seed, conversation, self.machine.initial, self._limits, salt=rollout.salt
        )
        facts = self.spec.environment.facts if self.spec.environment else None
        episode.shows_written = facts is not None and facts.reads_written
        return episode
