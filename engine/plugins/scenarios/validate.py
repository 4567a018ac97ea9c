"""Validating a file of scenarios: its form, and whether each scenario matches its spec. Nothing is run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import EngineError, SpecError
from engine.spec.references import mask_all
from engine.spec.text.diagnostic import Diagnostic, Origin

if TYPE_CHECKING:
    from engine.plugins.scenarios.load import ScenarioSet, ScenarioSpecs
    from engine.spec.access import Access
    from engine.spec.load import LoadedSpec


TASK_RULE = "scenario.unknown-task"


def scenario_problems(
    path: Path, overrides: Sequence[str] = (), access: Access | None = None
) -> tuple[list[Diagnostic], bool, list[str]] | None:
    """Return the findings in a file of scenarios, whether it could not be read, and the rules that were skipped; None for another file.

    Args:
        path: The file.
        overrides: As for `--set`.
        access: The files that may be opened, and whether code may be imported; the default allows everything.
    """
    from engine.plugins.scenarios.load import ScenarioSpecs, is_scenarios, load_scenarios, spec_of
    from engine.spec.load import UNREADABLE

    if not is_scenarios(path, access):
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
        found = list(_misfits(specs, scenarios, skipped))
    variables = {**specs.variables, **scenarios.document.variables}
    return mask_all(dict.fromkeys(found), variables), False, skipped


def _misfits(specs: ScenarioSpecs, scenarios: ScenarioSet, skipped: list[str]) -> Iterator[Diagnostic]:
    from engine.machine.machine import resolved_machine
    from engine.plugins.scenarios.load import check_scenario

    for index in range(len(scenarios.file.scenarios)):
        try:
            loaded = specs.loaded(scenarios, index)
            check_scenario(loaded, resolved_machine(loaded.spec), scenarios, index)
            if _made_by_code(loaded) and not isinstance(scenarios.file.scenarios[index].task, dict):
                skipped[:] = [TASK_RULE]
            else:
                specs.task(loaded, scenarios, index)
        except SpecError as error:
            yield from error.diagnostics
        except EngineError as error:
            yield Diagnostic("scenario.unplayable", "error", str(error), None, scenarios.origin(index))


def _made_by_code(loaded: LoadedSpec) -> bool:
    """Return whether the task rows come from code that may not be imported."""
    made = any(source.facts.outside for source in loaded.spec.tasks.sources)
    return made and not loaded.access.imports
