"""Loads the scenarios of a spec and checks that they match it, also for `engine validate`, which runs nothing.

Invariant: a scenario that refers to something that its spec does not have is refused before it is played, with file,
line and column, like a mistake in a spec.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from engine.errors import EngineError, SpecError
from engine.plugins.scenarios.schema import Scenario, ScenarioFile
from engine.spec.access import Access
from engine.spec.added import added_tools
from engine.spec.load import load_document, load_spec
from engine.spec.references import mask_all
from engine.spec.resolve import MAX_BYTES
from engine.spec.rows.row import Row
from engine.spec.tasks import load_tasks, task_of
from engine.spec.text.diagnostic import SET_FILE, DataPath, Diagnostic, Origin
from engine.spec.text.near import near_or_known
from engine.validate import refuse_first_tasks

if TYPE_CHECKING:
    from engine.machine.machine import ResolvedMachine
    from engine.schemas.environment import Task
    from engine.spec.access import Access
    from engine.spec.document import Document
    from engine.spec.load import LoadedSpec

SUFFIX = ".scenarios"
ENDINGS = (".yaml", ".yml")
_BACKEND = "backend={kind: scripted, replies: []}"
"""The override that replaces the spec's backend, so that nothing of it is needed."""
_SPEC_KEY = re.compile(r"^scenarios_of[ \t]*:(.*)$", re.MULTILINE)


def scenarios_of(spec: Path) -> Path | None:
    """Return the file of a spec's scenarios: `task.scenarios.yaml` beside `task.yaml`."""
    beside = (spec.with_name(f"{spec.stem}{SUFFIX}{ending}") for ending in ENDINGS)
    return next((path for path in beside if path.is_file()), None)


def spec_of(path: Path, access: Access | None = None) -> Path:
    """Return the spec of a path: the file itself or, for a file of scenarios, the spec that it names or the one beside
    it."""
    if path.suffix not in ENDINGS:
        return path
    if (named := _named_spec(path, access)) is not None:
        return Path(os.path.normpath(path.parent / named))
    if not path.stem.endswith(SUFFIX):
        return path
    stem = path.stem.removesuffix(SUFFIX)
    beside = [path.with_name(f"{stem}{ending}") for ending in ENDINGS]
    return next((file for file in beside if file.is_file()), beside[0])


def files_of_scenarios(path: Path) -> list[Path]:
    """Return the files that name their spec by `scenarios_of`: the file itself, or those below a folder, sorted."""
    if path.is_dir():
        files = sorted(file for ending in ENDINGS for file in path.rglob(f"*{ending}"))
        visible = (file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts))
        return [file for file in visible if file.is_file() and _named_spec(file, None) is not None]
    return [path] if path.suffix in ENDINGS and _named_spec(path, None) is not None else []


def _named_spec(path: Path, access: Access | None) -> str | None:
    """The value of `scenarios_of` in a file; None if it has none, or cannot be read, which reading it as a spec
    reports."""
    try:
        data = (access or Access()).read(path, MAX_BYTES)
    except (OSError, ValueError):
        return None
    line = _SPEC_KEY.search(data.decode("utf-8-sig", "replace")) if data is not None else None
    if line is None:
        return None
    try:
        value = yaml.safe_load(line[1])
    except yaml.YAMLError:
        return None
    return value if isinstance(value, str) else None


@dataclass(frozen=True)
class ScenarioSet:
    """The scenarios of one file."""

    path: Path
    file: ScenarioFile
    document: Document

    def origin(self, index: int, *rest: str | int) -> Origin | None:
        """Return the place in the file of a scenario, or of a part of it."""
        return self.document.origin(("scenarios", index, *rest))


def load_scenarios(path: Path, access: Access | None = None) -> ScenarioSet:
    """Read a file of scenarios.

    Args:
        path: The file.
        access: The files that may be opened; by default any.

    Raises:
        SpecError: the file has errors; it lists all of them.
    """
    file, document = load_document(path, ScenarioFile, access)
    return ScenarioSet(path, file, document)


