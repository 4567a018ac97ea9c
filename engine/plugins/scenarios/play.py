"""Plays one scenario: one episode, driven by the executor as in a run, with its journal kept in memory.

Invariants:
- The result depends only on the spec, the scenario and the tokenizer. Nothing is written to disk.
- A scripted answer replaces only the spec's own code; anything that a scenario does not script runs for real.
  Deadlines, checks of what is returned, the validation of a call's arguments, rewards and facts are the engine's, as in
  a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import orjson
from pydantic import BaseModel

from engine.actions.calling.code_call import call_spec_code, on_main_loop
from engine.actions.calling.host import HostedTool
from engine.actions.objects import ObjectBuilder
from engine.actions.record_filters import ImageStorer, MemoryImages, record_filters
from engine.actions.reward_source import JUDGE, SCORER, CodeRewards
from engine.actions.services import ServiceInputs, open_services
from engine.actions.spec_code import ScoreAction, StepAction
from engine.actions.toolbox import BoundTool, Toolbox
from engine.backends.backend import SlotSampler
from engine.backends.scripted import ScriptedBackend
from engine.backends.slots import Slots
from engine.episode.compiled import compile_spec
from engine.episode.executor import Executor
from engine.errors import EngineError, SpecCodeError
from engine.limits import EPISODE_SECONDS
from engine.machine.machine import resolved_machine
from engine.plugins.scenarios.coverage import Edge, Watcher
from engine.plugins.scenarios.load import ScenarioSet, ScenarioSpecs, check_scenario, check_tools
from engine.plugins.scenarios.schema import EnvironmentScript
from engine.schemas.environment import Reset, Step, ToolReply, UserTurn
from engine.schemas.journal import LimitRecord
from engine.schemas.script import Script
from engine.spec.conversation import conversation_of
from engine.store.journal import MemoryJournal

if TYPE_CHECKING:
    from engine.actions.action import Action, EpisodeObjects
    from engine.actions.calling.workers import Workers
    from engine.episode.episode import Episode
    from engine.plugins.scenarios.schema import (
        Scenario,
        ScriptedFault,
        ScriptedResult,
        ScriptedStep,
        ScriptedUserTurn,
    )
    from engine.schemas.environment import Task
    from engine.schemas.episode import EpisodeSpec
    from engine.schemas.trajectory import Blame, Trajectory
    from engine.tokens.template import ChatTemplate

SCORER_SECONDS = 60.0
"""Deadline of a scripted scorer, which answers at once."""
THREADS = 8
"""Maximum number of threads for the synchronous code of a scenario's spec."""


def _faulted(fault: ScriptedFault, blame: Blame, what: str) -> Any:
    """Raise the failure that the scenario scripts, or give an answer that is invalid."""
    if fault.timeout:
        raise SpecCodeError(
            f"{what} did not answer within its deadline: the scenario says so", blame=blame, kind=f"{blame}_timeout"
        )
    if fault.error is not None:
        raise RuntimeError(fault.error)
    return object()  # which JSON cannot hold, so no environment, tool or user may return it


def _scripted_answer(answer: Any, model: type[BaseModel] | None, blame: Blame, what: str, *_: Any) -> Any:
    """A scripted answer as the class that real code returns; `model` is None for rewards, which are a list."""
    if answer.faulty:
        return _faulted(answer, blame, what)
    if model is None:
        return list(answer.rewards)
    return model(**{name: getattr(answer, name) for name in model.model_fields})


class ScriptedUser:
    """A user with scripted answers; the real user gives the others."""

    def __init__(self, real: Any, answers: Sequence[ScriptedUserTurn | None]) -> None:
        self._real = real
        self._answers = iter(answers)

    @property
    def respond(self) -> Callable[..., Any]:
        """The function that gives the next answer. It is a property, because a real user may be `async` and a scripted
        one is not."""
        answer = next(self._answers, None)
        if answer is None:
            real: Callable[..., Any] = self._real.respond
            return real
        return partial(_scripted_answer, answer, UserTurn, "user", "the user")


