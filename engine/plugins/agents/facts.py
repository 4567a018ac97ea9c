"""The action `run_agent` and the preset `agent`: what the tables of the core have. It imports neither the section nor the action."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.actions.action_facts import ActionFacts
from engine.machine.preset import CUT_SHORT, DONE, GENERATING, PENDING, Preset
from engine.schemas.machine import MachineSpec, StateSpec, TransitionSpec

if TYPE_CHECKING:
    from engine.schemas.episode import EpisodeSpec

_RUNNING = "AGENT_RUNNING"


def _seconds(spec: EpisodeSpec, state: StateSpec) -> float:
    from engine.plugins.agents.spec import AgentSpec

    agent = AgentSpec.section_of(spec)
    return agent.timeout if agent is not None else 0.0


RUN_AGENT = ActionFacts(
    use="engine.plugins.agents.action:RunAgentAction",
    does="Run the program of `agent` until its next request, or its end.",
    events=("request", "exited", "died", "timeout"),
    seconds=_seconds,
    owns_conversation=True,
)
AGENT = Preset(
    about="The program of `agent` runs, and each of its requests to the model API is a turn, until it ends.",
    machine=MachineSpec(
        initial="PENDING",
        states=PENDING | {_RUNNING: StateSpec(action="run_agent")} | GENERATING | DONE,
        transitions=[
            TransitionSpec(trigger="ready", source="PENDING", dest=_RUNNING),
            TransitionSpec(trigger="request", source=_RUNNING, dest="GENERATING"),
            TransitionSpec(trigger=["exited", "died", "timeout"], source=_RUNNING, dest="DONE"),
            TransitionSpec(
                trigger=["answered", "tool_calls", "malformed", "truncated"], source="GENERATING", dest=_RUNNING
            ),
            CUT_SHORT,
        ],
    ),
)
