"""Environments, tools and users with answers from a scenario; anything a scenario does not script runs for real.

Invariant: a scripted answer replaces only the spec's own code. Deadlines, checks of what is
returned, the validation of a call's arguments, rewards and facts are the engine's, as in a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
from pydantic import BaseModel

from engine.actions.action import Action
from engine.actions.calling.host import HostedTool
from engine.actions.calling.workers import call_spec_code, on_main_loop
from engine.actions.reward_source import JUDGE, SCORER, RewardSource, ask_rewards
from engine.actions.spec_code import ScoreAction, StepAction
from engine.actions.toolbox import BoundTool, Toolbox
from engine.errors import SpecCodeError
from engine.limits import EPISODE_SECONDS
from engine.schemas.environment import Reset, Step, ToolReply, UserTurn
from engine.schemas.journal import ScoreRecord

if TYPE_CHECKING:
    from engine.actions.action import EpisodeObjects
    from engine.actions.calling.workers import Workers
    from engine.episode.episode import Episode
    from engine.plugins.scenarios.schema import (
        OutOfTime,
        Scenario,
        ScriptedFault,
        ScriptedResult,
        ScriptedScore,
        ScriptedStep,
    )
    from engine.schemas.environment import EpisodeView
    from engine.schemas.journal import Record
    from engine.schemas.trajectory import Blame


SCORER_SECONDS = 60.0
"""Deadline of a scripted scorer, which answers at once."""


class InvalidAnswer:
    """An answer that no environment, tool or user may return: JSON cannot hold it."""


def _faulted(fault: ScriptedFault, blame: Blame, what: str) -> Any:
    """Raise the failure that the scenario scripts."""
    if fault.timeout:
        raise SpecCodeError(
            f"{what} did not answer within its deadline: the scenario says so", blame=blame, kind=f"{blame}_timeout"
        )
    if fault.error is not None:
        raise RuntimeError(fault.error)
    return InvalidAnswer()


class ScriptedUser:
    """A user with scripted answers; the real user gives the others."""

    def __init__(self, real: Any, answers: Sequence[Any]) -> None:
        self._real = real
        self._answers = iter(answers)

    @property
    def respond(self) -> Callable[..., Any]:
        """The function that gives the next answer. It is a property, because a real user may be `async` and a scripted one is not."""
        answer = next(self._answers, None)
        if answer is None:
            real: Callable[..., Any] = self._real.respond
            return real
        return partial(self._say, answer)

    @staticmethod
    def _say(answer: Any, view: Any) -> Any:
        return _faulted(answer, "user", "the user") if answer.faulty else _as(UserTurn, answer)


class ScriptedEnvironment:
    """An environment with some scripted answers."""

    def __init__(self, real: Any, reset: Any, score: Any) -> None:
        self._real = real
        if reset is not None:
            self.reset = partial(self._answer, reset)
        if score is not None:
            self.score = partial(self._answer, score)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    @staticmethod
    def _answer(answer: Any, *_: Any) -> Any:
        if answer.faulty:
            return _faulted(answer, "environment", "the environment")
        return _as(Reset, answer) if hasattr(answer, "messages") else list(answer.rewards)


class ScriptedTools:
    """The scripted results of a scenario's tools, each used for a given number of calls."""

    def __init__(self, results: Sequence[ScriptedResult], workers: Workers) -> None:
        self._results = list(results)
        self._workers = workers
        self._served: Counter[int] = Counter()

    def bind(self, tools: Mapping[str, BoundTool]) -> Toolbox:
        """Return the tools with the same schemas; for a scripted tool, scripted results are used first."""
        named = {result.tool for result in self._results}
        bound = [self._bound(tool) if tool.shape.name in named else tool for tool in tools.values()]
        return Toolbox(bound, self._workers)

    def _bound(self, tool: BoundTool) -> BoundTool:
        if isinstance(tool.function, HostedTool):
            return BoundTool(
                _ScriptedHostedTool(self, tool.function, tool, self._workers), tool.shape, tool.seconds, tool.effects
            )
        return BoundTool(_ScriptedFunction(self, tool, self._workers), tool.shape, tool.seconds, tool.effects)

    def take(self, name: str, arguments: Mapping[str, Any]) -> ScriptedResult | None:
        """Return the first result that matches a call; None if the real tool must be called."""
        for index, result in enumerate(self._results):
            spent = result.times is not None and self._served[index] >= result.times
            if result.tool == name and not spent and _fits(result.arguments, arguments):
                self._served[index] += 1
                return result
        return None


class _ScriptedFunction:
    """A replacement for a tool's function."""

    def __init__(self, script: ScriptedTools, tool: BoundTool, workers: Workers) -> None:
        self._script = script
        self._tool = tool
        self._workers = workers

    @on_main_loop
    async def __call__(self, **arguments: Any) -> Any:
        shown = {name: value for name, value in arguments.items() if name != self._tool.shape.view}
        answer = self._script.take(self._tool.shape.name, shown)
        if answer is None:
            return await self._real(arguments)
        return _said(answer)

    async def _real(self, arguments: dict[str, Any]) -> Any:
        assert not isinstance(self._tool.function, HostedTool)  # it is called through its own replacement
        call = partial(self._tool.function, **arguments)
        what = f"tool `{self._tool.shape.name}`"
        return await call_spec_code(
            self._workers, call, seconds=None, blame="tool", what=what, effects=self._tool.effects
        )


