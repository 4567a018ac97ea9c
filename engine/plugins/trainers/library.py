"""What an adapter checks of a trainer's own library, which is needed only where that trainer runs: that its classes are
those that the adapter extends, and that its settings keep what the engine hands over.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from engine.errors import TrainError
from engine.plugins.trainers.capabilities import TRAINERS

if TYPE_CHECKING:
    from engine.spec.load import LoadedSpec


log = structlog.get_logger(__name__)
_Method = TypeVar("_Method", bound=Callable[..., Any])


@contextmanager
def imports_of(trainer: str) -> Iterator[None]:
    """Import modules of a trainer of `TRAINERS` inside of this block.

    Raises:
        TrainError: kind `train_setup`: an import failed.
    """
    try:
        yield
    except ImportError as error:
        raise TrainError(
            f"{TRAINERS[trainer].title} cannot be imported ({error}); pip install 'episode-engine[{trainer}]'",
            kind="train_setup",
        ) from error


def overrides(parameters: str) -> Callable[[_Method], _Method]:
    """Mark a method that overrides one of a trainer's class, with the names of that one's parameters in the tested
    version."""

    def mark(method: _Method) -> _Method:
        vars(method)["parameters"] = parameters
        return method

    return mark


@cache
def late_subclass(name: str, mixin: type, base: str) -> type[Any]:
    """A class of a trainer, `module:Class`, with the methods of `mixin`. The module is imported when this is first
    called.

    Raises:
        TrainError: kind `train_setup`: it cannot be imported, or as `check_overrides`.
    """
    module, _, class_name = base.partition(":")
    trainer = module.partition(".")[0]
    with imports_of(trainer):
        base_class = getattr(import_module(module), class_name)
    check_overrides(mixin, base_class, trainer)
    return type(name, (mixin, base_class), {"__doc__": mixin.__doc__})


def check_overrides(adapter: type, base: type, trainer: str) -> None:
    """Check that the methods of a trainer's class that the adapter `overrides` are those of the version with which it
    was tested.

    Other versions may rename a method, so that the override is never called, or call it with other arguments. A version
    that was not tested is logged.

    Raises:
        TrainError: kind `train_setup`: a method is missing or has other parameters, or the trainer has a method of the
            name of one of the adapter's own; the message names all of them, and both versions.
    """
    tested = TRAINERS[trainer].version.split()[0]
    try:
        installed = version(trainer)
    except PackageNotFoundError:
        installed = "of unknown version"
    problems = []
    for name, method in vars(adapter).items():
        expected: str | None = getattr(method, "parameters", None)
        actual = _parameters(base, name)
        if expected is None:
            if inspect.isfunction(method) and name != "__init__" and hasattr(base, name):
                problems.append(f"`{base.__name__}.{name}` has the name of a method of the adapter")
        elif actual is None:
            problems.append(f"`{base.__name__}.{name}` is missing")
        elif actual != expected:
            problems.append(f"`{base.__name__}.{name}` has the parameters ({actual}) and not ({expected})")
    if problems:
        raise TrainError(
            f"the adapter was tested with {trainer} {tested} and does not fit {trainer} {installed}: "
            f"{'; '.join(problems)}; pip install "
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
    stars: Mapping[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    _, *rest = inspect.signature(method).parameters.values()
    return ", ".join(stars.get(parameter.kind, "") + parameter.name for parameter in rest)


OFF = None
"""The values of a row whose setting must be off: absent, null, false, 0 or empty."""
Row = tuple[str, tuple[Any, ...] | None, str]
"""The dotted path of a setting, the values that it may have (None: absent or null), and why it may have no other."""


def value_of(config: Any, path: str, default: Any = None) -> Any:
    """A value of a trainer's configuration, by its dotted path; the default where it is absent or null."""
    for name in path.removeprefix("--").split("."):
        attribute = name.replace("-", "_")
        config = config.get(name) if hasattr(config, "get") else getattr(config, attribute, None)
    return default if config is None else config


def refuse(
    loaded: LoadedSpec, trainer: str, config: Any, table: Iterable[Row], conditions: Mapping[str, bool] | None = None
) -> None:
    """Refuse a configuration with other values than a table's, or in which one of the conditions holds.

    Raises:
        TrainError: kind `train_setup`; the message names all of them, each with what to change.
    """
    problems = []
    for path, values, why in table:
        value = value_of(config, path)
        if bool(value) if values is None else value not in values:
            problems.append(f"{path}{_shown(value)}: {why}")
    problems += [text for text, holds in (conditions or {}).items() if holds]
    if problems:
        raise TrainError(f"{loaded.path}: with {trainer}, change these: " + "; ".join(problems), kind="train_setup")


def _shown(value: Any) -> str:
    if value is None or value is False:
        return "=null" if value is None else "=false"
    return f"={value}" if value is not True and isinstance(value, str | int | float) else ""
