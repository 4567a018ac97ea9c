"""Agent programs: unmodified programs that speak to a model API, whose requests are the turns of an episode.

spec.py         the section `agent`; facts.py: the rows of its action and its preset in the tables of the core
action.py       the action `run_agent`: gives the program the newest reply, and waits for its next request or its end
agent_run.py    one program and its rewards at the end; process.py, keeper.py, command.py, confined.py, coroutine.py: what runs
record.py       the journal record of a request or an end
threads.py      where a request continues in the conversation, by echo.py
prefetch.py     samples replies to requests that wait
service.py      what it adds to each episode's objects
server.py       the endpoint; connection.py, admission.py, inbox.py: its requests; wire/: the model APIs
rewards.py      rewards that a program gives; served.py: a program that runs elsewhere
spec_facts.py   what the section means for other parts of a spec; rules.py: its rules of `engine validate`
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
        "open_service": "engine.plugins.agents.service:open_service",
        "reward_source": "engine.plugins.agents.agent_run:reward_source",
        "spec_facts": "engine.plugins.agents.spec_facts:facts",
    },
)
