"""From a state of the machine to the action that it names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from engine.actions.ask_user import AskUserAction
from engine.actions.base import Action, Services
from engine.actions.call_tools import CallToolsAction
from engine.actions.custom import EnvironmentStep, OwnAction
from engine.actions.generate import GenerateAction
from engine.actions.reset import ResetAction
from engine.actions.score import ScoreAction
from engine.schemas.episode import StateSpec

BUILT_IN: dict[str, Callable[[Services, Path], Action]] = {
    "reset": ResetAction,
    "generate": GenerateAction,
    "call_tools": CallToolsAction,
    "ask_user": AskUserAction,
    "step": EnvironmentStep,
    "score": ScoreAction,
}


def build_actions(states: Mapping[str, StateSpec], services: Services, base: Path) -> dict[str, Action]:
    """One action for each state that names one; states without are left out."""
    actions: dict[str, Action] = {}
    for name, state in states.items():
        if state.action is None:
            continue
        known = BUILT_IN.get(state.action)
        actions[name] = known(services, base) if known else OwnAction(services, base, state)
    return actions
