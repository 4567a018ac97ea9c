"""A file of scenarios, validated: its form, and whether each scenario fits the spec beside it. Nothing is played."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import EngineError, SpecError
from engine.spec.diagnostic import Diagnostic, Origin

if TYPE_CHECKING:
    from engine.scenarios.load import ScenarioSet, Stages


def is_scenarios(path: Path) -> bool:
    """Whether a file's name says that it holds scenarios: `task.scenarios.yaml`."""
    return path.suffix in (".yaml", ".yml") and path.stem.endswith(".scenarios")


def scenario_problems(path: Path, overrides: Sequence[str] = ()) -> tuple[list[Diagnostic], bool]:
    """What is wrong with a file of scenarios, and whether it could not be read at all."""
    from engine.scenarios.load import Stages, load_scenarios, spec_of
    from engine.spec.load import UNREADABLE

    try:
        scenarios = load_scenarios(path)
    except SpecError as error:
        return list(error.diagnostics), any(item.rule in UNREADABLE for item in error.diagnostics)
    spec = spec_of(path)
    here = Origin(str(path), 1, 1)
    if not spec.is_file():
        fix = f"write {spec.name}, or name this file after its spec"
        message = f"there is no spec `{spec}` that these scenarios could be of"
        return [Diagnostic("scenario.no-spec", "error", message, fix, here)], False
    stages = Stages(spec, overrides)
    with contextlib.redirect_stdout(sys.stderr):
        try:
            stages.base()
        except SpecError as error:
            message = (
                f"the spec `{spec}` is not valid, so its scenarios cannot be held to it: {error.diagnostics[0].message}"
            )
            return [Diagnostic("scenario.bad-spec", "error", message, f"engine validate {spec}", here)], False
        found = list(_misfits(stages, scenarios))
    return list(dict.fromkeys(found)), False


def _misfits(stages: Stages, scenarios: ScenarioSet) -> Iterator[Diagnostic]:
    from engine.machine.presets import resolve_machine
    from engine.scenarios.load import check_scenario

    for index in range(len(scenarios.file.scenarios)):
        try:
            loaded = stages.loaded(scenarios, index)
            check_scenario(loaded, resolve_machine(loaded.spec.machine), scenarios, index)
            stages.task(loaded, scenarios, index)
        except SpecError as error:
            yield from error.diagnostics
        except EngineError as error:
            yield Diagnostic("scenario.unplayable", "error", str(error), None, scenarios.origin(index))