class _ScriptedHostedTool(HostedTool):
    """A replacement for a tool in a worker process, where its arguments are still checked."""

    def __init__(self, script: ScriptedTools, real: HostedTool, tool: BoundTool, workers: Workers) -> None:
        self._script = script
        self._real = real
        self._tool = tool
        self._workers = workers

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
        answer = self._script.take(self._tool.shape.name, arguments)
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
            content = answer.result if isinstance(answer.result, str) else _json(answer.result)
        return ToolReply(content=content, rewards=answer.rewards, facts=answer.facts)
    return answer.result


def _fits(wanted: Mapping[str, Any] | None, arguments: Mapping[str, Any]) -> bool:
    if wanted is None:
        return True
    return all(name in arguments and _plain(arguments[name]) == value for name, value in wanted.items())


def _plain(value: Any) -> Any:
    """Return an argument as JSON, because validation may have made an object of it."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    try:
        return orjson.loads(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS))
    except TypeError:
        return value


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()


def _as(model: Any, answer: Any) -> Any:
    """Convert a scripted answer to the class that real code returns."""
    return model(**{name: getattr(answer, name) for name in model.model_fields})


class ScriptedStepAction(StepAction):
    """`step`, or an action of the spec's own, with some scripted answers."""

    def __init__(self, real: StepAction, answers: Sequence[ScriptedStep | None]) -> None:
        vars(self).update(vars(real))
        self._real, self._answers = real, iter(answers)

    def target(self, objects: EpisodeObjects) -> Callable[..., Any]:
        """Return the next scripted answer, or the real code."""
        answer = next(self._answers, None)
        return self._real.target(objects) if answer is None else partial(self._say, answer)

    def _say(self, answer: ScriptedStep, view: Any) -> Any:
        return _faulted(answer, self.blame, self.what) if answer.faulty else _as(Step, answer)


class ScriptedRewards(RewardSource):
    """A scripted answer in place of the spec's scorer or judge. The environment's `score` is asked as in a run."""

    order = SCORER

    def __init__(self, code: Workers, answer: ScriptedScore, source: str) -> None:
        self._code, self._answer, self.source = code, answer, source

    async def rewards(self, episode: Episode, objects: EpisodeObjects) -> ScoreRecord:
        """Return the scripted rewards."""
        view = episode.view()
        return await ask_rewards(
            self._code, self._say, view, source=self.source, seconds=SCORER_SECONDS, what="the scorer"
        )

    def _say(self, view: EpisodeView) -> Any:
        answer = self._answer
        return _faulted(answer, "environment", "the scorer") if answer.faulty else list(answer.rewards)


def _scripted_sources(action: ScoreAction, answer: ScriptedScore) -> list[RewardSource]:
    """The sources of an action, with a scripted one in place of the scorer or the judge."""
    real = next((source for source in action.sources if source.order in (SCORER, JUDGE)), None)
    scripted = ScriptedRewards(action._code, answer, "score" if real is None else real.source)
    return sorted([scripted, *(source for source in action.sources if source is not real)], key=lambda item: item.order)


class OutOfTimeAction(Action):
    """An action with `episode_seconds` reached at one visit."""

    def __init__(self, real: Action, visit: int, seconds: float) -> None:
        self._real = real
        self._left = visit
        self._seconds = seconds
        self.events = real.events

    def limit(self, episode: Episode) -> tuple[str, float] | None:
        """Return `episode_seconds` at that visit, before every other limit; otherwise the action's own limit."""
        self._left -= 1
        return (EPISODE_SECONDS.name, self._seconds) if self._left == 0 else self._real.limit(episode)

    def prepare(self, episode: Episode) -> Awaitable[object] | None:
        """The action's own."""
        return self._real.prepare(episode)

    def perform(self, episode: Episode, objects: EpisodeObjects) -> Record | Awaitable[Record]:
        """The action's own."""
        return self._real.perform(episode, objects)

    def apply(self, episode: Episode, record: Any) -> str:
        """The action's own."""
        return self._real.apply(episode, record)

    def pipelined(self, episode: Episode, objects: EpisodeObjects) -> bool:
        """The action's own."""
        return self._real.pipelined(episode, objects)

    def effects(self, *arguments: Any) -> str:
        """The action's own."""
        return self._real.effects(*arguments)


def script_objects(objects: EpisodeObjects, scenario: Scenario, workers: Workers) -> None:
    """Wrap an episode's objects with a scenario's answers. The objects are closed as usual."""
    if scenario.user:
        objects.user = ScriptedUser(objects.user, scenario.user)
    reset, score = scenario.environment.reset, scenario.environment.score
    if reset is not None or score is not None:
        objects.environment = ScriptedEnvironment(objects.environment, reset, score)
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
    if scenario.scorer is not None:
        for state, action in actions.items():
            if isinstance(action, ScoreAction):
                changed[state] = scripted = copy(action)
                scripted.sources = _scripted_sources(action, scenario.scorer)
    if (late := scenario.out_of_time) is not None:
        changed[late.state] = _late(changed[late.state], late, episode_seconds)
    return changed


def _late(real: Action, late: OutOfTime, seconds: float | None) -> Action:
    return OutOfTimeAction(real, late.visit, seconds or 0.0)
