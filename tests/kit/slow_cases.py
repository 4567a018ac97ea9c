"""Parametrised tests of which the default run takes some cases and the slow run all others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import pytest

_Case = type(pytest.param())


def slow_but(cases: Iterable[Any], *default: Any) -> list[Any]:
    """The cases as parameters, each marked slow unless it is one of `default`.

    Raises:
        ValueError: A default case is not among the cases.
    """
    cases = list(cases)
    if missing := [case for case in default if case not in cases]:
        raise ValueError(f"{missing} are not among the cases {cases}")
    return _slow_unless(cases, lambda at: cases[at] in default, several=False)


def slow_after(count: int, cases: Iterable[Any], *, several: bool = False) -> list[Any]:
    """The cases as parameters, all after the first `count` marked slow. `several`: a case is a tuple of arguments."""
    return _slow_unless(cases, lambda at: at < count, several)


def slow_but_each(nth: int, cases: Iterable[Any], *, several: bool = False) -> list[Any]:
    """The cases as parameters, marked slow but the first and each `nth` after it. `several`: a case is a tuple of arguments."""
    return _slow_unless(cases, lambda at: at % nth == 0, several)


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


def _slow_unless(cases: Iterable[Any], default: Callable[[int], bool], several: bool) -> list[Any]:
    made = []
    for at, case in enumerate(cases):
        param = case if isinstance(case, _Case) else pytest.param(*case) if several else pytest.param(case)
        marks = [*param.marks, *([] if default(at) else [pytest.mark.slow])]
        made.append(pytest.param(*param.values, id=param.id, marks=marks))
    return made
