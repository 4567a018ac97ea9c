"""Plays and compares every scenario of a spec, and finds transitions that no scenario takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import structlog

from engine.actions.calling.workers import Workers
from engine.errors import EngineError, SpecError
from engine.plugins.scenarios.compare import Difference, compare
from engine.plugins.scenarios.coverage import Coverage, Edge, coverage_of
from engine.plugins.scenarios.load import ScenarioSpecs, load_scenarios, scenarios_of
from engine.plugins.scenarios.play import THREADS, Played, play
from engine.spec.text.diagnostic import Diagnostic

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.plugins.scenarios.load import ScenarioSet
    from engine.schemas.model import ModelSpec
    from engine.schemas.trajectory import Failure
    from engine.spec.text.diagnostic import Origin
    from engine.tokens.template import ChatTemplate

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ScenarioResult:
    """The result of one scenario."""

    name: str
    origin: Origin | None
    """Its place in the file of scenarios."""
    differences: list[Difference] = field(default_factory=list)
    problems: list[Diagnostic] = field(default_factory=list)
    """Why it could not be played."""
    failure: Failure | None = None
    """The failure of its episode, expected or not."""
    seconds: float = 0.0

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

    def __init__(self, load: Callable[[ModelSpec, Path], ChatTemplate] | None = None) -> None:
        if load is None:
            from engine.tokens.loading import load_format

            load = load_format
        self._load = load
        self._known: dict[tuple[bytes, Path], ChatTemplate] = {}

    def of(self, model: ModelSpec, base: Path) -> ChatTemplate:
        """Return the chat format of a spec's model.

        Raises:
            EngineError: it cannot be loaded.
        """
        key = (orjson.dumps(model.model_dump(mode="json")), base)
        if key not in self._known:
            self._known[key] = self._load(model, base)
        return self._known[key]


def run_suite(
    spec: Path,
    formats: Formats,
    overrides: Sequence[str] = (),
    only: str | None = None,
    file: Path | None = None,
) -> SuiteResult:
    """Play every scenario of a file. It runs an event loop of its own: call it in a thread where one runs.

    Args:
        spec: The spec.
        formats: Chat formats, shared by all specs of the command.
        overrides: Overrides in the form of `--set`; a scenario's own `set` is applied after them.
        only: Play only scenarios whose name contains this. Coverage then counts only these.
        file: The scenarios; by default those beside the spec.
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
    wanted = [index for index, one in enumerate(scenarios.file.scenarios) if only is None or only in one.name]
    results, taken = asyncio.run(_play_all(specs, scenarios, wanted, formats))
    return SuiteResult(spec, path, results, coverage_of(loaded, taken))


async def _play_all(
    specs: ScenarioSpecs, scenarios: ScenarioSet, wanted: Sequence[int], formats: Formats
) -> tuple[list[ScenarioResult], list[Edge]]:
    workers = Workers(THREADS)
    results: list[ScenarioResult] = []
    taken: list[Edge] = []
    try:
        for index in wanted:
            result, edges = await _one(specs, scenarios, index, formats, workers)
            results.append(result)
            taken += edges
    finally:
        workers.close()
    return results, taken


async def _one(
    specs: ScenarioSpecs, scenarios: ScenarioSet, index: int, formats: Formats, workers: Workers
) -> tuple[ScenarioResult, list[Edge]]:
    scenario = scenarios.file.scenarios[index]
    told: dict[str, Any] = {"name": scenario.name, "origin": scenarios.origin(index)}
    began = time.perf_counter()
    try:
        loaded = specs.loaded(scenarios, index)
        template = formats.of(loaded.spec.model, loaded.base)
        played: Played = await play(specs, scenarios, index, template, workers)
    except SpecError as error:
        return ScenarioResult(**told, problems=list(error.diagnostics)), []
    except EngineError as error:
        problem = Diagnostic("scenario.cannot-play", "error", str(error), None, told["origin"], ("scenarios", index))
        return ScenarioResult(**told, problems=[problem]), []
    differences = compare(scenario.expect, played)
    seconds = time.perf_counter() - began
    failure = played.trajectory.outcome.failure
    return ScenarioResult(**told, differences=differences, failure=failure, seconds=seconds), played.taken
