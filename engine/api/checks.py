"""A spec -> what is wrong with it, as objects: the rules of `engine validate`, applied in this process.

Invariant: what has no error here begins to run. The command applies the same rules in a process of their own, because a
spec may be a stranger's.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from engine.api.specs import Overrides, load
from engine.errors import SpecError
from engine.spec.load import LoadedSpec
from engine.validate import check_spec

if TYPE_CHECKING:
    from engine.spec.text.diagnostic import Diagnostic


def check(spec: str | Path | LoadedSpec, overrides: Overrides = ()) -> list[Diagnostic]:
    """Find everything that is wrong with a spec: rule, severity, message, fix, place, in the order of the file.

    The code that the spec names is imported in this process. A spec with a finding of severity `error` is refused by
    `run`.

    Args:
        spec: A file, or a spec that is loaded.
        overrides: See `load`.
    """
    try:
        return check_spec(load(spec, overrides))
    except SpecError as error:
        return error.diagnostics