class ScenarioSpecs:
    """The spec with the `set` of each scenario, loaded once for each different `set`."""

    def __init__(self, spec: Path, given: Sequence[str] = (), access: Access | None = None) -> None:
        self._spec = spec
        self._access = access
        self.variables: dict[str, str] = {}
        """The environment variables that the specs use, with their values."""
        self._given = list(given)
        self._loaded: dict[tuple[str, ...], LoadedSpec] = {}
        self._tasks: dict[int, Sequence[Task]] = {}

    def base(self) -> LoadedSpec:
        """Return the spec with the overrides of the command, without the `set` of any scenario. Raises: SpecError."""
        return load_spec(self._spec, self._given, self._access)

    def loaded(self, scenarios: ScenarioSet, index: int) -> LoadedSpec:
        """Return the spec with the `set` of one scenario and a scripted backend.

        Paths in `set` are relative to the file of scenarios, which is beside the spec.

        Raises:
            SpecError: a value of `set` is invalid; the error has its place in the file of scenarios.
        """
        common, of_scenario = scenarios.file.set, scenarios.file.scenarios[index].set
        given = [(key, value, scenarios.document.origin(("set", key))) for key, value in common.items()]
        given += [(key, value, scenarios.origin(index, "set", key)) for key, value in of_scenario.items()]
        places = {f"{key}={json.dumps(value, ensure_ascii=False)}": place for key, value, place in given}
        overrides = (*self._given, *places, _BACKEND)
        if overrides not in self._loaded:
            try:
                loaded = load_spec(self._spec, overrides, self._access)
            except SpecError as error:
                problems = [replace(item, origin=_placed(item.origin, places)) for item in error.diagnostics]
                raise SpecError(problems) from error
            self.variables.update(loaded.variables)
            origins = {path: _placed(origin, places) or origin for path, origin in loaded.origins.items()}
            self._loaded[overrides] = replace(loaded, origins=origins)
        return self._loaded[overrides]

    def task(self, loaded: LoadedSpec, scenarios: ScenarioSet, index: int) -> Task:
        """Return the task of a scenario.

        Raises:
            SpecError: there is no such task, or the row is not a valid task.
        """
        wanted = scenarios.file.scenarios[index].task
        place = scenarios.origin(index, "task")
        if isinstance(wanted, dict):
            return task_of(Row(number=1, fields=wanted, origin=place), 0, loaded.spec.tasks, loaded)
        tasks = self._tasks.get(id(loaded))
        if tasks is None:
            tasks = load_tasks(loaded)
            refuse_first_tasks(loaded, tasks)
            self._tasks[id(loaded)] = tasks
        if wanted is None:
            return tasks[0]
        task = next((task for task in tasks if task.id == wanted), None)
        if task is None:
            fix = near_or_known(wanted, [task.id for task in tasks], cutoff=0.5)
            message = f"the spec has no task `{wanted}`"
            raise SpecError([Diagnostic("scenario.unknown-task", "error", message, fix, place)])
        return task


def _placed(origin: Origin | None, places: dict[str, Origin | None]) -> Origin | None:
    """Return the place in the file of scenarios of an override; any other place unchanged."""
    if origin is None or origin.file != SET_FILE:
        return origin
    return places.get(origin.via.removeprefix(f"{SET_FILE} ")) or origin


def check_scenario(loaded: LoadedSpec, machine: ResolvedMachine, scenarios: ScenarioSet, index: int) -> None:
    """Check that a scenario matches its spec.

    Raises:
        SpecError: it does not match; the error lists all problems.
    """
    problems = [
        Diagnostic(f"scenario.{rule}", "error", message, fix, scenarios.origin(index, *path), ("scenarios", index))
        for rule, message, fix, path in _misfits(loaded, machine, scenarios.file.scenarios[index])
    ]
    if problems:
        raise SpecError(problems)


_Misfit = tuple[str, str, str | None, DataPath]


