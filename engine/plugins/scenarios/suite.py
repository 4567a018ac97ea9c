"""Plays every scenario of a spec, compares the results with the expectations, and finds transitions that no scenario
takes.

Invariant: only what a scenario states is compared, with one exception: a failure that it does not state is a
difference. A difference is shown as a diff: `-` is expected, `+` is the result, other lines agree.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import eq
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import orjson
import structlog

from engine.actions.calling.workers import Workers
from engine.errors import EngineError, SpecError
from engine.machine.machine import resolved_machine
from engine.plugins.scenarios.coverage import Coverage, Edge, coverage_of
from engine.plugins.scenarios.failures import failing
from engine.plugins.scenarios.load import ScenarioSpecs, load_scenarios, scenarios_of
from engine.plugins.scenarios.play import THREADS, Played, play
from engine.plugins.scenarios.schema import ANYTHING, ExpectedFailure, ExpectedMessage, ExpectedOutcome
from engine.spec.text.diagnostic import Diagnostic

if TYPE_CHECKING:
    from engine.plugins.scenarios.load import ScenarioSet
    from engine.plugins.scenarios.schema import Expectation, ExpectedCall, TurnRewards
    from engine.schemas.message import Message, ToolCall
    from engine.schemas.model import ModelSpec
    from engine.schemas.trajectory import Failure, Outcome
    from engine.spec.load import LoadedSpec
    from engine.spec.text.diagnostic import Origin
    from engine.tokens.template import ChatTemplate

TOLERANCE = 1e-9
"""Rewards are equal if they differ by at most this."""

Mark = Literal[" ", "-", "+"]
Line = tuple[Mark, str]
_Expected = TypeVar("_Expected")
_Actual = TypeVar("_Actual")
log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Mismatch:
    """One part of the result that is not as expected."""

    what: str
    """`states`, `events`, `outcome`, `rewards`, `limits`, `messages`, `facts` or `counts`."""
    lines: list[Line]

    @property
    def text(self) -> str:
        """Return the diff, with a mark before each line."""
        return "\n".join(f"{mark}{text}" for mark, text in self.lines)


def compare(expect: Expectation, played: Played) -> list[Mismatch]:
    """Return all differences, in the order of the expectation's fields."""
    trajectory = played.trajectory
    events = [event for _, event, _ in trajectory.path]
    said = trajectory.messages[played.prompt :]
    parts: tuple[tuple[str, Any, Any, Callable[[Any, Any], list[Line]]], ...] = (
        ("states", expect.states, played.states, align),
        ("events", expect.events, events, align),
        ("outcome", expect.outcome or ExpectedOutcome(), trajectory.outcome, _outcome),
        ("rewards", expect.rewards, [turn.rewards for turn in trajectory.turns], _rewards),
        ("limits", expect.limits, played.limits, align),
        ("messages", expect.messages, said, _messages),
        ("facts", expect.facts, trajectory.facts, _fields),
        ("counts", expect.counts, trajectory.counts, _fields),
    )
    mismatches = [Mismatch(what, lines(stated, actual)) for what, stated, actual, lines in parts if stated is not None]
    return [mismatch for mismatch in mismatches if any(mark != " " for mark, _ in mismatch.lines)]


# ---- lists


