"""Parametrised tests of which the default run takes some cases and the slow run all others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(cases: Iterable[Any], *default: Any) -> list[Any]:
    """The cases as parameters, each marked slow unless it is one of `default`.

    Raises:
        ValueError: A default case is not among the cases.
    """
    cases = list(cases)
    if missing := [case for case in default if case not in cases]:
        raise ValueError(f"{missing} are not among the cases {cases}")
    return [pytest.param(case, marks=() if case in default else (pytest.mark.slow,)) for case in cases]