class ScriptedEnvironment:
    """An environment with some scripted answers."""

    def __init__(self, real: Any, script: EnvironmentScript) -> None:
        self._real = real
        if script.reset is not None:
            self.reset = partial(_scripted_answer, script.reset, Reset, "environment", "the environment")
        if script.score is not None:
            self.score = partial(_scripted_answer, script.score, None, "environment", "the environment")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class ScriptedTools:
    """The scripted results of a scenario's tools, each used for a given number of calls."""

    def __init__(self, results: Sequence[ScriptedResult], workers: Workers) -> None:
        self._results = list(results)
        self._workers = workers
        self._served: Counter[int] = Counter()

    def bind(self, tools: Mapping[str, BoundTool]) -> Toolbox:
        """Return the tools with the same schemas; for a scripted tool, scripted results are used first."""
        bound = dict(tools)
        for name in {result.tool for result in self._results} & tools.keys():
            tool, function = tools[name], tools[name].function
            scripted = (
                _ScriptedHostedTool(self, function, name, self._workers)
                if isinstance(function, HostedTool)
                else self._in_process(tool, function)
            )
            bound[name] = BoundTool(scripted, tool.shape, tool.seconds, tool.effects)
        return Toolbox(list(bound.values()), self._workers)

    def _in_process(self, tool: BoundTool, function: Callable[..., Any]) -> Callable[..., Any]:
        """A replacement for a tool's function in this process."""

        @on_main_loop
        async def call(**arguments: Any) -> Any:
            written = {name: value for name, value in arguments.items() if name != tool.shape.view}
            answer = self.take(tool.shape.name, written)
            if answer is not None:
                return _said(answer)
            real = partial(function, **arguments)
            what = f"tool `{tool.shape.name}`"
            return await call_spec_code(
                self._workers, real, seconds=None, blame="tool", what=what, effects=tool.effects
            )

        return call

    def take(self, name: str, arguments: Mapping[str, Any]) -> ScriptedResult | None:
        """Return the first result that matches a call; None if the real tool must be called."""
        for index, result in enumerate(self._results):
            spent = result.times is not None and self._served[index] >= result.times
            wanted = result.arguments or {}
            fits = all(key in arguments and _plain(arguments[key]) == value for key, value in wanted.items())
            if result.tool == name and not spent and fits:
                self._served[index] += 1
                return result
        return None


class _ScriptedHostedTool(HostedTool):
    """A replacement for a tool in a worker process, where its arguments are still checked."""

    def __init__(self, script: ScriptedTools, real: HostedTool, name: str, workers: Workers) -> None:
        self._script, self._real, self._name, self._workers = script, real, name, workers

    @property
    def lost(self) -> bool:
        """Whether the real tool's worker is lost."""
        return self._real.lost

    async def check(self, arguments: Mapping[str, Any], *, seconds: float, what: str) -> None:
        """Check the arguments, as the real tool does."""
        await self._real.check(arguments, seconds=seconds, what=what)

    async def call(self, arguments: Mapping[str, Any], view: Any, *, seconds: float, what: str) -> Any:
        """Return the scripted result, or the real tool's."""
        await self.check(arguments, seconds=seconds, what=what)
        answer = self._script.take(self._name, arguments)
        if answer is None:
            return await self._real.call(arguments, view, seconds=seconds, what=what)
        said = partial(_said, answer)
        return await call_spec_code(self._workers, said, seconds=seconds, blame="tool", what=what)


def _said(answer: ScriptedResult) -> Any:
    """Return the result of a scripted tool."""
    if answer.faulty:
        return _faulted(answer, "tool", f"tool `{answer.tool}`")
    if answer.rewards or answer.facts or answer.content is not None:
        content = answer.content
        if content is None:
            content = answer.result if isinstance(answer.result, str) else orjson.dumps(answer.result).decode()
        return ToolReply(content=content, rewards=answer.rewards, facts=answer.facts)
    return answer.result


def _plain(value: Any) -> Any:
    """Return an argument as JSON, because validation may have made an object of it."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    try:
        return orjson.loads(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS))
    except TypeError:
        return value


class ScriptedStepAction(StepAction):
    """`step`, or an action of the spec's own, with some scripted answers."""

    def __init__(self, real: StepAction, answers: Sequence[ScriptedStep | None]) -> None:
        vars(self).update(vars(real))
        self._real, self._answers = real, iter(answers)

    def target(self, objects: EpisodeObjects) -> Callable[..., Any]:
        """Return the next scripted answer, or the real code."""
        answer = next(self._answers, None)
        if answer is None:
            return self._real.target(objects)
        return partial(_scripted_answer, answer, Step, self.blame, self.what)


