"""Builds the actions of a machine's states."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from engine import plugin
from engine.actions.base import Action, Services
from engine.actions.custom import OwnAction
from engine.actions.facts import ACTIONS
from engine.errors import SpecCodeError
from engine.schemas.machine import StateSpec


def build_actions(states: Mapping[str, StateSpec], services: Services, base: Path) -> dict[str, Action]:
    """Return the action of each state that names one."""
    return {name: _build(state, services, base) for name, state in states.items() if state.action is not None}


def _build(state: StateSpec, services: Services, base: Path) -> Action:
    facts = ACTIONS.get(str(state.action))
    if facts is None:
        if (why := plugin.missing("actions", str(state.action))) is not None:
            raise SpecCodeError(f"the action `{state.action}`: {why}", blame="spec", kind="plugin_missing")
        return OwnAction(services, base, state)
    module, _, name = facts.use.partition(":")
    action: Action = getattr(import_module(module), name)(services, base)
    return action