def align(
    expected: Sequence[_Expected],
    actual: Sequence[_Actual],
    fits: Callable[[_Expected, _Actual], bool] = eq,
    show_expected: Callable[[_Expected], list[str]] = lambda item: [str(item)],
    show_actual: Callable[[_Actual], list[str]] = lambda item: [str(item)],
) -> list[Line]:
    """Return the shortest diff between two lists; `...` among the expected items matches any number of items."""
    rows, columns = len(expected), len(actual)
    cost = [[0] * (columns + 1) for _ in range(rows + 1)]
    steps: dict[tuple[int, int], tuple[int, int]] = {}
    for row in range(rows, -1, -1):
        for column in range(columns, -1, -1):
            if (row, column) == (rows, columns):
                continue
            ways = []
            free = row < rows and expected[row] == ANYTHING
            if row < rows and column < columns and not free and fits(expected[row], actual[column]):
                ways.append((cost[row + 1][column + 1], (1, 1)))
            if row < rows:
                ways.append((cost[row + 1][column] + (not free), (1, 0)))
            if column < columns:
                ways.append((cost[row][column + 1] + (not free), (0, 1)))
            cost[row][column], steps[row, column] = min(ways, key=lambda way: way[0])
    lines: list[Line] = []
    row = column = 0
    while (row, column) in steps:
        down, right = steps[row, column]
        free = row < rows and expected[row] == ANYTHING
        if right:
            mark: Mark = " " if down or free else "+"
            lines += [(mark, line) for line in show_actual(actual[column])]
        elif not free:
            lines += [("-", line) for line in show_expected(expected[row])]
        row, column = row + down, column + right
    return lines


# ---- outcome and rewards


def _outcome(expected: ExpectedOutcome, outcome: Outcome) -> list[Line]:
    """The parts of the outcome that are stated, and its failure, which is a difference also where none is stated."""
    stated = expected.model_fields_set
    lines: list[Line] = []
    for name in ("state", "event", "limit", "solved", "trainable"):
        if name in stated:
            lines += _field(name, getattr(expected, name), getattr(outcome, name))
    if "reward" in stated and expected.reward is not None:
        same = _close(expected.reward, outcome.reward)
        lines += _pair(same, f"reward: {_number(expected.reward)}", f"reward: {_number(outcome.reward)}")
    return lines + _failure(expected.failure, outcome.failure)


def _failure(expected: ExpectedFailure | None, actual: Failure | None) -> list[Line]:
    if expected is None and actual is None:
        return []
    if expected is None or actual is None:
        stated = {} if expected is None else expected.model_dump(exclude_none=True)
        wanted = ", ".join(f"{name} {value}" for name, value in stated.items()) or "any"
        lines: list[Line] = [("-", f"failure: {'none' if expected is None else wanted}")]
        if actual is None:
            return [*lines, ("+", "failure: none")]
        came = f"failure: {actual.kind} (blame {actual.blame}) in {actual.state}, turn {actual.turn}"
        return [*lines, ("+", came), *(("+", f"  {line}") for line in actual.message.splitlines())]
    lines = []
    for name in ("kind", "blame", "state", "turn"):
        if (wanted_value := getattr(expected, name)) is not None:
            lines += _field(f"failure.{name}", wanted_value, getattr(actual, name))
    if expected.contains is not None:
        wanted, came = f"failure.message contains {_quoted(expected.contains)}", _quoted(actual.message)
        lines += _pair(expected.contains in actual.message, wanted, f"failure.message: {came}")
    return lines


def _rewards(expected: Sequence[TurnRewards], actual: Sequence[dict[str, float]]) -> list[Line]:
    lines: list[Line] = []
    for turn, (wanted, came) in enumerate(zip(expected, actual, strict=False)):
        if isinstance(wanted, int | float):
            total = sum(came.values())
            shown = _number(total) + (f" ({_named(came)})" if came else "")
            same = _close(wanted, total)
        else:
            shown = _named(came)
            same = wanted is None or all(
                _close(wanted.get(name, 0.0), came.get(name, 0.0)) for name in {*wanted, *came}
            )
        lines += _pair(same, f"turn {turn}: {_wanted(wanted)}", f"turn {turn}: {shown}")
    both = min(len(expected), len(actual))
    lines += [("-", f"turn {turn}: {_wanted(wanted)}") for turn, wanted in enumerate(expected[both:], both)]
    lines += [("+", f"turn {turn}: {_named(came)}") for turn, came in enumerate(actual[both:], both)]
    return lines


def _wanted(wanted: TurnRewards) -> str:
    if wanted is None:
        return "anything"
    return _number(wanted) if isinstance(wanted, int | float) else _named(wanted)


def _named(rewards: dict[str, float]) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in sorted(rewards.items())) or "no reward"


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=0.0, abs_tol=TOLERANCE)


def _number(value: float) -> str:
    return f"{value:.10g}"


