"""Imports of a trainer's own library, which is needed only where that trainer runs, and the check that its classes are those that the adapter extends."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import structlog

from engine.errors import TrainError
from engine.plugins.trainers.capabilities import TRAINERS

log = structlog.get_logger(__name__)


@contextmanager
def imports_of(library: str, install: str) -> Iterator[None]:
    """Import modules of a trainer inside of this block. `install`: what pip installs.

    Raises:
        TrainError: kind `train_setup`: an import failed.
    """
    try:
        yield
    except ImportError as error:
        raise TrainError(
            f"{library} cannot be imported ({error}); pip install {install}", kind="train_setup"
        ) from error


def check_overrides(own: type, base: type, trainer: str, overrides: Mapping[str, str]) -> None:
    """Check that the methods of a trainer's class that the adapter overrides are those of the version with which it was tested.

    Other versions may rename a method, so that the override is never called, or call it with other arguments. A version that was not tested
    is logged. `overrides`: the overridden methods, each with the names of its parameters in the tested version.

    Raises:
        TrainError: kind `train_setup`: a method is missing or has other parameters, or the trainer has a method of the name of one of the
            adapter's own; the message names all of them, and both versions.
    """
    tested = TRAINERS[trainer].version.split()[0]
    try:
        installed = version(trainer)
    except PackageNotFoundError:
        installed = "of unknown version"
    problems = []
    for name, parameters in overrides.items():
        found = _parameters(base, name)
        if found is None:
            problems.append(f"`{base.__name__}.{name}` is missing")
        elif found != parameters:
            problems.append(f"`{base.__name__}.{name}` has the parameters ({found}) and not ({parameters})")
    for name, member in vars(own).items():
        if inspect.isfunction(member) and name not in overrides and name != "__init__" and hasattr(base, name):
            problems.append(f"`{base.__name__}.{name}` has the name of a method of the adapter")
    if problems:
        raise TrainError(
            f"the adapter was tested with {trainer} {tested} and does not fit {trainer} {installed}: {'; '.join(problems)}; pip install "
            f"'{trainer}=={tested}'",
            kind="train_setup",
        )
    if installed != tested:
        log.warning("the adapter was tested with another version", package=trainer, installed=installed, tested=tested)


def _parameters(base: type, name: str) -> str | None:
    """The names of a method's parameters after `self`, separated by commas; None if there is no such method."""
    method = getattr(base, name, None)
    if not callable(method):
        return None
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    _, *rest = inspect.signature(method).parameters.values()
    return ", ".join(stars.get(each.kind, "") + each.name for each in rest)
