"""A spec file, values and objects of one's own -> a spec that can be run.

    spec = engine.load("guess.yaml", {"tasks.limit": 4}, environment=Guess)

Invariant: an object that is given stands in the spec by an entry point, so a run's header says what was used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.given import use_of
from engine.schemas.base import Contract
from engine.spec.load import LoadedSpec, load_spec, override_spec

Overrides = Mapping[str, Any] | Sequence[str]
"""Values for keys of the spec: `{"limits.user_turns": 2}`, or as `--set` takes them: `["limits.user_turns=2"]`."""
Code = str | type | Callable[..., Any] | object
"""An entry point `module:Name`, a class, a function, or an object, which each episode gets a copy of."""


def load(
    spec: str | Path | LoadedSpec,
    overrides: Overrides = (),
    *,
    machine: str | Mapping[str, Any] | Contract | None = None,
    environment: Code | None = None,
    user: Code | None = None,
    tools: Sequence[Code] | None = None,
    scorer: Code | None = None,
) -> LoadedSpec:
    """Read a spec. Objects that are given replace those of the spec.

    A class or function of an importable module is written into the spec as `module:Name`. Others, such as those of a
    notebook's cell, belong to this process: they run in threads, and `resume`, `replay`, several drivers and
    `isolation: process` refuse them.

    Args:
        spec: The YAML file, or a spec that is loaded.
        overrides: Values for keys of the spec.
        machine: The name of a preset, or what stands below `machine:`; an `action` may be a function.
        environment: For `environment.use`; arguments of `environment.with` stay.
        user: For `user.use`.
        tools: For `tools`, all of them.
        scorer: For `rewards.scorer.use`.

    Raises:
        SpecError: the spec is not valid, with every diagnostic.
    """
    changes = texts_of(overrides)
    if machine is not None:
        changes.append(f"machine={_text(_with_entries(machine))}")
    for key, code in (("environment", environment), ("user", user), ("rewards.scorer", scorer)):
        if code is not None:
            changes.append(f"{key}.use={_text(_entry(code))}")
    if tools is not None:
        named = [tool if isinstance(tool, Mapping) else {"use": _entry(tool)} for tool in tools]
        changes.append(f"tools={_text(named)}")
    return override_spec(spec, changes) if isinstance(spec, LoadedSpec) else load_spec(spec, changes)


def texts_of(overrides: Overrides) -> list[str]:
    """Overrides as `--set` takes them."""
    if isinstance(overrides, Mapping):
        return [f"{key}={_text(value)}" for key, value in overrides.items()]
    return list(overrides)


def _text(value: Any) -> str:
    """A value as YAML; every JSON text is YAML."""
    plain = value.model_dump(mode="json", by_alias=True, exclude_unset=True) if isinstance(value, Contract) else value
    return json.dumps(plain, default=str)


def _entry(code: Code) -> str:
    return code if isinstance(code, str) else use_of(code)


def _with_entries(machine: Any) -> Any:
    """A machine whose functions are written as entry points."""
    if isinstance(machine, Mapping):
        return {key: _with_entries(value) for key, value in machine.items()}
    if isinstance(machine, list | tuple):
        return [_with_entries(value) for value in machine]
    return use_of(machine) if callable(machine) else machine