# ---- messages


def _messages(expected: Sequence[ExpectedMessage], actual: Sequence[Message]) -> list[Line]:
    wanted = [ANYTHING if one.role == ANYTHING else one for one in expected]
    return align(
        wanted,
        actual,
        _fits,
        _show_expected,
        lambda message: _show_message(message.role, message.text, message.tool_calls),
    )


def _fits(expected: ExpectedMessage | str, message: Message) -> bool:
    if isinstance(expected, str):
        return False  # `...` equals no message: `align` handles it
    if expected.role != message.role:
        return False
    if expected.content is not None and expected.content != message.text:
        return False
    if expected.contains is not None and expected.contains not in message.text:
        return False
    return expected.calls is None or (
        len(expected.calls) == len(message.tool_calls)
        and all(
            wanted.name == call.name and wanted.arguments in (None, call.arguments)
            for wanted, call in zip(expected.calls, message.tool_calls, strict=True)
        )
    )


def _show_expected(expected: ExpectedMessage | str) -> list[str]:
    if isinstance(expected, str):
        return [expected]
    calls = expected.calls or []
    if expected.content is not None:
        return _show_message(expected.role, expected.content, calls)
    parts = ["…"] if expected.contains is None else [f"… {line} …" for line in expected.contains.splitlines()]
    return [*(f"{expected.role}: {part}" for part in parts), *map(_show_call, calls)]


def _show_message(role: str, text: str, calls: Sequence[ExpectedCall | ToolCall]) -> list[str]:
    first, *rest = text.split("\n")
    return [f"{role}: {first}", *(f"  {line}" for line in rest), *map(_show_call, calls)]


def _show_call(call: ExpectedCall | ToolCall) -> str:
    arguments = call.arguments
    shown = "…" if arguments is None else ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return f"  → {call.name}({shown})"


# ---- fields


def _fields(expected: dict[str, Any], actual: dict[str, Any]) -> list[Line]:
    lines: list[Line] = []
    for name, value in expected.items():
        if name in actual:
            lines += _field(name, value, actual[name])
        else:
            lines += [("-", f"{name}: {_quoted(value)}"), ("+", f"{name}: not there")]
    return lines


def _field(name: str, expected: Any, actual: Any) -> list[Line]:
    return _pair(expected == actual, f"{name}: {_quoted(expected)}", f"{name}: {_quoted(actual)}")


def _pair(same: bool, expected: str, actual: str) -> list[Line]:
    return [(" ", actual)] if same else [("-", expected), ("+", actual)]


def _quoted(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, str) and value and "\n" not in value:
        return value
    return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY).decode()


@dataclass(frozen=True)
class ScenarioResult:
    """The result of one scenario."""

    name: str
    origin: Origin | None
    """Its place in the file of scenarios."""
    differences: list[Mismatch] = field(default_factory=list)
    problems: list[Diagnostic] = field(default_factory=list)
    """Why it could not be played."""
    failure: Failure | None = None
    """The failure of its episode, expected or not."""
    seconds: float = 0.0
    played: Played | None = None
    """Its episode; None if it could not be played."""

    @property
    def taken(self) -> list[Edge]:
        """The transitions that its episode took."""
        return self.played.taken if self.played else []

    @property
    def passed(self) -> bool:
        """Whether it was played without a difference."""
        return not self.differences and not self.problems


@dataclass(frozen=True)
class SuiteResult:
    """The results of one spec."""

    spec: Path
    scenarios: Path | None
    """The file of scenarios; None if there is none."""
    results: list[ScenarioResult] = field(default_factory=list)
    coverage: Coverage | None = None
    """The coverage; None if the spec cannot be read."""
    problems: list[Diagnostic] = field(default_factory=list)
    """Why the spec or its scenarios cannot be read."""

    @property
    def invalid(self) -> bool:
        """Whether something could not be played at all."""
        return bool(self.problems) or any(result.problems for result in self.results)

    @property
    def differs(self) -> bool:
        """Whether the result of a scenario differs from its expectation."""
        return any(result.differences for result in self.results)