def _misfits(loaded: LoadedSpec, machine: ResolvedMachine, scenario: Scenario) -> Iterator[_Misfit]:
    spec, environment, late = loaded.spec, scenario.environment, scenario.out_of_time
    without_tools = not spec.tools and spec.environment is None and not added_tools(spec)
    for key, who, answers, missing, fix in (
        ("user", "the user answers", scenario.user, not spec.users_by_name, "give it a `user`"),
        ("environment", "the environment answers", environment.reset or environment.score, not spec.environment, None),
        ("scorer", "the scorer answers", scenario.scorer, not spec.rewards.scorer, "give it a `rewards.scorer`"),
        ("tools", "tools answer", scenario.tools, without_tools, None),
    ):
        if answers and missing:
            yield f"no-{key}", f"{who} here, but the spec has none", fix, (key,)
    named: list[tuple[DataPath, str]] = [(("steps", state), state) for state in scenario.steps]
    named += [(("out_of_time",), late.state)] if late is not None else []
    named += [(("expect", "states", position), name) for position, name in enumerate(scenario.expect.states or [])]
    for path, name in named:
        if name not in machine.states:
            yield (
                "unknown-state",
                f"there is no state `{name}`",
                near_or_known(name, list(machine.states), cutoff=0.5),
                path,
            )
    for name in scenario.steps:
        action = machine.states[name].action or "" if name in machine.states else "step"
        if action != "step" and ":" not in action:
            does = f"`{action}`" if action else "nothing"
            message = f"{name} does {does}; `steps` are for `step` and for actions of the spec's own"
            yield "no-step", message, None, ("steps", name)
    if late is not None:
        state = machine.states.get(late.state)
        if state is not None and (state.final or state.action is None):
            message = f"no limit is checked in {late.state}"
            yield "no-limit", message, "name a state with an action", ("out_of_time",)
        if spec.limits.episode_seconds is None:
            yield "no-limit", "the spec has no `limits.episode_seconds`", None, ("out_of_time",)


def check_tools(offered: Sequence[str], scenarios: ScenarioSet, index: int) -> None:
    """Check that the tools that a scenario scripts exist, which is known only when the episode's objects are built.

    Raises:
        SpecError: a tool does not exist; the error lists all such tools.
    """
    problems = []
    for position, result in enumerate(scenarios.file.scenarios[index].tools):
        if result.tool not in offered:
            message, fix = f"there is no tool `{result.tool}`", near_or_known(result.tool, offered, cutoff=0.5)
            place = scenarios.origin(index, "tools", position, "tool")
            problems.append(Diagnostic("scenario.unknown-tool", "error", message, fix, place))
    if problems:
        raise SpecError(problems)


def scenario_problems(
    path: Path, overrides: Sequence[str] = (), access: Access | None = None
) -> tuple[list[Diagnostic], bool, list[str]] | None:
    """Return the findings in a file of scenarios, whether it could not be read, and the rules that were skipped; None
    for another file.

    Args:
        path: The file.
        overrides: As for `--set`.
        access: The files that may be opened, and whether code may be imported; the default allows everything.
    """
    from engine.spec.load import UNREADABLE

    if path.suffix not in ENDINGS or not (path.stem.endswith(SUFFIX) or _named_spec(path, access) is not None):
        return None
    try:
        scenarios = load_scenarios(path, access)
    except SpecError as error:
        return list(error.diagnostics), any(item.rule in UNREADABLE for item in error.diagnostics), []
    spec = spec_of(path, access)
    here = Origin(str(path), 1, 1)
    if not spec.is_file():
        fix = f"write {spec.name}, name this file after its spec, or name the spec in `scenarios_of`"
        message = f"there is no spec `{spec}` for these scenarios"
        return [Diagnostic("scenario.no-spec", "error", message, fix, here)], False, []
    specs = ScenarioSpecs(spec, overrides, access)
    with contextlib.redirect_stdout(sys.stderr):
        try:
            specs.base()
        except SpecError as error:
            message = (
                f"the spec `{spec}` is not valid, so its scenarios cannot be checked: {error.diagnostics[0].message}"
            )
            return [Diagnostic("scenario.bad-spec", "error", message, f"engine validate {spec}", here)], False, []
        skipped: list[str] = []
        diagnostics = list(_problems(specs, scenarios, skipped))
    variables = {**specs.variables, **scenarios.document.variables}
    return mask_all(dict.fromkeys(diagnostics), variables), False, skipped


def _problems(specs: ScenarioSpecs, scenarios: ScenarioSet, skipped: list[str]) -> Iterator[Diagnostic]:
    """What is wrong with each scenario; a rule that cannot be checked without importing code is added to `skipped`."""
    from engine.machine.machine import resolved_machine

    for index, scenario in enumerate(scenarios.file.scenarios):
        try:
            loaded = specs.loaded(scenarios, index)
            check_scenario(loaded, resolved_machine(loaded.spec), scenarios, index)
            by_code = any(source.facts.outside for source in loaded.spec.tasks.sources)
            if by_code and not loaded.access.imports and not isinstance(scenario.task, dict):
                skipped[:] = ["scenario.unknown-task"]
            else:
                specs.task(loaded, scenarios, index)
        except SpecError as error:
            yield from error.diagnostics
        except EngineError as error:
            yield Diagnostic("scenario.unplayable", "error", str(error), None, scenarios.origin(index))
