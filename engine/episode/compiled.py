"""What all episodes of a spec share: machine, actions, rules, template and limits. Invariant: it never changes.

    compiled = compile_spec(loaded, template, code)
    episode = compiled.episode(task, sample, toolbox.schemas)
    episode.feed(record)

Runs, replays, scenarios and training build episodes only here, so an option of the spec has the same effect in all of
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine import plugin
from engine.actions.facts import ACTIONS
from engine.actions.spec_code import StepAction
from engine.episode.episode import Episode
from engine.errors import SpecCodeError
from engine.limits import limit_values
from engine.machine.machine import Machine, resolved_machine
from engine.rewards.ledger import Rules
from engine.schemas.limits import OVERFLOW
from engine.tokens.conversation import Conversation

if TYPE_CHECKING:
    from engine.actions.action import Action
    from engine.actions.calling.workers import Workers
    from engine.schemas.environment import Task
    from engine.schemas.journal import JournalEntry
    from engine.schemas.machine import StateSpec
    from engine.spec.load import LoadedSpec
    from engine.tokens.template import ChatTemplate


class CompiledSpec:
    """A spec that is ready for episodes. `compile_spec` makes it."""

    def __init__(
        self, loaded: LoadedSpec, template: ChatTemplate, machine: Machine, actions: Mapping[str, Action]
    ) -> None:
        spec = loaded.spec
        self.loaded = loaded
        """The spec; its `model.context` is the longest context that model and backend have, None if neither says
        one."""
        self.spec = spec
        self.template = template
        self.machine = machine
        self.actions = actions
        """By state; states without an action are left out."""
        self.rules = Rules(spec.rewards.reassign)
        self.limit_values: dict[str, int | float] = limit_values(spec.limits)
        """The `limits` variable of guards."""
        self.makes_room = frozenset(state for state in machine.states if machine.resolved.leaving(state, OVERFLOW))
        """The states that handle the event `overflow`."""
        self.ends = frozenset(["", *(state for state in machine.final if state not in actions)])
        """The states whose entry ends an episode, because no action remains there; "" where the machine stops."""
        environment = spec.environment.facts if spec.environment else None
        self.shows_written = environment is not None and environment.reads_written
        """Whether views of episodes show the newest reply as it was sampled."""

    def episode(self, task: Task, sample: int, tools: Sequence[dict[str, Any]]) -> Episode:
        """Build a new episode in the machine's first state.

        Args:
            task: Its task.
            sample: Its index in the task's group, from 0.
            tools: The tools that its prompt lists.
        """
        conversation = Conversation(self.template, tools, self.spec.model.history)
        return Episode(self, task, sample, conversation)

    def has_ended(self, journal: Sequence[JournalEntry]) -> bool:
        """Whether a journal has the entry that ends its episode."""
        return bool(journal) and journal[-1].dest in self.ends


def compile_spec(
    loaded: LoadedSpec, template: ChatTemplate, code: Workers, *, context: int | None = None
) -> CompiledSpec:
    """Compile a spec.

    Args:
        loaded: The spec.
        template: The policy's chat format.
        code: Threads and worker processes for the spec's code; closed by the caller.
        context: The backend's own limit on a prompt and its reply, in tokens.

    Raises:
        EngineError: the spec's code cannot be imported, or its machine or rules are invalid.
    """
    model = loaded.spec.model
    contexts = [length for length in (model.context or template.context, context) if length]
    model = model.model_copy(update={"context": min(contexts, default=None)})
    loaded = replace(loaded, spec=loaded.spec.model_copy(update={"model": model}))
    machine = Machine(resolved_machine(loaded.spec))
    states = machine.states.items()
    actions = {name: _action(loaded, state, template, code) for name, state in states if state.action is not None}
    return CompiledSpec(loaded, template, machine, actions)


def _action(loaded: LoadedSpec, state: StateSpec, template: ChatTemplate, code: Workers) -> Action:
    facts = ACTIONS.get(str(state.action))
    if facts is None:
        if (why := plugin.missing("actions", str(state.action))) is not None:
            raise SpecCodeError(f"the action `{state.action}`: {why}", blame="spec", kind="plugin_missing")
        return StepAction(loaded, state, template, code)
    module, _, name = facts.use.partition(":")
    action: Action = getattr(import_module(module), name)(loaded, state, template, code)
    return action