def script_objects(objects: EpisodeObjects, scenario: Scenario, workers: Workers) -> None:
    """Wrap an episode's objects with a scenario's answers. The objects are closed as usual."""
    if scenario.user:
        objects.user = ScriptedUser(objects.user, scenario.user)
    if scenario.environment != EnvironmentScript():
        objects.environment = ScriptedEnvironment(objects.environment, scenario.environment)
    if scenario.tools and objects.toolbox is not None:
        objects.toolbox = ScriptedTools(scenario.tools, workers).bind(objects.toolbox.tools)


def script_actions(
    actions: Mapping[str, Action], scenario: Scenario, episode_seconds: float | None
) -> dict[str, Action]:
    """Return the actions with a scenario's answers, and with its time limit."""
    changed = dict(actions)
    for state, answers in scenario.steps.items():
        real = changed[state]
        assert isinstance(real, StepAction)  # `check_scenario` has checked it
        changed[state] = ScriptedStepAction(real, answers)
    if scenario.scorer is not None:  # in place of the spec's scorer or judge; an environment's `score` is asked as ever
        say = partial(_scripted_answer, scenario.scorer, None, "environment", "the scorer")
        for state, action in actions.items():
            if isinstance(action, ScoreAction):
                changed[state] = scripted = copy(action)
                scorer = next((source for source in action.sources if source.order in (SCORER, JUDGE)), None)
                rewards = CodeRewards(
                    action._code,
                    lambda objects: say,
                    order=SCORER,
                    source="score" if scorer is None else scorer.source,
                    what="the scorer",
                    seconds=SCORER_SECONDS,
                )
                others = [source for source in action.sources if source is not scorer]
                scripted.sources = sorted([rewards, *others], key=lambda source: source.order)
    if (late := scenario.out_of_time) is not None:
        changed[late.state] = _out_of_time(changed[late.state], late.visit, episode_seconds or 0.0)
    return changed


def _out_of_time(real: Action, visit: int, seconds: float) -> Action:
    """An action that reaches `episode_seconds` at one visit, before every other limit."""
    action, visits = copy(real), count(1)

    def limit(episode: Episode) -> tuple[str, float] | None:
        return (EPISODE_SECONDS.name, seconds) if next(visits) == visit else real.limit(episode)

    action.limit = limit  # type: ignore[method-assign]
    return action


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
    # A scenario may have no replies; then it fails where one is requested.
    script = Script.model_construct(replies=list(scenario.replies), cases=[], exhausted="error")
    backend = ScriptedBackend(script, template)
    await backend.start()
    slots = Slots(1)  # no scenario waits for a model
    compiled = compile_spec(loaded, template, workers, context=backend.context)
    compiled.actions = script_actions(compiled.actions, scenario, loaded.spec.limits.episode_seconds)
    services = open_services(
        ServiceInputs(loaded=loaded, template=template, code=workers, backend=backend, slots=slots, only_scripted=True)
    )
    builder = ObjectBuilder(loaded, compiled.machine, workers, sampler=SlotSampler(backend, slots), services=services)
    images = MemoryImages()
    storer = ImageStorer(template, images, images.sources.get, loaded.spec)
    watcher = Watcher(compiled.machine.resolved)
    executor = Executor(compiled, watch=watcher, filters=record_filters(loaded.spec, template, services, storer))
    journal = MemoryJournal()

    broken: EngineError | None = None
    async with AsyncExitStack() as ending:
        for service in services:
            ending.push_async_callback(service.close)
            await service.start([backend])
        try:
            objects = await builder.open(task)
        except EngineError as error:  # a failure of the episode
            objects, broken = builder.bare(), error
        ending.push_async_callback(builder.close, objects)
        if broken is None:
            check_tools(list(objects.toolbox.tools) if objects.toolbox else [], scenarios, index)
            script_objects(objects, scenario, workers)
        episode = compiled.episode(task, scenario.sample, objects.toolbox.schemas if objects.toolbox else [])
        if broken is None or not await executor.fail(episode, journal, broken):
            await executor.run(episode, objects, journal)
        trajectory = episode.trajectory("scenario", exact=True)
    return Played(
        trajectory=trajectory,
        limits=[entry.record.limit for entry in journal.entries if isinstance(entry.record, LimitRecord)],
        states=[compiled.machine.initial, *(dest for _, _, dest in trajectory.path)],
        taken=watcher.taken,
        prompt=prompt_length(loaded.spec, task),
    )


def prompt_length(spec: EpisodeSpec, task: Task) -> int:
    """Number of messages that the spec's prompt has for a task."""
    return len(spec.messages if spec.conversation is None else conversation_of(task.fields, spec.conversation))
