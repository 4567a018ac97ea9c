"""Specs -> what is wrong with them, as objects. `engine validate` is built on `check_files`.

Invariant: what has no error here begins to run. `check` imports a spec's code in this process; `check_files` judges
files of others, in processes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.api.specs import Overrides, load, texts_of
from engine.errors import SpecError
from engine.spec.access import Access
from engine.spec.load import LoadedSpec
from engine.validate.check import trainer_of
from engine.validate.examine import SECONDS, Options, examine, examine_all, examine_spec, find_specs
from engine.validate.worst_case import read_budget

if TYPE_CHECKING:
    from engine.spec.text.diagnostic import Diagnostic
    from engine.validate.report import Report

Budget = Mapping[str, float] | Sequence[str]
"""The most that the whole run may cost: `{"tokens": 1e9}`, or as `--budget` takes it: `["tokens=1e9"]`."""


def check(
    spec: str | Path | LoadedSpec, overrides: Overrides = (), *, trainer: str | None = None, budget: Budget = ()
) -> list[Diagnostic]:
    """Find everything that is wrong with a spec: rule, severity, message, fix, place, in the order of the file.

    The code that the spec names is imported in this process. A spec with a finding of severity `error` is refused by
    `run`.

    Args:
        spec: A file, also one of scenarios or replies, or a spec that is loaded.
        overrides: See `load`.
        trainer: Also compare what the spec uses with what another trainer carries: `verl`.
        budget: Also compare the worst case of the run with this.

    Raises:
        EngineError: there is no such trainer, or the budget is not valid.
    """
    options = Options(texts_of(overrides), budget=read_budget(budget), trainer=_named(trainer), apart=True)
    if not isinstance(spec, LoadedSpec):
        return examine(Path(spec), options, access=Access()).diagnostics
    try:
        return examine_spec(load(spec, overrides), options).diagnostics
    except SpecError as error:
        return error.diagnostics


def check_files(
    files: Sequence[str | Path],
    overrides: Overrides = (),
    *,
    imports: bool = False,
    worst_case: bool = False,
    budget: Budget = (),
    trainer: str | None = None,
    allowed: Sequence[str | Path] = (),
    seconds: float = SECONDS,
    heard: Callable[[str], None] | None = None,
) -> list[Report]:
    """Find everything that is wrong with files that others may have written: nothing that a spec names is imported or
    called, and one that is too slow or ends its process loses its own result alone.

    Args:
        files: Specs, files of scenarios or replies, and folders, of which all specs are checked.
        overrides: See `load`.
        imports: Import the code that specs name, in a second process for each.
        worst_case: Compute the most that an episode and the run may cost.
        budget: See `check`.
        trainer: See `check`.
        allowed: Folders whose files may be opened too; by default the spec's folder and the current folder.
        seconds: Time limit for one file.
        heard: Called with each line that imported code or a parser printed.

    Raises:
        EngineError: there is no such trainer, or the budget is not valid.
    """
    folders = [Path(folder) for folder in allowed]
    options = Options(
        texts_of(overrides),
        cost=worst_case,
        budget=read_budget(budget),
        imports=imports,
        allowed=folders,
        seconds=seconds,
        trainer=_named(trainer),
    )
    reports, printed = examine_all(list(find_specs([*map(Path, files)], folders)), options)
    if heard is not None:
        for line in printed:
            heard(line)
    return reports


def _named(trainer: str | None) -> str | None:
    """The name of a trainer. Raises: TrainerError: there is none of that name."""
    if trainer is not None:
        trainer_of(trainer)
    return trainer
