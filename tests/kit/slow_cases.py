"""Parametrised tests of which the default run takes some cases and the slow run all others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
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


def each_once(*axes: Sequence[Any]) -> list[Any]:
    """All combinations of the axes' values as parameters, each marked slow unless it is one of those that the default run takes.

    The default run takes as many as the longest axis has values: the first values together, then the second ones, and so on.
    The shorter axes begin again where they end, so each value of each axis is in at least one of them.
    """
    default = {tuple(n % len(axis) for axis in axes) for n in range(max(map(len, axes)))}
    places = product(*(range(len(axis)) for axis in axes))
    return [
        pytest.param(
            *(axis[at] for axis, at in zip(axes, place, strict=True)),
            marks=() if place in default else (pytest.mark.slow,),
        )
        for place in places
    ]
