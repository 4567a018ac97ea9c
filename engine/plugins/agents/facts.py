"""What other parts of the engine know of `agent`: its action, its preset, what its section means. The section and the
action are imported when asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.actions.action_facts import ActionFacts
from engine.machine.preset import CUT_SHORT, DONE, GENERATING, PENDING, Preset
from engine.schemas.entry import Entry
from engine.schemas.machine import MachineSpec, StateSpec, TransitionSpec
from engine.spec.added import AddedCode, SpecFacts

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


def spec_facts(spec: EpisodeSpec) -> SpecFacts:
    """The hook `spec_facts`: what `agent` means for other parts of a spec, its coroutine, its rewards, and where its
    programs run."""
    from engine.plugins.agents.spec import AgentSpec

    agent = AgentSpec.section_of(spec)
    if agent is None:
        return SpecFacts()
    code: tuple[AddedCode, ...] = ()
    if agent.use is not None:
        code = (
            AddedCode(
                path=("agent",),
                entry=Entry(use=agent.use, with_=agent.with_),
                part="agent",
                takes=(),
                keywords=("task", "base_url", "key", "model"),
                isolated=False,
                awaited="write it with `async def`, or start a program with `run`",
            ),
        )
    message = "agent programs that run elsewhere have one endpoint"
    return SpecFacts(
        code=code,
        rewards=tuple(agent.reward_names),
        one_process=((message, ("agent",), "set `rollout.drivers: 1`"),) if agent.elsewhere else (),
    )
