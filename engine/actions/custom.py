"""`step`, and a spec's own actions: the environment or a function returns a `Step`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.actions.action import EpisodeObjects, LimitedAction, post_rewards
from engine.actions.action_facts import OWN_ACTION_SECONDS
from engine.actions.calling.workers import call_spec_code
from engine.episode.episode import Episode
from engine.errors import SpecCodeError
from engine.isolation.pool import RemoteFunction
from engine.isolation.remote import Origin, function_in
from engine.schemas.environment import Step
from engine.schemas.journal import StepRecord
from engine.spec.code.entry import load_entry

if TYPE_CHECKING:
    from engine.actions.calling.workers import Workers
    from engine.schemas.entry import Effects
    from engine.schemas.machine import StateSpec
    from engine.schemas.trajectory import Blame
    from engine.spec.load import LoadedSpec
    from engine.tokens.template import ChatTemplate


class StepAction(LimitedAction):
    """Call code outside the engine, which returns the next event."""

    _what: str
    _blame: Blame
    _seconds: float
    _effects: Effects = "replayable"

    def _target(self, objects: EpisodeObjects) -> Callable[..., Any]:
        raise NotImplementedError

    async def perform(self, episode: Episode, objects: EpisodeObjects) -> StepRecord:
        """Return the answer, after checking that its event is declared and that it has no message of role assistant.

        Raises:
            SpecCodeError: it failed, or returned no `Step`, an undeclared event, or a message of role assistant.
        """
        step = await call_spec_code(
            self._code,
            self._target(objects),
            episode.view(),
            seconds=self._seconds,
            blame=self._blame,
            what=self._what,
            effects=self._effects,
        )
        if not isinstance(step, Step):
            raise SpecCodeError(
                f"{self._what} returned {type(step).__name__}; it must return a Step",
                blame=self._blame,
                kind=f"{self._blame}_bad_reply",
            )
        if step.event not in self.events:
            raise SpecCodeError(
                f"{self._what} returned the event `{step.event}`; it declares {', '.join(self.events)}",
                blame=self._blame,
                kind=f"{self._blame}_bad_reply",
            )
        if any(message.role == "assistant" for message in step.messages):
            raise SpecCodeError(
                f"{self._what} returned a message of role assistant; only the model's replies have this role",
                blame=self._blame,
                kind=f"{self._blame}_bad_reply",
            )
        return StepRecord(step=step)

    def apply(self, episode: Episode, record: StepRecord) -> str:
        """Add its messages to the conversation, and write its rewards and facts."""
        episode.facts.update(record.step.facts)
        if record.step.messages:
            episode.conversation.add(list(record.step.messages))
        post_rewards(episode, record.step.rewards, "environment")
        episode.solved = episode.solved or bool(episode.facts.get("solved"))
        return record.step.event

    def effects(self, episode: Episode, objects: EpisodeObjects) -> str:
        """Return the declared effects."""
        return self._effects


class EnvironmentStep(StepAction):
    """`step`: calls the environment's `step`."""

    def __init__(self, loaded: LoadedSpec, state: StateSpec, template: ChatTemplate, code: Workers) -> None:
        """Read the environment's events.

        Raises:
            SpecCodeError: the spec has no environment.
        """
        spec = loaded.spec.environment
        if spec is None:
            raise SpecCodeError(
                "a state's action is `step`, but the spec has no environment", blame="spec", kind="no_environment"
            )
        isolation = loaded.spec.environment_isolation
        use = spec.entry.use
        if isolation.mode == "process":
            events = code.isolation.describe(use, loaded.base, isolation).events
        else:
            events = load_entry(use, loaded.base).events
        super().__init__(loaded, state, template, code)
        self.events = tuple(events or ())
        self._blame = "environment"
        self._what = f"`{spec.use}`.step"
        self._seconds = spec.timeout
        self._effects = spec.effects

    def _target(self, objects: EpisodeObjects) -> Callable[..., Any]:
        target: Callable[..., Any] = objects.environment.step
        return target


class OwnAction(StepAction):
    """A spec's own action, by entry point."""

    def __init__(self, loaded: LoadedSpec, state: StateSpec, template: ChatTemplate, code: Workers) -> None:
        """Load the function and read its events.

        Raises:
            SpecCodeError: the function declares no events.
        """
        assert state.action is not None
        isolation = loaded.spec.isolation_of(None)
        self._origin = Origin(state.action, loaded.base, state.with_, "function")
        function: Callable[..., Any]
        if isolation.mode == "process":
            described = code.isolation.describe(state.action, loaded.base, isolation)
            events, effects = described.events, described.effects
            function = RemoteFunction(self._origin, code.isolation.pool(isolation, functions=True), "step")
        else:
            function = load_entry(state.action, loaded.base)
            events, effects = getattr(function, "events", None), getattr(function, "effects", "pure")
            function = partial(function, **state.with_) if state.with_ else function
        if not events:
            raise SpecCodeError(
                f'`{state.action}` declares no events; decorate it with `@action("done", …)` from engine.schemas.environment',
                blame="spec",
                kind="bad_action",
            )
        super().__init__(loaded, state, template, code)
        self.events = tuple(events)
        self._function = function
        self._blame = "spec"
        self._what = f"`{state.action}`"
        self._seconds = state.timeout or OWN_ACTION_SECONDS
        self._effects = effects

    def _target(self, objects: EpisodeObjects) -> Callable[..., Any]:
        return self._function if objects.cell is None else function_in(objects.cell, self._origin, "step")
