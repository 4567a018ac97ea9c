"""Agent programs: unmodified programs that speak to a model API, whose requests are the turns of an episode.

spec.py         the section `agent`; facts.py: what other parts of the engine know of it; rules.py: its
                rules of `engine validate`
action.py       the action `run_agent`: starts the program, gives it the newest reply, and waits for its next
                request or its end
agent_run.py    the program of one episode: what the episode's objects have of it; its rewards at the end
program.py      one program: what runs, its requests, its end; command.py, keeper.py, confined.py: a program
                that is a shell command
record.py       the journal record of a request or an end
threads.py      where a request continues in the conversation
prefetch.py     samples replies to requests that wait
server.py       the endpoint; connection.py, inbox.py: its requests; wire/: the model APIs
rewards.py      rewards that a program gives
"""

from engine.plugin import Plugin, Section

PLUGIN = Plugin(
    name="agents",
    about="Agent programs: each request that a program sends to a model API is a turn",
    needs=("confinement",),
    sections=(Section(keys=("agent",), use="engine.plugins.agents.spec:AgentSpec"),),
    actions={"run_agent": "engine.plugins.agents.facts:RUN_AGENT"},
    presets={"agent": "engine.plugins.agents.facts:AGENT"},
    records={"agent": "engine.plugins.agents.record:AgentRecord"},
    rules=("engine.plugins.agents.rules",),
    hooks={
        "open_service": "engine.plugins.agents.agent_run:open_service",
        "reward_source": "engine.plugins.agents.agent_run:reward_source",
        "spec_facts": "engine.plugins.agents.facts:spec_facts",
    },
)