class Formats:
    """Chat formats, each loaded once for all specs and scenarios with the same model."""

    def __init__(self) -> None:
        self._by_model: dict[tuple[bytes, Path], ChatTemplate] = {}

    def of(self, model: ModelSpec, base: Path) -> ChatTemplate:
        """Return the chat format of a spec's model.

        Raises:
            EngineError: it cannot be loaded.
        """
        from engine.tokens.loading import load_format

        key = (orjson.dumps(model.model_dump(mode="json")), base)
        if key not in self._by_model:
            self._by_model[key] = load_format(model, base)
        return self._by_model[key]


def run_suite(
    spec: Path,
    formats: Formats,
    overrides: Sequence[str] = (),
    only: str | None = None,
    file: Path | None = None,
    generate: bool = False,
) -> SuiteResult:
    """Play every scenario of a file. It runs an event loop of its own: call it in a thread where one runs.

    Args:
        spec: The spec.
        formats: Chat formats, shared by all specs of the command.
        overrides: Overrides in the form of `--set`; a scenario's own `set` is applied after them.
        only: Play only scenarios whose name contains this. Coverage then counts only these.
        file: The scenarios; by default those beside the spec.
        generate: Also play scenarios of failures and of the time limit, for transitions that no written one takes.
    """
    path = file or scenarios_of(spec)
    specs = ScenarioSpecs(spec, overrides)
    try:
        loaded = specs.base()
        if path is None:
            return SuiteResult(spec, None, coverage=coverage_of(loaded, []))
        scenarios = load_scenarios(path)
    except SpecError as error:
        return SuiteResult(spec, path, problems=list(error.diagnostics))
    wanted = [index for index, item in enumerate(scenarios.file.scenarios) if only is None or only in item.name]
    results = asyncio.run(_play_all(specs, scenarios, wanted, formats, loaded if generate else None))
    taken = [edge for result in results for edge in result.taken]
    return SuiteResult(spec, path, results, coverage_of(loaded, taken))


async def _play_all(
    specs: ScenarioSpecs,
    scenarios: ScenarioSet,
    wanted: Sequence[int],
    formats: Formats,
    base: LoadedSpec | None,
) -> list[ScenarioResult]:
    """Play scenarios; with `base` also those of failures, for the transitions of its machine that none of them
    takes."""
    workers = Workers(THREADS)
    try:
        results = [await _result(specs, scenarios, index, formats, workers) for index in wanted]
        if base is not None:
            written = [
                (scenarios.file.scenarios[index], one.played)
                for index, one in zip(wanted, results, strict=True)
                if one.played and one.passed
            ]
            missing = coverage_of(base, [edge for one in results for edge in one.taken]).missing
            timed = base.spec.limits.episode_seconds is not None
            for edge, scenario in list(failing(missing, written, resolved_machine(base.spec), timed=timed)):
                alone = replace(scenarios, file=scenarios.file.model_copy(update={"scenarios": [scenario]}))
                result = await _result(specs, alone, 0, formats, workers)
                results += [result] if edge in result.taken else []
        return results
    finally:
        workers.close()


async def _result(
    specs: ScenarioSpecs, scenarios: ScenarioSet, index: int, formats: Formats, workers: Workers
) -> ScenarioResult:
    scenario, origin = scenarios.file.scenarios[index], scenarios.origin(index)
    began = time.perf_counter()
    try:
        loaded = specs.loaded(scenarios, index)
        template = formats.of(loaded.spec.model, loaded.base)
        played = await play(specs, scenarios, index, template, workers)
    except SpecError as error:
        return ScenarioResult(scenario.name, origin, problems=list(error.diagnostics))
    except EngineError as error:
        problem = Diagnostic("scenario.cannot-play", "error", str(error), None, origin, ("scenarios", index))
        return ScenarioResult(scenario.name, origin, problems=[problem])
    return ScenarioResult(
        scenario.name,
        origin,
        differences=compare(scenario.expect, played),
        failure=played.trajectory.outcome.failure,
        seconds=time.perf_counter() - began,
        played=played,
    )
