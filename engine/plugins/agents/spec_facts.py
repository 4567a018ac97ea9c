"""What `agent` means for other parts of a spec: its coroutine, its rewards, and where its programs run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.plugins.agents.spec import AgentSpec
from engine.schemas.entry import Entry
from engine.spec.added import AddedCode, SpecFacts

if TYPE_CHECKING:
    from engine.schemas.episode import EpisodeSpec

_PATH = ("agent",)


def facts(spec: EpisodeSpec) -> SpecFacts:
    """The hook `spec_facts`."""
    agent = AgentSpec.section_of(spec)
    if agent is None:
        return SpecFacts()
    code: tuple[AddedCode, ...] = ()
    if agent.use is not None:
        code = (
            AddedCode(
                path=_PATH,
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
        one_process=((message, _PATH, "set `rollout.drivers: 1`"),) if agent.elsewhere else (),
    )
